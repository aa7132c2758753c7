"""Quiet and loud features of synthetic curves whose leads, orders and rises are known in closed form."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import emergent_heads as eh
from emergent_heads.analysis.early_warning import early_warning
from emergent_heads.analysis.leads import Lead
from emergent_heads.analysis.probes import ProbeSeries
from emergent_heads.analysis.quiet import classify_features
from emergent_heads.analysis.transition import Crossing, LossRange

RANGE = LossRange(plateau=0.7, floor=0.2)
SHARPNESS = 6
EVALUATED = np.concatenate([[0], np.round(np.geomspace(1, 8000, 250))]).astype(int)
EVALUATED = np.unique(EVALUATED)
PROBED = EVALUATED[::2]
COARSE = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 4000, 8000])
SEEDS = (800.0, 950.0, 1100.0, 1250.0)  # steps of the transition
TOLERANCE = 0.02  # of a step, by the distance between evaluations


def gap_left(steps, middle, sharpness=SHARPNESS):
    return 1 / (1 + (np.asarray(steps, float) / middle) ** sharpness)


def metrics(middle, steps=EVALUATED):
    losses = RANGE.floor + (RANGE.plateau - RANGE.floor) * gap_left(steps, middle)
    return pd.DataFrame({"step": steps, "loss_nats": losses, "exact_match": 1 - gap_left(steps, middle)})


def feature(
    name, middles, *, removed=0.8, baseline=0.5, prior=0.69, rise=0.0, rise_at=3000.0, steps=PROBED, noise=0.0
):
    """Probes of one feature: a place emerges at its middle; `rise` of what was removed comes back around `rise_at`."""
    random = np.random.default_rng(len(name))
    blocks = []
    for place, middle in enumerate(np.atleast_1d(np.asarray(middles, float))):
        share = removed * (1 - gap_left(steps, middle) - rise * (1 - gap_left(steps, rise_at, 12)))
        clean = baseline * (1 - share)
        loss, validation_loss = clean + noise * random.normal(size=(2, len(steps)))
        for layer, worse in ((0, 0.3), (1, 0.0)):  # the second layer is the best
            blocks.append(
                pd.DataFrame(
                    {
                        "step": steps,
                        "feature": name,
                        "kind": "binary",
                        "place": place,
                        "layer": layer,
                        "loss": loss + worse,
                        "validation_loss": validation_loss + worse,
                        "baseline_loss": baseline,
                        "prior_loss": prior,
                        "is_best": not worse,
                    }
                )
            )
    return pd.concat(blocks, ignore_index=True)


def series(*features, about=None):
    about = {"plateau": RANGE.plateau, "floor": RANGE.floor} if about is None else about
    return ProbeSeries(pd.concat(features, ignore_index=True), {}, about=about)


def runs(make, transitions=SEEDS):
    """Probes and metrics of several seeds; `make` gives the features' tables for the step of a transition."""
    return [series(*make(middle)) for middle in transitions], [metrics(middle) for middle in transitions]


def rows_of(result):
    return result.table.set_index("feature")


# ---- verdicts and leads ----


@pytest.fixture(scope="module")
def classified():
    probes, tables = runs(
        lambda middle: [
            feature("carry", [middle / 4]),
            feature("adjacency", [middle * 2], removed=0.5),
            feature("with it", [middle]),
            feature("noise", [middle / 4], removed=0.05),
        ]
    )
    return classify_features(probes, tables)


def test_a_feature_before_the_transition_is_quiet_and_one_after_it_loud(classified):
    rows = rows_of(classified)
    assert rows["verdict"].to_dict() == {
        "carry": "quiet",
        "adjacency": "loud",
        "with it": "undecided",
        "noise": "not learned",
    }
    assert classified.quiet == ["carry"]
    assert classified.loud == ["adjacency"]
    assert (rows["kind"] == "binary").all()


def test_leads_are_those_of_the_curves(classified):
    seeds = classified.seeds.set_index(["feature", "run"])
    for run, middle in enumerate(SEEDS):
        for name, emergence in (("carry", middle / 4), ("adjacency", middle * 2), ("with it", middle)):
            row = seeds.loc[(name, run)]
            assert row["emergence_step"] == pytest.approx(emergence, rel=TOLERANCE)
            assert row["transition_step"] == pytest.approx(middle, rel=TOLERANCE)
            assert row["lead_steps"] == pytest.approx(middle - emergence, abs=TOLERANCE * (middle + emergence))
            assert row["lead_least"] < row["lead_steps"] < row["lead_most"]
            assert row["lead_ratio"] == pytest.approx(middle / emergence, rel=2 * TOLERANCE)
            assert row["lead_censored"] == ""
    rows = rows_of(classified)
    leads = seeds.loc["carry"]
    assert rows.loc["carry", "lead_steps"] == np.median(leads["lead_steps"])
    # Of up to five seeds the interval spans all of them, and what the evaluations around them allow.
    assert rows.loc["carry", "lead_low"] == leads["lead_least"].min()
    assert rows.loc["carry", "lead_high"] == leads["lead_most"].max()
    assert rows.loc["carry", ["n_seeds", "n_censored", "n_before_start"]].tolist() == [4, 0, 4]
    assert rows.loc["with it", "n_before_start"] == 0


def test_undecided_and_not_learned_say_why(classified):
    rows = rows_of(classified)
    assert rows.loc["with it", "reason"] == "the lead's interval holds 0"
    assert rows.loc["noise", "reason"] == "learned in 0 of 4 seeds; removes 5% of the strongest baseline"
    assert np.isnan(rows.loc["noise", "emergence_step"])
    assert np.isnan(rows.loc["noise", "lead_steps"])
    assert np.isnan(rows.loc["noise", "rise"])


def test_one_seed_that_disagrees_makes_it_undecided():
    probes, tables = runs(lambda middle: [feature("carry", [middle / 4 if middle != 950 else 2 * middle])])
    (row,) = classify_features(probes, tables).table.to_dict("records")
    assert row["verdict"] == "undecided"
    assert row["lead_low"] < 0 < row["lead_high"]


def test_fewer_than_three_seeds_decide_nothing():
    probes, tables = runs(lambda middle: [feature("carry", [middle / 4])], SEEDS[:2])
    (row,) = classify_features(probes, tables).table.to_dict("records")
    assert (row["verdict"], row["n_seeds"]) == ("undecided", 2)
    assert row["reason"] == "the loss has a transition in 2 of 2 seeds; 3 are needed"
    single = classify_features(probes[0], tables[0])
    (row,) = single.table.to_dict("records")
    seed = single.seeds.iloc[0]
    assert row["verdict"] == "undecided"
    # The lead is there all the same, with the interval that the evaluations around both crossings allow.
    assert (row["lead_steps"], row["lead_low"], row["lead_high"]) == (
        seed["lead_steps"],
        seed["lead_least"],
        seed["lead_most"],
    )


def test_checkpoints_too_far_apart_leave_it_undecided():
    transitions = (800.0, 850.0, 900.0)  # emergence at 9/10 of them: all between the checkpoints 512 and 1000
    for steps, verdict in ((PROBED, "quiet"), (COARSE, "undecided")):
        tables = [metrics(middle) for middle in transitions]
        probes = [series(feature("carry", [0.8 * middle], steps=steps)) for middle in transitions]
        (row,) = classify_features(probes, tables).table.to_dict("records")
        assert row["verdict"] == verdict
    assert row["reason"].startswith("too few checkpoints")
    probes = [series(feature("carry", [0.2 * middle], steps=COARSE)) for middle in transitions]
    assert classify_features(probes, tables).quiet == ["carry"]


@settings(max_examples=10, deadline=None)
@given(
    scale=st.floats(0.01, 100),
    stretch=st.sampled_from([2, 7, 1000]),
    task_scale=st.floats(0.1, 10),
    shift=st.floats(-3, 3),
)
def test_verdicts_do_not_depend_on_units(scale, stretch, task_scale, shift):
    probes, tables = runs(
        lambda middle: [
            feature("carry", [middle / 3, middle / 4, middle / 5, middle / 6], rise=0.2, steps=COARSE),
            feature("late", [middle * 1.5], steps=COARSE),
        ],
        SEEDS[:3],
    )
    plain = classify_features(probes, tables).table
    losses = ["loss", "validation_loss", "baseline_loss", "prior_loss"]
    probes = [
        replace(each, table=each.table.assign(step=each.table["step"] * stretch, **(each.table[losses] * scale)))
        for each in probes
    ]
    tables = [
        table.assign(step=table["step"] * stretch, loss_nats=shift + task_scale * table["loss_nats"])
        for table in tables
    ]
    task = LossRange(*(shift + task_scale * np.array(RANGE)))
    changed = classify_features(probes, tables, task=task).table
    assert changed["verdict"].tolist() == plain["verdict"].tolist()
    steps = ["lead_steps", "lead_low", "lead_high", "emergence_step", "transition_step"]
    np.testing.assert_allclose(changed[steps], plain[steps] * stretch, rtol=1e-5)
    shares = ["lead_ratio", "rise", "share_removed", "share_removed_at_start", "order_rho", "order_low"]
    np.testing.assert_allclose(changed[shares].to_numpy(float), plain[shares].to_numpy(float), rtol=1e-5, atol=1e-9)


def test_noisy_probes_give_the_same_verdicts():
    probes, tables = runs(
        lambda middle: [
            feature("carry", [middle / 4] * 3, noise=0.02),
            feature("late", [2 * middle] * 3, noise=0.02),
            feature("nothing", [middle] * 3, removed=0.0, noise=0.02),
        ]
    )
    rows = rows_of(classify_features(probes, tables))
    assert rows["verdict"].tolist() == ["quiet", "loud", "not learned"]
    assert rows.loc["carry", "emergence_step"] == pytest.approx(1025 / 4, rel=0.1)


# ---- what counts as learned ----


def test_emergence_is_half_way_from_the_baseline_to_the_best_that_is_reached():
    # Loss 0.5 (1 - 0.8 (1 - u)): the best is 0.1, half-way is 0.3, reached where u is one half.
    probes, tables = runs(
        lambda middle: [feature("carry", [100.0], removed=0.8), feature("part", [100.0], removed=0.3)]
    )
    rows = rows_of(classify_features(probes, tables))
    assert rows["emergence_step"].to_numpy() == pytest.approx([100, 100], rel=TOLERANCE)
    assert rows["share_removed"].to_numpy() == pytest.approx([0.8, 0.3])


def test_a_strong_baseline_makes_a_feature_not_learned():
    # The probe's loss falls from 0.5 to 0.1, but a probe on the tokens alone has 0.105 already.
    probes, tables = runs(lambda middle: [feature("carry", [middle / 4])])
    probes = [replace(each, table=each.table.assign(baseline_loss=0.105)) for each in probes]
    (row,) = classify_features(probes, tables).table.to_dict("records")
    assert row["verdict"] == "not learned"
    assert row["share_removed"] == pytest.approx(1 - 0.1 / 0.105)
    assert classify_features(probes, tables, least_share=0.02).table["verdict"].tolist() != ["not learned"]


def test_a_baseline_that_leaves_nothing_to_learn():
    # A place that the visible tokens give away: what is left of its loss is noise, however large its share.
    def make(middle):
        given_away = feature("queue", [middle / 4], baseline=0.004, prior=0.69)
        return [pd.concat([feature("queue", [middle / 4] * 2), given_away.assign(place=2)])]

    probes, tables = runs(make)
    places = classify_features(probes, tables).places
    assert (places.loc[places["place"] == 2, "status"] == "never").all()
    assert (places.loc[places["place"] < 2, "status"] == "crossed").all()


def test_learned_in_few_seeds_is_not_learned():
    def make(removed):
        probes, tables = runs(lambda middle: [feature("carry", [middle / 4], removed=removed(middle))])
        return classify_features(probes, tables).table.to_dict("records")[0]

    one_of_four = make(lambda middle: 0.8 if middle == 800 else 0.01)
    assert one_of_four["verdict"] == "not learned"
    assert one_of_four["reason"].startswith("learned in 1 of 4 seeds")
    # Where most have learned it, a seed that did not is one in which it comes after the transition.
    three_of_four = make(lambda middle: 0.01 if middle == 800 else 0.8)
    assert (three_of_four["verdict"], three_of_four["n_censored"]) == ("undecided", 1)
    assert three_of_four["lead_low"] == -np.inf


def test_the_best_is_chosen_by_validation_loss():
    table = feature("carry", [200.0])
    lucky = (table["step"] == table["step"].iloc[-3]) & (table["layer"] == 1)
    probes = [series(table.assign(loss=np.where(lucky, 0.0, table["loss"]))) for _ in SEEDS]
    result = classify_features(probes, [metrics(middle) for middle in SEEDS])
    assert result.table["share_removed"].tolist() == pytest.approx([0.8], abs=1e-6)
    assert result.table["emergence_step"].tolist() == pytest.approx([200], rel=TOLERANCE)


def test_a_feature_that_comes_and_goes_is_not_learned():
    table = feature("carry", [200.0])
    while_there = table["step"].between(300, 500)
    table = table.assign(
        **{name: np.where(while_there, table[name], table["loss"].max()) for name in ("loss", "validation_loss")}
    )
    result = classify_features([series(table)] * 4, [metrics(middle) for middle in SEEDS])
    assert result.named("not learned") == ["carry"]


def test_share_removed_at_the_start_of_the_transition():
    probes, tables = runs(lambda middle: [feature("carry", [middle / 4]), feature("late", [4 * middle])])
    rows = rows_of(classify_features(probes, tables))
    start = 9 ** (-1 / SHARPNESS)  # of the transition, where u is 0.9
    for name, ratio in (("carry", 4), ("late", 1 / 4)):
        wanted = 0.8 * (1 - gap_left(start, 1 / ratio))
        assert rows.loc[name, "share_removed_at_start"] == pytest.approx(wanted, abs=0.01)
        assert rows.loc[name, "share_removed_at_start_low"] <= rows.loc[name, "share_removed_at_start_high"]


# ---- runs without a transition, and features there from the start ----

LATE = Crossing("crossed", 100.0, 90.0, 110.0)
EARLY = Crossing("crossed", 20.0, 16.0, 32.0)
NEVER = Crossing("never", None, 500.0, None)
FIRST = Crossing("from the start", None, None, 5.0)
UNKNOWN = (np.nan, np.nan, np.nan, "")


@pytest.mark.parametrize(
    ("early", "late", "lead"),
    [
        (EARLY, LATE, (80, 90 - 32, 110 - 16, "")),
        (LATE, EARLY, (-80, 16 - 110, 32 - 90, "")),
        (EARLY, NEVER, (480, 500 - 32, np.inf, "at least")),
        (FIRST, LATE, (95, 90 - 5, np.inf, "at least")),
        (FIRST, NEVER, (495, 495, np.inf, "at least")),
        (NEVER, LATE, (-400, -np.inf, 110 - 500, "at most")),
        (LATE, FIRST, (-95, -np.inf, 5 - 90, "at most")),
        (NEVER, FIRST, (-495, -np.inf, -495, "at most")),
        (NEVER, NEVER, UNKNOWN),
        (FIRST, FIRST, UNKNOWN),
        (Crossing("never", None, 50.0, None), LATE, UNKNOWN),  # the probes stop before the transition
        (LATE, Crossing("never", None, 50.0, None), UNKNOWN),  # the metrics stop before the emergence
    ],
)
def test_leads_by_hand(early, late, lead):
    found = Lead.between(early, late)
    np.testing.assert_equal(tuple(found), lead)


def test_runs_without_a_transition_count_as_a_lead_of_at_least_so_long():
    transitions = [*SEEDS[:3], 1e9]
    probes = [series(feature("carry", [200.0]), feature("late", [3000.0])) for _ in transitions]
    result = classify_features(probes, [metrics(middle) for middle in transitions])
    rows = rows_of(result)
    assert rows["verdict"].to_dict() == {"carry": "quiet", "late": "undecided"}
    assert rows["n_censored"].tolist() == [1, 1]
    assert rows.loc["carry", "lead_high"] == np.inf
    assert result.seeds.set_index(["feature", "run"]).loc[("carry", 3), "lead_steps"] == pytest.approx(7800, rel=0.01)
    assert "1 never" in result.headline()


def test_a_verdict_needs_three_transitions():
    transitions = [*SEEDS[:2], 1e9, 1e9]
    probes = [series(feature("carry", [200.0])) for _ in transitions]
    (row,) = classify_features(probes, [metrics(middle) for middle in transitions]).table.to_dict("records")
    assert (row["verdict"], row["n_seeds"]) == ("undecided", 4)
    assert row["reason"] == "the loss has a transition in 2 of 4 seeds; 3 are needed"


def test_a_feature_there_at_the_first_checkpoint_is_quiet():
    late_checkpoints = np.array([500, 600, 2000, 4000])
    probes = [series(feature("carry", [50.0], steps=late_checkpoints)) for _ in SEEDS]
    result = classify_features(probes, [metrics(middle) for middle in SEEDS])
    (row,) = result.table.to_dict("records")
    assert (row["verdict"], row["n_censored"], row["n_before_start"]) == ("quiet", 4, 4)
    assert result.seeds["lead_censored"].tolist() == ["at least"] * 4


# ---- order over places ----


@pytest.mark.parametrize(("slope", "order"), [(0.2, "early first"), (-0.2, "late first")])
def test_order_over_places(slope, order):
    probes, tables = runs(lambda middle: [feature("carry", middle / 6 * np.exp(slope * np.arange(6)))])
    result = classify_features(probes, tables)
    (row,) = result.table.to_dict("records")
    assert row["order"] == order
    assert row["order_rho"] == row["order_low"] == row["order_high"] == np.sign(slope)
    for place, rows in result.places.groupby("place"):
        wanted = np.array(SEEDS) / 6 * np.exp(slope * place)
        assert rows["emergence_step"].to_numpy() == pytest.approx(wanted, rel=2 * TOLERANCE)
        assert rows["lead_steps"].to_numpy() == pytest.approx(SEEDS - wanted, rel=3 * TOLERANCE)


def test_order_is_spearmans_mean_over_seeds():
    random = np.random.default_rng(3)
    steps = {middle: middle / 5 * np.exp(random.normal(size=8)) for middle in SEEDS}
    probes, tables = runs(lambda middle: [feature("carry", steps[middle])])
    (row,) = classify_features(probes, tables).table.to_dict("records")
    assert row["order_rho"] == pytest.approx(
        np.mean([stats.spearmanr(range(8), of_seed).statistic for of_seed in steps.values()])
    )
    assert row["order_low"] < 0 < row["order_high"]
    assert row["order"] == "no order"


def test_places_that_emerge_together_have_no_order():
    probes, tables = runs(lambda middle: [feature("carry", [middle / 5] * 6)])
    (row,) = classify_features(probes, tables).table.to_dict("records")
    assert (row["order"], row["order_rho"]) == ("no order", 0)


def test_order_needs_places_and_seeds():
    few_places, tables = runs(lambda middle: [feature("carry", middle / np.array([6, 5, 4]))])
    (row,) = classify_features(few_places, tables).table.to_dict("records")
    assert row["order"] == "undecided"
    assert np.isnan(row["order_rho"])
    few_seeds, tables = runs(lambda middle: [feature("carry", middle / np.array([6, 5, 4, 3]))], SEEDS[:2])
    (row,) = classify_features(few_seeds, tables).table.to_dict("records")
    assert (row["order"], row["order_rho"]) == ("undecided", 1)


def test_places_that_are_not_learned_have_no_say_in_the_order():
    def make(middle):
        learned = feature("carry", middle / np.array([8, 7, 6, 5]))
        return [pd.concat([learned, feature("carry", [middle], removed=0.01).assign(place=4)])]

    probes, tables = runs(make)
    result = classify_features(probes, tables)
    assert result.table["order_rho"].tolist() == [1]
    assert (result.seeds[["n_places", "n_places_learned"]] == [5, 4]).all().all()


def test_a_place_missing_at_a_step_is_left_out():
    table = feature("carry", [100.0, 200.0, 400.0])
    gone = (table["place"] == 2) & (table["step"] == table["step"].max())
    for broken in (table.loc[~gone], table.assign(loss=table["loss"].where(~gone))):
        result = classify_features(series(broken), metrics(900.0))
        assert sorted(result.places["place"]) == [0, 1]
        whole = classify_features(series(feature("carry", [100.0, 200.0])), metrics(900.0))
        assert result.table["emergence_step"].tolist() == whole.table["emergence_step"].tolist()


# ---- the rise after the transition ----


def test_rise_is_what_comes_back_of_what_was_removed():
    probes, tables = runs(lambda middle: [feature("carry", [middle / 4], rise=0.25), feature("flat", [middle / 4])])
    rows = rows_of(classify_features(probes, tables))
    # At the lowest nearly all is removed; at the last step the curve has risen by a quarter of it.
    assert rows.loc["carry", "rise"] == pytest.approx(0.25, abs=0.01)
    assert rows.loc["carry", "rise_low"] > 0.2
    assert rows.loc["flat", "rise"] == pytest.approx(0, abs=1e-3)
    assert (rows["verdict"] == "quiet").all()


def test_noise_alone_is_no_rise():
    rises = []
    for trial in range(30):
        table = feature("n" * (trial + 1), [200.0], noise=0.02)
        rises.append(classify_features(series(table), metrics(900.0)).seeds["rise"].iloc[0])
    # Taking the lowest test loss itself would give about two and a half standard deviations, 0.14, every time.
    assert abs(np.mean(rises)) < 3 * 0.02 * np.sqrt(2) / 0.4 / np.sqrt(len(rises))


def test_a_rise_needs_checkpoints_after_the_transition():
    early = PROBED[PROBED < 700]
    probes = [series(feature("carry", [100.0], steps=early)) for _ in SEEDS]
    (row,) = classify_features(probes, [metrics(middle) for middle in SEEDS]).table.to_dict("records")
    assert row["verdict"] == "quiet"
    assert np.isnan(row["rise"])


# ---- early warning ----


def warned(ratios, transitions=SEEDS, **more):
    """Runs in which two features have both left their baselines at the transition's step over the ratio."""
    # Loss / baseline = 1 - 0.8 (1 - u) is 0.9 where u is 0.875.
    at = 7 ** (-1 / SHARPNESS)
    probes = [
        series(
            *(
                feature(name, [middle / ratio / at], baseline=baseline)
                for name, baseline in (("carry", 0.5), ("sum", 0.2))
            ),
            feature("late", [3 * middle]),
        )
        for middle, ratio in zip(transitions, ratios, strict=True)
    ]
    return early_warning(probes, [metrics(middle) for middle in transitions], **more)


def test_warning_comes_where_a_tenth_of_the_baseline_is_gone():
    ratios = [10, 5, 4, 3]
    found = warned(ratios, features=["carry", "sum"])
    wanted = np.array(SEEDS) / ratios
    assert found.table["warning_step"].to_numpy() == pytest.approx(wanted, rel=TOLERANCE)
    assert found.table["transition_step"].to_numpy() == pytest.approx(SEEDS, rel=TOLERANCE)
    assert found.table["steps_between"].to_numpy() == pytest.approx(SEEDS - wanted, rel=2 * TOLERANCE)
    assert found.table["ratio"].to_numpy() == pytest.approx(ratios, rel=2 * TOLERANCE)
    assert found.steps_between == np.median(found.table["steps_between"])
    assert found.steps_low == found.table["steps_least"].min()
    assert found.steps_high == found.table["steps_most"].max()


def test_the_mean_is_over_features_as_shares_of_their_baselines():
    # One feature removes all of its small loss at once, the other nothing: the mean share falls to one half.
    def make(middle):
        return [feature("a", [100.0], removed=1.0, baseline=0.1), feature("b", [1e9], removed=1.0, baseline=10.0)]

    probes, tables = runs(make)
    found = early_warning(probes, tables, ["a", "b"])
    at = (0.2 / 0.8) ** (1 / SHARPNESS)  # 1 - (1 - u) / 2 is 0.9 where u is 0.8
    assert found.table["warning_step"].to_numpy() == pytest.approx(100 * at, rel=TOLERANCE)


def test_a_baseline_without_loss_gives_no_warning():
    probes, tables = runs(lambda middle: [feature("given away", [100.0], baseline=0.0)])
    found = early_warning(probes, tables, ["given away"])
    assert (found.table["warning_status"] == "never").all()
    assert classify_features(probes, tables).named("not learned") == ["given away"]


def test_quiet_features_are_watched_by_default():
    assert warned([4, 4, 4, 4]).features == ("carry", "sum")


def test_rank_correlation_over_seeds():
    transitions = np.array([700.0, 850.0, 950.0, 1100.0, 1300.0, 1500.0])
    ratios = np.array([4.0, 6.0, 4.0, 5.5, 4.0, 6.0])
    found = warned(ratios, transitions)
    assert found.correlation == pytest.approx(stats.spearmanr(transitions / ratios, transitions).statistic)
    assert found.correlation_low < found.correlation < found.correlation_high <= 1
    assert found.caveats == ()
    assert f"rank correlation {found.correlation:.2g}" in found.headline()


def test_rank_correlation_of_few_seeds():
    four = warned([4, 4, 4, 4])
    assert four.correlation == pytest.approx(1)
    assert four.correlation_low is four.correlation_high is None
    assert four.caveats == ("4 seeds: the interval of a rank correlation needs 5",)
    two = warned([4, 4], SEEDS[:2], features=["carry"])
    assert two.correlation is None
    assert two.caveats == ("2 seed(s): a rank correlation over seeds needs 3, its interval 5",)
    assert "rank correlation unknown" in repr(two)
    assert "rank correlation over seeds needs 3" in two._repr_html_()


def test_runs_without_a_transition_come_last_in_the_ranks():
    transitions = [700.0, 900.0, 1100.0, 1300.0, 1e9]
    probes = [series(feature("carry", [step])) for step in (100.0, 150.0, 200.0, 250.0, 300.0)]
    found = early_warning(probes, [metrics(middle) for middle in transitions], ["carry"])
    assert found.correlation == pytest.approx(1)
    assert found.caveats == ("1 of 5 runs: transition never",)
    assert found.table["censored"].tolist() == ["", "", "", "", "at least"]
    assert found.steps_high == np.inf


def test_a_feature_that_gives_no_warning():
    found = warned([4, 4, 4, 4], features=["late"])
    assert found.steps_between < 0
    silent = early_warning(
        [series(feature("carry", [9.0], removed=0.05))] * 3, [metrics(middle) for middle in SEEDS[:3]], ["carry"]
    )
    assert (silent.table["warning_status"] == "never").all()
    assert silent.correlation is None
    assert silent.table["censored"].tolist() == ["at most"] * 3


# ---- bad input ----


def test_numbers_of_series_and_tables_must_agree():
    probes, tables = runs(lambda middle: [feature("carry", [100.0])])
    with pytest.raises(eh.errors.ArgumentError, match="4 series of probes and 3 tables of metrics"):
        classify_features(probes, tables[:3])
    with pytest.raises(eh.errors.ArgumentError, match="1 series of probes and 4 tables"):
        early_warning(probes[0], tables)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda probes: [], "probes must be one or several series of probes.* got an empty list"),
        (lambda probes: [probes[0].table] * 4, "got a list of DataFrame"),
        (lambda probes: [replace(each, about={}) for each in probes], "do not say the plateau and floor.* task="),
        (
            lambda probes: [*probes[1:], replace(probes[0], about={"plateau": 3.0, "floor": 0.0})],
            "different plateaus and floors",
        ),
        (
            lambda probes: [replace(each, table=each.table.drop(columns="baseline_loss")) for each in probes],
            "probes of run 0 lack the column 'baseline_loss'",
        ),
        (
            lambda probes: [replace(each, table=each.table[each.table["step"] == 0]) for each in probes],
            "probes of run 0 are of 1 checkpoint",
        ),
        (
            lambda probes: [*probes[:3], series(feature("queue", [100.0]))],
            r"run 3 was probed for other features than run 0 \(carry, queue\)",
        ),
        (
            lambda probes: [replace(each, table=each.table.assign(loss=np.nan)) for each in probes],
            "feature 'carry' has no place that was probed at every step",
        ),
        (
            lambda probes: [replace(each, table=each.table.assign(is_best=True)) for each in probes],
            "feature 'carry' has two best layers at step 0, place 0",
        ),
    ],
)
def test_bad_probes(change, said):
    probes, tables = runs(lambda middle: [feature("carry", [100.0])])
    with pytest.raises(eh.errors.ArgumentError, match=said):
        classify_features(change(probes), tables)
    with pytest.raises(eh.errors.ArgumentError, match=said):
        early_warning(change(probes), tables)


def test_bad_metrics():
    probes, tables = runs(lambda middle: [feature("carry", [100.0])])
    with pytest.raises(eh.errors.ArgumentError, match="a series without metrics: the metrics of run 0 lack"):
        classify_features(probes, [table[["step"]] for table in tables])
    with pytest.raises(eh.errors.ArgumentError, match="metrics must be one or several tables"):
        classify_features(probes, None)


@pytest.mark.parametrize("least_share", [0, 1, -0.5, float("nan")])
def test_bad_share(least_share):
    with pytest.raises(eh.errors.ArgumentError, match="it is a share, above 0 and below 1"):
        classify_features(series(feature("carry", [9.0])), metrics(900.0), least_share=least_share)


def test_features_to_watch_must_be_there():
    probes, tables = runs(lambda middle: [feature("carry", [4 * middle]), feature("sum", [4 * middle])])
    with pytest.raises(eh.errors.ArgumentError, match=r"no feature is quiet .* name those to watch: carry, sum"):
        early_warning(probes, tables)
    with pytest.raises(eh.errors.ArgumentError, match="no feature 'cary'; nearest: carry"):
        early_warning(probes, tables, ["cary"])
    with pytest.raises(eh.errors.ArgumentError, match="no feature named; the probes have carry, sum"):
        early_warning(probes, tables, [])
    assert early_warning(probes, tables, "carry").features == ("carry",)


def test_the_task_may_be_given():
    probes, tables = runs(lambda middle: [feature("carry", [100.0])])
    plain = classify_features(probes, tables)
    probes = [replace(each, about={}) for each in probes]
    pd.testing.assert_frame_equal(classify_features(probes, tables, task=RANGE).table, plain.table)
    assert early_warning(probes, tables, task=RANGE).features == ("carry",)


# ---- what a result offers ----


def test_repr_and_files(classified, tmp_path):
    text = repr(classified)
    assert text.startswith(
        "quiet: carry; loud: adjacency; undecided: with it; not learned: noise (transition at step "
    )
    assert "the lead's interval holds 0" in text
    assert "<table" in classified._repr_html_()
    path = classified.save(tmp_path / "quiet.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(path), classified.table)
    assert classified.about["least_share"] == 0.1


def test_results_repeat():
    probes, tables = runs(lambda middle: [feature("carry", middle / np.array([6, 5, 4, 3]), noise=0.01)])
    first, again = (classify_features(probes, tables, seed=3) for _ in range(2))
    pd.testing.assert_frame_equal(first.table, again.table)


@pytest.mark.parametrize("n_features", [1, 8])
def test_plot_shows_the_loss_and_each_learned_feature(n_features):
    probes, tables = runs(
        lambda middle: [
            *(feature(f"feature {index}", [middle / (2 + index)], steps=COARSE) for index in range(n_features)),
            feature("noise", [middle], removed=0.01, steps=COARSE),
        ]
    )
    result = classify_features(probes, tables)
    (axes,) = result.plot().axes
    entries = [text.get_text() for text in axes.get_legend().get_texts()]
    assert entries[0] == "task loss: plateau to floor"
    assert [entry.split(":")[0] for entry in entries[1 : n_features + 1]] == [
        f"feature {i}" for i in range(n_features)
    ]
    assert entries[-1] == "noise: not learned"
    thin = [line for line in axes.lines if line.get_linewidth() == 0.6]
    assert len(thin) == len(SEEDS) * (1 + n_features)
    looks = {(line.get_color(), str(line.get_linestyle())) for line in axes.lines if line.get_linewidth() == 1.4}
    assert len(looks) >= n_features  # no two features look the same
    (shade,) = axes.patches
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == pytest.approx(result.transition.fast_phase)


def test_plot_draws_the_median_over_seeds(classified):
    (axes,) = classified.plot().axes
    (task, *_) = axes.lines
    steps, median = task.get_data()
    wanted = np.median([gap_left(steps, middle) for middle in SEEDS], axis=0)
    np.testing.assert_allclose(median, wanted, atol=1e-9)


def test_plot_of_runs_of_different_lengths_and_no_transition():
    probes = [series(feature("carry", [20.0], steps=COARSE[last >= COARSE])) for last in (512, 4000, 8000)]
    result = classify_features(probes, [metrics(1e9, EVALUATED[last >= EVALUATED]) for last in (512, 4000, 8000)])
    (axes,) = result.plot().axes
    assert not axes.patches
    assert max(axes.lines[0].get_xdata()) <= 512


def test_warning_plot_has_a_dot_per_seed():
    transitions = [700.0, 900.0, 1100.0, 1300.0, 1e9]
    probes = [series(feature("carry", [step])) for step in (100.0, 150.0, 200.0, 250.0, 300.0)]
    found = early_warning(probes, [metrics(middle) for middle in transitions], ["carry"])
    (axes,) = found.plot().axes
    dots, crosses, _ = axes.lines
    np.testing.assert_array_equal(dots.get_xdata(), found.table["warning_step"][:4])
    np.testing.assert_array_equal(dots.get_ydata(), found.table["transition_step"][:4])
    assert len(crosses.get_xdata()) == 1
    assert "never" in [label.get_text() for label in axes.get_yticklabels()]
    assert axes.get_title() == "rank correlation 1.00, 5 seeds"
