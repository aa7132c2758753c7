"""Verification of a series: each fault of published suites planted, on the loopback hub, in folders and in runs."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from checkpoints_fixtures import save, tiny_neox
from command_line import run
from hub_server import serving, use_hub
from safetensors.torch import load_file, save_file

import emergent_heads as eh
from emergent_heads.checkpoints.run import checkpoint_path
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.checkpoints.verification import OUTLIER_AT, deviations
from emergent_heads.errors import ArgumentError, HubError, UnknownStepError

REPOSITORY = "org/sharded"
STEPS = (0, 1, 2, 1000, 2000, 3000)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """Folders `step0` to `step3000`, each of several shards."""
    path = tmp_path_factory.mktemp("clean")
    for step in STEPS:
        tiny_neox(step).save_pretrained(path / f"step{step}", max_shard_size="8KB")
    return path


@pytest.fixture
def folder(clean, tmp_path) -> Path:
    """A copy to plant faults in."""
    return shutil.copytree(clean, tmp_path / "series")


@pytest.fixture
def verified(folder, tmp_path, monkeypatch):
    """Verifies what then lies in `folder`, served as a repository; `verified.hub` is the server."""

    def verify(repository=REPOSITORY, *, made=CheckpointSeries.from_hub, source=None, **options):
        steps = [path for path in folder.iterdir() if path.is_dir()]
        with serving({(repository, path.name): path for path in steps}) as hub:
            use_hub(monkeypatch, hub, tmp_path / "cache")
            verify.hub = hub
            return made(repository, **(source or {})).verify(progress=False, **options)

    return verify


def shards(folder: Path, step: int) -> list[Path]:
    return sorted((folder / f"step{step}").glob("*.safetensors"))


def replace_weights(folder: Path, step: int, by: int) -> None:
    for path in shards(folder, by):
        shutil.copy(path, folder / f"step{step}" / path.name)


def rewrite(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def found(verification, column="status") -> dict[int, str]:
    return dict(zip(verification.table["step"], verification.table[column], strict=True))


def everything_ok() -> dict[int, str]:
    return dict.fromkeys(STEPS, "ok")


# by hashes


def test_a_sound_series_takes_one_question_a_revision_and_no_weights(verified):
    verification = verified()
    assert found(verification) == everything_ok()
    assert verification.ok
    assert verification.faults.empty
    assert repr(verification).startswith("Verification of sharded, 6 checkpoints by the hashes of their files: 6 ok")
    assert verification.table["place"].tolist() == [f"{REPOSITORY}, revision step{step}" for step in STEPS]
    requests = verified.hub.requests
    assert sum("/refs" in request for request in requests) == 1
    assert sum("/tree/" in request for request in requests) == len(STEPS)
    assert not [request for request in requests if request.endswith(".safetensors")]
    assert verified.hub.fetched(INDEX) == 1  # the same file at every step


def test_long_listings_come_in_pages(folder, tmp_path, monkeypatch):
    with serving({(REPOSITORY, path.name): path for path in folder.iterdir()}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        hub.page_size = 3
        assert CheckpointSeries.from_hub(REPOSITORY).verify(progress=False).ok
        pages = -(-len(list((folder / "step0").iterdir())) // 3)
        assert pages > 2
        assert sum("/tree/" in request for request in hub.requests) == pages * len(STEPS)


def test_a_duplicated_neighbour(verified, folder):
    replace_weights(folder, 1000, by=2000)
    verification = verified()
    assert found(verification) == everything_ok() | {1000: "identical", 2000: "identical"}
    assert found(verification, "what")[1000] == "weights identical to those of step 2000, next to it"
    assert found(verification, "identical_to")[2000] == "1000"
    assert not verification.ok
    assert "step2000" in verification.faults["place"].iloc[1]
    assert "4 ok" in verification.headline()
    assert "identical" in repr(verification)


def test_final_weights_in_early_branches_as_in_pythia_2_8b(verified, folder):
    for step in (0, 2):
        replace_weights(folder, step, by=3000)
    verification = verified()
    assert found(verification) == everything_ok() | dict.fromkeys((0, 2, 3000), "identical")
    assert found(verification, "what")[0] == "weights identical to those of step 2, 3000, with others between"
    assert found(verification, "identical_to")[3000] == "0, 2"


def test_a_shared_first_shard_as_in_pythia_12b(verified, folder):
    name = shards(folder, 3000)[0].name
    shutil.copy(folder / "step3000" / name, folder / "step1" / name)
    verification = verified()
    assert found(verification) == everything_ok() | dict.fromkeys((1, 3000), "shared")
    assert found(verification, "what")[1] == f"{name} is also that of step 3000"
    assert found(verification, "shared_with") == dict.fromkeys(STEPS, "") | {1: "3000", 3000: "1"}


def test_a_missing_shard(verified, folder):
    shards(folder, 2)[1].unlink()
    verification = verified()
    assert found(verification) == everything_ok() | {2: "missing shard"}
    assert f"model-00002-of-{len(shards(folder, 0)):05d}.safetensors missing" in found(verification, "what")[2]


def test_no_weights_no_config_and_a_broken_index(verified, folder):
    for path in (*shards(folder, 1), folder / "step1" / INDEX):
        path.unlink()
    (folder / "step2" / "config.json").unlink()
    (folder / "step1000" / INDEX).write_text("{")
    assert found(verified()) == everything_ok() | {1: "no weights", 2: "no config", 1000: "unreadable"}


def test_a_missing_revision_of_a_published_schedule(verified, folder):
    (folder / "step3000").rename(folder / "step9000")
    suite = lambda repository: eh.suite(repository)  # noqa: E731
    verification = verified("EleutherAI/pythia-14m", made=suite, steps=[1000, 3000, 9000])
    assert found(verification) == {1000: "ok", 3000: "missing revision", 9000: "ok"}


def test_known_issues_are_named_and_harmless_twins_are_no_fault(verified, folder):
    for step in (1, 2):
        replace_weights(folder, step, by=0)
    harmless = verified("EleutherAI/pythia-14m")
    assert found(harmless) == everything_ok() | dict.fromkeys((0, 1, 2), "harmless")
    assert harmless.ok
    assert "harmless: EleutherAI/pythia#83" in found(harmless, "what")[0]
    elsewhere = verified("org/other")
    assert found(elsewhere)[1] == "identical"
    known = verified("EleutherAI/pythia-2.8b", steps=[1, 1000])
    assert found(known) == {1: "known issue", 1000: "known issue"}  # nothing found, and still reported
    assert not known.ok
    assert found(known, "known_issue")[1000] == "wrong weights: EleutherAI/pythia#205"


def test_more_than_the_harmless_steps_are_a_fault(verified, folder):
    for step in (1, 1000):
        replace_weights(folder, step, by=0)
    assert found(verified("EleutherAI/pythia-14m"))[0] == "identical"


def test_what_is_asked_for_must_make_sense(verified):
    with pytest.raises(UnknownStepError):
        verified(steps=[5])
    with pytest.raises(ArgumentError, match="steps is empty"):
        verified(steps=[])
    with pytest.raises(ArgumentError, match="no weights were read"):
        verified().plot()


def test_offline_the_hub_cannot_be_asked(verified, folder, tmp_path, monkeypatch):
    with serving({(REPOSITORY, "step0"): folder / "step0"}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        CheckpointSeries.from_hub(REPOSITORY).hooked(0)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(HubError, match="can only be asked of the hub, and HF_HUB_OFFLINE is set"):
            CheckpointSeries.from_hub(REPOSITORY).verify(progress=False)


# by tensors


def test_weights_from_the_hub_obey_the_cache_policy(verified, folder, tmp_path):
    def poison(tensors):
        next(iter(tensors.values())).view(-1)[0] = float("nan")

    rewrite(shards(folder, 1000)[0], poison)
    verification = verified(source={"cache": "evict"}, weights=True)
    assert found(verification) == everything_ok() | {1000: "not finite"}
    assert "holds NaN or infinite values" in found(verification, "what")[1000]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert set(verification.norms["step"]) == set(STEPS)


def test_folders_on_the_disk_are_read_without_being_asked(folder):
    replace_weights(folder, 1000, by=0)
    shards(folder, 2)[0].write_bytes(b"nothing")
    verification = CheckpointSeries.from_directory(folder).verify(progress=False)
    assert found(verification) == everything_ok() | dict.fromkeys((0, 1000), "identical") | {2: "unreadable"}
    assert "is damaged" in found(verification, "what")[2]
    assert "by the hashes of their files and their tensors" in verification.headline()
    by_hash = CheckpointSeries.from_directory(folder).verify(weights=False, progress=False)
    assert by_hash.norms.empty
    assert found(by_hash)[1000] == "identical"


def test_tensors_that_come_back_are_told_whatever_file_they_are_in(folder):
    """A shard of the final model saved anew has another hash."""
    last = {name: tensor for path in shards(folder, 3000) for name, tensor in load_file(path).items()}
    first = shards(folder, 1)[0]
    n = len(load_file(first))
    rewrite(first, lambda tensors: tensors.update({name: last[name] for name in tensors}))
    save_file(load_file(first), first, metadata={"format": "pt", "saved": "anew"})
    verification = CheckpointSeries.from_directory(folder).verify(progress=False)
    assert found(verification) == everything_ok() | dict.fromkeys((1, 3000), "shared")
    matrices = sum(tensor.ndim >= 2 for tensor in load_file(first).values())
    assert f"{matrices} of " in found(verification, "what")[1]
    assert n >= matrices > 0


def test_constant_tensors_are_not_shared_ones(tmp_path):
    """Such as the frequencies of rotary positions, and embeddings that stand still for a while."""
    for place, step in enumerate(STEPS):
        model = tiny_neox(step)
        with torch.no_grad():
            model.gpt_neox.embed_in.weight.fill_(min(place, 2))
        save(model, tmp_path / "series" / f"step{step}")
    assert CheckpointSeries.from_directory(tmp_path / "series").verify(progress=False).ok


def test_a_trained_series_raises_no_alarm_and_a_swapped_shard_does(emerging_series, tmp_path):
    sound = CheckpointSeries.from_directory(emerging_series).verify(progress=False)
    assert sound.ok
    assert sound.table["max_deviation"].max() < OUTLIER_AT / 2
    planted = shutil.copytree(emerging_series, tmp_path / "planted")
    steps = CheckpointSeries.from_directory(planted).steps
    last = load_file(planted / f"step{steps[-1]}" / "model.safetensors")
    half = sorted(last)[: len(last) // 2]

    def swap(tensors):  # a shard of the final weights, in another precision, so that no hash tells
        tensors.update({name: last[name] * (1 + 1e-5) for name in half})

    rewrite(planted / "step50" / "model.safetensors", swap)
    verification = CheckpointSeries.from_directory(planted).verify(progress=False)
    assert found(verification) == dict.fromkeys(steps, "ok") | {50: "outlier"}
    assert "leave their neighbours'" in found(verification, "what")[50]
    assert verification.table["max_deviation"].max() >= OUTLIER_AT
    figure = verification.plot()
    (axes,) = figure.axes
    assert axes.get_xlabel() == "training step"
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert set(crosses[0].get_xdata()) == {50}


def test_deviations_by_hand():
    """A line in log step with a bump: the neighbours' line, half their difference, the noise, and the least noise."""
    steps = [10**power - 1 for power in range(9)]
    slope, bump = 0.1 * np.log(10), 0.5
    x = np.arange(9.0)[:, None] * slope
    x[4] += bump
    said = deviations(steps, np.exp(x))[:, 0]
    assert np.isnan(said[[0, -1]]).all()
    assert said[4] == pytest.approx(bump / (slope + 0.002))  # the residuals but its neighbours' are 0
    # around place 3 the others are those at 1, 5 (half the bump), 6 and 7: the median of 0, 0.25, 0, 0 is 0
    assert said[3] == pytest.approx(bump / 2 / (slope + bump / 2 + 0.002))
    # around place 7: those at 1, 2, 3, 4, 5, of which 3, 4 and 5 see the bump; the median is half the bump
    assert said[7] == pytest.approx(0, abs=1e-9)
    x[7] += 0.1
    again = deviations(steps, np.exp(x))[:, 0]
    assert again[7] == pytest.approx(0.1 / (slope + 1.4826 * bump / 2 + 0.002))


def test_deviations_of_the_report_on_pythia_12b():
    """Norms of the input embedding as EleutherAI/pythia#206 gives them, every thousand steps between interpolated."""
    steps = list(range(40_000, 70_001, 1000))
    norms = np.interp(steps, [49_000, 51_000, 57_000, 59_000, 141_000], [1.5169, 1.5132, 1.5003, 1.4952, 1.30])
    wrong = [steps.index(50_000), steps.index(58_000)]
    norms[wrong] = 1.3056
    said = deviations(steps, norms[:, None])[:, 0]
    assert np.flatnonzero(said >= OUTLIER_AT).tolist() == wrong


def test_few_steps_and_zeros_are_not_judged():
    assert np.isnan(deviations(range(7), np.ones((7, 2)))).all()
    norms = np.ones((8, 2))
    norms[0, 1] = 0.0
    said = deviations(range(8), norms)
    assert (said[1:-1, 0] == 0).all()
    assert np.isnan(said[1, 1])
    assert said[2, 1] == 0


# runs and loaders


def test_runs_of_the_library(tmp_path):
    config = eh.SmallModelConfig(n_layers=1, d_model=16, n_heads=2)
    task = eh.tasks.Addition(bits=3)
    options = {"steps": 6, "checkpoints": (0, 1, 2, 3, 4, 5, 6), "progress": False, "tokens_per_batch": 256}
    trained = eh.train(config, task, tmp_path / "run", **options)
    assert trained.series.verify(progress=False).ok
    shutil.copy(checkpoint_path(tmp_path / "run", 2), checkpoint_path(tmp_path / "run", 5))
    verification = CheckpointSeries.from_run(tmp_path / "run").verify(progress=False)
    assert verification.faults["step"].tolist() == [2, 5]
    assert set(verification.faults["status"]) == {"identical"}


def test_files_of_one_revision(tmp_path, monkeypatch):
    """As TransformerLens' own repositories have them."""
    files = tmp_path / "main" / "checkpoints"
    files.mkdir(parents=True)
    for step in (10, 20, 40):
        weights = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        torch.save({"W_E": weights, "IGNORE": torch.tensor(float("-inf"))}, files / f"tokens_{step}.pth")
    shutil.copy(files / "tokens_10.pth", files / "tokens_30.pth")
    torch.save({"W_E": torch.full((4, 4), float("nan"))}, files / "tokens_50.pth")
    with serving({("org/files", "main"): tmp_path / "main"}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        series = CheckpointSeries.from_hub("org/files", "checkpoints/*_{step}.pth", cache="evict")
        by_hash = series.verify(progress=False)
        assert found(by_hash) == {10: "identical", 20: "ok", 30: "identical", 40: "ok", 50: "ok"}
        assert not [request for request in hub.requests if request.endswith(".pth")]
        assert sum("/tree/" in request for request in hub.requests) <= 2
        by_tensor = series.verify(weights=True, progress=False)
        assert found(by_tensor) == found(by_hash) | {50: "not finite"}
        assert not list((tmp_path / "cache").rglob("*.pth"))


def test_loaders_have_tensors_only():
    models = {step: tiny_neox(step % 3) for step in (0, 1, 2, 3)}
    series = CheckpointSeries.from_loader(models, models.__getitem__)
    with pytest.raises(ArgumentError, match="use weights=True"):
        series.verify(progress=False)
    assert found(series.verify(weights=True, progress=False)) == {0: "identical", 1: "ok", 2: "ok", 3: "identical"}


# the command line


def test_the_command_line(folder, tmp_path, monkeypatch, capsys):
    replace_weights(folder, 1, by=2)
    with serving({(REPOSITORY, path.name): path for path in folder.iterdir()}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        out, plot = tmp_path / "verified.csv", tmp_path / "norms.png"
        arguments = ["--hub", REPOSITORY, "--steps", 1, 2, 1000, "--weights", "--cache", "evict"]
        assert run("verify", *arguments, "--out", out, "--plot", plot) == 0
        assert hub.fetched(shards(folder, 1)[0].name) == 3
    assert "2 identical, 1 ok" in capsys.readouterr().out
    assert pd.read_csv(out)["step"].tolist() == [1, 2, 1000]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_no_figure_without_weights(folder, tmp_path, monkeypatch, capsys):
    with serving({(REPOSITORY, path.name): path for path in folder.iterdir()}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        assert run("verify", "--hub", REPOSITORY, "--plot", tmp_path / "norms.png") == 2
        assert hub.requests == []
    assert "--plot needs --weights" in capsys.readouterr().err
