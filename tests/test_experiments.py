"""Experiments on sparse attention: what they train, what their rules say of planted results, and what is kept."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emergent_heads.errors import ArgumentError, NoCheckpointsError
from emergent_heads.experiments import context_length, one_bit_at_a_time, sparsity
from emergent_heads.experiments.comparisons import log_savings, more, slope, slower
from emergent_heads.experiments.mixers import most
from emergent_heads.experiments.one_bit_at_a_time import entropy_drop, head_entropies, rise
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.registry import EXPERIMENTS, SCALES, find_experiment
from emergent_heads.experiments.report import markdown_table, write_page
from emergent_heads.experiments.reproduce import read_finding, run_experiment
from emergent_heads.experiments.seeds import spread_factor
from emergent_heads.experiments.study import Arm, Judgement, arms_table, settings_of, verdict_of
from emergent_heads.tasks import LinearMap
from emergent_heads.training.loop import train

NAMES = tuple(name for name, each in EXPERIMENTS.items() if each.paper == "sparse attention")
FROM_TABLES = [name for name in NAMES if name not in ("bits-one-at-a-time", "sparsity")]
TINY = {"d_model": 16, "n_heads": 2, "tokens_per_batch": 64, "evaluate_every": 10, "n_held_out": 16}


def rows(steps, *, seeds=None, x=1.0, horizon=1000, task="linear map", setting="", event="step_solved"):
    """Rows of a runs table; None stands for a run that never got there."""
    table = pd.DataFrame(
        {
            "task": task,
            "setting": setting,
            "x": x,
            "seed": range(len(steps)) if seeds is None else seeds,
            "run": [f"{task}-{setting}-{x}-{index}" for index in range(len(steps))],
            "status": ["solved" if step is not None else "not solved" for step in steps],
            "steps": horizon,
            "last_step": [horizon if step is None else step for step in steps],
            "share_learned": [1.0 if step is not None else 0.5 for step in steps],
            "excess_loss_nats": 0.1,
            "n_parameters": 1000,
            "seconds": 1.0,
        }
    )
    for each in ("step_left_plateau", "step_solved"):
        table[each] = pd.array(steps if each == event or event == "both" else [None] * len(steps), dtype="Int64")
    return table


def planted(name):
    """A runs table of an experiment, with steps that grow along its arms."""
    arms = find_experiment(name).study().arms(Recipes("small"))
    made = [
        rows(
            [200 + 7 * index + 11 * run.seed for run in arm.runs],
            seeds=[run.seed for run in arm.runs],
            x=arm.x,
            task=arm.task,
            setting=arm.setting,
            event="both",
        )
        for index, arm in enumerate(arms)
    ]
    return pd.concat(made, ignore_index=True), arms


# ---- the list ----


def test_the_list_of_experiments_needs_no_torch():
    code = "import sys, emergent_heads.experiments.registry as r; print(len(r.EXPERIMENTS), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["21", "False"]


def test_an_unknown_experiment_is_refused_with_the_nearest_names():
    with pytest.raises(ArgumentError, match="nearest: seeds"):
        find_experiment("seed")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_arm_has_at_least_three_seeds_that_differ_in_nothing_else(name, scale):
    for arm in find_experiment(name).study().arms(Recipes(scale)):
        seeds = [run.seed for run in arm.runs]
        assert len(set(seeds)) == len(seeds) >= (10 if name == "seeds" else 3)
        alike = [
            {key: value for key, value in run.columns.items() if key not in ("seed", "task_seed")} for run in arm.runs
        ]
        assert all(each == alike[0] for each in alike)


@pytest.mark.parametrize("name", NAMES)
def test_the_paper_scale_has_the_papers_sizes(name):
    for arm in find_experiment(name).study().arms(Recipes("paper")):
        for run in arm.runs:
            assert run.training.steps == 10_000
            if arm.task == "cellular automata":
                assert (run.task.rules, run.task.states, run.task.symbols) == (256, 16, 4)


def test_experiments_share_the_runs_of_the_base_configuration():
    named = {
        name: {run.name for arm in find_experiment(name).study().arms(Recipes("small")) for run in arm.runs}
        for name in ("context-length", "heads", "mixer-linear-map", "mixers", "attention-bias")
    }
    assert len(set.intersection(*named.values())) == 3


def test_the_seeds_experiment_fixes_the_task():
    for arm in find_experiment("seeds").study().arms(Recipes("small")):
        assert len({run.task for run in arm.runs}) == 1


def test_no_run_is_longer_than_max_steps():
    for name in NAMES:
        arms = find_experiment(name).study().arms(Recipes("paper", max_steps=20))
        assert {run.training.steps for arm in arms for run in arm.runs} == {20}


# ---- rules ----


def test_a_planted_ratio_of_steps_is_found_and_decides():
    fast, slow = rows([100, 120, 140]), rows([200, 240, 280])
    check = slower("part", slow, fast)
    assert check.holds is True
    assert (check.value, check.low, check.high) == pytest.approx((2.0, 2.0, 2.0))
    assert slower("part", fast, slow).holds is False
    assert slower("part", slow, fast, above=3.0).holds is False
    assert slower("part", fast, fast).holds is False


def test_seeds_are_paired_by_number_and_not_by_place():
    fast, slow = rows([100, 120, 140], seeds=[0, 1, 2]), rows([280, 240, 200], seeds=[2, 1, 0])
    assert slower("part", slow, fast).low == pytest.approx(2.0)


def test_runs_that_never_get_there_count_with_their_last_step():
    check = slower("part", rows([None, None, None]), rows([100, 100, 100]))
    assert check.holds is True
    assert check.value == pytest.approx(10.0)
    assert "at least" in check.says


def test_a_small_ratio_of_runs_that_were_cut_short_settles_nothing():
    assert slower("part", rows([None, None, None], horizon=1000), rows([900, 950, 900])).holds is True
    assert slower("part", rows([None, None, 900], horizon=1000), rows([1000, 990, 900])).holds is None


def test_two_arms_that_never_get_there_settle_nothing():
    assert slower("part", rows([None] * 3), rows([None] * 3)).holds is None


def test_two_seeds_settle_nothing():
    assert slower("part", rows([500, 500]), rows([100, 100])).holds is None


def test_the_horizon_is_that_of_the_shorter_runs():
    check = slower("part", rows([1500] * 3, horizon=2000), rows([100] * 3, horizon=1000))
    assert check.value == pytest.approx(10.0)


def test_a_spread_around_one_settles_nothing():
    assert slower("part", rows([100, 300, 90]), rows([200, 100, 200])).holds is None


@settings(max_examples=25, deadline=None)
@given(st.floats(0.2, 3.0), st.floats(10.0, 40.0))
def test_the_slope_of_a_power_law_is_its_exponent(exponent, factor):
    arms = [rows([round(factor * x**exponent * (1 + seed)) for seed in range(3)], x=x) for x in (4.0, 8.0, 16.0)]
    table = pd.concat(arms, ignore_index=True).assign(steps=10**7)
    check = slope("part", table, "step_solved")
    assert check.value == pytest.approx(exponent, abs=0.05)  # steps are whole numbers
    assert check.holds is True


def test_a_falling_slope_does_not_hold():
    table = pd.concat([rows([900, 800, 700], x=4.0), rows([90, 80, 70], x=8.0)], ignore_index=True)
    assert slope("part", table, "step_solved").holds is False


def test_a_difference_of_shares_is_judged_in_pairs():
    high = rows([1, 1, 1]).assign(share_learned=[0.5, 0.7, 0.9])
    low = rows([1, 1, 1]).assign(share_learned=[0.3, 0.5, 0.7])
    assert more("part", high, low, "share_learned").holds is True
    assert more("part", high, low, "share_learned").value == pytest.approx(0.2)
    assert more("part", low, high, "share_learned").holds is False


def test_log_savings_are_those_of_each_step_to_the_next():
    savings = log_savings([rows([800, 400]), rows([200, 200]), rows([100, 200])], "step_solved")
    assert savings == pytest.approx(np.log([[4, 2], [2, 1]]))


def test_the_spread_factor_is_that_of_log_normal_steps():
    steps = np.exp(np.random.default_rng(0).normal(6.0, 0.5, size=4000))
    interval = spread_factor(steps)
    assert interval.value == pytest.approx(math.exp(0.5), rel=0.03)
    assert interval.low < math.exp(0.5) < interval.high
    assert spread_factor(np.full(10, 300.0)) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ([True, True], "holds"),
        ([True, None], "not settled"),
        ([None, False], "does not hold"),
        ([], "not settled"),
    ],
)
def test_the_verdict_follows_from_the_parts(parts, verdict):
    assert verdict_of(parts) == verdict


def test_a_vote_needs_more_than_half():
    assert most([True, True, None]) == "holds"
    assert most([True, False, None, None]) == "not settled"
    assert most([False, False, None]) == "does not hold"


# ---- one bit at a time ----


def test_the_rise_of_a_bit_is_measured_around_its_own_jump():
    steps = np.arange(0, 100, 10)
    losses = np.log(2) * np.array([1, 1, 0.5, 1, 1, 0.6, 0.3, 0.05, 0, 0])
    assert rise(steps, losses, 70) == 70 - 40
    assert math.isnan(rise(steps, losses, float("nan")))


def test_the_drop_is_that_of_the_head_whose_entropy_falls_in_the_window():
    steps = np.arange(0, 400, 20)
    entropies = np.full((len(steps), 3), 2.0)
    entropies[steps >= 200, 1] = 0.5
    drop, elsewhere, head = entropy_drop(steps, entropies, 210)
    assert (drop, head) == (1.5, 1)
    assert elsewhere == 0.0
    assert math.isnan(entropy_drop(steps, entropies, float("nan"))[0])


def test_the_entropy_of_uniform_attention_has_its_closed_form(tmp_path):
    task = LinearMap(state_size=4, sparsity=2)
    config = Recipes("small").linear_map(state_size=4, sparsity=2, steps=1, seed=0, **TINY)[0].config
    run = train(config, task, tmp_path / "run", steps=1, learning_rate=1e-12, weight_decay=0.0, progress=False)
    model = run.series[1].load()
    assert model.config.n_heads == 2
    steps, entropies = head_entropies(run, task)
    assert entropies.shape == (len(steps), 2, 4)

    with torch.no_grad():
        for parameter in model.blocks[0].attn.qkv.parameters():
            parameter.zero_()
    tokens = task.batch(32, seed=0, split="held-out").tokens[:, :-1]
    seen = np.arange(4, 8)  # keys that the query of each output bit sees, four of them in the first state
    uniform = one_bit_at_a_time._entropies(model, tokens, 4)
    assert uniform.numpy() == pytest.approx(np.tile(4 / seen * np.log(seen), (2, 1)), rel=1e-5)


# ---- from runs to a page ----


@pytest.mark.parametrize("name", FROM_TABLES)
def test_every_judgement_and_figure_works_on_a_table_of_runs(name, tmp_path):
    study = find_experiment(name).study()
    runs, arms = planted(name)
    judgement = study.judge(runs, tmp_path)
    assert judgement.final in ("holds", "does not hold", "not settled")
    assert len(judgement.checks) >= 1
    assert all(check.says.startswith(check.part) for check in judgement.checks)
    assert len(arms_table(runs, study.varied)) == len(arms)
    figure = study.draw(runs, judgement)
    assert [axes.get_title() for axes in figure.axes] == list(dict.fromkeys(runs["task"]))


@pytest.mark.parametrize("name", FROM_TABLES)
def test_failed_runs_are_left_out_and_settle_nothing(name, tmp_path):
    study = find_experiment(name).study()
    runs, _ = planted(name)
    runs.loc[runs["seed"] > 0, "status"] = "failed"
    assert study.judge(runs, tmp_path).final == "not settled"


def tiny_linear_maps(recipes):
    return [
        Arm("linear map", "", size, recipes.linear_map(state_size=size, sparsity=2, steps=20, seed=range(3), **TINY))
        for size in (3, 4)
    ]


@pytest.fixture
def tiny(monkeypatch):
    """`context-length` and two others that read run folders, with runs that take no time."""
    study = context_length.CONTEXT_LENGTH
    one_task = replace(
        study, arms=tiny_linear_maps, judge=lambda runs, _: Judgement([slope("s", runs, "step_solved")])
    )
    monkeypatch.setattr(context_length, "CONTEXT_LENGTH", one_task)

    def bits(recipes):
        runs = recipes.linear_map(state_size=4, sparsity=2, steps=20, checkpoints=(0, 10, 20), seed=range(3), **TINY)
        return [Arm("linear map", "", "linear map", runs)]

    monkeypatch.setattr(one_bit_at_a_time, "BITS", replace(one_bit_at_a_time.BITS, arms=bits))

    def sparse(recipes):
        runs = {s: recipes.linear_map(state_size=4, sparsity=s, steps=20, seed=range(3), **TINY) for s in (2, 3, 4)}
        return [Arm("linear map", "", s, each) for s, each in runs.items()]

    monkeypatch.setattr(sparsity, "SPARSITY", replace(sparsity.SPARSITY, arms=sparse))


def test_an_experiment_is_kept_and_runs_are_not_trained_twice(tiny, tmp_path):
    found = run_experiment("context-length", tmp_path, workers=0, progress=False)
    assert found.verdict == "not settled"
    assert len(found.runs) == 6
    assert set(found.runs["last_step"]) == {20}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.parquet")}
    assert before
    again = run_experiment("context-length", tmp_path, workers=0, progress=False)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.parquet")} == before
    pd.testing.assert_frame_equal(found.runs, again.runs)

    kept = read_finding(tmp_path / "context-length")
    assert (kept.verdict, kept.claim, kept.seconds) == (found.verdict, found.claim, found.seconds)
    assert kept.figure.is_file()
    assert kept.about["settings"]["linear map"]["d_model"] == 16


def test_the_page_of_findings_says_verdicts_and_shows_figures(tiny, tmp_path):
    for name in ("context-length", "bits-one-at-a-time", "sparsity"):
        run_experiment(name, tmp_path / "out", workers=0, progress=False)
    page = write_page(tmp_path / "out", tmp_path / "docs" / "findings.md")
    text = page.read_text()
    for name in ("context-length", "bits-one-at-a-time", "sparsity"):
        assert (page.parent / "images" / "findings" / f"{name}.png").is_file()
        assert f"images/findings/{name}.png" in text
        assert EXPERIMENTS[name].claim in text
        assert f"(#{name})" in text
    assert "not settled" in text
    assert "n_layers 1" in text


def test_bits_are_read_from_checkpoints(tiny, tmp_path):
    found = run_experiment("bits-one-at-a-time", tmp_path, workers=0, progress=False)
    assert len(found.table) == sum(LinearMap(state_size=4, sparsity=2, seed=seed).n_distinct_rows for seed in range(3))
    assert set(found.table["seed"]) == {0, 1, 2}
    curves = pd.read_csv(tmp_path / "bits-one-at-a-time" / "curves.csv")
    assert set(curves["step"]) == {0, 10, 20}
    assert curves["entropy_nats"].between(0, math.log(8)).all()


def test_copying_is_all_bits_but_the_first(tmp_path, monkeypatch):
    class Kept:
        def __init__(self, first):
            accuracy = [first, 1.0, 1.0, 0.97]
            self.positions = pd.DataFrame(
                {"step": 20, "position": [4, 5, 6, 7], "is_answer": True, "accuracy": accuracy}
            )

    firsts = {"a": 0.5, "b": 0.51, "c": 1.0}
    monkeypatch.setattr(sparsity, "Run", type("Runs", (), {"open": lambda path: Kept(firsts[path.name])}))
    check = sparsity._copies(pd.DataFrame({"run": ["a", "b", "c"]}), tmp_path, 4)
    assert check.holds is True
    assert check.value == pytest.approx(2 / 3)
    check = sparsity._copies(pd.DataFrame({"run": ["a", "c", "c"]}), tmp_path, 4)
    assert check.holds is False


def test_a_folder_without_findings_is_refused(tmp_path):
    with pytest.raises(NoCheckpointsError, match="no finished experiment"):
        write_page(tmp_path, tmp_path / "page.md")
    with pytest.raises(NoCheckpointsError, match="no finished experiment"):
        read_finding(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"), [({"scale": "papr"}, "nearest: paper"), ({"max_steps": 0}, "at least 1")]
)
def test_wrong_arguments_are_refused_before_any_work(tmp_path, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        run_experiment("seeds", tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


def test_shared_settings_are_those_that_all_runs_of_a_task_have():
    shared = settings_of(tiny_linear_maps(Recipes("small")))["linear map"]
    assert shared["sparsity"] == 2
    assert "state_size" not in shared
    assert "seed" not in shared


def test_a_markdown_table_keeps_its_columns():
    text = markdown_table(pd.DataFrame({"a": ["x|y", "z", "w"], "b": [1.0, float("nan"), -float("inf")]}))
    assert text.splitlines() == ["| a | b |", "| --- | --- |", "| x\\|y | 1 |", "| z | - |", "| w | -inf |"]


def test_the_paper_scale_trains(tmp_path):
    run = Recipes("paper", max_steps=20).linear_map(seed=0)[0]
    trained = train(
        run.config, run.task, tmp_path / "run", steps=20, tokens_per_batch=2048, n_held_out=32, progress=False
    )
    assert trained.metrics["step"].iloc[-1] == 20
    assert trained.config.d_model == 128


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_runs_at_the_papers_sizes(name, tmp_path):
    found = run_experiment(name, tmp_path, scale="paper", max_steps=20, workers=1, device="cuda", progress=False)
    assert (found.runs["status"] != "failed").all()


def test_a_part_of_the_page_without_new_findings_stays(tiny, tmp_path):
    page = tmp_path / "findings.md"
    kept = "<!-- begin: quiet features -->\nas it was\n<!-- end: quiet features -->\n"
    page.write_text(f"# Findings\n\n<!-- begin: sparse attention -->\nold\n<!-- end: sparse attention -->\n\n{kept}")
    run_experiment("context-length", tmp_path / "out", workers=0, progress=False)
    write_page(tmp_path / "out", page)
    once = page.read_text()
    assert once.endswith(kept)
    assert "\nold\n" not in once
    write_page(tmp_path / "out", page)
    assert page.read_text() == once
