"""Transitions of curves whose crossings are known in closed form, and of curves that come and go."""

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import emergent_heads as eh
from emergent_heads.analysis.transition import Crossing, LossRange, find_crossing, find_transition

RANGE = LossRange(plateau=0.7, floor=0.2)
STEPS = np.concatenate([[0], 2 ** np.arange(9), np.arange(300, 4001, 20)]).astype(float)
SHARPNESS = 5


def gap_left(steps, middle):
    """Logistic in log step: 1 on the plateau, one half at `middle`, 0 at the floor."""
    return 1 / (1 + (steps / middle) ** SHARPNESS)


def crossing_of_logistic(middle, level):
    return middle * ((1 - level) / level) ** (1 / SHARPNESS)


def metrics(middle, steps=STEPS, noise=0.0, seed=0):
    losses = RANGE.floor + (RANGE.plateau - RANGE.floor) * gap_left(steps, middle)
    losses = losses + noise * np.random.default_rng(seed).normal(size=len(steps))
    exact_match = 1 - gap_left(steps, 1.5 * middle)
    return pd.DataFrame(
        {"step": steps.astype(int), "tokens": steps * 64, "loss_nats": losses, "exact_match": exact_match}
    )


def table_of(shares, xs=None, x="step"):
    """Metrics with these shares of the gap left."""
    xs = np.arange(1, len(shares) + 1) if xs is None else xs
    return pd.DataFrame({x: xs, "loss_nats": RANGE.floor + (RANGE.plateau - RANGE.floor) * np.array(shares, float)})


# ---- the rule ----


def test_crossing_is_linear_on_the_logarithmic_axis():
    for level in (0.9, 0.5, 0.1):
        found = find_crossing(np.array([10.0, 1000.0]), np.array([1.0, 0.0]), level)
        assert found.status == "crossed"
        assert found.step == pytest.approx(10 ** (1 + 2 * (1 - level)))
        assert (found.low, found.high) == (10, 1000)


def test_step_0_stands_at_half_of_the_first_positive_step():
    found = find_crossing(np.array([0.0, 8.0, 16.0]), np.array([1.0, 0.0, 0.0]), 0.5)
    assert found.step == pytest.approx(4 * 2**0.5)
    assert (found.low, found.high) == (0, 8)


def wrong_sides(below, place):
    return sum(below[:place]) + sum(not each for each in below[place:])


@given(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 1.0, np.inf]), min_size=1, max_size=14))
def test_crossing_leaves_the_fewest_evaluations_on_the_wrong_side(values):
    n = len(values)
    below = [value <= 0.5 for value in values]
    found = find_crossing(np.arange(1.0, n + 1), np.array(values), 0.5)
    fewest = min(wrong_sides(below, place) for place in range(n + 1))
    if found.status == "never":
        assert wrong_sides(below, n) == fewest
        assert found == Crossing("never", None, n, None)
        return
    place = int(found.high) - 1
    assert wrong_sides(below, place) == fewest < wrong_sides(below, n)
    assert all(wrong_sides(below, earlier) > fewest for earlier in range(place))
    assert below[place]
    # What follows from it: from there on most are below, and up to there most are above, wherever one starts to count.
    assert all(2 * sum(below[start:place]) < place - start for start in range(place))
    assert 2 * sum(below[place:]) > n - place
    if place == 0:
        assert found == Crossing("from the start", None, None, 1)
    else:
        assert found.low == place
        assert found.low <= found.step <= found.high


@given(
    n_above=st.integers(4, 12), n_below=st.integers(4, 12), place=st.integers(0, 23), share=st.sampled_from([0.0, 1.0])
)
def test_one_bad_evaluation_neither_makes_nor_unmakes_a_crossing(n_above, n_below, place, share):
    values = np.array([1.0] * n_above + [0.0] * n_below)
    near = range(n_above - 2, n_above + 1)  # an evaluation next to the drop may well belong to it
    if place >= len(values) or place in near:
        return
    xs = np.arange(1.0, len(values) + 1)
    clean = find_crossing(xs, values, 0.5)
    values[place] = share
    assert find_crossing(xs, values, 0.5) == clean


@pytest.mark.parametrize(
    ("shares", "status", "between"),
    [
        ([1, 1, 0.4, 1, 1, 1], "never", None),  # one low evaluation
        ([1, 1, 0.1, 0.1, 1, 1, 1], "never", None),  # lower for a while, then back for longer
        ([1, 1, 0.1, 0.1, 0.1, 1, 1], "crossed", (2, 3)),  # back again, for a shorter time
        ([1, 0.4, 1, 1, 1, 0.4, 0.4, 0.4, 0.4, 0.4], "crossed", (5, 6)),  # an early dip, long before the drop
        ([1, 1, 1, 0.4], "crossed", (3, 4)),  # nothing speaks against the last one
        ([0.4, 0.4, 1, 0.4], "from the start", (None, 1)),
        ([1, np.nan, 0.4, np.nan, 0.3, 0.3], "crossed", (2, 3)),  # what is not finite is not low
        ([1, 0.4, np.inf, np.inf, np.inf], "never", None),
    ],
)
def test_crossings_that_come_and_go(shares, status, between):
    found = find_transition(table_of(shares), RANGE)
    (row,) = found.runs.to_dict("records")
    assert row["status"] == status
    if status == "crossed":
        assert (found.low, found.high) == between
        assert found.low <= found.step <= found.high
    else:
        assert found.step is found.low is found.high is None


# ---- one run ----


@pytest.mark.parametrize("middle", [3.0, 90.0, 700.0, 1500.0])
def test_transition_of_a_logistic_curve(middle):
    found = find_transition(metrics(middle), RANGE)
    tolerance = 0.02 if middle > 300 else 0.25  # the steps double below 300
    assert found.step == pytest.approx(crossing_of_logistic(middle, 0.5), rel=tolerance)
    assert found.start == pytest.approx(crossing_of_logistic(middle, 0.9), rel=tolerance)
    assert found.end == pytest.approx(crossing_of_logistic(middle, 0.1), rel=tolerance)
    assert found.exact_match_step == pytest.approx(1.5 * middle, rel=tolerance)
    assert found.low <= found.step <= found.high
    steps = found.table["step"].tolist()
    assert steps.index(found.high) == steps.index(found.low) + 1
    assert found.slow_phase == (0, found.start)
    assert found.fast_phase == (found.start, found.end)
    assert found.caveats == ()


def test_noise_moves_the_transition_little():
    clean = find_transition(metrics(700), RANGE)
    for seed in range(10):
        noisy = find_transition(metrics(700, noise=0.02, seed=seed), RANGE)  # 4 % of the gap
        for name, tolerance in {"step": 0.08, "start": 0.25, "end": 0.25}.items():
            assert getattr(noisy, name) == pytest.approx(getattr(clean, name), rel=tolerance)


@given(
    middle=st.floats(0.5, 5000),
    scale=st.floats(0.01, 100),
    shift=st.floats(-5, 5),
    stretch=st.sampled_from([0.25, 3.0, 64.0, 1e9]),
)
def test_losses_and_steps_may_be_in_any_unit(middle, scale, shift, stretch):
    table = metrics(middle, noise=0.01)
    plain = find_transition(table, RANGE)
    other = table.assign(step=table["step"] * stretch, loss_nats=shift + scale * table["loss_nats"])
    changed = find_transition(other, LossRange(*(shift + scale * np.array(RANGE))))
    for name in ("step", "low", "high", "start", "end", "exact_match_step"):
        before, after = getattr(plain, name), getattr(changed, name)
        assert after == (None if before is None else pytest.approx(before * stretch, rel=1e-5)), name


@given(st.lists(st.floats(-0.2, 1.3), min_size=2, max_size=12))
def test_start_middle_and_end_come_in_order(shares):
    (row,) = find_transition(table_of(shares), RANGE).runs[["start", "step", "end"]].to_numpy()
    reached = np.where(np.isnan(row), [np.inf if max(shares) > 0 else 0] * 3, row)
    known = reached[~np.isnan(row)]
    assert (np.diff(known) >= 0).all()


def test_rows_may_come_in_any_order():
    table = metrics(700)
    shuffled = table.sample(frac=1, random_state=0)
    assert find_transition(shuffled, RANGE).step == find_transition(table, RANGE).step


def test_a_run_that_never_leaves_the_plateau():
    found = find_transition(metrics(1e9), RANGE)
    assert found.step is found.start is found.end is found.exact_match_step is found.fast_phase is None
    assert found.slow_phase == (0, 4000)
    assert found.headline() == "no transition: 1 run, 1 never"
    assert found.caveats == ("u does not come down to 0.5 by step 4,000",)


def test_a_run_that_only_starts_has_no_fast_phase():
    found = find_transition(metrics(4500), RANGE)
    assert found.start == pytest.approx(crossing_of_logistic(4500, 0.9), rel=0.01)
    assert found.step is found.fast_phase is None
    assert found.slow_phase == (0, found.start)


def test_a_run_that_starts_below():
    found = find_transition(table_of([0.05, 0.04, 0.04]), RANGE)
    assert found.step is found.slow_phase is found.fast_phase is None
    assert found.runs["status"].tolist() == ["from the start"]
    assert "at the first evaluation already, step 1" in found.caveats[0]


def test_caveats_say_what_the_step_hides():
    (last_only,) = find_transition(table_of([1, 1, 1, 0.2]), RANGE).caveats
    assert last_only == "u comes down to 0.5 at the last evaluation only"
    (back,) = find_transition(table_of([1, 1, 0.2, 0.2, 0.2, 1]), RANGE).caveats
    assert back == "u is above 0.5 again at the last evaluation"
    never, came_back = find_transition(table_of([1, 0.2, 1, 1, 1]), RANGE).caveats
    assert "does not come down" in never
    assert "for a while, and came back" in came_back


def test_a_loss_that_falls_through_the_plateau_is_said():
    falling = table_of([4, 2, 1.6, 0.6, 0.2, 0], [1, 2, 4, 8, 16, 32])
    (said,) = find_transition(falling, RANGE).caveats
    # From 1.6 to 0.6 between 4 and 8: 1.1 is half of the way, 0.9 seven tenths.
    assert said == "no plateau: u falls from 1.1 to 0.9 between step 5.66 and 6.5"
    resting = table_of([4, 2, 1.05, 1.0, 0.95, 0.2, 0], 2.0 ** np.arange(7))
    found = find_transition([resting, falling], RANGE)
    assert found.caveats == (f"run 1: {said}",)
    assert found.runs["plateau_step"].tolist() == pytest.approx([2 ** (1 + 0.9 / 0.95), 4 * 2**0.5])
    assert np.isnan(find_transition(metrics(700), RANGE).runs["plateau_step"][0])


def test_exact_match_of_one_half_is_enough():
    table = table_of([1, 1, 0, 0], [1, 10, 100, 1000]).assign(exact_match=[0.0, 0.5, 0.5, 0.5])
    assert find_transition(table, RANGE).exact_match_step == pytest.approx(10)
    assert find_transition(table.drop(columns="exact_match"), RANGE).exact_match_step is None


# ---- several runs and other views ----


def test_several_runs_give_the_median_and_an_interval_over_them():
    middles = [500.0, 620.0, 700.0, 800.0, 950.0]
    found = find_transition([metrics(middle) for middle in middles], RANGE)
    alone = [find_transition(metrics(middle), RANGE) for middle in middles]
    assert found.step == np.median([one.step for one in alone])
    assert (found.low, found.high) == (alone[0].step, alone[-1].step)  # of five runs: from the first to the last
    assert found.start == np.median([one.start for one in alone])
    assert found.runs["step"].tolist() == [one.step for one in alone]
    assert found.runs[["low", "high"]].to_numpy().tolist() == [[one.low, one.high] for one in alone]
    assert set(found.table["run"]) == set(range(5))


def test_runs_that_never_got_there_are_counted():
    found = find_transition([metrics(middle) for middle in (500, 600, 700, 1e9, 1e9)], RANGE)
    assert found.step == pytest.approx(700, rel=0.01)
    assert found.low == pytest.approx(500, rel=0.01)
    assert found.high is None
    assert "5 runs, 2 never" in found.headline()
    assert [caveat[:6] for caveat in found.caveats] == ["run 3:", "run 4:"]
    most_never = find_transition([metrics(middle) for middle in (500, 1e9, 1e9)], RANGE)
    assert most_never.step is most_never.low is most_never.high is None


def test_half_of_the_runs_from_the_start_leave_no_transition():
    start, late = table_of([0.2, 0.1, 0.1]), table_of([1, 1, 0.1])
    assert find_transition([start, start, late], RANGE).step is None
    assert find_transition([start, late], RANGE).step is None
    assert find_transition([start, late, late], RANGE).step == find_transition(late, RANGE).step


def test_interval_over_runs_repeats_with_the_seed():
    tables = [metrics(middle) for middle in np.geomspace(400, 1500, 9)]
    first, again, other = (find_transition(tables, RANGE, seed=seed) for seed in (1, 1, 2))
    assert (first.low, first.step, first.high) == (again.low, again.step, again.high)
    assert first.step == other.step
    assert first.low < first.step < first.high


def test_three_views():
    within = find_transition(metrics(700), RANGE, x="tokens")
    assert within.step == pytest.approx(64 * find_transition(metrics(700), RANGE).step)
    budgets = 10.0 ** np.arange(3, 9)
    data = find_transition(table_of([1.0, 1.0, 0.98, 0.62, 0.02, 0.0], budgets, "tokens"), RANGE, x="tokens")
    assert data.step == pytest.approx(10 ** (6 + 0.12 / 0.6))
    assert (data.low, data.high) == (1e6, 1e7)
    assert data.slow_phase == (1e3, pytest.approx(10 ** (5 + 0.08 / 0.36)))
    frontier = find_transition(table_of([1.0, 1.0, 0.9, 0.4], 10.0 ** np.arange(9, 13), "flops"), RANGE, x="flops")
    assert frontier.step == pytest.approx(10 ** (11 + 0.4 / 0.5))
    assert frontier.end is frontier.fast_phase is None
    assert frontier.about["x"] == "flops"


def test_loss_column_may_be_another():
    table = metrics(700).rename(columns={"loss_nats": "test_loss_nats"})
    assert find_transition(table, RANGE, loss="test_loss_nats").step == find_transition(metrics(700), RANGE).step


def test_a_task_says_its_own_plateau_and_floor():
    task = eh.tasks.LinearMap(state_size=4, sparsity=1, seed=0)
    losses = task.floor + (task.plateau - task.floor) * gap_left(STEPS, 700.0)
    found = eh.find_transition(metrics(1).assign(loss_nats=losses), task)
    assert found.step == pytest.approx(700, rel=0.01)
    assert found.about["plateau"] == task.plateau


# ---- bad input, and what a result offers ----


@pytest.mark.parametrize(
    ("given_metrics", "said"),
    [
        (None, "metrics must be one or several tables .* got a NoneType"),
        ([], "metrics must be one or several tables .* got an empty list"),
        ([metrics(9), None], "got a list of DataFrame and NoneType"),
        (metrics(9).drop(columns="loss_nats"), "without metrics: the metrics of run 0 lack the column 'loss_nats'"),
        ([metrics(9), metrics(9)[["loss_nats"]]], "the metrics of run 1 lack the column 'step'"),
        (metrics(9).iloc[:1], "without metrics: the metrics of run 0 have 1 row"),
        (pd.concat([metrics(9), metrics(9)]), "step 0 is there twice; give one table for each run"),
        (metrics(9).assign(step=lambda table: table["step"] - 5), "step is -5; it must be at least 0"),
        (metrics(9).assign(step=np.nan), "step is nan; it must be at least 0"),
        (metrics(9).assign(step="late"), "step is 'late'; it must be at least 0"),
    ],
)
def test_bad_metrics(given_metrics, said):
    with pytest.raises(eh.errors.ArgumentError, match=said):
        find_transition(given_metrics, RANGE)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (None, "NoneType does not say its plateau and floor"),
        (LossRange(0.2, 0.2), "the plateau must be above the floor"),
        (LossRange(float("nan"), 0.2), "the plateau must be above the floor"),
        (LossRange("high", 0.2), "does not say its plateau and floor"),
    ],
)
def test_bad_task(task, said):
    with pytest.raises(eh.errors.ArgumentError, match=said):
        find_transition(metrics(9), task)


def test_repr_and_file(tmp_path):
    found = find_transition([metrics(600), metrics(1e9)], RANGE)
    assert "caveat: run 1" in repr(found)
    assert "caveat: run 1" in found._repr_html_()
    single = find_transition(metrics(700), RANGE)
    assert repr(single).startswith("transition at step 700 (680 to 700; 1 run), from 451 to 1,086")
    path = single.save(tmp_path / "transition.csv")
    assert list(pd.read_csv(path).columns) == ["run", "step", "loss_nats", "exact_match", "gap_left"]


def test_crossings_are_those_of_the_runs():
    found = find_transition([metrics(600), metrics(1e9), table_of([0.1, 0.1])], RANGE)
    assert [each.status for each in found.crossings] == ["crossed", "never", "from the start"]
    assert found.crossings[1] == Crossing("never", None, 4000, None)
    assert found.crossings[2] == Crossing("from the start", None, None, 1)
    assert found.crossings[0].step == found.runs["step"][0]


def test_plot_shows_each_run_and_shades_the_fast_phase():
    found = find_transition([metrics(600), metrics(800)], RANGE)
    (axes,) = found.plot().axes
    curves = [line for line in axes.lines if len(line.get_xdata()) == len(STEPS)]
    assert len(curves) == 2
    np.testing.assert_allclose(curves[0].get_ydata(), gap_left(STEPS, 600), atol=1e-12)
    (shade,) = axes.patches
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == pytest.approx(found.fast_phase)
    (none,) = find_transition(metrics(1e9), RANGE).plot().axes
    assert not none.patches


def test_plot_of_a_frontier_has_a_readable_axis():
    budgets = 10.0 ** np.arange(9, 17)
    table = table_of([1, 1, 1, 0.9, 0.4, 0.1, 0, 0], budgets, "flops")
    (axes,) = find_transition(table, RANGE, x="flops").plot().axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert len(labels) == 8
    assert labels[0] == "1G"
    assert axes.get_xlabel() == "flops"


def test_every_pair_of_statuses_is_said(recwarn):
    kinds = {"crossed": metrics(600), "never": metrics(1e9), "from the start": table_of([0.1, 0.1])}
    for pair in itertools.product(kinds, repeat=2):
        said = find_transition([kinds[kind] for kind in pair], RANGE).headline()
        assert all(kind in said for kind in pair if kind != "crossed")
    assert not recwarn.list
