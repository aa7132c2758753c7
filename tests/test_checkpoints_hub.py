"""Series from the hub: the real client against a server on the loopback address that fails on request."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints_fixtures import logits, logits_of, save, save_as_old_pythia, tiny_neox
from hub_server import serving, use_hub

import emergent_heads as eh
from emergent_heads.checkpoints.hub import RETRY_WAITS_S
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.errors import ArgumentError, CheckpointError, HubError, NoCheckpointsError, UnknownStepError

REPOSITORY = "EleutherAI/pythia-14m-seed3"
STEPS = (0, 1, 512, 1000)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, str], Path]:
    path = tmp_path_factory.mktemp("served")
    made = {(REPOSITORY, f"step{step}"): save(tiny_neox(step), path / f"step{step}", tokenizer=True) for step in STEPS}
    return made | {(REPOSITORY, "main"): made[REPOSITORY, "step1000"]}


@pytest.fixture
def hub(folders, tmp_path, monkeypatch):
    with serving(folders) as running:
        running.waits = use_hub(monkeypatch, running, tmp_path / "cache")
        yield running


def hub_series(**options) -> CheckpointSeries:
    return CheckpointSeries.from_hub(REPOSITORY, **options)


def assert_holds(series, step, folders):
    series.hooked(step)
    assert torch.equal(logits(series._resident.model), logits_of(folders[REPOSITORY, f"step{step}"]))


def weights_in(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file() and file.stat().st_size > 20_000]


def test_a_suite_asks_nothing_until_a_step_is_used(hub, folders):
    series = eh.suite("pythia-14m", seed=3)
    assert len(series) == 154
    assert repr(series) == "CheckpointSeries(pythia-14m-seed3, 154 checkpoints, steps 0 to 143000)"
    assert hub.requests == []
    assert_holds(series, 512, folders)
    assert series.hooked(512).tokenizer.get_vocab()["w7"] == 7
    assert torch.equal(logits(series[1].load("huggingface")), logits_of(folders[REPOSITORY, "step1"]))


def test_the_steps_are_read_from_the_repository(hub):
    series = hub_series()
    assert repr(series) == "CheckpointSeries(pythia-14m-seed3, steps not asked for yet)"
    assert hub.requests == []
    assert series.steps == STEPS
    with pytest.raises(UnknownStepError, match="nearest: 1, 512, 1000"):
        series[700]
    assert hub.requests == [f"GET /api/models/{REPOSITORY}/refs"]


def test_patterns_of_other_suites(tmp_path, monkeypatch, folders):
    names = ["main", "stage1-step1000-tokens3B", "stage1-step150-tokens1B", "stage2-step9-tokens1B"]
    with serving({("allenai/OLMo", name): folders[REPOSITORY, "step1"] for name in names}) as hub:
        use_hub(monkeypatch, hub, tmp_path)
        series = CheckpointSeries.from_hub("allenai/OLMo", "stage1-step{step}-tokens*B")
        assert series.steps == (150, 1000)
        assert series.identity(150) == f"allenai/OLMo@{hub.commit('allenai/OLMo', names[2])}"
        with pytest.raises(
            NoCheckpointsError, match=r"fits pattern='checkpoint-\{step\}'; revisions there are: main, "
        ):
            _ = CheckpointSeries.from_hub("allenai/OLMo", "checkpoint-{step}").steps
        with pytest.raises(ArgumentError, match="are both step"):
            _ = CheckpointSeries.from_hub("allenai/OLMo", "stage*-step*{step}-tokens*").steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "step"}, "must hold {step} once"),
        ({"cache": "drop"}, "use 'keep' or 'evict'"),
        ({"disk_budget_gb": 0}, "must be above 0"),
    ],
)
def test_wrong_arguments_are_told_at_once(options, message):
    with pytest.raises(ArgumentError, match=message):
        hub_series(**options)


def test_a_repository_name_that_is_none():
    with pytest.raises(ArgumentError, match="write owner/name"):
        CheckpointSeries.from_hub("https://example.org/a/b")


def test_a_second_session_fetches_nothing_again(hub, folders):
    hub_series().hooked(1)
    hub.requests.clear()
    assert_holds(hub_series(), 1, folders)
    assert hub.requests == [f"GET /api/models/{REPOSITORY}/refs"]


def test_identity_is_the_commit_and_costs_one_request(hub):
    series = hub_series()
    assert [series.identity(step) for step in STEPS] == [
        f"{REPOSITORY}@{hub.commit(REPOSITORY, f'step{step}')}" for step in STEPS
    ]
    assert eh.suite("pythia-14m", seed=3).identity(2) is None
    assert hub.requests == [f"GET /api/models/{REPOSITORY}/refs"] * 2


# trouble


@pytest.mark.parametrize("where", ["refs", "tree", "config.json", "model.safetensors"])
@pytest.mark.parametrize("how", [{"status": 503}, {"drop": True}])
def test_passing_trouble_is_outlived(hub, folders, where, how):
    hub.fail(where, times=1, **how)
    assert_holds(hub_series(), 1, folders)
    assert hub.faults[0].times == 0


def test_a_truncated_file_is_fetched_again(hub, folders):
    hub.fail("model.safetensors", truncate=True, times=1)
    assert_holds(hub_series(), 1, folders)
    assert hub.fetched("model.safetensors") == 2
    assert hub.waits == [RETRY_WAITS_S[0]]


LASTING = [
    ("tree", {"status": 503}, "answers with status 503", True),
    ("tree", {"drop": True}, r"cannot be reached \(Server disconnected.*HF_HUB_OFFLINE=1", True),
    ("model.safetensors", {"truncate": True}, "should be of size", True),
    ("tree", {"status": 401}, "says 401: no such repository or revision, or one that needs `hf auth login`", False),
    ("tree", {"status": 403}, "says 403", False),
    ("config.json", {"status": 404}, "says 404", False),
]


@pytest.mark.parametrize(("where", "how", "cause", "retried"), LASTING)
def test_lasting_trouble_ends_in_one_error_with_repository_revision_and_cause(hub, where, how, cause, retried):
    hub.fail(where, **how)
    series = hub_series()
    with pytest.raises(HubError, match=cause) as caught:
        series.hooked(1)
    assert str(caught.value).startswith(f"{REPOSITORY}, revision step1, from {hub.endpoint}: ")
    assert "\n" not in str(caught.value)
    assert bool(hub.waits) == retried
    assert series.problems == {}  # the hub's trouble is not the checkpoint's
    hub.faults.clear()
    series.hooked(1)


def test_a_hub_that_refuses_connections(folders, tmp_path, monkeypatch):
    with serving(folders) as hub:
        pass
    waits = use_hub(monkeypatch, hub, tmp_path)
    with pytest.raises(HubError, match=rf"{REPOSITORY}, from {hub.endpoint}: it cannot be reached .*refused"):
        hub_series().hooked(1)
    assert waits == list(RETRY_WAITS_S)


def test_an_unknown_repository(hub):
    with pytest.raises(HubError, match=r"EleutherAI/none.* says 404"):
        CheckpointSeries.from_hub("EleutherAI/none").hooked(1)
    assert hub.waits == []


def test_a_revision_that_the_hub_lacks_is_a_problem_of_that_step_only(hub, folders):
    series = eh.suite("pythia-14m", seed=3)
    with pytest.raises(CheckpointError, match=f"step 2 of .*{REPOSITORY}, revision step2.*no such revision"):
        series.hooked(2)
    assert set(series.problems) == {2}
    assert_holds(series, 1, folders)


def test_a_revision_without_weights_is_a_problem_of_that_step_only(tmp_path, monkeypatch, folders):
    """As pythia-410m-seed9 at step 40000."""
    bare = tmp_path / "bare"
    shutil.copytree(folders[REPOSITORY, "step1"], bare)
    (bare / "model.safetensors").unlink()
    with serving(folders | {(REPOSITORY, "step40000"): bare}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        series = hub_series()
        with pytest.raises(CheckpointError, match=r"revision step40000.*: the revision has no weights"):
            series.hooked(40000)
        assert set(series.problems) == {40000}
        assert_holds(series, 1, folders)


def test_a_missing_shard_is_told_before_the_others_are_fetched(tmp_path, monkeypatch):
    folder = tmp_path / "sharded"
    tiny_neox(1).save_pretrained(folder, max_shard_size="8KB")
    with serving({("o/r", "step1"): folder}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        CheckpointSeries.from_hub("o/r").hooked(1)
        shutil.rmtree(tmp_path / "cache")
        hub.requests.clear()
        lost = sorted(folder.glob("*.safetensors"))[1]
        lost.unlink()
        with pytest.raises(
            CheckpointError, match=f"{lost.name}, which model.safetensors.index.json lists, is missing"
        ):
            CheckpointSeries.from_hub("o/r").hooked(1)
        assert not [request for request in hub.requests if request.endswith(".safetensors")]


def test_safetensors_are_preferred_and_pickles_read_where_there_is_nothing_else(tmp_path, monkeypatch):
    old = save_as_old_pythia(tiny_neox(1), tmp_path / "old")
    both = save_as_old_pythia(tiny_neox(2), tmp_path / "both")
    save(tiny_neox(2), both)
    with serving({("o/r", "step1"): old, ("o/r", "step2"): both}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        series = CheckpointSeries.from_hub("o/r")
        series.hooked(2)
        assert (hub.fetched("model.safetensors"), hub.fetched("pytorch_model.bin")) == (1, 0)
        series.hooked(1)
        assert torch.equal(logits(series._resident.model), logits_of(old))


# offline


def test_offline_uses_what_is_in_the_cache_and_nothing_else(hub, folders, monkeypatch):
    hub_series().hooked(1)
    hub_series(cache="evict")[512].tokenizer()
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    series = eh.suite("pythia-14m", seed=3)
    assert_holds(series, 1, folders)
    assert series.identity(1) == f"{REPOSITORY}@{hub.commit(REPOSITORY, 'step1')}"
    with pytest.raises(
        HubError, match=f"{REPOSITORY}, revision step512 is not in the local cache, and HF_HUB_OFFLINE"
    ):
        series.hooked(512)
    assert hub_series().steps == (1,)
    assert hub.requests == []
    assert series.problems == {}


def test_offline_with_an_empty_cache(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NoCheckpointsError, match=r"the local cache .*HF_HUB_OFFLINE is set.* has no revision"):
        _ = hub_series().steps
    assert hub.requests == []


# disk


def test_evicted_checkpoints_leave_nothing_and_are_fetched_again_when_needed(hub, folders, tmp_path):
    series = hub_series(cache="evict")
    for step in (1, 512, 1):
        assert_holds(series, step, folders)
        assert weights_in(tmp_path / "cache") == []
    series[1].load("huggingface")
    assert weights_in(tmp_path / "cache") == []
    assert hub.fetched("model.safetensors") == 4


def test_eviction_leaves_alone_what_was_in_the_cache_before(hub, folders, tmp_path):
    hub_series().hooked(1)
    before = sorted((tmp_path / "cache").rglob("*"))
    hub.requests.clear()
    assert_holds(hub_series(cache="evict"), 1, folders)
    assert sorted((tmp_path / "cache").rglob("*")) == before
    assert hub.fetched("model.safetensors") == 0


def test_damaged_weights_are_evicted_too(tmp_path, monkeypatch, folders):
    broken = tmp_path / "broken"
    shutil.copytree(folders[REPOSITORY, "step1"], broken)
    content = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[:-64])
    with serving({(REPOSITORY, "step1"): broken}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        with pytest.raises(CheckpointError, match="is damaged"):
            hub_series(cache="evict").hooked(1)
        assert weights_in(tmp_path / "cache") == []


def test_the_disk_budget_evicts_the_least_recently_used(hub, folders, tmp_path):
    size = (folders[REPOSITORY, "step1"] / "model.safetensors").stat().st_size
    small = sum(file.stat().st_size for file in folders[REPOSITORY, "step1"].iterdir()) - size
    budget = 2.5 * (size + small) / 1e9
    series = hub_series(disk_budget_gb=budget)
    for step in (0, 1, 0, 512):  # 1 is the least recently used when 512 comes
        assert_holds(series, step, folders)
        assert len(weights_in(tmp_path / "cache")) <= 2
    fetched = hub.fetched("model.safetensors")
    assert fetched == 3
    later = hub_series(disk_budget_gb=budget)  # another session counts what this one left
    later.hooked(0)
    assert hub.fetched("model.safetensors") == fetched
    later.hooked(1)
    assert hub.fetched("model.safetensors") == fetched + 1
    assert len(weights_in(tmp_path / "cache")) == 2


def test_a_budget_below_one_checkpoint_is_refused(hub, tmp_path):
    with pytest.raises(ArgumentError, match="disk_budget_gb=1e-06 is less than one checkpoint"):
        hub_series(disk_budget_gb=1e-6).hooked(1)
    assert weights_in(tmp_path / "cache") == []


def test_another_program_of_the_hub_can_use_the_cache(hub, folders, tmp_path):
    """What "keep" leaves behind is an ordinary hub cache."""
    from huggingface_hub import try_to_load_from_cache

    hub_series().hooked(1)
    found = try_to_load_from_cache(REPOSITORY, "model.safetensors", tmp_path / "cache" / "hub", "step1")
    assert Path(found).read_bytes() == (folders[REPOSITORY, "step1"] / "model.safetensors").read_bytes()


def test_a_process_of_its_own_needs_only_the_environment(hub, tmp_path):
    code = (
        "import emergent_heads as eh, json\n"
        "series = eh.CheckpointSeries.from_hub('EleutherAI/pythia-14m-seed3')\n"
        "print(json.dumps([series.steps, series.identity(1)]))"
    )
    environment = os.environ | hub.environment(tmp_path / "other")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout) == [list(STEPS), f"{REPOSITORY}@{hub.commit(REPOSITORY, 'step1')}"]


def test_nothing_but_our_own_folders_is_ever_deleted(hub, tmp_path, monkeypatch):
    """Even where the two caches are one folder."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache" / "checkpoints"))
    monkeypatch.setenv("EMERGENT_HEADS_CACHE", str(tmp_path / "cache"))
    hub_series().hooked(1)
    before = {path for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    size = sum(path.stat().st_size for path in before)
    hub_series(cache="evict", disk_budget_gb=size / 1e9).hooked(512)
    assert before <= {path for path in (tmp_path / "cache").rglob("*") if path.is_file()}
