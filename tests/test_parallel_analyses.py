"""Analyses by workers: the same numbers as without them, each checkpoint read once, nothing lost with a worker."""

import copy
import pickle
import shutil
import sys
import types
import warnings
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from checkpoints_fixtures import save, tiny_neox
from command_line import complaint
from command_line import run as command
from hub_server import serving, use_hub
from parallel_series import (
    DAMAGED,
    FAILS,
    LOG,
    N_STEPS,
    REPEATED,
    blended,
    blended_series,
    deadly_series,
    loads,
    loads_by_process,
    prompts,
    published_series,
)

import emergent_heads as eh
from emergent_heads import executors, workers
from emergent_heads.checkpoints import suites
from emergent_heads.checkpoints.hub import HubSource
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.checkpoints.weights import Resident
from emergent_heads.errors import ArgumentError, HubError, KnownIssueWarning

TASK = eh.tasks.Addition(5)
HEADS = [(0, 1), (1, 2), (2, 3)]
PROBING = {"n_train": 200, "n_test": 60, "penalties": (1.0,), "n_untrained": 1, "progress": False}
ABLATING = {"n": 40, "n_reference": 60, "progress": False}


class AtOnce:
    """The least that an executor can be: pickles, runs and returns; its futures say nothing but the result."""

    def submit(self, function, /, *arguments):
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture(scope="module")
def processes():
    with executors.Local(2) as made:
        yield made


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture(scope="module")
def tasks():
    return [prompts(0, "early", right=5), prompts(1, "late")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A small run with seven checkpoints; don't write to it."""
    config = eh.SmallModelConfig.transformer_pp(n_layers=2, d_model=16)
    path = tmp_path_factory.mktemp("parallel") / "run"
    settings = {"tokens_per_batch": 256, "checkpoints": range(7), "evaluate_every": 6, "progress": False}
    eh.train(config, TASK, path, steps=6, seed=0, learning_rate=1e-2, **settings)
    return path


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="module")
def probed(trained):
    return eh.probe_series(CheckpointSeries.from_run(trained), TASK, ["carry", "first_operand"], **PROBING)


def same_points(points, others):
    assert len(points) == len(others)
    for one, other in zip(points, others, strict=True):
        pd.testing.assert_frame_equal(one.table, other.table)
        assert one.about == other.about


def close(table: pd.DataFrame, other: pd.DataFrame):
    pd.testing.assert_frame_equal(table, other, rtol=1e-4, atol=1e-6)


# ---- what travels ----


def test_a_series_travels_without_its_models_and_with_what_is_known_of_it(trained, monkeypatch):
    monkeypatch.chdir(trained.parent)
    series = CheckpointSeries.from_run("run", kind="small")
    series.allow_known_bad = False
    series.problems[3] = "odd"
    series.hooked(2)
    assert len(pickle.dumps(series)) < 3000
    sent = pickle.loads(pickle.dumps(series[4]))
    assert sent.step == 4
    assert (sent.series.steps, sent.series.name, sent.series.problems) == (series.steps, "run", {3: "odd"})
    assert not sent.series.allow_known_bad
    assert (sent.series._resident, sent.series._hooked, series._hooked_step) == (None, None, 2)
    wanted = series[4].load().state_dict()
    monkeypatch.chdir("/")
    torch.testing.assert_close(sent.load().state_dict(), wanted)


def test_commits_that_the_hub_told_go_along():
    source = HubSource("owner/name")
    vars(source)["_commits"] = {"step5": "a" * 40}
    sent = pickle.loads(pickle.dumps(CheckpointSeries(source)))
    assert sent.steps == (5,)
    assert sent.identity(5) == f"owner/name@{'a' * 40}"


def test_a_copy_is_apart_from_its_series(trained):
    series = CheckpointSeries.from_run(trained)
    other = copy.copy(series)
    other.problems[1] = "odd"
    assert series.problems == {}
    assert other.hooked(0) is not series.hooked(0)


@pytest.mark.parametrize("where", [{"workers": 1}, {"executor": ProcessPoolExecutor(1)}])
def test_a_loader_that_cannot_be_sent_is_refused_before_any_work(tasks, where):
    series, many = CheckpointSeries.from_loader([0, 1], lambda step: blended(step), name="mine"), many_prompts()
    for call in (
        lambda: eh.find_emergence(series, tasks, **where),
        lambda: eh.emergence_table([series], tasks, **where),
        lambda: eh.probe_series(series, many, _last_token(), **QUICK, **where),
        lambda: eh.recovery_curve(series[0], series[1], tasks[0], HEADS, **where),
    ):
        with pytest.raises(ArgumentError, match=r"the loader of mine cannot be sent .*top level of a module"):
            call()


def test_what_only_cloudpickle_can_send_is_left_to_executors_that_use_it(tasks):
    pytest.importorskip("cloudpickle")

    class Clouds(AtOnce):
        def submit(self, function, /, *arguments):
            cloudpickle = pytest.importorskip("cloudpickle")
            return super().submit(_call_pickled, cloudpickle.dumps((function, arguments)))

    series = CheckpointSeries.from_loader([0, 5], lambda step: blended(step))
    point = eh.find_emergence(series, tasks[0], "scan", executor=Clouds(), progress=False)
    assert point.require() == (0, 5)


def _call_pickled(content):
    function, arguments = pickle.loads(content)
    return function(*arguments)


def test_what_a_notebook_defines_is_refused_where_processes_cannot_import_it(tasks, monkeypatch):
    notebook = types.ModuleType("__main__")
    exec("def load(step): ...", vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    series = CheckpointSeries.from_loader([0, 1], notebook.load, name="mine")
    with pytest.raises(ArgumentError, match=r"the loader of mine is defined in this session.* put it into a module"):
        eh.find_emergence(series, tasks, workers=1)


def test_a_model_that_cannot_be_sent_is_refused(tasks, monkeypatch):
    odd = blended(0)
    odd.odd = lambda: None
    with pytest.raises(ArgumentError, match=r"pre cannot be sent .*give checkpoints of a series"):
        eh.recovery_curve(odd, blended(7), tasks[0], HEADS, workers=1)
    monkeypatch.setattr(workers, "_MOST_SENT_GB", 1e-5)
    with pytest.raises(ArgumentError, match=r"pre takes .* GB, too much"):
        eh.recovery_curve(blended(0), blended(7), tasks[0], HEADS, workers=1)


def test_an_executor_and_workers_are_one_too_many(tasks, trained, probed):
    series, both = CheckpointSeries.from_run(trained), {"executor": AtOnce(), "workers": 2}
    for call in (
        lambda: eh.find_emergence(series, tasks[0], **both),
        lambda: eh.probe_series(series, TASK, "carry", **PROBING, **both),
        lambda: eh.recovery_curve(blended(0), blended(7), tasks[0], HEADS, **both),
        lambda: eh.ablate_features(series.last, TASK, probed, 2, **ABLATING, **both),
        lambda: eh.ablation_series(series, TASK, probed, **both),
    ):
        with pytest.raises(ArgumentError, match="leave them out, or the executor"):
            call()


# ---- emergence ----


@pytest.mark.parametrize("strategy", ["bisect", "scan", "verify"])
def test_workers_find_what_is_found_without_them(strategy, tasks, threads, processes, tmp_path):
    def table(name, **how):
        runs = [blended_series(tmp_path / name / str(seed), f"seed {seed}", seed) for seed in range(2)]
        found = eh.emergence_table(runs, tasks, strategy, progress=False, **how)
        return found, runs

    found, runs = table("alone")
    assert (found.table["status"] == "emerged").sum() >= 2
    assert any(REPEATED in each.problems for each in runs) is (strategy != "bisect")
    for name, executor in {"threads": threads, "processes": processes, "least": AtOnce()}.items():
        other, of_workers = table(name, executor=executor)
        pd.testing.assert_frame_equal(other.table, found.table)
        pd.testing.assert_frame_equal(other.summary, found.summary)
        same_points(other.points, found.points)
        assert other.about == found.about
        assert [each.problems for each in of_workers] == [each.problems for each in runs]
        for one in map(str, range(2)):
            assert loads(tmp_path / name / one) == loads(tmp_path / "alone" / one)  # once, for both tasks


def test_a_scan_of_one_series_is_spread_and_reads_each_checkpoint_once(tasks, tmp_path, processes, monkeypatch):
    monkeypatch.setattr("emergent_heads.analysis.emergence._MOST_IN_PIECE", 1)
    series = blended_series(tmp_path)
    points = eh.find_emergence(series, tasks, "scan", executor=processes, progress=False)
    assert loads(tmp_path) == dict.fromkeys(range(N_STEPS), 1)
    same_points(points, eh.find_emergence(blended_series(tmp_path / "alone"), tasks, "scan", progress=False))
    assert series.problems == {DAMAGED: points[0].problems[DAMAGED], REPEATED: "weights identical to step 0"}
    (tmp_path / LOG).unlink()
    again = eh.find_emergence(series, tasks, "verify", progress=False)  # all is kept, though by no file
    assert again[0].table["reused"].all()
    assert set(loads(tmp_path)) <= {0, DAMAGED, N_STEPS - 1}  # to try it again, and for a tokenizer


def test_jobs_of_one_worker_share_a_resident_model(trained, monkeypatch, tmp_path):
    made, filled = [], []
    start, fill = Resident.__init__, Resident.fill
    monkeypatch.setattr(Resident, "__init__", lambda self, *a, **k: made.append(self) or start(self, *a, **k))
    monkeypatch.setattr(Resident, "fill", lambda self, *a, **k: filled.append(self) or fill(self, *a, **k))
    monkeypatch.setattr("emergent_heads.analysis.emergence._MOST_IN_PIECE", 1)
    for step in range(5):
        blended(step).save_pretrained(tmp_path / f"step{step}")
    series = CheckpointSeries.from_directory(tmp_path)
    with ThreadPoolExecutor(1) as one:
        eh.find_emergence(series, prompts(0, "late"), "scan", executor=one, progress=False)
    assert (len(made), len(filled)) == (1, 4)
    assert series._resident is None


def test_a_series_that_fails_costs_the_others_nothing(tasks, tmp_path, threads):
    folders = {name: tmp_path / name for name in ("first", "second", "third")}
    runs = [blended_series(folder, name) for name, folder in folders.items()]
    (folders["second"] / FAILS).touch()
    with pytest.raises(HubError, match=r"second does not answer \(1 of 3 jobs failed, of second"):
        eh.emergence_table(runs, tasks, progress=False, executor=threads)
    (folders["second"] / FAILS).unlink()
    for folder in folders.values():
        (folder / LOG).unlink(missing_ok=True)
    found = eh.emergence_table(runs, tasks, progress=False, executor=threads)
    assert found.table["status"].eq("emerged").sum() == 3
    assert len(loads(folders["second"])) > 1
    assert set(loads(folders["first"])) <= {N_STEPS - 1, DAMAGED}  # for a tokenizer; all else is kept


def test_known_issues_are_warned_of_once_and_by_the_caller(tasks, tmp_path, threads, monkeypatch):
    monkeypatch.setattr("emergent_heads.analysis.emergence._MOST_IN_PIECE", 1)
    series = published_series(tmp_path)
    with pytest.warns(KnownIssueWarning) as met:
        eh.find_emergence(series, tasks[0], "scan", executor=threads, progress=False)
    assert len(met) == 1
    assert met[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eh.find_emergence(series, tasks[0], "scan", executor=threads, progress=False)
        refused = published_series(tmp_path, allow_known_bad=False)
        point = eh.find_emergence(refused, tasks[0], "scan", executor=threads, progress=False)
    assert sorted(point.problems) == [0, 512]
    assert "allow_known_bad=True" in point.problems[0]


def test_a_killed_worker_costs_the_evaluation_it_was_at(run, monkeypatch):
    monkeypatch.setattr("emergent_heads.analysis.emergence._MOST_IN_PIECE", 4)
    batch = TASK.batch(8, seed=1)
    task = eh.tasks.from_tokens(batch.tokens[:, :-1], batch.tokens[:, -1])
    alone = eh.find_emergence(CheckpointSeries.from_run(run), task, "scan", progress=False)
    shutil.rmtree(eh.storage.cache_folder())
    (run / "kills_at_2").touch()
    with executors.Local(2) as processes:  # begun here, for they keep evaluations where this test does
        point = eh.find_emergence(deadly_series(run), task, "scan", executor=processes, progress=False)
    assert not (run / "kills_at_2").exists()
    rest = [name for name in alone.table if name != "reused"]
    pd.testing.assert_frame_equal(point.table[rest], alone.table[rest])
    assert point.table.loc[point.table["reused"], "step"].tolist() == [0, 1]  # before it died
    # Step 0 once more for the number of tokens, which no evaluation says.
    assert loads(run) == {0: 2, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}


# ---- probes ----


QUICK = {"n_train": 40, "n_test": 12, "n_untrained": 0, "progress": False}


def many_prompts():
    return eh.tasks.from_tokens(torch.randint(50, (80, 6), generator=torch.Generator().manual_seed(2)), [0] * 80)


def _last_token():
    return eh.Feature("last", "binary", lambda tokens: tokens[:, -1:] % 2, positions=[5])


def same_probes(found, other):
    pd.testing.assert_frame_equal(found.table, other.table)
    assert found.about == other.about
    assert found.problems == other.problems
    for step in other.steps:
        for name in ("weights", "shuffled"):
            of_step, wanted = getattr(found[step], name), getattr(other[step], name)
            assert of_step.keys() == wanted.keys()
            for key, probe in wanted.items():
                np.testing.assert_array_equal(of_step[key].weights, probe.weights)
                np.testing.assert_array_equal(of_step[key].intercepts, probe.intercepts)


def test_probes_of_workers_are_the_same_to_the_last_bit(trained, probed, processes, threads, tmp_path):
    for name, executor in {"processes": processes, "threads": threads}.items():
        series = CheckpointSeries.from_run(trained)
        found = eh.probe_series(
            series, TASK, ["carry", "first_operand"], path=tmp_path / name, executor=executor, **PROBING
        )
        same_probes(found, probed)
        pd.testing.assert_frame_equal(eh.open_probes(tmp_path / name).table, probed.table)


def test_features_need_not_travel(tmp_path):
    series, how = blended_series(tmp_path), {**QUICK, "steps": [2, DAMAGED, 5]}
    found = eh.probe_series(series, many_prompts(), _last_token(), executor=AtOnce(), **how)
    assert found.steps == (2, 5)
    assert "damaged" in found.problems[DAMAGED]
    same_probes(found, eh.probe_series(series, many_prompts(), _last_token(), **how))


def test_a_worker_killed_while_probing_costs_the_checkpoint_it_was_at(run, probed, processes, tmp_path):
    (run / "kills_at_4").touch()
    how = {**PROBING, "path": tmp_path / "probes"}
    found = eh.probe_series(deadly_series(run), TASK, ["carry", "first_operand"], executor=processes, **how)
    pd.testing.assert_frame_equal(found.table, probed.table)
    assert loads(run) == {0: 2, 1: 1, 2: 1, 3: 1, 4: 2, 5: 1, 6: 1}  # step 0 also here, for the baselines
    (run / LOG).unlink()
    eh.probe_series(deadly_series(run), TASK, ["carry", "first_operand"], executor=processes, **how)
    assert loads(run) == {0: 1}


def test_submitit_runs_the_jobs(trained, probed, tmp_path):
    pytest.importorskip("submitit", reason="the extra slurm is not installed")
    with executors.Slurm(tmp_path / "logs", cluster="debug") as slurm:
        series = CheckpointSeries.from_run(trained)
        found = eh.probe_series(series, TASK, ["carry", "first_operand"], steps=[0, 6], executor=slurm, **PROBING)
    wanted = probed.table.loc[probed.table["step"].isin([0, 6])].reset_index(drop=True)
    pd.testing.assert_frame_equal(found.table, wanted)


# ---- control draws ----


def test_recovery_by_workers(tasks, processes, threads, tmp_path, monkeypatch):
    monkeypatch.setattr("emergent_heads.analysis.recovery._MOST_IN_JOB", 7)
    series = blended_series(tmp_path)
    how = {"ks": (1, 2, 3), "controls": 20, "order": "greedy"}
    alone = eh.recovery_curve(series[0], series[7], tasks[1], HEADS, **how)
    (tmp_path / LOG).unlink()
    found = eh.recovery_curve(series[0], series[7], tasks[1], HEADS, executor=processes, **how)
    close(found.table, alone.table)
    assert (found.greedy, found.about) == (alone.greedy, alone.about)
    read = loads_by_process(tmp_path)
    assert set(read.values()) == {1}  # the pair, once by each worker and once here, for all rounds of the greedy order
    assert 2 <= len({pid for pid, _ in read}) <= 3
    models = eh.recovery_curve(blended(0), blended(7), tasks[1], HEADS, executor=threads, **how)
    close(models.table, alone.table)


def test_ablations_by_workers(trained, probed, processes, threads):
    series = CheckpointSeries.from_run(trained)
    alone = eh.ablate_features(series.last, TASK, probed, 3, **ABLATING)
    for model, executor in ((series.last, processes), (series.last.load(), threads)):
        found = eh.ablate_features(model, TASK, probed, 3, executor=executor, **ABLATING)
        close(found.table, alone.table)
        close(found.controls, alone.controls)
        for key, exact in alone.exact.items():
            np.testing.assert_array_equal(found.exact[key], exact)


def test_ablations_along_a_series_by_workers(trained, probed, processes):
    how = {"steps": [0, 3, 6], "controls": 2, "features": "carry", **ABLATING}
    alone = eh.ablation_series(CheckpointSeries.from_run(trained), TASK, probed, **how)
    found = eh.ablation_series(CheckpointSeries.from_run(trained), TASK, probed, executor=processes, **how)
    pd.testing.assert_frame_equal(found.table, alone.table)
    assert found.about == alone.about


# ---- on the command line ----


COPYING = ("--task", "in_context_repetition", "--vocabulary", 50, "--n-prompts", 4)
SLURM = ("--executor", "slurm", "--executor-option", "cluster=debug")


def test_seeds_of_a_suite_make_one_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suites, "SUITES", dict(suites.SUITES))
    eh.register_suite("mine", {0: "me/a", 1: "me/b"}, steps=[0, 1], size="tiny")
    folders = {}
    for number, repository in enumerate(("me/a", "me/b")):
        for step in (0, 1):
            model = tiny_neox(step + 2 * number, max_position_embeddings=128)
            folders[repository, f"step{step}"] = save(model, tmp_path / repository / str(step))
    where = ("--suite", "mine", "--seeds", 1, 0, *COPYING)
    with serving(folders) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        assert command("emergence", *where, "--out", tmp_path / "table.csv", "--plot", tmp_path / "seeds.png") == 0
        said = capsys.readouterr().out
        table = pd.read_csv(tmp_path / "table.csv")
        assert table["seed"].tolist() == [1, 0]
        assert "points of emergence of 2 series" in said
        assert "over the seeds:" in said
        assert "restricted_mean_step" in said
        assert (tmp_path / "seeds.png").stat().st_size > 0
        pytest.importorskip("submitit", reason="the extra slurm is not installed")
        monkeypatch.setenv("EMERGENT_HEADS_CACHE", str(tmp_path / "other"))
        out = tmp_path / "out" / "table.csv"
        assert command("emergence", *where, "--strategy", "scan", "--out", out, *SLURM) == 0
    scanned = pd.read_csv(out)
    assert scanned["n_evaluated"].tolist() == [2, 2]
    assert any((out.parent / "slurm").iterdir())


def test_probes_recovery_and_ablation_take_workers(run, probed, tmp_path, capsys):
    pytest.importorskip("submitit", reason="the extra slurm is not installed")
    sizes = ("--n-train", 200, "--n-test", 60)
    assert command("probe", "--run", run, "--feature", "carry", *sizes, "--out", tmp_path / "probes", *SLURM) == 0
    assert eh.open_probes(tmp_path / "probes" / "run").steps == tuple(range(7))
    how = ("--probes", tmp_path / "probes", "--controls", 2, "--rows", 40, "--out", tmp_path / "ablation.csv")
    assert command("ablate", "--run", run, *how, *SLURM) == 0
    assert "feature" in set(pd.read_csv(tmp_path / "ablation.csv")["edit"])
    for step in range(2):
        save(tiny_neox(step, max_position_embeddings=128), tmp_path / "models" / f"step{step}")
    steps = ("--directory", tmp_path / "models", *COPYING, "--pre", 0, "--post", 1)
    recovery = ("--recovery", tmp_path / "recovery.csv", "--controls", 3)
    assert command("rank", *steps, *recovery, *SLURM) == 0
    assert pd.read_csv(tmp_path / "recovery.csv")["k"].max() == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["emergence", "--hub", "a/b", "--seeds", 1], "--seeds goes with --suite"),
        (["emergence", "--suite", "pythia-14m", "--seed", 1, "--seeds", 2], "not both"),
        (["emergence", "--suite", "pythia-14m", "--seeds", 1, 1], "given twice: pythia-14m-seed1"),
        (["emergence", "--suite", "pythia-14m", "--workers", 0, "--executor", "ray"], "--workers is 0"),
        (["rank", "--suite", "pythia-14m", "--workers", 2], "for the random heads of --recovery"),
    ],
)
def test_options_that_do_not_go_together(arguments, said, capsys):
    assert command(*arguments, "--task", "string_repetition") == 2
    assert said in complaint(capsys)


def test_scores_take_neither_seeds_nor_workers(tmp_path, capsys):
    pd.DataFrame({"model": ["a"], "step": [0], "score": [0.1]}).to_csv(tmp_path / "scores.csv", index=False)
    for option in (("--seeds", 1), ("--workers", 2)):
        assert command("emergence", "--from-table", tmp_path / "scores.csv", "--threshold", 0.5, *option) == 2
        assert "leave out checkpoints, tasks, seeds and workers" in complaint(capsys)
