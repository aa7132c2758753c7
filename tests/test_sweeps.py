"""Grids make the runs they say, sweeps survive what kills single runs, and the table says what came out."""

import json
import os
import pickle
import re
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from emergent_heads import jobs
from emergent_heads.errors import ArgumentError
from emergent_heads.models.attention_bias import AttentionBias
from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.processes import ProcessStartError
from emergent_heads.sweeps import RunSpec, event_times, grid, load_runs, run_sweep
from emergent_heads.sweeps.measures import measures_of, training_cost
from emergent_heads.sweeps.result import Outcome, sweep_result
from emergent_heads.tasks import CellularAutomaton, LinearMap
from emergent_heads.training.loop import train
from emergent_heads.training.run import Run
from emergent_heads.training.settings import TrainingSettings
from emergent_heads.training.stacking import StackedModel

BUILT_IN = (
    *("attention", "linear", "mlp_mixer", "mamba", "mamba2", "gated_delta_net", "rwkv4", "rwkv7", "xlstm"),
    "linear_rnn",
)
MODEL = {"n_layers": 1, "d_model": 16, "n_heads": 2}
SHORT = {"steps": 4, "evaluate_every": 2, "tokens_per_batch": 64, "checkpoints": [0], "warmup_steps": 2}


def tiny(**changes) -> list[RunSpec]:
    return grid(LinearMap, **{"state_size": 4, "sparsity": 2, **MODEL, **SHORT, **changes})


# --- grids


@given(
    sizes=st.lists(st.integers(3, 6), min_size=1, max_size=3, unique=True),
    heads=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3, unique=True),
    rates=st.lists(st.sampled_from([1e-3, 3e-3]), min_size=1, max_size=2, unique=True),
    n_seeds=st.integers(1, 3),
)
@settings(max_examples=20, deadline=None)
def test_a_grid_is_every_combination_once(sizes, heads, rates, n_seeds):
    runs = tiny(state_size=sizes, n_heads=heads, learning_rate=rates, seed=range(n_seeds))
    made = [(run.task.state_size, run.config.n_heads, run.training.learning_rate, run.seed) for run in runs]
    assert made == list(product(sizes, heads, rates, range(n_seeds)))
    assert len({run.name for run in runs}) == len(runs)
    assert all(re.fullmatch(r"[\w.=+-]+", run.name) for run in runs)


def test_settings_reach_task_model_mixer_and_training():
    (run,) = tiny(
        mixer="mlp_mixer",
        hidden_units=2,
        embedding_std=0.5,
        clip=None,
        seed=3,
        states=3,
        betas=[0.8, 0.9],
        task_seed=7,
    )
    assert run.task == LinearMap(4, 2, states=3, seed=7)
    assert (run.config.embedding_std, dict(run.config.mixer_options)) == (0.5, {"hidden_units": 2})
    assert (run.config.vocabulary_size, run.config.context) == (2, 12)
    assert (run.training.clip, run.training.betas, run.training.checkpoints) == (None, (0.8, 0.9), (0,))
    assert run.seed == 3


def test_a_list_is_an_axis_and_a_tuple_one_value():
    mixture = tiny(mixer=("attention", "linear"), n_layers=2)
    assert [run.config.mixers for run in mixture] == [("attention", "linear")]
    axis = tiny(mixer=["attention", "linear"], n_layers=2)
    assert [run.config.mixers for run in axis] == [("attention",) * 2, ("linear",) * 2]
    assert [run.config.d_model for run in tiny(d_model=np.array([16, 32]))] == [16, 32]


def test_heads_at_fixed_width_and_of_fixed_size():
    width = tiny(n_heads=[2, 4, 8], d_model=32)
    assert [(run.config.d_model, run.config.head_size) for run in width] == [(32, 16), (32, 8), (32, 4)]
    size = grid(LinearMap, state_size=4, sparsity=2, n_layers=1, n_heads=[1, 2, 4], d_head=8, **SHORT)
    assert [(run.config.d_model, run.config.head_size) for run in size] == [(8, 8), (16, 8), (32, 8)]


def test_each_seed_has_a_matrix_of_its_own_unless_told_otherwise():
    def task_seeds(task, **given):
        return [run.task.seed for run in grid(task, **MODEL, **SHORT, seed=[5, 6], **given)]

    assert task_seeds(LinearMap) == [5, 6]
    assert task_seeds(LinearMap(seed=9)) == [9, 9]
    assert task_seeds(LinearMap(seed=9), task_seed="seed") == [5, 6]
    assert task_seeds(LinearMap, task_seed=1) == [1, 1]
    assert sorted(task_seeds(LinearMap, task_seed=[1, 2])) == [1, 1, 2, 2]


def test_several_tasks_take_the_settings_they_have():
    runs = grid([LinearMap, CellularAutomaton], state_size=8, sparsity=[2, 3], rules=4, **MODEL, **SHORT)
    assert [run.task.name for run in runs] == ["LinearMap", "LinearMap", "CellularAutomaton"]
    assert (runs[-1].task.state_size, runs[-1].task.rules) == (8, 4)


def test_several_mixers_take_the_options_they_have():
    runs = tiny(mixer=["attention", "mlp_mixer"], hidden_units=[2, 4])
    assert [(run.config.mixer, *run.config.mixer_options.values()) for run in runs] == [
        ("attention",),
        ("mlp_mixer", 2),
        ("mlp_mixer", 4),
    ]


def test_a_config_gives_what_the_grid_leaves_open():
    config = SmallModelConfig.transformer_pp(2, 32, 4)
    (run,) = grid(LinearMap(4, 2), config, n_heads=2, **SHORT)
    assert run.config == replace(config, n_heads=2).for_task(run.task)
    mixer = SmallModelConfig(1, 16, mixer="mlp_mixer", mixer_options={"hidden_units": 3})
    own = [dict(run.config.mixer_options) for run in grid(LinearMap(4, 2), mixer, hidden_units=[2, 4], **SHORT)]
    assert own == [{"hidden_units": 2}, {"hidden_units": 4}]
    other = grid(LinearMap(4, 2), mixer, mixer=["mlp_mixer", "attention"], **SHORT)
    assert [dict(run.config.mixer_options) for run in other] == [{"hidden_units": 3}, {}]


WRONG = {
    "unknown setting": ({"sparsty": 2}, "'sparsty'; nearest: sparsity"),
    "unknown training setting": ({"learning_rates": [1e-3]}, "nearest: learning_rate"),
    "another task's setting": ({"rules": 3}, "no task, model or training takes 'rules'"),
    "option of another mixer": ({"hidden_units": 3}, "takes 'hidden_units'"),
    "unknown mixer": ({"mixer": "attentoin"}, "nearest: attention"),
    "sparsity above the size": ({"sparsity": [2, 5]}, r"sparsity is 5.*\(at sparsity=5\)"),
    "heads that do not divide": ({"n_heads": [2, 3]}, r"does not divide into 3 heads.*\(at n_heads=3\)"),
    "bias without attention": ({"mixer": "linear", "attention_bias": 5.0}, "layer 0 is linear"),
    "bias on a missing layer": ({"attention_bias": AttentionBias(5.0, layers=(1,))}, "layers 0 to 0"),
    "context too short": ({"context": 3}, "leave context out"),
    "no steps": ({"steps": 0}, "steps is 0; it must be"),
    "empty axis": ({"seed": []}, "seed is an empty list"),
    "wrong choice": ({"invalid": "skip"}, '"refuse" or "leave out"'),
    "nothing left": ({"sparsity": [5, 6], "invalid": "leave out"}, "no combination is left"),
}


@pytest.mark.parametrize(("changes", "said"), WRONG.values(), ids=WRONG)
def test_wrong_grids_are_refused(changes, said):
    with pytest.raises(ArgumentError, match=said):
        tiny(**changes)


def test_missing_and_misplaced_settings_are_refused():
    with pytest.raises(ArgumentError, match="give n_layers, or a config"):
        grid(LinearMap, d_model=16, steps=3)
    with pytest.raises(ArgumentError, match="give steps"):
        grid(LinearMap, **MODEL)
    with pytest.raises(ArgumentError, match=r"such as emergent_heads.tasks.LinearMap, not 'linear_map'"):
        grid("linear_map", **MODEL, steps=3)


def test_combinations_that_make_no_sense_can_be_left_out():
    runs = tiny(sparsity=[2, 4, 6], mixer=["attention", "linear"], attention_bias=[None, 5.0], invalid="leave out")
    made = [(run.task.sparsity, run.config.mixer, run.training.bias is not None) for run in runs]
    one = [("attention", False), ("attention", True), ("linear", False)]
    assert made == [(sparsity, *rest) for sparsity in (2, 4) for rest in one]


# --- runs


def test_the_name_depends_on_the_run_only():
    """Written down, because folders of older sweeps are found by it."""
    (run,) = tiny(seed=1)
    (same,) = [each for each in tiny(seed=range(3), learning_rate=[1e-3, 3e-3]) if each.name == run.name]
    assert same.settings == run.settings
    explicit = RunSpec(
        SmallModelConfig(1, 16, 2, vocabulary_size=2, context=8),
        LinearMap(4, 2, seed=1),
        TrainingSettings(**SHORT, learning_rate=1e-3),
        1,
    )
    assert explicit.name == run.name
    assert run.name.startswith("LinearMap-state_size=4-sparsity=2-task_seed=1-attention-1x16x2-seed=1-")
    names = {each.name for each in (*tiny(attention_bias=[None, 1.0, 2.0]), *tiny(biases=False), *tiny(clip=2.0))}
    assert len(names) == 5


def test_runs_travel_to_other_processes():
    for run in (*tiny(attention_bias=2.0), *tiny(mixer="mlp_mixer", hidden_units=3)):
        _ = run.name, run.columns
        assert pickle.loads(pickle.dumps(run)) == run
        assert json.loads(json.dumps(run.settings, default=str))["seed"] == 0


# --- sweeps, in this process and elsewhere


def test_a_sweep_gives_what_training_gives(tmp_path):
    runs = tiny(sparsity=[1, 2], seed=range(2))
    result = run_sweep(runs, tmp_path / "sweep", workers=0, progress=False)
    assert result.table["run"].tolist() == [run.name for run in runs]
    assert result.table[["sparsity", "seed"]].to_numpy().tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]
    for run, row in zip(runs, result.table.to_dict("records"), strict=True):
        alone = train(run.config, run.task, tmp_path / "alone" / run.name, seed=run.seed, progress=False, **SHORT)
        last = alone.metrics.iloc[-1]
        assert (row["loss_nats"], row["last_step"]) == (last["loss_nats"], 4)
        assert row["excess_loss_nats"] == pytest.approx(last["loss_nats"] - run.task.floor)
        assert row["n_parameters"] == sum(parameter.numel() for parameter in alone.series.last.load().parameters())
        assert row["seconds"] > 0
    assert set(result.table["status"]) == {"not solved"}
    assert result.table["step_solved"].isna().all()
    assert result.table["error"].isna().all()
    assert "sweep of 4 runs: 4 not solved" in repr(result)
    assert result.about["settings"]["state_size"] == 4


def test_finished_runs_are_not_trained_again_and_unfinished_ones_go_on(tmp_path, monkeypatch):
    first = run_sweep(tiny(seed=range(2)), tmp_path, workers=0, progress=False)
    trained = []

    def noted(config, task, path, **settings):
        trained.append(path.name)
        return train(config, task, path, **settings)

    monkeypatch.setattr("emergent_heads.sweeps.running.train", noted)
    wider = tiny(seed=range(3))
    unfinished = tmp_path / wider[1].name / "manifest.json"
    unfinished.write_text(unfinished.read_text().replace('"status": "finished"', '"status": "unfinished"'))
    second = run_sweep([*wider, wider[0]], tmp_path, workers=0, progress=False)
    assert trained == [wider[1].name, wider[2].name]
    columns = ["run", "loss_nats", "share_learned", "last_step", "flops"]
    pd.testing.assert_frame_equal(second.table.loc[:1, columns], first.table[columns])
    assert len(second.table) == 3


@dataclass(frozen=True)
class Trouble(LinearMap):
    """A linear map whose training does what `how` says at its second step."""

    state_size: int = 4
    sparsity: int | None = 2
    how: str = "raise"

    def batch(self, n, *, seed, step=0, split="train", device="cpu"):
        if step == 1 and self.how == "raise":
            raise RuntimeError("the dog ate\nthe batch")
        if step == 1 and self.how == "die":
            os._exit(3)
        if step == 1 and self.how == "interrupt":
            raise KeyboardInterrupt
        return super().batch(n, seed=seed, step=step, split=split, device=device)


def trouble(*how: str) -> list[RunSpec]:
    return [run for each in how for run in grid(Trouble(how=each), **MODEL, **SHORT)]


def test_a_failed_run_costs_no_other_and_is_tried_again(tmp_path, monkeypatch):
    runs = trouble("none", "raise", "no trouble")
    result = run_sweep(runs, tmp_path, workers=0, progress=False)
    assert result.table["status"].tolist() == ["not solved", "failed", "not solved"]
    assert result.failures == {runs[1].name: "RuntimeError: the dog ate the batch"}
    report = tmp_path / f"{runs[1].name}.error.txt"
    assert 'raise RuntimeError("the dog ate' in report.read_text()
    assert result.summary.set_index("how")["n_failed"].to_dict() == {"none": 0, "raise": 1, "no trouble": 0}

    monkeypatch.setattr(Trouble, "batch", LinearMap.batch)
    again = run_sweep(runs, tmp_path, workers=0, progress=False)
    assert set(again.table["status"]) == {"not solved"}
    assert not report.exists()


def test_an_interrupt_leaves_a_sweep_that_goes_on(tmp_path, monkeypatch):
    runs = trouble("none", "interrupt", "no trouble")
    with pytest.raises(KeyboardInterrupt):
        run_sweep(runs, tmp_path, workers=0, progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {runs[0].name, runs[1].name}
    monkeypatch.setattr(Trouble, "batch", LinearMap.batch)
    assert set(run_sweep(runs, tmp_path, workers=0, progress=False).table["status"]) == {"not solved"}


def test_a_process_that_dies_costs_its_own_run_only(tmp_path):
    """The default executor: processes, each with one thread. Tasks and mixers of this module are known there."""
    runs = trouble("none", "die", "raise", "no trouble")
    result = run_sweep(runs, tmp_path, workers=1, progress=False)
    assert result.table["status"].tolist() == ["not solved", "failed", "failed", "not solved"]
    assert all((tmp_path / run.name / "metrics.parquet").is_file() for run in runs[::3])  # the name is the same there
    assert result.failures == {
        runs[1].name: "ProcessDiedError: its process ended (exit status 3)",
        runs[2].name: "RuntimeError: the dog ate the batch",
    }
    here = run_sweep(runs[:1], tmp_path / "here", workers=0, progress=False)
    assert result.table["loss_nats"][0] == here.table["loss_nats"][0]


class Asked:
    """A future that can only be asked whether it is done."""

    def __init__(self, run):
        self._run, self._asked = run, 0

    def done(self):
        self._asked += 1
        return True

    def result(self):
        assert self._asked
        return self._run()


class Awaited:
    """A future that can only be waited for, such as a wrapper around ray."""

    def __init__(self, run):
        self._run = run

    def result(self):
        return self._run()


class Own:
    def __init__(self, kind):
        self.kind, self.arguments = kind, []

    def submit(self, function, *arguments):
        self.arguments.append(arguments)
        return self.kind(lambda: pickle.loads(pickle.dumps(function))(*pickle.loads(pickle.dumps(arguments))))


@pytest.mark.parametrize("kind", [Asked, Awaited])
def test_executors_of_ones_own(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs, executor = trouble("none", "raise"), Own(kind)
    result = run_sweep(runs, "sweep", executor, progress=False)
    assert result.table["status"].tolist() == ["not solved", "failed"]
    assert [parcel.arguments[1] for (parcel,) in executor.arguments] == [
        tmp_path / "sweep"
    ] * 2  # absolute: other machines


def test_processes_that_cannot_begin_end_the_sweep(tmp_path):
    class Refusing:
        def submit(self, function, *arguments):
            future = Future()
            future.set_exception(ProcessStartError("no process could be started"))
            return future

    with pytest.raises(ProcessStartError):
        run_sweep(tiny(), tmp_path, Refusing(), progress=False)
    assert not list(tmp_path.iterdir())


def test_executors_of_the_standard_library(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        result = run_sweep(trouble("none", "raise"), tmp_path, pool, progress=False)
    assert result.table["status"].tolist() == ["not solved", "failed"]


def test_an_executor_that_breaks_is_recorded(tmp_path):
    class Broken:
        def submit(self, function, *arguments):
            future = Future()
            future.set_exception(ConnectionError("the cluster is gone"))
            return future

    result = run_sweep(tiny(), tmp_path, Broken(), progress=False)
    assert list(result.failures.values()) == ["ConnectionError: the cluster is gone"]
    assert np.isnan(result.summary["share_solved"][0])


def test_submitit_is_an_executor(tmp_path):
    submitit = pytest.importorskip("submitit", reason="needs submitit, of the extra slurm")
    executor = submitit.AutoExecutor(tmp_path / "log", cluster="debug")
    result = run_sweep(trouble("none"), tmp_path / "sweep", executor, progress=False)
    assert result.table["status"].tolist() == ["not solved"]


def test_wrong_sweeps_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="no runs"):
        run_sweep([], tmp_path)
    with pytest.raises(ArgumentError, match="not LinearMap"):
        run_sweep([LinearMap()], tmp_path)
    with pytest.raises(ArgumentError, match="leave them out"):
        run_sweep(tiny(), tmp_path, Own(Awaited), workers=2)
    with pytest.raises(ArgumentError, match="workers is -1"):
        run_sweep(tiny(), tmp_path, workers=-1)
    with pytest.raises(ArgumentError, match="together is 0"):
        run_sweep(tiny(), tmp_path, together=0)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="does not take files"):
        run_sweep(tiny(), tmp_path / "file", workers=0)


# --- several runs in one process


@pytest.fixture
def stacks(monkeypatch) -> list[int]:
    """How many models each stack has had."""
    sizes = []
    real = StackedModel.__init__
    monkeypatch.setattr(
        StackedModel, "__init__", lambda self, models: (sizes.append(len(models)), real(self, models))[1]
    )
    return sizes


def same_table(first, second, tolerance=1e-4):
    columns = ["run", "status", "last_step", "step_solved", "loss_nats", "share_learned"]
    pd.testing.assert_frame_equal(first.table[columns], second.table[columns], rtol=0, atol=tolerance)


def test_seeds_trained_together_are_the_runs_that_each_would_be_alone(tmp_path, stacks):
    """The seeds have matrices of their own. Two models of another width, and three of which two fit into a job."""
    runs = tiny(d_model=[16, 32], seed=range(3), clip=0.1)
    result = run_sweep(runs, tmp_path / "together", workers=0, together=2, progress=False)
    assert stacks == [2, 2]  # and one alone of each width
    alone = run_sweep(runs, tmp_path / "alone", workers=0, progress=False)
    assert stacks == [2, 2]
    same_table(result, alone)
    assert len(set(result.table["loss_nats"])) == 6
    for run in runs:
        trained = Run.open(tmp_path / "together" / run.name)
        assert (trained.seed, trained.task, trained.config) == (run.seed, run.task, run.config)


def test_what_cannot_be_stacked_is_not(tmp_path, stacks):
    """An attention bias is that of one task's matrix; other lengths and settings have other batches."""
    bias = tiny(seed=range(2), attention_bias=2.0)
    run_sweep(bias, tmp_path / "bias", workers=0, together=4, progress=False)
    run_sweep([*tiny(states=[2, 3]), *tiny(steps=3)], tmp_path / "other", workers=0, together=4, progress=False)
    assert stacks == []
    one_matrix = tiny(seed=range(2), attention_bias=2.0, task_seed=0)
    result = run_sweep(one_matrix, tmp_path / "one", workers=0, together=4, progress=False)
    assert stacks == [2]
    same_table(result, run_sweep(one_matrix, tmp_path / "alone", workers=0, progress=False))


@pytest.mark.parametrize("mixer", ["attention", "mlp_mixer"])
def test_bfloat16_trained_together_is_what_it_is_alone_up_to_its_rounding(tmp_path, mixer, stacks):
    runs = tiny(seed=range(2), dtype="bfloat16", mixer=mixer)
    result = run_sweep(runs, tmp_path / "together", workers=0, together=2, progress=False)
    assert stacks == [2]
    same_table(result, run_sweep(runs, tmp_path / "alone", workers=0, progress=False), tolerance=5e-3)
    plain = run_sweep(tiny(seed=range(2), mixer=mixer), tmp_path / "plain", workers=0, together=2, progress=False)
    assert (plain.table["loss_nats"] != result.table["loss_nats"]).all()


def test_a_run_that_fails_together_with_others_fails_alone(tmp_path, monkeypatch, stacks):
    runs = trouble("none", "raise", "no trouble")
    result = run_sweep(runs, tmp_path, workers=0, together=3, progress=False)
    assert stacks[0] == 3
    assert result.table["status"].tolist() == ["not solved", "failed", "not solved"]
    assert result.failures == {runs[1].name: "RuntimeError: the dog ate the batch"}
    same_table(
        *(run_sweep([runs[0], runs[2]], path, workers=0, progress=False) for path in (tmp_path, tmp_path / "x"))
    )


def test_runs_that_start_from_others_are_trained_together_and_so_are_those(tmp_path, stacks):
    early = tiny(seed=range(2), steps=3)
    runs = [replace(run, init_from=start) for run, start in zip(tiny(seed=range(2)), early, strict=True)]
    result = run_sweep(runs, tmp_path / "together", workers=0, together=2, progress=False)
    assert stacks == [2, 2]
    same_table(result, run_sweep(runs, tmp_path / "alone", workers=0, progress=False))


def test_what_another_process_trains_is_waited_for_and_the_rest_is_trained_meanwhile(tmp_path, monkeypatch):
    """One seed of those together is in use, and so is the run that another starts from."""
    monkeypatch.setattr("emergent_heads.jobs.FIRST_REST_SECONDS", 0.01)
    early = tiny(seed=5, steps=3)[0]
    after = replace(tiny(seed=6)[0], init_from=early)
    runs = [*tiny(seed=range(3)), after]
    in_use = [tmp_path / runs[1].name, tmp_path / early.name]
    locks = [FileLock(folder / ".lock") for folder in in_use]
    for folder, lock in zip(in_use, locks, strict=True):
        folder.mkdir()
        lock.acquire()
    rests = []

    def rested(self, each):
        ended = taken(self, each)
        if ended is None:
            done = [run.name for run in runs if (tmp_path / run.name / "metrics.parquet").is_file()]
            rests.append(done)
            if len(rests) == 4:
                for lock in locks:
                    lock.release()
        return ended

    taken = jobs._Round._taken
    monkeypatch.setattr(jobs._Round, "_taken", rested)
    result = run_sweep(runs, tmp_path, workers=0, together=3, progress=False)
    assert set(result.table["status"]) == {"not solved"}
    assert rests[-1] == [runs[0].name, runs[2].name]
    monkeypatch.undo()
    same_table(result, run_sweep(runs, tmp_path / "alone", workers=0, progress=False))


# --- measures


def fake_run(losses, *, solved_step=None, status="finished", share=0.5):
    steps = np.arange(len(losses)) * 10
    metrics = pd.DataFrame({"step": steps, "loss_nats": losses, "share_learned": share, "seconds": steps * 0.1})
    metrics["exact_match"] = 0.25
    return type("Run", (), {"metrics": metrics, "solved_step": solved_step, "status": status})()


def test_the_plateau_is_left_at_six_hundredths_of_the_way():
    (run,) = tiny(state_size=16, sparsity=3)
    one_bit, half_a_bit = run.task.loss_with_unlearned(15), run.task.plateau - 0.5 * np.log(2) / 31
    measures = measures_of(run, fake_run([0.7, half_a_bit, one_bit, run.task.floor], solved_step=30))
    assert (measures["step_left_plateau"], measures["step_solved"]) == (20, 30)
    assert measures["excess_loss_nats"] == pytest.approx(0)
    never = measures_of(run, fake_run([0.7, half_a_bit]))
    assert (never["step_left_plateau"], never["step_solved"], never["status"]) == (None, None, "not solved")
    assert measures_of(run, fake_run([0.7, float("nan")], status="diverged"))["status"] == "diverged"


def test_for_cellular_automata_it_is_the_loss_of_the_paper():
    task = CellularAutomaton(state_size=16)
    run = RunSpec(SmallModelConfig(1, 16), task, TrainingSettings(steps=5))
    assert measures_of(run, fake_run([1.386, 1.32, 1.3]))["step_left_plateau"] == 20
    assert measures_of(run, fake_run([1.386, 1.32, 1.315]))["step_left_plateau"] is None


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_flops_are_six_per_weight_and_token_and_those_of_attention(mlp):
    """Kaplan et al. 2020: forward 2 and backward 4 per weight; attention 12 n_layers d_model per pair of positions."""
    config = SmallModelConfig(2, 32, 4, mlp=mlp, vocabulary_size=4, context=24)
    model = SmallModel(config)
    matrices = sum(parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim == 2)
    matrices -= model.embed.weight.numel() + model.pos_embed.weight.numel()
    n_parameters, flops = training_cost(config, 24)
    assert n_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert flops == 6 * matrices * 23 + 12 * 2 * 32 * 23**2


@pytest.mark.parametrize("mixer", BUILT_IN)
def test_flops_of_every_mixer_are_counted(mixer):
    def flops(mixer, mlp="gelu"):
        config = SmallModelConfig(2, 16, 2, mixer=mixer, mlp=mlp, vocabulary_size=4, context=12)
        return training_cost(config, 12)[1]

    assert flops(mixer) - flops(mixer, "none") == 2 * 6 * 11 * 2 * 16 * 64  # the MLPs of two layers
    assert flops(mixer, "none") > 6 * 11 * 16 * 4  # more than the unembedding
    assert 2 * flops(("attention", mixer)) == flops("attention") + flops(mixer)


# --- tables over seeds


def made_up(solved: dict[tuple[int, int], int | None], *, status=None) -> "object":
    """A sweep in which (heads, seed) solved at that step of 100, without training."""
    runs = [run for heads, seed in solved for run in tiny(n_heads=heads, seed=seed, steps=100, learning_rate=1e-3)]
    outcomes = {}
    for run, step in zip(runs, solved.values(), strict=True):
        measures = {"status": "not solved" if step is None else "solved", "step_solved": step, "last_step": 100}
        measures |= {"step_left_plateau": 10, "share_learned": 0.5, "excess_loss_nats": 0.1 * run.config.n_heads}
        measures |= {"loss_nats": 1.0, "n_parameters": 5, "flops": 1e6, "seconds": 1.0}
        outcomes[run.name] = Outcome({**measures, **(status or {}).get((run.config.n_heads, run.seed), {})})
    return sweep_result(runs, outcomes, Path("sweep"))


def test_seeds_that_never_solve_are_censored():
    solved = {(1, 0): 40, (1, 1): None, (1, 2): None, (2, 0): 20, (2, 1): 30, (2, 2): None}
    result = made_up(solved)
    assert result.varying == ("n_heads", "d_head")
    summary = result.summary.set_index("n_heads")
    assert summary["n_solved"].to_dict() == {1: 1, 2: 2}
    assert summary["share_solved"].tolist() == pytest.approx([1 / 3, 2 / 3])
    assert summary["median_step_solved"].to_dict() == {1: np.inf, 2: 30}
    assert summary["restricted_mean_step_solved"].to_dict() == pytest.approx({1: 80, 2: 50})
    assert summary["restricted_to_step"].to_dict() == {1: 100, 2: 100}
    assert summary["median_step_left_plateau"].to_dict() == {1: 10, 2: 10}
    assert summary["excess_loss_nats"].to_dict() == pytest.approx({1: 0.1, 2: 0.2})


def test_diverged_runs_never_solve_and_failed_ones_are_not_counted():
    gone = {(1, 1): {"status": "diverged", "last_step": 20}, (1, 2): {"status": "failed", "last_step": None}}
    result = made_up({(1, 0): 40, (1, 1): None, (1, 2): None}, status=gone)
    times, censored = event_times(result.table.iloc[:2], "step_solved")
    assert (times.tolist(), censored.tolist()) == ([40, 100], [False, True])
    (row,) = result.summary.to_dict("records")
    assert (row["n_seeds"], row["n_failed"], row["n_diverged"], row["n_solved"]) == (2, 1, 1, 1)
    assert row["restricted_mean_step_solved"] == pytest.approx(70)


def test_runs_without_bias_have_strength_zero_and_settings_without_meaning_are_left_out():
    runs = tiny(steps=[4, 8], attention_bias=[None, 5.0])
    result = sweep_result(runs, {run.name: Outcome(error="x") for run in runs}, Path("sweep"))
    assert result.varying == ("steps", "attention_bias")
    assert result.table["attention_bias"].tolist() == [0.0, 5.0, 0.0, 5.0]
    assert result.table["steps"].tolist() == [4, 4, 8, 8]
    assert result.table.columns.is_unique
    shared = tiny(seed=[1, 2], task_seed=[1, 2])
    table = sweep_result(shared, {run.name: Outcome(error="x") for run in shared}, Path("sweep")).table
    assert table[["seed", "task_seed"]].to_numpy().tolist() == [[1, 1], [2, 1], [1, 2], [2, 2]]


def test_tables_are_saved(tmp_path):
    result = made_up({(1, 0): 40, (1, 1): None})
    for suffix in (".csv", ".parquet", ".json"):
        result.save(tmp_path / f"sweep{suffix}")
    read = pd.read_csv(tmp_path / "sweep.csv")
    assert read["step_solved"].tolist()[0] == 40
    assert np.isnan(read["step_solved"][1])
    assert json.loads((tmp_path / "sweep.csv.about.json").read_text())["settings"]["state_size"] == 4


def test_the_plot_shows_every_run():
    result = made_up({(heads, seed): None if heads == 1 else 20 + seed for heads in (1, 2, 4, 8) for seed in range(3)})
    figure = result.plot("n_heads")
    (axes,) = figure.axes
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert sum(len(line.get_xdata()) for line in crosses) == 3
    dots = [line for line in axes.lines if line.get_marker() == "o" and line.get_alpha() is not None]
    assert sorted(np.concatenate([line.get_ydata() for line in dots])) == [20] * 3 + [21] * 3 + [22] * 3
    assert axes.get_xscale() == "log"
    by_size = result.plot("n_heads", "excess_loss_nats", by="d_head")
    assert len(by_size.legends[0].get_texts()) == 4
    assert result.plot("n_heads", "share_learned").axes[0].get_ylabel() == "share learned"


def test_a_narrow_range_of_steps_has_ticks_at_its_ends():
    axes = made_up({(1, 0): 40, (2, 0): 30}).plot("n_heads").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["30", "40"]


def test_settings_that_are_words_or_missing_are_plotted():
    runs = tiny(mixer=["attention", "linear"], clip=[None, 1.0])
    measures = {"status": "solved", "step_solved": 4, "last_step": 4, "share_learned": 1.0}
    result = sweep_result(runs, {run.name: Outcome(measures) for run in runs}, Path("sweep"))
    ticks = [label.get_text() for label in result.plot("mixer", "share_learned").axes[0].get_xticklabels()]
    assert ticks == ["attention", "linear"]
    assert len(result.plot("clip", "share_learned").axes[0].get_xticklabels()) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("heads",), "nearest: n_heads"),
        (("n_heads", "step_solve"), "nearest: step_solved"),
        (("n_heads", "seconds", "x"), "'x'"),
    ],
)
def test_plots_of_what_is_not_there_are_refused(arguments, said):
    with pytest.raises(ArgumentError, match=said):
        made_up({(1, 0): 40, (2, 0): 30}).plot(*arguments)


# --- sweeps in files


def test_runs_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import emergent_heads.sweeps as s, emergent_heads.tasks as t\n"
        f"runs = s.grid(t.LinearMap(4, 2), **{MODEL}, **{SHORT})\n"
    )
    assert [run.name for run in load_runs(file)] == [run.name for run in grid(LinearMap(4, 2), **MODEL, **SHORT)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "does not define runs"),
        ("runs = 3", "runs in .*'int' object is not iterable"),
        ("runs = [3]", "not 3"),
        ("runs = []", "no runs"),
        ("\nruns = 1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("def f(:\n  pass", "line 1: SyntaxError: invalid syntax"),
        (
            "from emergent_heads.sweeps import grid\nfrom emergent_heads.tasks import LinearMap\n\n"
            "runs = grid(LinearMap, sparsty=2)",
            "line 4: no task, model or training takes 'sparsty'",
        ),
    ],
)
def test_wrong_files_are_refused_with_the_line(text, said, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        load_runs(file)
    with pytest.raises(ArgumentError, match="no sweep file"):
        load_runs(tmp_path / "nowhere.py")
