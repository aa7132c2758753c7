"""The checkpoints of a run that the library trained, as a series."""

import json
import shutil

import pytest
import torch
from tiny_models import HAS_HOOKED_TRANSFORMER
from training_runs import CONFIG, QUICK, TASK

from emergent_heads import tasks
from emergent_heads.analysis.emergence import find_emergence
from emergent_heads.analysis.heads import rank_heads
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.errors import (
    ArgumentError,
    CheckpointError,
    NoCheckpointsError,
    RunFolderError,
    UnknownStepError,
)
from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.tasks.linear_map import LinearMap
from emergent_heads.training.loop import train

TOKENS = TASK.batch(3, seed=9).tokens


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(CONFIG, TASK, tmp_path_factory.mktemp("runs") / "lm", **QUICK, seed=6).path


@pytest.fixture
def folder(trained, tmp_path):
    """A copy to break."""
    return shutil.copytree(trained, tmp_path / "lm")


def test_a_run_is_a_series_of_its_checkpoints(trained):
    series = CheckpointSeries.from_run(trained)
    assert (series.name, series.seed, series.kind) == ("lm", 6, "small")
    assert series.steps == (0, 1, 2, 4, 8, 16, 24)
    assert series.first.tokenizer() is None
    with pytest.raises(UnknownStepError, match="nearest: 2, 4, 8"):
        _ = series[5]


def test_a_loaded_model_is_the_callers_own(trained):
    series = CheckpointSeries.from_run(trained)
    model, other = series.last.load(), series.last.load()
    assert isinstance(model, SmallModel)
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    model.embed.weight.fill_(0.0)
    assert not torch.equal(model.W_E, other.W_E)
    assert torch.equal(series.last.load().W_E, other.W_E)
    first = SmallModel(CONFIG.for_task(TASK), 6)
    assert torch.equal(series.first.load()(TOKENS), first(TOKENS))


def test_the_resident_model_takes_one_step_after_another(trained):
    series = CheckpointSeries.from_run(trained)
    resident = series.hooked(0)
    for step in (24, 0, 8, 8):
        assert series.hooked(step) is resident
        torch.testing.assert_close(resident.run(TOKENS), series[step].load()(TOKENS), rtol=0, atol=0)
    assert not series.problems
    series.unload()
    assert series.hooked(8) is not resident


def test_a_checkpoint_loads_as_other_kinds_where_there_is_one(trained):
    series = CheckpointSeries.from_run(trained)
    for kind in ("bridge", "huggingface"):
        with pytest.raises(ArgumentError, match="trained by the library, and its models load as 'small'"):
            series.last.load(kind)
    with pytest.raises(ArgumentError, match="use one of"):
        series.last.load("smal")
    if HAS_HOOKED_TRANSFORMER:
        converted = CheckpointSeries.from_run(trained, kind="hooked_transformer").last.load()
        torch.testing.assert_close(converted(TOKENS), series.last.load()(TOKENS), rtol=0, atol=1e-5)


def test_small_is_no_kind_of_other_series(tmp_path, trained):
    from checkpoints_fixtures import save, tiny_neox

    save(tiny_neox(1), tmp_path / "step1")
    with pytest.raises(ArgumentError, match="kind='small' is for runs that the library trained"):
        CheckpointSeries.from_directory(tmp_path).last.load("small")


@pytest.mark.parametrize("use", ["load", "hooked"])
def test_broken_checkpoints_are_told_with_step_and_file(folder, use):
    weights = folder / "checkpoints"
    (weights / "step_00000001.safetensors").write_bytes(b"nonsense")
    whole = (weights / "step_00000004.safetensors").read_bytes()
    (weights / "step_00000004.safetensors").write_bytes(whole[: len(whole) // 2])
    bad = SmallModel(CONFIG.for_task(TASK), 6)
    bad.unembed.weight.data[1, 1] = float("nan")
    save(bad, weights / "step_00000008.safetensors")
    save(SmallModel(SmallModelConfig(1, 8, 2, vocabulary_size=2, context=8)), weights / "step_00000016.safetensors")
    save(SmallModel(CONFIG.for_task(TASK)).ln_final, weights / "step_00000024.safetensors")
    series = CheckpointSeries.from_run(folder)
    (weights / "step_00000002.safetensors").unlink()
    told = {1: "damaged", 2: "missing", 4: "damaged", 8: "not finite: unembed.weight", 16: "shape", 24: "lacks"}
    for step, problem in told.items():
        with pytest.raises(CheckpointError, match=f"step {step} of lm .*step_0000.*{problem}"):
            getattr(series[step], use)()
        assert problem in series.problems[step]
    assert torch.isfinite(series.hooked(0).run(TOKENS)).all()  # the others can still be used
    shutil.copy(weights / "step_00000000.safetensors", weights / "step_00000001.safetensors")
    series[1].load()
    assert series.problems[1] == "weights identical to step 0"


def save(module, path):
    from safetensors.torch import save_file

    save_file(module.state_dict(), path)


def test_a_bias_whose_pattern_is_gone_is_told(tmp_path):
    run = train(CONFIG, TASK, tmp_path, **QUICK, attention_bias=2.0)
    (tmp_path / "attention_bias.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"attention_bias\.safetensors is missing"):
        run.series.last.load()


def test_the_identity_of_weights_changes_when_they_are_written_again(folder):
    series = CheckpointSeries.from_run(folder)
    before = series.identity(8)
    assert CheckpointSeries.from_run(folder).identity(8) == before
    file = folder / "checkpoints" / "step_00000008.safetensors"
    shutil.copy(folder / "checkpoints" / "step_00000016.safetensors", file)
    assert series.identity(8) != before
    file.unlink()
    assert series.identity(8) is None


def test_an_empty_run_and_one_of_another_version_are_told(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format_version": 2}))
    with pytest.raises(RunFolderError, match=r"format version 2, made by emergent-heads .*reads format version 1"):
        CheckpointSeries.from_run(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(NoCheckpointsError, match="holds no checkpoints"):
        CheckpointSeries.from_run(folder)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(NoCheckpointsError, match="no manifest of a run"):
        CheckpointSeries.from_run(folder)


def test_emergence_and_heads_are_found_in_a_trained_run(tmp_path):
    """With one source for each token the linear map is copying, in an order that the task's matrix gives."""
    task = LinearMap(state_size=3, sparsity=1, symbols=8, seed=1)
    run = train(
        SmallModelConfig(n_layers=1, d_model=16, n_heads=2),
        task,
        tmp_path,
        steps=120,
        tokens_per_batch=512,
        warmup_steps=10,
        learning_rate=1e-2,
        checkpoints=range(0, 121, 8),
        seed=1,
    )
    tokens = task.batch(64, seed=5).tokens
    prompts = tasks.from_tokens(tokens[:, :-1].tolist(), tokens[:, -1].tolist())
    point = find_emergence(run.series, prompts)
    assert point.status == "emerged"
    assert 0 < point.post < 120
    heads = rank_heads(run.series[point.pre], run.series[point.post], prompts)
    assert len(heads.table) == 2
