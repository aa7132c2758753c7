"""Budget grids keep their budgets, FLOPs are counted in two ways, and the best run of each budget is found."""

import math
from functools import lru_cache
from itertools import product

import numpy as np
import pandas as pd
import pytest
from command_line import run as command
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from emergent_heads.errors import ArgumentError
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.sweeps import RunSpec, SweepResult, budget_grid, check_frontier, compute_frontier, grid, run_sweep
from emergent_heads.sweeps.budgets import MOST_OFF
from emergent_heads.sweeps.measures import flops_of, paper_flops_per_token
from emergent_heads.tasks import Addition, LinearMap
from emergent_heads.training.run import open_run
from emergent_heads.training.settings import TrainingSettings

TINY = {"n_layers": 1, "n_heads": 2, "min_steps": 10, "n_held_out": 40}


def spec(n_layers: int, d_model: int, batch_size: int, bits: int = 16, **changes) -> RunSpec:
    task = Addition(bits)
    training = TrainingSettings(steps=1, tokens_per_batch=batch_size * task.length)
    return RunSpec(SmallModelConfig.transformer_pp(n_layers, d_model, **changes), task, training)


# --- FLOPs


@pytest.mark.parametrize(
    ("d_model", "steps"),
    [
        (8, [11, 106, 1058, 10575]),
        (32, [1, 9, 90, 898, 8974, 89737]),
        (64, [1, 3, 24, 239, 2386, 23857]),
        (128, [1, 1, 7, 62, 616, 6160, 61595]),
    ],
)
def test_the_paper_s_formula_gives_its_numbers_of_steps(d_model, steps):
    """The published grid for additions of 16 bits: 4 layers, batches of 64, budgets of 1e9, 1e10 and so on."""
    a_step = flops_of(spec(4, d_model, 64))["flops_paper"]
    assert [math.ceil(10.0 ** (9 + place) / a_step) for place in range(len(steps))] == steps


@given(n_layers=st.integers(1, 3), heads=st.sampled_from([1, 2]), half=st.integers(1, 6), batch_size=st.integers(1, 9))
@settings(max_examples=8, deadline=None)
def test_exact_flops_are_those_of_all_matrices_and_pairs(n_layers, heads, half, batch_size):
    d_model = 2 * half * heads
    found = flops_of(spec(n_layers, d_model, batch_size, bits=4, n_heads=heads))
    hidden = 2 * math.ceil(int(8 * d_model / 3) / 2)
    matrices = n_layers * (4 * d_model**2 + 3 * d_model * hidden) + 5 * d_model
    read = 3 * 4 + 4 - 1
    assert found["flops"] == batch_size * (6 * matrices * read + 12 * n_layers * d_model * read**2)
    assert found["flops_paper"] == pytest.approx(6 * n_layers * (12 * d_model**2 + 16 * d_model) * 16 * batch_size)


def test_the_formula_is_of_attention_only():
    assert math.isnan(flops_of(spec(1, 8, 2, mixer="linear", positions="none"))["flops_paper"])
    assert paper_flops_per_token(2, 8, 10.0) == 6 * (12 * 2 * 64 + 2 * 10 * 8)
    with pytest.raises(ArgumentError, match="attention only, not 'linear'"):
        budget_grid(Addition(4), 1e9, d_model=8, n_layers=1, mixer="linear", positions="none", count="flops_paper")


# --- grids


@lru_cache
def cost_of_a_step(n_layers: int, d_model: int, batch_size: int, count: str) -> float:
    return flops_of(spec(n_layers, d_model, batch_size, bits=3, n_heads=2))[count]


@given(
    exponents=st.lists(st.integers(13, 18), min_size=1, max_size=2, unique=True),
    widths=st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=3, unique=True),
    depths=st.lists(st.integers(1, 2), min_size=1, max_size=2, unique=True),
    batches=st.lists(st.sampled_from([1, 8, 20]), min_size=1, max_size=2, unique=True),
    least=st.integers(1, 60),
    count=st.sampled_from(["flops", "flops_paper"]),
)
@settings(max_examples=12, deadline=None)
def test_every_combination_that_can_keep_its_budget_is_trained(exponents, widths, depths, batches, least, count):
    task, most = Addition(3), 400
    budgets = [10 ** (each / 2) for each in exponents]
    expected, kept_budgets, left_out = set(), set(), 0
    for budget, layers, width, size, rate in product(budgets, depths, widths, batches, [1e-2, 1e-3]):
        cost = cost_of_a_step(layers, width, size, count)
        steps = max(1, round(budget / cost))
        if least <= steps <= most and abs(cost * steps / budget - 1) <= MOST_OFF:
            kept_budgets.add(budget)
            expected |= {(layers, width, size, rate, steps, seed) for seed in (3, 4)}
        else:
            left_out += 1
    sizes = {"d_model": widths, "n_layers": depths, "batch_size": batches, "learning_rate": [1e-2, 1e-3]}
    asked = {**sizes, "seeds": [3, 4], "min_steps": least, "max_steps": most, "count": count, "n_heads": 2}
    if len(kept_budgets) < len(budgets):
        with pytest.raises(ArgumentError, match="no combination can keep the budget"):
            budget_grid(task, budgets, **asked)
        return
    runs = budget_grid(task, budgets, **asked)
    made = {
        (*values, run.training.learning_rate, run.training.steps, run.seed)
        for run in runs
        for values in [(run.config.n_layers, run.config.d_model, run.training.batch_size(task))]
    }
    assert made == expected
    assert isinstance(runs, list)
    assert runs.table["left_out"].notna().sum() == left_out
    kept = runs.table[runs.table["left_out"].isna()]
    assert (kept[count] / kept["budget_flops"] - 1).abs().max() <= MOST_OFF
    assert kept["off_share"].tolist() == pytest.approx((kept[count] / kept["budget_flops"] - 1).tolist())


def test_training_is_the_paper_s_unless_told_otherwise():
    first, *_ = budget_grid(Addition(4), 1e8, d_model=8, n_layers=1, batch_size=8, learning_rate=1e-2)
    assert first.config == SmallModelConfig.transformer_pp(1, 8).for_task(Addition(4))
    found, steps = first.training, first.training.steps
    assert (found.betas, found.weight_decay, found.clip, found.schedule) == ((0.9, 0.95), 0.1, 1.0, "cosine")
    assert (found.warmup_steps, found.checkpoint_steps(), found.n_held_out) == (steps // 10, [steps], 1000)
    assert found.learning_rate_at(steps) == pytest.approx(1e-3)
    assert len(found.evaluation_steps()) in (10, 11, 12)
    asked = {"d_model": 8, "n_layers": 1, "batch_size": 8, "learning_rate": 1e-2, "seeds": 7}
    (own,) = budget_grid(Addition(4), 1e8, **asked, n_heads=2, schedule="constant", warmup_steps=3, clip=None)
    assert (own.config.n_heads, own.seed) == (2, 7)
    assert (own.training.schedule, own.training.warmup_steps, own.training.clip) == ("constant", 3, None)


def test_what_is_left_out_is_said():
    asked = {"d_model": [8, 64], "n_layers": 1, "batch_size": 8, "learning_rate": 1e-2, "max_steps": 5000, "seeds": 0}
    runs = budget_grid(Addition(4), [1e8, 1e10], **asked)
    assert repr(runs) == (
        "BudgetRuns(2 runs under 2 budgets; 1 combinations left out (fewer than 100 steps); "
        "1 combinations left out (more than 5000 steps))"
    )
    reasons = runs.table.set_index(["budget_flops", "d_model"])["left_out"]
    assert (reasons[(1e8, 64)], reasons[(1e10, 8)]) == ("fewer than 100 steps", "more than 5000 steps")
    assert [run.config.d_model for run in runs] == [8, 64]
    off = budget_grid(Addition(4), 10**6.6, d_model=[8, 16], n_layers=1, batch_size=8, min_steps=1).table
    assert set(off["left_out"].dropna()) == {"more than 5% off the budget"}


WRONG = {
    "task class": ({"task": Addition}, "made already"),
    "count": ({"count": "flop"}, "count must be"),
    "bounds": ({"min_steps": 10, "max_steps": 5}, "no number of steps"),
    "unknown setting": ({"learning_rates": 1e-3}, "nearest: "),
    "steps": ({"steps": 10}, "follows from the budget"),
    "stopping early": ({"stop_when_solved": True}, "follows from the budget"),
    "budget below 0": ({"budgets": [-1.0]}, "above 0, not -1.0"),
    "budgets too close": ({"budgets": [1e8, 1.2e8]}, "too close"),
    "no budgets": ({"budgets": []}, "budgets is empty"),
    "no batch": ({"batch_size": 0}, "batch_size is 0"),
    "no seed": ({"seeds": [-1]}, "seeds is -1"),
    "width": ({"d_model": 7}, "does not divide"),
    "unreachable budget": (
        {"budgets": [1e8, 1e3]},
        "FLOPs in 100 to 100000 steps: it pays for 1 to 1;",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_grids_are_refused(case):
    changes, said = WRONG[case]
    asked = {"task": Addition(4), "budgets": 1e8, "d_model": 8, "n_layers": 1, "batch_size": 8, **changes}
    with pytest.raises(ArgumentError, match=said):
        budget_grid(**asked)


# --- the frontier of a sweep, trained


FILE = """
import emergent_heads as eh
runs = eh.budget_grid(
    eh.tasks.Addition(4), [1e7, 3e7], d_model=[4, 8], n_layers=1, n_heads=2, batch_size=8, learning_rate=[1e-2],
    seeds=range(2), min_steps=10, n_held_out=40,
)
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> SweepResult:
    """Four combinations with two seeds, trained by the command line, which was interrupted after one."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "mine.py").write_text(FILE)
    runs = budget_grid(
        Addition(4), [1e7, 3e7], d_model=[4, 8], batch_size=8, learning_rate=[1e-2], seeds=range(2), **TINY
    )
    run_sweep(runs[:1], folder / "out", workers=0, progress=False)
    first = (folder / "out" / runs[0].name / "metrics.parquet").stat().st_mtime_ns
    assert command("sweep", folder / "mine.py", "--out", folder / "out", "--workers", 0, "--frontier") == 0
    assert (folder / "out" / runs[0].name / "metrics.parquet").stat().st_mtime_ns == first  # went on, not anew
    return run_sweep(runs, folder / "out", workers=0, progress=False)


def test_the_command_line_writes_the_frontier(sweep):
    written = pd.read_csv(sweep.path / "frontier.csv")
    frontier = compute_frontier(sweep)
    pd.testing.assert_frame_equal(written, pd.read_csv(frontier.save(sweep.path / "again.csv")))
    assert (sweep.path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert set(sweep.table["status"]) <= {"solved", "not solved"}


def test_the_best_of_each_budget_is_chosen_on_one_split_and_reported_on_another(sweep):
    frontier = compute_frontier(sweep, n_rows=30)
    rows = sweep.table.assign(d_model=[run.config.d_model for run in sweep.runs], flops=sweep.table["flops"])
    assert len(frontier.table) == 2
    for _, found in frontier.table.iterrows():
        here = rows[(rows["flops"] / found["budget_flops"] - 1).abs() < 2 * MOST_OFF]
        means = here.groupby("d_model")["loss_nats"].mean()
        assert found["d_model"] == means.idxmin()
        assert found["selection_loss_nats"] == pytest.approx(means.min())
        assert (found["n_seeds"], found["n_configurations"]) == (2, 2)
    for _, found in frontier.seeds.iterrows():
        path = sweep.path / found["run"]
        (spec_,) = [run for run in sweep.runs if run.name == path.name]
        model = open_run(path).series.last.load()
        batch = Addition(4).batch(30, seed=spec_.seed, split="report")
        logits = model(batch.tokens[:, :-1])
        counts = batch.loss_mask[:, 1:]
        loss = functional.cross_entropy(logits[counts], batch.tokens[:, 1:][counts])
        right = ((logits.argmax(-1) == batch.tokens[:, 1:]) | ~counts).all(dim=1)
        assert found["loss_nats"] == pytest.approx(float(loss), rel=1e-5)
        assert found["exact_match"] == pytest.approx(float(right.double().mean()))
        assert found["flops"] == flops_of(spec_)["flops"]
    assert frontier.runs["chosen"].sum() == 4


def test_one_size_over_data_budgets(sweep):
    curve = compute_frontier(sweep, only={"d_model": 8, "n_layers": 1}, budgets=[1e7, 3e7], n_rows=20)
    assert curve.table["d_model"].tolist() == [8, 8]
    assert curve.table["budget_flops"].tolist() == [1e7, 3e7]
    assert curve.table["n_configurations"].tolist() == [1, 1]
    tokens = [run.training.steps * 8 * 16 for run in sweep.runs if run.config.d_model == 8 and run.seed == 0]
    assert curve.table["tokens"].tolist() == tokens
    assert curve.table["flops"].is_monotonic_increasing
    assert curve.about["only"] == {"d_model": 8, "n_layers": 1}


def test_runs_by_the_paper_s_count_stand_under_other_budgets(sweep):
    frontier = compute_frontier(sweep, count="flops_paper", n_rows=20)
    planned = {run.name: flops_of(run)["flops_paper"] for run in sweep.runs}
    for _, found in frontier.runs.iterrows():
        assert abs(planned[found["run"]] / found["budget_flops"] - 1) <= 2 * MOST_OFF
    assert frontier.x == "flops_paper"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"count": "tokens"}, "count must be"),
        ({"n_rows": 0}, "n_rows is 0"),
        ({"only": {"d_mode": 8}}, "nearest: d_model"),
        ({"only": {"d_model": 64}}, "no run has d_model 64"),
        ({"budgets": [1e12]}, "no run lies within 5%"),
        ({"budgets": [3e7]}, "at least two budgets"),
    ],
)
def test_wrong_questions_are_refused(asked, said, sweep):
    with pytest.raises(ArgumentError, match=said):
        compute_frontier(sweep, **asked)


def test_sweeps_that_have_no_frontier_are_refused_before_they_are_trained(tmp_path, capsys):
    short = {"n_layers": 1, "d_model": 8, "n_heads": 2, "tokens_per_batch": 64}
    with pytest.raises(ArgumentError, match="several tasks"):
        check_frontier(grid([Addition(4), LinearMap(4, 2)], **short, steps=[4, 8]))
    with pytest.raises(ArgumentError, match="stops when solved"):
        check_frontier(grid(Addition(4), **short, steps=[4, 8], stop_when_solved=True))
    with pytest.raises(ArgumentError, match="at least two budgets"):
        check_frontier(grid(Addition(4), **short, steps=4, seed=[0, 1]))
    check_frontier(grid(LinearMap, state_size=4, sparsity=2, **short, steps=[4, 8], seed=[0, 1]))
    file = tmp_path / "mine.py"
    file.write_text(f"import emergent_heads as eh\nruns = eh.grid(eh.tasks.Addition(4), steps=4, **{short})")
    assert command("sweep", file, "--out", tmp_path / "out", "--frontier") == 2
    assert "at least two budgets" in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*/manifest.json"))


def test_runs_that_cost_nearly_the_same_are_of_one_budget():
    from emergent_heads.sweeps.frontier import _groups

    planned = np.array([1.0, 1.04, 0.97, 2.0, 1.95, 1.3])
    assert _groups(planned).tolist() == [1.0, 1.0, 1.0, 1.975, 1.975, 1.3]
