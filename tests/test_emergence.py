"""Points of emergence of series of models: search, reuse of evaluations, unusable checkpoints, tables and figures."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import emergent_heads as eh
from emergent_heads.analysis import emergence
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.errors import (
    ArgumentError,
    CheckpointError,
    EmergenceError,
    HubError,
    OutputError,
    TokenizerError,
    UnsafeWeightsError,
)
from emergent_heads.storage import KeptTables
from emergent_heads.tasks import PromptBatch, PromptTask

STEPS = (0, 1, 2, 4, 8, 16, 100, 200, 300, 400, 500, 600)
N_PROMPTS = 10


class Curve(PromptTask):
    """Task `index` of a `FakeSeries`; `name` tells its prompts."""

    def __init__(self, index=0, name="copy", n_prompts=N_PROMPTS):
        self.index, self.name, self.n_prompts = index, name, n_prompts

    def batch(self, tokenizer, *, vocabulary_size, context):
        rows = torch.tensor([[self.index, row] for row in range(self.n_prompts)])
        ones = torch.ones(self.n_prompts, dtype=torch.long)
        return PromptBatch(rows, ones, ones, (("task", "row"),) * self.n_prompts)


class FakeModel:
    """Matches the first `matched[task]` prompts of each task."""

    tokenizer, vocabulary_size, context, device = None, 4, None, torch.device("cpu")

    def __init__(self, matched, series, step):
        self.matched, self.series, self.step = matched, series, step

    def logits(self, tokens, positions):
        self.series.evaluated.append((self.step, int(tokens[0, 0])))
        logits = torch.zeros(len(tokens), 4)
        right = torch.tensor([row < self.matched[task] for task, row in tokens.tolist()])
        logits[:, 1] = torch.where(right, 3.0, -3.0)
        if -1 in self.matched:
            logits[0, 0] = float("nan")
        return logits


class FakeSeries:
    """Series with a number of matched prompts per step (and task); -1 gives NaN logits, None no usable weights."""

    def __init__(
        self,
        *matched,
        name="run-seed3",
        steps=STEPS,
        size="160m",
        seed=3,
        kept=None,
        weights=None,
        error=CheckpointError,
    ):
        self.name, self.steps, self.size, self.seed = name, steps[: len(matched[0])], size, seed
        self.matched = dict(zip(self.steps, zip(*matched, strict=True), strict=True))
        self.evaluations = KeptTables.open(kept)
        self.problems, self.error, self.weights = {}, error, weights
        self.loaded, self.evaluated = [], []

    repository = None

    def check_known_issues(self, step):
        """Nothing is known."""

    def unload(self):
        self.loaded.append("unloaded")

    def identity(self, step):
        return None if self.weights is None else f"{self.weights} {step}"

    def hooked(self, step):
        self.loaded.append(step)
        if None in self.matched[step]:
            self.problems[step] = f"step {step} of {self.name}: weights are damaged"
            raise self.error(self.problems[step])
        return FakeModel(self.matched[step], self, step)


RISING = [0, 0, 1, 2, 2, 3, 4, 6, 7, 8, 9, 9]  # passes one half between steps 100 and 200
LOST = [0, 0, 0, 0, 1, 6, 7, 8, 7, 6, 3, 2]  # passes between 8 and 16, fails again from 500


def find(series, *arguments, **named):
    return eh.find_emergence(series, *arguments, progress=False, **named)


@pytest.mark.parametrize("strategy", ["bisect", "scan", "verify"])
def test_a_rise_is_found_between_its_two_checkpoints(strategy):
    point = find(FakeSeries(RISING), Curve(), strategy)
    assert (point.status, point.pre, point.post, point.midpoint) == ("emerged", 100, 200, 150.0)
    assert (point.step, point.first_crossing, point.persistent_crossing) == (200, 200, 200)
    assert point.require() == (100, 200)
    assert point.persistent is (None if strategy == "bisect" else True)
    assert point.missed_by_bisect is (None if strategy == "bisect" else False)
    assert "copy in run-seed3: emerged between step 100 and step 200" in repr(point)


def test_bisect_visits_the_last_checkpoint_first_and_few_others():
    series = FakeSeries(RISING)
    point = find(series, Curve())
    assert series.evaluated[0] == (600, 0)
    assert len(series.evaluated) == len(point.table) <= 6
    assert len(set(series.evaluated)) == len(series.evaluated)
    (caveat,) = point.caveats
    assert caveat.startswith(f"bisect assumes one rise: {12 - len(point.table)} of 12 checkpoints were not evaluated")


def test_the_table_says_what_was_measured():
    point = find(FakeSeries(RISING), Curve(), "scan", threshold=0.7)
    assert point.post == 300
    table = point.table
    assert table["step"].tolist() == list(STEPS)
    np.testing.assert_allclose(table["share_matched"], np.array(RISING) / N_PROMPTS)
    assert table["passed"].tolist() == [matched >= 7 for matched in RISING]
    for row, k in zip(table.itertuples(), RISING, strict=True):
        bounds = stats.binomtest(k, N_PROMPTS).proportion_ci(method="exact")
        assert (row.share_low, row.share_high) == pytest.approx((bounds.low, bounds.high))
        right, wrong = np.exp(3) / (np.exp(3) + 3), np.exp(-3) / (np.exp(-3) + 3)
        assert row.p_target == pytest.approx((k * right + (N_PROMPTS - k) * wrong) / N_PROMPTS)
        assert row.log_p_target_nats == pytest.approx((k * np.log(right) + (10 - k) * np.log(wrong)) / 10)
        assert row.rank == np.median([1] * k + [4] * (N_PROMPTS - k))
        assert row.n_prompts == N_PROMPTS
        assert row.p_low - 1e-12 <= row.p_target <= row.p_high + 1e-12
    assert not table["reused"].any()


def test_one_prompt_and_threshold_one_is_the_papers_criterion():
    point = find(FakeSeries([0, 0, 0, 1, 1]), Curve(n_prompts=1), threshold=1)
    assert point.require() == (2, 4)
    assert set(point.table["share_matched"]) <= {0.0, 1.0}


def test_a_share_equal_to_the_threshold_passes():
    for k in range(1, 11):
        assert find(FakeSeries([0, k, k]), Curve(), "scan", threshold=k / 10).post == 1


def test_never():
    point = find(FakeSeries([0] * 12), Curve())
    assert (point.status, point.pre, point.post, point.midpoint) == ("never", None, None, None)
    assert point.first_crossing is point.persistent_crossing is point.persistent is None
    assert point.table["step"].tolist() == [600]
    assert "a crossing lost again would be missed" in point.caveats[0]
    with pytest.raises(EmergenceError, match=r"never emerged by step 600.*verify"):
        point.require()


def test_from_the_start():
    point = find(FakeSeries([9] * 12), Curve())
    assert (point.status, point.pre, point.post, point.midpoint) == ("from the start", None, 0, None)
    with pytest.raises(EmergenceError, match="there from the start"):
        point.require()


def test_a_crossing_that_is_lost_again():
    missed = find(FakeSeries(LOST), Curve(), "bisect")
    assert missed.status == "never"
    for strategy in ("scan", "verify"):
        point = find(FakeSeries(LOST), Curve(), strategy)
        assert point.require() == (8, 16)
        assert (point.first_crossing, point.persistent_crossing) == (16, None)
        assert point.persistent is False
        assert point.missed_by_bisect is True
        assert "lost again later, missed by plain bisection" in point.headline()


def test_a_crossing_that_is_lost_and_comes_back():
    point = find(FakeSeries([0, 0, 0, 6, 6, 6, 2, 2, 6, 7, 7, 8]), Curve(), "scan")
    assert (point.first_crossing, point.persistent_crossing, point.persistent) == (4, 300, False)
    assert "for good from step 300" in point.headline()


def test_bisection_that_asked_for_every_checkpoint_knows_whether_the_crossing_lasts():
    point = find(FakeSeries([0, 6]), Curve())
    assert point.persistent is True
    assert point.caveats == ()


def test_scan_after_bisect_evaluates_only_the_rest():
    series = FakeSeries(RISING)
    bisected = find(series, Curve())
    before = len(series.evaluated)
    scanned = find(series, Curve(), "scan")
    assert len(series.evaluated) == len(set(series.evaluated)) == len(STEPS)
    assert before < len(STEPS)
    assert scanned.table.loc[scanned.table["reused"], "step"].tolist() == bisected.table["step"].tolist()
    once_more = find(series, Curve(), "scan")
    assert len(series.evaluated) == len(STEPS)
    assert once_more.table["reused"].all()
    pd.testing.assert_frame_equal(once_more.table.drop(columns="reused"), scanned.table.drop(columns="reused"))


def test_evaluations_outlive_the_session_for_the_same_weights_and_prompts(tmp_path):
    first = FakeSeries(RISING, kept=tmp_path, weights="a")
    find(first, Curve(), "scan")
    again = FakeSeries(RISING, kept=tmp_path, weights="a")
    assert find(again, Curve(), "scan").table["reused"].all()
    assert again.evaluated == []
    assert len(again.loaded) == 1  # for the tokenizer

    other_weights = FakeSeries(RISING[::-1], kept=tmp_path, weights="b")
    assert find(other_weights, Curve(), "scan").status == "from the start"
    other_prompts = FakeSeries(RISING, kept=tmp_path, weights="a")
    find(other_prompts, Curve(n_prompts=9), "scan")
    assert len(other_weights.evaluated) == len(other_prompts.evaluated) == len(STEPS)


def test_weights_without_identity_are_not_mixed_up_between_series():
    assert find(FakeSeries(RISING), Curve()).status == "emerged"
    assert find(FakeSeries([0] * 12), Curve()).status == "never"


def test_several_tasks_share_each_loaded_checkpoint():
    later = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 9]
    series = FakeSeries(RISING, later, LOST)
    tasks = [Curve(0, "copy"), Curve(1, "later"), Curve(2, "lost")]
    points = find(series, tasks)
    assert [point.task for point in points] == ["copy", "later", "lost"]
    for point, task, matched in zip(points, tasks, (RISING, later, LOST), strict=True):
        alone = find(FakeSeries(*[matched] * 3), task)
        assert (point.status, point.pre, point.post) == (alone.status, alone.pre, alone.post)
        assert set(alone.table["step"]) <= set(point.table["step"])
    assert len(set(series.evaluated)) == len(series.evaluated)
    steps = {step for step, _ in series.evaluated}
    assert len(series.evaluated) == 3 * len(steps)
    assert sorted(set(series.loaded)) == sorted(steps)
    assert len(series.loaded) == len(steps)


def test_an_earlier_pass_seen_for_another_task_is_said():
    _, lost = find(FakeSeries(RISING, LOST), [Curve(0, "copy"), Curve(1, "lost")])
    assert lost.status == "never"
    assert lost.first_crossing is not None
    assert any(f"step {lost.first_crossing}, evaluated for another task, passes" in text for text in lost.caveats)


def test_one_task_in_a_list_gives_a_list():
    (point,) = find(FakeSeries(RISING), [Curve()])
    assert point.post == 200


def test_tasks_of_one_name_are_told_apart():
    first, second = Curve(0), Curve(1)
    points = find(FakeSeries(RISING, LOST), [first, second])
    assert [point.task for point in points] == [repr(first), repr(second)]


@pytest.mark.parametrize("bad", [None, -1])
@pytest.mark.parametrize("strategy", ["bisect", "scan", "verify"])
def test_unusable_checkpoints_are_passed_over_and_named(strategy, bad):
    matched = [*RISING]
    matched[6] = matched[7] = matched[11] = bad  # steps 100, 200 and 600
    series = FakeSeries(matched)
    point = find(series, Curve(), strategy)
    assert point.require() == (16, 300)
    assert {100, 200, 600} == set(point.problems) == set(series.problems)
    assert not {100, 200, 600} & set(point.table["step"])
    reason = "weights are damaged" if bad is None else "logits of run-seed3 at step 200 are NaN"
    assert reason in point.problems[200]
    assert "no checkpoint just before step 300 could be used: step 100, 200" in point.caveats
    assert "the last checkpoints could not be used: step 600" in point.caveats
    for said in (repr(point), point._repr_html_()):
        assert "caveat: the last checkpoints could not be used: step 600" in said
        assert "problems (see .problems): step 100, 200, 600" in said


def test_a_first_checkpoint_that_cannot_be_used():
    point = find(FakeSeries([None, None, 7, 8, 9]), Curve())
    assert (point.status, point.post) == ("from the start", 2)
    assert "no checkpoint just before step 2 could be used: step 0, 1" in point.caveats


def test_a_series_without_a_usable_checkpoint_is_an_error():
    with pytest.raises(CheckpointError, match=r"none of the 3 checkpoints of run-seed3 can be used: step 2 of"):
        find(FakeSeries([None, None, None]), Curve())


@pytest.mark.parametrize("error", [UnsafeWeightsError, HubError])
def test_what_holds_for_the_whole_series_ends_the_search(error):
    series = FakeSeries([None] * 12, error=error)
    with pytest.raises(error):
        find(series, Curve())
    assert len(series.loaded) == 1


def test_errors_of_the_task_come_through():
    class NeedsTokenizer(Curve):
        def batch(self, tokenizer, *, vocabulary_size, context):
            raise TokenizerError("words need a tokenizer")

    with pytest.raises(TokenizerError, match="words need a tokenizer"):
        find(FakeSeries(RISING), NeedsTokenizer())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "bisection"}, "unknown strategy 'bisection': nearest: bisect"),
        ({"threshold": 0}, "threshold is 0: it is a share of prompts"),
        ({"threshold": 1.2}, "threshold is 1.2"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"task": []}, "no task given"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        find(FakeSeries(RISING), **{"task": Curve(), **arguments})


def test_progress_is_shown_unless_not_wanted(monkeypatch):
    asked = []
    bar = emergence.tqdm
    monkeypatch.setattr(emergence, "tqdm", lambda **named: asked.append(named.get("disable")) or bar(**named))
    eh.find_emergence(FakeSeries(RISING), Curve(), progress=False)
    eh.find_emergence(FakeSeries(RISING), Curve())
    assert asked == [True, None]  # None: tqdm's own default, which TQDM_DISABLE sets


def test_a_saved_point_says_how_it_came_about(tmp_path):
    path = find(FakeSeries(RISING), Curve()).save(tmp_path / "point.csv")
    saved = pd.read_csv(path)
    assert saved["step"].is_monotonic_increasing
    about = pd.read_json(path.with_name("point.csv.about.json"), typ="series")
    assert (about["series"], about["strategy"], about["pre"], about["post"]) == ("run-seed3", "bisect", 100, 200)
    with pytest.raises(OutputError):
        find(FakeSeries(RISING), Curve()).save(tmp_path / "point.xlsx")


@pytest.fixture(scope="module")
def two_sizes():
    """Two sizes with three seeds each on two tasks; one seed never solves the first task."""
    series = []
    for size, shift in (("14m", 0), ("1b", 2)):
        for seed in range(3):
            copy = RISING[shift + seed :] + [9] * (shift + seed) if (size, seed) != ("14m", 1) else [0] * 12
            series.append(FakeSeries(copy, LOST, name=f"{size}-seed{seed}", size=size, seed=seed))
    return eh.emergence_table(series, [Curve(0, "copy"), Curve(1, "lost")], "scan", progress=False)


def test_emergence_table_has_a_row_per_series_and_task(two_sizes):
    table = two_sizes.table
    assert len(table) == len(two_sizes.points) == 12
    assert table["series"].nunique() == 6
    assert set(table["task"]) == {"copy", "lost"}
    copy = table[table["task"] == "copy"].set_index(["size", "seed"])
    assert copy.loc[("14m", 1), "status"] == "never"
    assert copy["censored"].tolist() == [False, True, False, False, False, False]
    assert copy.loc[("14m", 1), "steps_to_emergence"] == 600
    assert pd.isna(copy.loc[("14m", 1), "post"])
    assert copy.loc[("14m", 0), "midpoint"] == copy.loc[("14m", 0), "steps_to_emergence"] == 150
    assert (table["last_step"] == 600).all()
    assert (table["n_evaluated"] == 12).all()
    assert table.loc[table["task"] == "lost", "persistent"].eq(False).all()
    for row, point in zip(table.itertuples(), two_sizes.points, strict=True):
        assert (row.series, row.task, row.status) == (point.series, point.task, point.status)


def test_summary_counts_the_censored_seeds(two_sizes):
    summary = two_sizes.summary.set_index(["size", "task"])
    assert len(summary) == 4
    small = summary.loc[("14m", "copy")]
    assert (small["n_seeds"], small["n_solved"], small["n_persistent"]) == (3, 2, 2)
    bounds = stats.binomtest(2, 3).proportion_ci(method="exact")
    assert (small["share_low"], small["share_high"]) == pytest.approx((bounds.low, bounds.high))
    # RISING shifted by 0 and 2 places crosses between 100 and 200 and between 8 and 16; the third counts as 600.
    assert small["restricted_mean_step"] == pytest.approx((150 + 12 + 600) / 3)
    assert small["restricted_to_step"] == 600
    assert small["median_step"] == 150
    lost = summary.loc[("1b", "lost")]
    assert (lost["n_solved"], lost["n_persistent"]) == (3, 0)


def test_summary_does_not_say_what_bisection_did_not_look_at():
    (summary,) = eh.emergence_table([FakeSeries(RISING)], Curve(), progress=False).summary.to_dict("records")
    assert summary["n_solved"] == 1
    assert pd.isna(summary["n_persistent"])


def test_the_papers_means_come_out_of_its_points():
    """Steps to emergence (thousands) and their drawn mean, read off the figure of string repetition."""
    drawn = {
        "14m": ([2.5, 3.5, 7.5, 13.5, 66.5, 112.5, *4 * [None]], 77.8),
        "31m": ([1.5, 1.5, 2.5, 9.5, 14.5, 47.5, 104.5, 142.5, *2 * [None]], 61.0),
        "160m": ([0.756, 1.5, 4.5, 5.5, 6.5, 6.5, 18.5, 47.5, 138.5, None], 37.3),
        "410m": ([*4 * [1.5], 2.5, *3 * [4.5], 5.5, 30.5], 5.8),
    }
    steps = (0, *(2**power for power in range(10)), *range(1000, 144_000, 1000))
    series = []
    for size, (midpoints, _) in drawn.items():
        for seed, midpoint in enumerate(midpoints):
            matched = [0 if midpoint is None or step < 1000 * midpoint else 9 for step in steps]
            series.append(FakeSeries(matched, name=f"{size}-seed{seed}", steps=steps, size=size, seed=seed))
    found = eh.emergence_table(series, Curve(), progress=False)
    assert found.table["n_evaluated"].max() <= 10
    solved = [1000 * midpoint for midpoints, _ in drawn.values() for midpoint in midpoints if midpoint is not None]
    assert found.table["midpoint"].dropna().tolist() == solved
    summary = found.summary.set_index("size")
    assert summary["n_solved"].to_dict() == {"14m": 6, "31m": 8, "160m": 9, "410m": 10}
    for size, (_, mean) in drawn.items():
        assert summary.loc[size, "restricted_mean_step"] == pytest.approx(1000 * mean, abs=50)


def test_emergence_table_refuses_what_would_count_twice():
    with pytest.raises(ArgumentError, match="no series given"):
        eh.emergence_table([], Curve())
    with pytest.raises(ArgumentError, match="series of the same name given twice: run-seed3"):
        eh.emergence_table([FakeSeries(RISING), FakeSeries(RISING)], Curve(), progress=False)
    task = Curve()
    with pytest.raises(ArgumentError, match="tasks given twice"):
        eh.emergence_table([FakeSeries(RISING)], [task, task], progress=False)


def marks(figure):
    """Label -> number of points drawn under it, over all panels."""
    counts = {}
    for axes in figure.axes:
        for line in axes.lines:
            if not line.get_label().startswith("_"):
                counts[line.get_label()] = counts.get(line.get_label(), 0) + len(line.get_xdata())
    return counts


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("quiet")
def test_scatter_shows_every_seed_and_crosses_for_never(two_sizes, tmp_path):
    figure = two_sizes.plot()
    assert len(figure.axes) == 2
    assert marks(figure) == {"emerged": 5, "never, by the last step": 1, "emerged, lost again later": 6}
    copy = figure.axes[0]
    assert copy.get_title() == "copy"
    assert [label.get_text() for label in copy.get_xticklabels()] == ["14m", "1b"]
    assert copy.get_ylabel() == "training steps to emergence"
    (cross,) = [line for line in copy.lines if line.get_label().startswith("never")]
    assert 600 < cross.get_ydata()[0] <= copy.get_ylim()[1]
    places = [tuple(point) for line in copy.lines if line.get_marker() in "ox" for point in line.get_xydata()]
    assert len(set(places)) == 6
    figure.savefig(tmp_path / "scatter.png")
    assert (tmp_path / "scatter.png").stat().st_size > 5000


@pytest.mark.usefixtures("quiet")
def test_curve_shades_the_interval_and_draws_what_was_measured(tmp_path):
    point = find(FakeSeries(RISING), Curve(), "scan")
    figure = point.plot()
    (axes,) = figure.axes
    drawn = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(drawn["mean p(target)"].get_ydata(), point.table["p_target"])
    np.testing.assert_allclose(drawn["share of prompts matched"].get_ydata(), point.table["share_matched"])
    shaded = next(patch for patch in axes.patches if patch.get_label() == "emergence: 100 to 200")
    assert shaded.get_x() == 100
    assert shaded.get_width() == 100
    assert axes.get_xlabel() == "training step"
    figure.savefig(tmp_path / "curve.png")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("curve", [[0], [0] * 12, [9] * 12, [0, 9]])
def test_every_outcome_can_be_drawn(curve, tmp_path):
    series = FakeSeries(curve, size=None)
    table = eh.emergence_table([series], Curve(), progress=False)
    table.plot().savefig(tmp_path / "scatter.png")
    table.points[0].plot().savefig(tmp_path / "curve.png")


def test_drawing_leaves_matplotlib_as_it_was(two_sizes):
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    before, open_figures = dict(mpl.rcParams), plt.get_fignums()
    two_sizes.plot()
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == open_figures


def test_real_models_in_a_real_series():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = GPTNeoXConfig(**shape, vocab_size=64, max_position_embeddings=32, initializer_range=0.5)

    def load(step):
        torch.manual_seed(0 if step >= 300 else step + 1)
        model = GPTNeoXForCausalLM(config).eval()
        with torch.no_grad():
            model.gpt_neox.final_layer_norm.weight *= 1 + step / 1000  # other weights, the same greedy tokens
        return model

    tokens = torch.arange(24).reshape(6, 4)
    with torch.no_grad():
        targets = load(900)(tokens).logits[:, -1].argmax(-1)
    series = eh.CheckpointSeries.from_loader(range(0, 1000, 100), load, name="tiny")
    point = find(series, eh.tasks.from_tokens(tokens, targets), threshold=1)
    assert point.require() == (200, 300)
    assert series.problems == {}
    for row in point.table.itertuples():
        with torch.no_grad():
            log_p = load(row.step)(tokens).logits[:, -1].log_softmax(-1)[torch.arange(6), targets]
        assert row.p_target == pytest.approx(log_p.exp().mean().item(), abs=1e-5)


def test_a_series_of_folders_is_searched_once_over_sessions_and_left_unloaded(emerging_series):
    task = eh.tasks.in_context_repetition(n_prompts=4, length=6, n_repeated=4, vocabulary=range(20, 90))
    first = CheckpointSeries.from_directory(emerging_series)
    table = eh.emergence_table([first], task, progress=False)
    assert first._resident is None
    again = find(CheckpointSeries.from_directory(emerging_series), task)
    assert again.table["reused"].all()
    pd.testing.assert_frame_equal(
        again.table.drop(columns="reused"), table.points[0].table.drop(columns="reused"), check_exact=True
    )
