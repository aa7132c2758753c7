"""Points of emergence from scores: published evaluations of Pythia and PolyPythias, and wrong tables."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import emergent_heads as eh
from emergent_heads.errors import ArgumentError

DATA = Path(__file__).parents[1].parent / "shared" / "data"
PYTHIA = DATA / "pythia_v1_zeroshot_acc_wide.csv"
POLYPYTHIAS = DATA / "polypythias_410m_training_maps.tsv"

needs_pythia = pytest.mark.skipif(not PYTHIA.exists(), reason=f"{PYTHIA.name} is not here")
needs_polypythias = pytest.mark.skipif(not POLYPYTHIAS.exists(), reason=f"{POLYPYTHIAS.name} is not here")

NEVER = None
SIZES = ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")


@pytest.fixture(scope="module")
def pythia():
    return pd.read_csv(PYTHIA)


@pytest.fixture(scope="module")
def polypythias():
    return pd.read_csv(POLYPYTHIAS, sep="\t")


def column(result, name, key="series"):
    """Series (or other key) -> step, None where there is none."""
    values = result.table.set_index(key)[name]
    return {index: None if pd.isna(value) else int(value) for index, value in values.items()}


def lambada(pythia, threshold, **named):
    return eh.emergence_from_table(pythia, threshold, group=["model"], score="lambada_openai", **named)


def model_name(size, deduped=False):
    return "pythia-1b-bf16" if size == "1b" and not deduped else f"pythia-{size}" + "-deduped" * deduped


@needs_pythia
@pytest.mark.parametrize(
    ("threshold", "steps"),
    [
        (0.2, [13_000, 3000, 3000, 3000, 3000, 3000, 3000, 3000]),
        (0.3, [NEVER, 23_000, 13_000, 3000, 3000, 3000, 3000, 3000]),
        (0.5, [NEVER, NEVER, 83_000, 43_000, 23_000, 13_000, 13_000, 13_000]),
        (0.6, [NEVER, NEVER, NEVER, NEVER, 103_000, 53_000, 33_000, 23_000]),
    ],
)
def test_lambada_crosses_where_the_evaluations_say(pythia, threshold, steps):
    found = column(lambada(pythia, threshold), "first_crossing")
    assert [found[model_name(size)] for size in SIZES] == steps


@needs_pythia
def test_lambada_crossings_of_the_deduped_models(pythia):
    assert set(column(lambada(pythia, 0.2), "first_crossing").values()) == {3000, 13_000}
    at_half = lambada(pythia, 0.5)
    first, lasting = column(at_half, "first_crossing"), column(at_half, "persistent_crossing")
    assert (first["pythia-410m"], lasting["pythia-410m"]) == (83_000, 113_000)
    assert first["pythia-410m-deduped"] == lasting["pythia-410m-deduped"] == 83_000
    assert first["pythia-1b-deduped"] == 33_000


@needs_pythia
def test_70m_on_lambada_is_found_by_verify_and_missed_by_bisect(pythia):
    for model in ("pythia-70m", "pythia-70m-deduped"):
        rows = pythia[pythia["model"] == model]
        (bisected,) = lambada(rows, 0.2, strategy="bisect").points
        assert bisected.status == "never"
        assert len(bisected.table) == 1
        for strategy in ("verify", "scan"):
            (point,) = lambada(rows, 0.2, strategy=strategy).points
            assert point.require() == (3000, 13_000)
            assert point.missed_by_bisect is True
            assert point.persistent is False
            assert point.persistent_crossing is None


@needs_pythia
def test_verify_equals_scan_on_lambada_for_fewer_evaluations(pythia):
    for threshold in (0.2, 0.3, 0.5, 0.6):
        scanned, verified = lambada(pythia, threshold), lambada(pythia, threshold, strategy="verify")
        assert column(verified, "post") == column(scanned, "post")
        assert verified.table["n_evaluated"].max() < 20


@needs_pythia
def test_bisection_stays_in_its_bound_on_the_27_checkpoints(pythia):
    for threshold in (0.2, 0.3, 0.5, 0.6):
        n_evaluated = lambada(pythia, threshold, strategy="bisect").table.set_index("status")["n_evaluated"]
        assert n_evaluated.max() <= 7
        assert n_evaluated.get("never", pd.Series([1])).max() == 1


@needs_pythia
def test_wsc_which_flips_between_two_guesses_is_not_persistent(pythia):
    for strategy in ("scan", "verify"):
        wsc = eh.emergence_from_table(pythia, 0.5, score="wsc", strategy=strategy).table
        assert len(wsc) == 16
        assert (wsc["status"] != "never").all()
        assert wsc["persistent"].eq(False).all()


@needs_pythia
def test_a_task_that_stays_at_chance_never_emerges(pythia):
    small = pythia[pythia["model"].isin(["pythia-70m", "pythia-160m"])]
    found = eh.emergence_from_table(small, 0.3, score=["logiqa", "arc_challenge"])
    assert found.table["status"].eq("never").all()
    assert found.table["censored"].all()
    assert found.summary["median_step"].eq(np.inf).all()
    assert found.summary["restricted_mean_step"].eq(143_000).all()


@needs_polypythias
@pytest.mark.parametrize(
    ("threshold", "first", "lasting"),
    [
        (0.0, [3000] * 10, [3000] * 4 + [133_000] + [3000] * 5),
        (0.5, [13_000] * 10, [13_000] * 3 + [93_000, NEVER] + [13_000] * 5),
        (
            1.0,
            [63_000, 63_000, 83_000, NEVER, 73_000, 83_000, 53_000, 93_000, 63_000, 73_000],
            [63_000, 103_000, 83_000, NEVER, NEVER, 113_000, 73_000, 113_000, 83_000, 113_000],
        ),
    ],
)
def test_the_ten_seeds_of_410m(polypythias, threshold, first, lasting):
    found = eh.emergence_from_table(polypythias, threshold, group=["seed"], seed="seed")
    assert list(column(found, "first_crossing", "seed").values()) == first
    assert list(column(found, "persistent_crossing", "seed").values()) == lasting
    persistent = [a == b for a, b in zip(first, lasting, strict=True)]
    known = [point.persistent for point in found.points]
    assert known == [None if step is None else same for step, same in zip(first, persistent, strict=True)]


@needs_polypythias
def test_the_summary_of_the_ten_seeds(polypythias):
    rows = polypythias.assign(size="410m")
    found = eh.emergence_from_table(rows, 1.0, group=["size", "seed"], size="size", seed="seed")
    (summary,) = found.summary.to_dict("records")
    assert (summary["size"], summary["n_seeds"], summary["n_solved"], summary["n_persistent"]) == ("410m", 10, 9, 2)
    midpoints = [58, 58, 78, 143, 68, 78, 48, 88, 58, 68]  # thousands; seed 3 never, so the last step
    assert summary["restricted_mean_step"] == pytest.approx(1000 * np.mean(midpoints))
    assert summary["median_step"] == 68_000
    assert summary["median_low"] <= 68_000 <= summary["median_high"]


@pytest.fixture
def scores():
    return pd.DataFrame(
        {
            "model": ["a"] * 4 + ["b"] * 4,
            "run": [0, 0, 0, 0, 1, 1, 1, 1],
            "step": [30, 0, 10, 20] * 2,
            "score": [0.9, 0.1, 0.2, 0.6, 0.3, 0.1, 0.2, 0.2],
            "other": [0.0] * 8,
        }
    )


def test_rows_need_no_order_and_several_scores_become_tasks(scores):
    found = eh.emergence_from_table(scores, 0.5, score=["score", "other"])
    table = found.table.set_index(["series", "task"])
    assert table.loc[("a", "score"), ["pre", "post"]].tolist() == [10, 20]
    assert table["status"].eq("never").sum() == 3
    assert found.points[0].table["step"].tolist() == [0, 10, 20, 30]
    assert found.points[0].table["score"].tolist() == [0.1, 0.2, 0.6, 0.9]
    assert "points of emergence of 2 series: 3 never, 1 emerged" in repr(found)


def test_numbers_written_as_text_are_numbers(scores):
    (point, _) = eh.emergence_from_table(scores.assign(step=["100", "2", "10", "20"] * 2), 0.5).points
    assert point.require() == (10, 20)
    assert point.table["step"].tolist() == [2, 10, 20, 100]


def test_size_and_seed_are_group_columns(scores):
    found = eh.emergence_from_table(scores, 0.5, group=["model", "run"], size="model", seed="run")
    assert found.table["series"].tolist() == ["a 0", "b 1"]
    assert found.table["size"].tolist() == ["a", "b"]
    assert found.table["seed"].tolist() == [0, 1]
    assert found.summary["size"].tolist() == ["a", "b"]
    assert eh.emergence_from_table(scores, 0.5).table["size"].isna().all()


def test_negated_scores_look_for_a_fall(scores):
    loss = scores.assign(score=-(2 - scores["score"]))
    assert eh.emergence_from_table(loss, -1.5).table["post"].iloc[0] == 20


def changed(scores, row, column, value):
    table = scores.astype({column: object})
    table.loc[row, column] = value
    return table


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (None, {"score": "accuracy"}, r"no column \['accuracy'\]; it has \['model', 'run', 'step'"),
        (None, {"group": ["model", "size"], "step": "steps"}, r"no column \['size', 'steps'\]"),
        (None, {"group": []}, "at least one group column"),
        (None, {"score": []}, "at least one group column and one score"),
        (None, {"score": ["other", "other"]}, "score columns given twice: other"),
        (None, {"seed": "run"}, "seed='run' is none of the group columns"),
        (None, {"size": "size"}, "size='size' is none of the group columns"),
        (None, {"threshold": float("nan")}, "threshold is nan"),
        (None, {"strategy": "scann"}, "unknown strategy 'scann': nearest: scan"),
        ((1, "step", 30), {}, "steps of a given twice: 30"),
        ((1, "step", 0.5), {}, "column 'step' must hold whole numbers: it holds 0.5 at model a"),
        ((1, "step", "step10"), {}, "column 'step' must hold whole numbers: it holds 'step10'"),
        ((6, "score", float("nan")), {}, "column 'score' must hold finite numbers: it holds nan at model b, step 10"),
        ((6, "score", float("inf")), {}, "column 'score' must hold finite numbers: it holds inf"),
        ((6, "score", "high"), {}, "it holds 'high' at model b, step 10"),
    ],
)
def test_wrong_tables_and_arguments(scores, change, arguments, message):
    table = changed(scores, *change) if change else scores
    with pytest.raises(ArgumentError, match=message):
        eh.emergence_from_table(table, **{"threshold": 0.5, **arguments})


def test_an_empty_table(scores):
    with pytest.raises(ArgumentError, match="has no rows"):
        eh.emergence_from_table(scores.iloc[:0], 0.5)


def test_models_are_drawn_by_size_even_where_only_their_names_say_it(scores, tmp_path):
    names = ["pythia-12b", "pythia-70m", "pythia-1.4b-deduped", "other", "pythia-1b-bf16", "pythia-160m"]
    table = pd.concat([scores.assign(model=scores["model"] + f" {name}") for name in names])
    figure = eh.emergence_from_table(table[table["model"].str.startswith("a")], 0.5).plot()
    drawn = [label.get_text().split()[1] for label in figure.axes[0].get_xticklabels()]
    assert drawn == ["pythia-70m", "pythia-160m", "pythia-1b-bf16", "pythia-1.4b-deduped", "pythia-12b", "other"]
    figure.savefig(tmp_path / "models.png")
