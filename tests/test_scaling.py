"""Power laws, departures from them, and the choice of the best of each budget, on tables whose answer is known."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emergent_heads.analysis.scaling import (
    choose_configurations,
    fit_power_law,
    frontier_from_tables,
    smooth_part,
)
from emergent_heads.analysis.transition import LossRange
from emergent_heads.errors import ArgumentError

SETTINGS = ["d_model", "learning_rate"]
BUDGETS = 10.0 ** np.arange(9, 14, 0.5)


def losses(exponent: float, *, drop_at: int | None = None, noise: float = 0.0, seed: int = 0, n_seeds: int = 3):
    """FLOPs and excess losses of runs on a power law, which budgets from the `drop_at`-th on leave by a tenth."""
    generator = np.random.default_rng(seed)
    flops = np.repeat(BUDGETS, n_seeds)
    excess = 0.6 * (flops / 1e9) ** -exponent * np.exp(noise * generator.normal(size=len(flops)))
    if drop_at is not None:
        excess = np.where(flops >= BUDGETS[drop_at], 0.1 * excess, excess)
    return flops, excess


# --- power laws


@given(
    coefficient=st.floats(1e-2, 1e3),
    exponent=st.floats(-0.2, 0.8),
    budgets=st.lists(st.integers(6, 15), min_size=2, max_size=6, unique=True),
)
@settings(max_examples=50, deadline=None)
def test_a_power_law_is_found_again(coefficient, exponent, budgets):
    flops = np.repeat(10.0 ** np.array(budgets), 2)
    law = fit_power_law(flops, coefficient * flops**-exponent, n_resamples=20)
    assert law.coefficient.value == pytest.approx(coefficient, rel=1e-6)
    assert law.exponent.value == pytest.approx(exponent, abs=1e-8)
    assert law.spread == pytest.approx(0, abs=1e-6)
    assert law.excess_nats(1e10) == pytest.approx(coefficient * 1e10**-exponent, rel=1e-6)
    assert law.flops == (flops.min(), flops.max())
    assert (law.n_budgets, law.n_runs) == (len(budgets), 2 * len(budgets))


def test_the_fit_is_least_squares_on_logarithms():
    flops, excess = losses(0.05, noise=0.3)
    flops = np.append(flops, 1e9)  # one more run under the first budget
    excess = np.append(excess, 0.4)
    law = fit_power_law(flops, excess)
    slope, intercept = np.polyfit(np.log(flops), np.log(excess), 1)
    assert law.exponent.value == pytest.approx(-slope)
    assert np.log(law.coefficient.value) == pytest.approx(intercept)
    residuals = np.log(excess) - np.polyval([slope, intercept], np.log(flops))
    assert law.spread == pytest.approx(residuals.std(ddof=2))


def test_the_interval_is_over_runs_of_the_same_budget():
    """All 2^6 equally likely resamples of two runs under three budgets, each by numpy."""
    flops = np.repeat([1e9, 1e10, 1e12], 2)
    excess = np.array([0.9, 1.1, 0.5, 0.7, 0.2, 0.25])
    slopes = [
        np.polyfit(np.log(flops), np.log(excess[np.array([0, 0, 2, 2, 4, 4]) + draw]), 1)[0]
        for draw in product([0, 1], repeat=6)
    ]
    law = fit_power_law(flops, excess, n_resamples=20_000)
    low, high = np.quantile(-np.array(slopes), [0.025, 0.975])
    assert law.exponent.low == pytest.approx(low, abs=0.004)
    assert law.exponent.high == pytest.approx(high, abs=0.004)
    assert law.coefficient.low < law.coefficient.value < law.coefficient.high
    one = fit_power_law(flops[::2], excess[::2])
    assert np.isnan([one.exponent.low, one.exponent.high, one.coefficient.low]).all()


@pytest.mark.parametrize(
    ("flops", "excess", "said"),
    [([1e9, 1e10], [0.5, 0.0], "above 0"), ([1e9, 1e9], [0.5, 0.4], "two budgets"), ([1e9, 1e10], [0.5, np.nan], "0")],
)
def test_what_no_power_law_can_be_fitted_to_is_refused(flops, excess, said):
    with pytest.raises(ArgumentError, match=said):
        fit_power_law(np.array(flops), np.array(excess))


# --- where the losses leave it


@given(
    drop_at=st.integers(3, len(BUDGETS) - 1),
    exponent=st.floats(0.0, 0.3),
    seed=st.integers(0, 100),
    n_seeds=st.integers(2, 4),
)
@settings(max_examples=40, deadline=None)
def test_a_drop_is_found_where_it_is(drop_at, exponent, seed, n_seeds):
    law, leaves_at = smooth_part(*losses(exponent, drop_at=drop_at, noise=0.01, seed=seed, n_seeds=n_seeds))
    assert leaves_at == BUDGETS[drop_at]
    assert law is not None
    assert law.n_budgets == drop_at
    assert law.exponent.value == pytest.approx(exponent, abs=0.03)


@pytest.mark.parametrize("noise", [0.0, 1e-9, 0.02, 0.3])
def test_a_power_law_is_seldom_left_by_chance(noise):
    left = [smooth_part(*losses(0.05, noise=noise, seed=seed))[1] is not None for seed in range(100)]
    assert np.mean(left) <= 0.01


def test_one_bad_budget_is_no_departure_and_losses_may_go_up():
    flops, excess = losses(0.02, noise=0.01)
    lucky = np.where(flops == BUDGETS[4], 0.5 * excess, excess)
    assert smooth_part(flops, lucky)[1] is None
    assert smooth_part(flops, np.where(flops >= BUDGETS[5], 3 * excess, excess))[1] is None


def test_losses_at_the_floor_lie_below_every_law():
    flops, excess = losses(0.02, noise=0.01)
    law, leaves_at = smooth_part(flops, np.where(flops >= BUDGETS[6], -1e-4, excess))
    assert leaves_at == BUDGETS[6]
    assert law is not None
    first, nowhere = smooth_part(flops, np.where(flops < BUDGETS[1], -1e-4, excess))
    assert first is not None
    assert first.n_budgets == len(BUDGETS) - 1
    assert nowhere is None
    assert smooth_part(flops[:6], excess[:6]) == (None, None)


# --- the choice


@given(
    table=st.lists(
        st.tuples(
            st.sampled_from([1e9, 1e10]),
            st.sampled_from([4, 8]),
            st.sampled_from([1e-2, 1e-3]),
            st.integers(0, 2),
            st.sampled_from([0.1, 0.2, 0.3, 0.7, float("nan")]),
        ),
        min_size=1,
        max_size=24,
        unique_by=lambda row: row[:4],
    )
)
@settings(max_examples=60, deadline=None)
def test_the_configuration_with_the_lowest_mean_over_all_seeds_is_chosen(table):
    columns = ["budget_flops", *SETTINGS, "seed", "selection_loss_nats"]
    runs = choose_configurations(pd.DataFrame(table, columns=columns), SETTINGS)
    for budget in {row[0] for row in table}:
        by_key: dict[tuple[int, float], list[float]] = {}
        for row in table:
            if row[0] == budget:
                by_key.setdefault(row[1:3], []).append(row[4])
        most = max(map(len, by_key.values()))
        means = {key: np.mean(found) for key, found in by_key.items() if len(found) == most}
        means = {key: mean for key, mean in means.items() if np.isfinite(mean)}
        chosen = runs[runs["chosen"] & (runs["budget_flops"] == budget)]
        keys = set(zip(chosen["d_model"], chosen["learning_rate"], strict=True))
        assert len(keys) == (1 if means else 0)
        for key in keys:
            assert means[key] == pytest.approx(min(means.values()))
            assert len(chosen) == most


# --- the whole


def made_up(drop_at: int = 6, n_seeds: int = 3):
    """Two widths and two learning rates under ten budgets: width 8 is best up to the drop, width 16 from there."""
    rows = []
    for place, budget in enumerate(BUDGETS):
        for d_model, rate, seed in product([8, 16], [1e-2, 1e-3], range(n_seeds)):
            excess = 0.55 * (budget / 1e9) ** -0.002 * (0.02 if place >= drop_at else 1.0)
            excess *= 1.0 + 0.2 * (d_model != (16 if place >= drop_at else 8)) + 0.1 * (rate == 1e-2) + 0.001 * seed
            rows.append(
                {
                    "run": f"run {len(rows)}",
                    "budget_flops": budget,
                    "d_model": d_model,
                    "learning_rate": rate,
                    "seed": seed,
                    "status": "not solved",
                    "flops": budget * 1.01,
                    "flops_paper": budget * 0.9,
                    "sequences": budget / d_model,
                    "tokens": 10 * budget / d_model,
                    "selection_loss_nats": 0.1 + excess,
                }
            )
    runs = choose_configurations(pd.DataFrame(rows), SETTINGS)
    seeds = runs[runs["chosen"]].drop(columns=["chosen", "status"])
    seeds = seeds.assign(
        loss_nats=seeds["selection_loss_nats"], exact_match=(seeds["selection_loss_nats"] < 0.2) * 1.0
    )
    return frontier_from_tables(runs, seeds, LossRange(plateau=0.65, floor=0.1), SETTINGS)


def test_the_frontier_of_a_made_up_sweep():
    frontier = made_up()
    table = frontier.table
    assert table["budget_flops"].tolist() == BUDGETS.tolist()
    assert table["d_model"].tolist() == [8] * 6 + [16] * 4
    assert set(table["learning_rate"]) == {1e-3}
    assert table["n_configurations"].tolist() == [4] * 10
    assert table["exact_match"].tolist() == [0.0] * 6 + [1.0] * 4
    assert (table["loss_nats_low"] <= table["loss_nats"]).all()
    assert (table["loss_nats"] <= table["loss_nats_high"]).all()
    assert frontier.leaves_at == BUDGETS[6] * 1.01
    assert frontier.law is not None
    assert frontier.law.exponent.value == pytest.approx(0.002, abs=1e-3)
    assert frontier.transition.step is not None
    assert BUDGETS[5] * 1.01 < frontier.transition.step < BUDGETS[6] * 1.01
    assert table["phase"].tolist() == ["slow"] * 6 + ["after"] * 4
    assert table["law_loss_nats"][0] == pytest.approx(table["loss_nats"][0], rel=1e-3)
    assert "10 budgets" in repr(frontier)
    assert "left at" in frontier.headline()


def test_a_frontier_that_stays_up_has_no_fast_phase():
    frontier = made_up(drop_at=len(BUDGETS))
    assert frontier.transition.step is None
    assert frontier.leaves_at is None
    assert set(frontier.table["phase"]) == {"slow"}
    assert "never left" in frontier.headline()
    frontier.plot()


def test_one_seed_has_no_interval_but_a_frontier():
    frontier = made_up(n_seeds=1)
    assert frontier.table["loss_nats_low"].isna().all()
    assert frontier.transition.step is not None
    frontier.plot()


def test_the_plot_shows_every_run_and_the_law():
    frontier = made_up()
    above, below = frontier.plot().axes
    dots = [line for line in above.lines if line.get_alpha() is not None and len(line.get_xdata())]
    assert sum(len(line.get_xdata()) for line in dots) == len(frontier.runs)
    labels = above.get_legend_handles_labels()[1]
    assert {"all runs", "best of each budget", "plateau", "power law", "slow phase", "fast phase"} <= set(labels)
    assert above.get_xscale() == above.get_yscale() == below.get_xscale() == "log"
    assert above.get_ylabel() == "loss above the floor (nats)"


def test_the_frontier_is_saved_with_what_it_is_of(tmp_path):
    frontier = made_up()
    read = pd.read_csv(frontier.save(tmp_path / "frontier.csv"))
    pd.testing.assert_frame_equal(read, frontier.table, check_dtype=False)
    assert '"floor": 0.1' in (tmp_path / "frontier.csv.about.json").read_text()
