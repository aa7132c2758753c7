"""The experiments on quiet features: what they train, what their rules say, and the whole way at a tiny size."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from emergent_heads import tasks
from emergent_heads.analysis.transition import find_transition
from emergent_heads.experiments import (
    compute_budgets,
    feature_ablation,
    plateau_then_drop,
    probing,
    quiet_features,
    quiet_figures,
)
from emergent_heads.experiments.comparisons import of_interval
from emergent_heads.experiments.probing import PROBLEMS, Problem
from emergent_heads.experiments.recipes import ROWS, Recipes, checkpoint_steps
from emergent_heads.experiments.registry import EXPERIMENTS, find_experiment
from emergent_heads.experiments.report import write_page
from emergent_heads.experiments.reproduce import run_experiment
from emergent_heads.statistics import Interval

NAMES = tuple(name for name, each in EXPERIMENTS.items() if each.paper == "quiet features")
ADDITION = Problem("addition, 5 bits", tasks.Addition(5), 12, ("addition, 16 bits", tasks.Addition(16)))


# ---- what they train ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_arm_has_at_least_three_seeds_that_differ_in_nothing_else(name, scale):
    if (name, scale) == ("compute-budgets", "paper"):
        pytest.skip("counts the FLOPs of models of 50 million parameters, which takes half a minute")
    for arm in find_experiment(name).study().arms(Recipes(scale)):
        assert len({run.seed for run in arm.runs}) == len(arm.runs) >= (10 if name == "early-warning" else 3)
        alike = [{key: value for key, value in run.columns.items() if key != "seed"} for run in arm.runs]
        assert all(each == alike[0] for each in alike)


def test_every_algorithmic_task_is_there():
    every = {
        each for each in vars(tasks).values() if isinstance(each, type) and issubclass(each, tasks.AlgorithmicTask)
    }
    assert {type(problem.task) for problem in PROBLEMS} == every - {tasks.AlgorithmicTask}


def test_the_paper_scale_has_the_papers_sizes():
    """Section a.2 of arXiv 2505.03997: 16 bits, 64 input bits, 64 values, 16 activities, 11 nodes; four layers."""
    sizes = {"bits": {16, 64}, "nodes": {11}, "values": {64}, "activities": {16}}
    for problem in PROBLEMS:
        for run in problem.arm(Recipes("paper")).runs:
            told = {name: value for name, value in run.task.settings().items() if name in sizes}
            assert len(told) == 1
            assert all(value in sizes[name] for name, value in told.items())
            assert (run.config.n_layers, run.training.steps) == (4, 50_000)


def test_more_seeds_than_colours_are_drawn():
    curves = pd.concat([table.assign(task="t", run=run, gap_left=1.0) for run, table in enumerate(falling(9, 99, 9))])
    assert len(quiet_figures.transition_panels(curves, x="step", label="step").axes[0].lines) >= 9


def test_the_papers_features_are_features_of_the_tasks():
    known = set()
    for problem in PROBLEMS:
        for feature in problem.task.features:
            kind = "carry_k" if feature.name.startswith("carry_") else feature.name
            known.add((problem.title.partition(",")[0], kind))
    assert set(quiet_features.PAPER) <= known


def test_a_data_budget_is_what_the_run_sees():
    for arm in plateau_then_drop.DATA_BUDGETS.arms(Recipes("small")):
        for run in arm.runs:
            assert arm.x == run.training.steps * ROWS == run.training.steps * run.training.batch_size(run.task)


def test_budgets_grow_and_are_kept():
    budgets = [arm.x for arm in compute_budgets.COMPUTE_BUDGETS.arms(Recipes("small"))]
    assert budgets == sorted(budgets)
    assert len(set(budgets)) == 7


def test_checkpoints_grow_by_the_ratio_and_end_at_the_last_step():
    steps = checkpoint_steps(500, first=10, ratio=1.5)
    assert steps[:2] == (0, 10)
    assert steps[-1] == 500
    ratios = np.array(steps[2:]) / np.array(steps[1:-1])
    assert (ratios < 1.6).all()
    assert checkpoint_steps(5) == (0, 5)


# ---- rules ----


def falling(start, end, seeds=3):
    """Losses that are on the plateau up to `start`, at the floor from `end` on, straight in log steps in between."""
    steps = np.geomspace(1, 10_000, 400)
    way = np.clip(np.log(steps / start) / np.log(end / start), 0, 1)
    return [pd.DataFrame({"step": steps * (1 + 0.01 * seed), "loss_nats": 1 - way}) for seed in range(seeds)]


class Unit:
    plateau, floor = 1.0, 0.0


@pytest.mark.parametrize(("factor", "holds"), [(3.0, True), (20.0, False)])
def test_a_drop_is_abrupt_by_its_factor(factor, holds):
    check = plateau_then_drop.abrupt("planted", find_transition(falling(100, 100 * factor), Unit()))
    assert check.holds is holds
    assert check.value == pytest.approx(factor**0.8, rel=0.02)  # from 0.9 to 0.1 of the way, in log steps
    assert check.low <= check.value <= check.high


def test_a_drop_that_never_comes_settles_nothing():
    tables = [pd.DataFrame({"step": [1.0, 10.0, 100.0], "loss_nats": [1.0, 1.0, 0.97]})] * 3
    assert plateau_then_drop.abrupt("planted", find_transition(tables, Unit())).holds is None


@pytest.mark.parametrize(
    ("interval", "holds"), [((0.5, 0.3, 0.7), True), ((0.1, 0.0, 0.15), False), ((0.2, 0.1, 0.3), None)]
)
def test_an_interval_holds_only_as_a_whole(interval, holds):
    assert of_interval("part", Interval(*interval), 3, "so", above=0.2).holds is holds


@pytest.mark.parametrize(
    ("verdict", "holds"), [("quiet", True), ("loud", False), ("undecided", None), ("not learned", None)]
)
def test_a_verdict_that_is_not_settled_settles_nothing(verdict, holds):
    row = {"feature": "carry", "verdict": verdict, "reason": "", "n_seeds": 3, "share_removed_at_start": 0.5}
    row |= {"lead_steps": 10.0, "lead_low": 5.0, "lead_high": 15.0}
    assert quiet_features._has_verdict("addition", row, "quiet").holds is holds


@pytest.mark.parametrize(("wanted", "holds"), [("early first", True), ("late first", False)])
def test_an_order_is_judged_on_its_own_side(wanted, holds):
    row = {"feature": "carry", "verdict": "quiet", "reason": "", "n_seeds": 3}
    row |= {"order_rho": 0.8, "order_low": 0.5, "order_high": 0.9}
    check = quiet_features._ordered("addition", row, wanted)
    assert check.holds is holds
    assert check.low <= check.value <= check.high


@pytest.mark.parametrize(("feature", "holds"), [(0.3, True), (0.75, False)])
def test_an_ablation_is_judged_by_the_worst_control(feature, holds):
    edits = {"none": 1.0, "feature": feature, "random": 1.0, "matched_variance": 0.8, "shuffled_labels": 1.0}
    rows = [
        {"seed": seed, "edit": edit, "exact_match": value + 0.01 * seed * (edit == "feature")}
        for seed in range(3)
        for edit, value in edits.items()
    ]
    check = feature_ablation._needed("addition", "carry", pd.DataFrame(rows))
    assert check.holds is holds
    assert check.value == pytest.approx(0.8 - feature - 0.01)


# ---- the whole way ----


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(probing, "N_TRAIN", 120)
    monkeypatch.setattr(feature_ablation, "N_TRAIN", 120)
    monkeypatch.setattr(probing, "N_TEST", 60)
    monkeypatch.setattr(feature_ablation, "N_TEST", 60)
    monkeypatch.setattr(feature_ablation, "DRAWS", 2)
    for name, problems in {
        "QUIET_CARRY": [ADDITION],
        "QUIET_FEATURES": [ADDITION],
        "POSITION_ORDER": [ADDITION],
        "U_SHAPE": [ADDITION],
        "EARLY_WARNING": [ADDITION],
    }.items():
        study = replace(getattr(quiet_features, name), arms=probing.arms_of(problems))
        monkeypatch.setattr(quiet_features, name, study)
    ablation = replace(feature_ablation.FEATURE_ABLATION, arms=probing.arms_of([ADDITION]))
    monkeypatch.setattr(feature_ablation, "FEATURE_ABLATION", ablation)
    drop = replace(plateau_then_drop.PLATEAU_THEN_DROP, arms=probing.arms_of([ADDITION]))
    monkeypatch.setattr(plateau_then_drop, "PLATEAU_THEN_DROP", drop)


def test_experiments_end_in_a_finding_a_figure_and_a_page(tiny, tmp_path):
    """At a size at which nothing is learned, so no verdict is worth testing."""
    for name in NAMES:
        if name in ("compute-budgets", "data-budgets"):
            continue  # many runs; their parts are tested above and in test_budgets.py
        found = run_experiment(name, tmp_path, workers=0, progress=False)
        assert found.figure.read_bytes().startswith(b"\x89PNG")
        assert (found.runs["status"] != "failed").all()
        assert found.verdict in ("holds", "does not hold", "not settled")
    text = write_page(tmp_path, tmp_path / "findings.md").read_text()
    assert text.count("<a id=") == len(NAMES) - 2
    assert "<!-- begin: quiet features -->" in text


def test_an_executor_trains_and_measures(tiny, tmp_path):
    given = []

    class Noting(ThreadPoolExecutor):
        def submit(self, function, parcel):
            given.append((parcel.function.__name__, parcel.arguments[0]))
            return super().submit(function, parcel)

    with Noting(1) as executor:
        found = run_experiment("quiet-carry", tmp_path, executor=executor, together=2, progress=False)
    kinds = [kind for kind, _ in given]
    n_runs = len(found.runs)
    assert n_runs > 2
    assert kinds == ["train_and_measure"] * -(-n_runs // 2) + ["probe_run"] * n_runs
    assert all(folder.is_absolute() for kind, folder in given if kind == "probe_run")  # other machines
    assert (found.runs["status"] != "failed").all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_runs_at_the_papers_sizes(name, tmp_path):
    found = run_experiment(name, tmp_path, scale="paper", max_steps=20, workers=1, device="cuda", progress=False)
    assert (found.runs["status"] != "failed").all()
