"""Features taken out of a model, against plain full passes with hooks set by hand, and greedy decoding."""

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression
from tiny_models import bridge, tiny
from torch.nn import functional

import emergent_heads as eh
from emergent_heads import errors
from emergent_heads.analysis.ablation_controls import Reference, _drawn, _fitted
from emergent_heads.analysis.ablation_examples import Site
from emergent_heads.analysis.ablation_scores import refit
from emergent_heads.analysis.probes import Probe, Probes, ProbeSeries
from emergent_heads.analysis.subspaces import Moments, probe_removal
from emergent_heads.models.hooks import editing_output
from emergent_heads.statistics import sign_flip_p
from emergent_heads.tasks.algorithmic import AlgorithmicTask, Layout, Ragged

TASK = eh.tasks.Addition(bits=5)
WIDTH, STEPS, N, N_REFERENCE = 32, (60, 300), 60, 150
ALL = ("random", "matched_variance", "shuffled_labels", "other_features")


def quick(model, task, probes, controls=3, how="projection", **options):
    return eh.ablate_features(model, task, probes, controls, how, **{"n": N, "n_reference": N_REFERENCE, **options})


# ---- models, probes ----


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Solved at its last step, far from it at its first."""
    config = eh.SmallModelConfig.transformer_pp(2, WIDTH)
    settings = {"learning_rate": 1e-2, "warmup_steps": 30, "schedule": "cosine", "evaluate_every": 1000}
    settings |= {"tokens_per_batch": 64 * TASK.length, "checkpoints": STEPS, "progress": False}
    return eh.train(config, TASK, tmp_path_factory.mktemp("ablation") / "run", steps=STEPS[-1], seed=0, **settings)


def fitted(model, task, features, layers=(0, 1)):
    """Probes by scikit-learn, the best layer by accuracy on its own rows."""
    model = eh.hooked(model)
    tokens = task.batch(600, seed=5, split="probe").tokens
    resid = model.residual(tokens[:, :-1], layers).numpy()
    rows, weights = [], {}
    for feature in features:
        values = feature.read(tokens)
        for place in range(values.positions.shape[1]):
            there = np.flatnonzero(values.positions[:, place] >= 0)
            labels = values.labels[there, place]
            scores = []
            for layer, of_layer in zip(layers, resid, strict=True):
                x = of_layer[there, values.positions[there, place]]
                components = [LogisticRegression(C=1.0, max_iter=5000).fit(x, column) for column in labels.T]
                key = (feature.name, place, layer)
                coefficients = np.concatenate([each.coef_ for each in components])
                intercepts = np.concatenate([each.intercept_ for each in components])
                weights[key] = Probe(feature.name, feature.kind, place, layer, coefficients, intercepts)
                scores.append(np.mean([each.score(x, y) for each, y in zip(components, labels.T, strict=True)]))
                rows.append({"feature": feature.name, "place": place, "layer": layer, "penalty": 1.0})
            for row, layer in zip(rows[-len(layers) :], layers, strict=True):
                row["is_best"] = layer == layers[int(np.argmax(scores))]
    return Probes(pd.DataFrame(rows), weights)


@pytest.fixture(scope="module")
def series(run):
    by_step = {step: fitted(run.series[step], TASK, TASK.features) for step in STEPS}
    table = pd.concat([probes.table.assign(step=step) for step, probes in by_step.items()])
    return ProbeSeries(table, by_step)


@pytest.fixture(scope="module")
def solved(run):
    return run.series.last.load()


@pytest.fixture(scope="module")
def probes(series):
    return series.by_step[STEPS[-1]]


@dataclass(frozen=True)
class Echo(AlgorithmicTask):
    """Some letters, then the same again: `=` stands at another place in each row."""

    symbols: ClassVar[str] = "abcd"
    layout: Layout = "prompt"

    @property
    def length(self):
        return 12

    @property
    def features(self):
        return (eh.Feature("letter", "multilabel", self._letters, self._where),)

    def _draw(self, n, generator):
        drawn = generator.integers(4, size=(n, 5))
        return np.where(np.arange(5) < generator.integers(2, 6, size=(n, 1)), drawn, -1)

    def _prompts(self, instances):
        return Ragged(instances.clip(0), (instances >= 0).sum(axis=1))

    _answers = _prompts

    def _read(self, prompts):
        lengths = prompts.lengths[:, None]
        tokens = np.pad(prompts.tokens, ((0, 0), (0, 5)))[:, :5]
        return np.where(np.arange(5) < lengths, tokens, -1)

    def _letters(self, tokens):
        """Three components of one letter each; the third is the first again."""
        problems = self.problems(tokens)[:, :4, None]
        return np.concatenate([problems == 0, problems == 1, problems == 0], axis=2)

    def _where(self, tokens):
        """Where each letter is to be said: at `=`, and at the letter said before."""
        at = self.separators(tokens)[:, None] + np.arange(4)
        return np.where(self.problems(tokens)[:, :4] >= 0, at, -1)


ECHO = Echo()


@pytest.fixture(scope="module")
def echo():
    model = eh.SmallModel(eh.SmallModelConfig.transformer_pp(2, WIDTH).for_task(ECHO), seed=3).eval()
    return model, fitted(model, ECHO, ECHO.features)


# ---- by hand ----


@contextmanager
def edited_by_hand(model, edits):
    """One row and place after the other; edits are `(layer, feature values, place, change)`."""

    def hook(layer):
        def edit(resid):
            resid = resid.clone()
            for at, values, place, change in edits:
                for row, position in enumerate(values.positions[:, place] if at == layer else ()):
                    if 0 <= position < resid.shape[1]:
                        new = change(resid[row, position].double().numpy(), row)
                        resid[row, position] = torch.from_numpy(np.asarray(new)).to(resid)
            return resid

        return edit

    blocks = eh.hooked(model).blocks
    with torch.no_grad(), ExitStack() as stack:
        for layer in {edit[0] for edit in edits}:
            stack.enter_context(editing_output(blocks[layer], hook(layer)))
        yield


def by_hand(model, batch, edits):
    """Exact match and total loss of each row by one plain pass, and how many tokens count."""
    tokens = batch.tokens
    with edited_by_hand(model, edits):
        logits = model(tokens[:, :-1])
    losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    right = logits.argmax(-1) == tokens[:, 1:]
    counts = batch.loss_mask[:, 1:]
    return (right | ~batch.answer_mask[:, 1:]).all(1).numpy(), torch.where(counts, losses, 0).sum(1), counts.sum()


def changes(how, model, task, feature, probes, layers="probe"):
    """The change at each site, in NumPy, with means and LEACE of the reference rows; LEACE layer by layer."""
    reference = task.batch(N_REFERENCE, seed=0, split="ablation reference").tokens
    values = feature.read(reference)
    table = probes.table[probes.table["feature"] == feature.name]
    best = table[table["is_best"]].set_index("place")["layer"]
    found = []
    for layer in (0, 1):
        below = [(at, values, place, change) for at, place, change in found] if how == "leace" else []
        with edited_by_hand(model, below):
            resid = eh.hooked(model).residual(reference[:, :-1], [layer])[0].double().numpy()
        for place, first in best.items():
            if layer == first or (layers == "later" and layer > first):
                there = np.flatnonzero(values.positions[:, place] >= 0)
                x = resid[there, values.positions[there, place]]
                probe = probes.weights[feature.name, place, layer]
                found.append((layer, place, change_by(how, probe, x, values.labels[there, place])))
    return found


def change_by(how, probe, x, labels):
    if how == "leace":
        package = pytest.importorskip("concept_erasure", reason="the package concept-erasure is not installed")
        options = {"shrinkage": False, "constrain_cov_trace": False, "svd_tol": 1e-9, "dtype": torch.float64}
        fitter = package.LeaceFitter(x.shape[1], labels.shape[1], **options)
        variances, axes = np.linalg.eigh(np.cov(x.T))
        kept = axes[:, variances > (100 * np.finfo(np.float32).eps) ** 2 * np.square(x).sum(axis=1).mean()]
        fitter.update(torch.from_numpy(x @ kept @ kept.T), torch.from_numpy(labels))  # without what is rounding only
        return lambda value, row: fitter.eraser(torch.from_numpy(value)[None])[0].numpy()
    inverse = np.linalg.pinv(probe.weights, rcond=1e-6)
    projector = inverse @ probe.weights
    point = {"projection": 0.0, "mean": x.mean(axis=0), "hyperplane": -inverse @ probe.intercepts}[how]
    return lambda value, row: value - projector @ (value - point)


def sorted_batch(task, n=N):
    """The test rows in the order of the result: by where the answer begins."""
    batch = task.batch(n, seed=0, split="ablation")
    order = np.argsort(batch.answer_mask.numpy().argmax(1), kind="stable")
    return type(batch)(*(each[order] for each in (batch.tokens, batch.loss_mask, batch.answer_mask)))


@pytest.mark.parametrize("layers", ["probe", "later"])
@pytest.mark.parametrize("how", ["projection", "hyperplane", "mean", "leace"])
def test_a_feature_removed_equals_a_plain_pass_with_hooks(how, layers, solved, probes):
    exactly = copy.deepcopy(solved).double()  # LEACE divides by standard deviations, some of which are tiny
    found = quick(exactly, TASK, probes, how=how, layers=layers, features="carry", kinds=())
    feature, batch = TASK.feature("carry"), sorted_batch(TASK)
    values = feature.read(batch.tokens)
    sites = changes(how, exactly, TASK, feature, probes, layers)
    edits = [(layer, values, place, change) for layer, place, change in sites]
    for edit, edits_of in (("none", []), ("feature", edits)):
        exact, losses, count = by_hand(exactly, batch, edits_of)
        np.testing.assert_array_equal(found.exact["carry", edit][0], exact)
        loss = found.loss["carry", edit][0]
        np.testing.assert_allclose(loss.mean(), float(losses.sum() / count), atol=1e-5)
        np.testing.assert_allclose(loss * count.item() / N, losses, atol=5e-4 if how == "leace" else 2e-5)


@pytest.mark.parametrize("how", ["projection", "hyperplane", "leace"])
def test_positions_are_each_examples_own(how, echo):
    """`=` moves, some places are absent, and of three directions two are the same: a real projection of rank 2."""
    model, probes = echo
    feature, batch = ECHO.features[0], sorted_batch(ECHO)
    values = feature.read(batch.tokens)
    assert len(set(values.positions[:, 0])) == 4
    assert (values.positions[:, 3] < 0).sum() > 5
    found = quick(model, ECHO, probes, how=how, features=feature)
    table = found.table.set_index("edit")
    assert table.loc["feature", "rank"] == 2
    edits = [(layer, values, place, change) for layer, place, change in changes(how, model, ECHO, feature, probes)]
    _, losses, count = by_hand(model, batch, edits)
    assert table.loc["feature", "loss_nats"] == pytest.approx(float(losses.sum() / count), abs=1e-5)
    _, losses, _ = by_hand(model, batch, [])
    assert table.loc["none", "loss_nats"] == pytest.approx(float(losses.sum() / count), abs=1e-5)
    assert abs(table.loc["feature", "loss_nats"] - table.loc["none", "loss_nats"]) > 1e-3


@pytest.mark.parametrize("how", ["projection", "leace"])
def test_teacher_forced_exact_match_is_that_of_greedy_decoding(how, solved, probes):
    """Each token given those the model itself said before, under the same edits, one pass per token."""
    found = quick(solved, TASK, probes, how=how, features="carry", kinds=())
    batch, feature = sorted_batch(TASK), TASK.feature("carry")
    values = feature.read(batch.tokens)
    sites = changes(how, solved, TASK, feature, probes)
    said = batch.tokens[:, : 2 * TASK.bits + 2]
    with edited_by_hand(solved, [(layer, values, place, change) for layer, place, change in sites]):
        while said.shape[1] < batch.tokens.shape[1]:
            said = torch.cat([said, solved(said)[:, -1:].argmax(-1)], dim=1)
    exact = (said == batch.tokens).all(1).numpy()
    np.testing.assert_array_equal(found.exact["carry", "feature"][0], exact)
    assert not exact.all()


# ---- what comes out ----


@pytest.fixture(scope="module")
def leace(solved, probes):
    """At the first layer, where later blocks still read the carry."""
    first = Probes(probes.table[probes.table["layer"] == 0].assign(is_best=True), probes.weights)
    return quick(solved, TASK, first, controls=8, how="leace", n=200, n_reference=2000)


def test_the_carry_is_needed_and_controls_are_not(leace):
    table = leace.table.set_index(["feature", "edit"])
    carry = table.loc["carry"]
    assert carry.loc["none", "exact_match"] > 0.9
    assert carry.loc["feature", "exact_match"] < 0.7
    for control in ("random", "matched_variance", "shuffled_labels"):
        assert carry.loc[control, "exact_match"] > carry.loc["feature", "exact_match"] + 0.1
        assert carry.loc[control, "p_value"] < 0.001
        assert carry.loc[control, "p_value_runs"] == pytest.approx(1 / 9)
        assert carry.loc[control, "loss_p_value_runs"] == pytest.approx(1 / 9)
    assert carry.loc["none", "p_value"] < 0.001
    assert np.isnan(carry.loc["feature", "p_value"])


def test_after_leace_a_fresh_probe_finds_nothing(leace):
    for feature, rows in leace.table.groupby("feature"):
        rows = rows.set_index("edit")
        assert rows.loc["none", "refit_loss"] < rows.loc["none", "prior_loss"] - 0.1, feature
        assert rows.loc["feature", "refit_loss"] > rows.loc["feature", "prior_loss"] - 0.02
        assert rows.loc["feature", "refit_accuracy"] < rows.loc["feature", "prior_accuracy"] + 0.06
        assert rows["refit_loss"].notna().sum() == 2


def test_the_table_sums_up_rows_and_runs(leace):
    for row in leace.table.itertuples():
        exact, loss = leace.exact[row.feature, row.edit], leace.loss[row.feature, row.edit]
        assert exact.shape == loss.shape == (row.n_runs, 200)
        assert row.exact_match == pytest.approx(exact.mean())
        assert row.loss_nats == pytest.approx(loss.mean())
        assert row.exact_match_low - 1e-9 <= row.exact_match <= row.exact_match_high + 1e-9
        assert row.loss_low < row.loss_nats < row.loss_high
        if row.n_runs == 1:
            interval = stats.binomtest(int(exact.sum()), 200).proportion_ci(method="exact")
            assert (row.exact_match_low, row.exact_match_high) == pytest.approx(tuple(interval))
        else:
            assert row.loss_runs_low == pytest.approx(np.quantile(loss.mean(axis=1), 0.025))
            assert row.exact_match_runs_high == pytest.approx(np.quantile(exact.mean(axis=1), 0.975))
    runs = leace.controls.set_index(["feature", "edit", "run"])
    assert len(runs) == 3 * (3 * 8 + 2)
    assert runs.loc[("carry", "random", 5), "loss_nats"] == pytest.approx(leace.loss["carry", "random"][5].mean())
    means = leace.controls.groupby(["feature", "edit"])[["removed_norm", "removed_variance", "rank"]].mean()
    for (feature, edit), mean in means.iterrows():
        row = leace.table.set_index(["feature", "edit"]).loc[(feature, edit)]
        assert row[mean.index].to_numpy(float) == pytest.approx(mean.to_numpy())


def test_p_values_by_scipy(leace):
    exact = leace.exact["carry", "random"].mean(axis=0) - leace.exact["carry", "feature"][0]
    found = stats.permutation_test(
        (exact, np.zeros_like(exact)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        n_resamples=9999,
        vectorized=True,
    )
    assert leace.table.set_index(["feature", "edit"]).loc[("carry", "random"), "p_value"] == pytest.approx(
        found.pvalue, abs=3e-4
    )


def test_headline_repr_plot_and_files(leace, tmp_path):
    exact = leace.table.set_index(["feature", "edit"])["exact_match"]["carry"]
    assert f"carry: exact match {exact['none']:.3f} -> {exact['feature']:.3f} (controls 0." in leace.headline()
    assert "(controls " in leace.headline()
    assert "matched_variance" in repr(leace)
    assert len(leace.plot().axes) == 3
    assert eh.tasks.Addition(5).name in repr(leace)
    leace.save(tmp_path / "ablation.csv")
    assert len(pd.read_csv(tmp_path / "ablation.csv")) == 18


def test_a_plateau_is_said_in_loss(run, series):
    found = quick(run.series[STEPS[0]], TASK, series, features="carry", kinds=("random",))
    if found.table.loc[0, "exact_match"] < 0.05:
        assert "carry: loss 0." in found.headline()
    assert found.about["model"].endswith(f"step {STEPS[0]}")


# ---- controls ----


@pytest.mark.parametrize("how", ["projection", "mean", "hyperplane"])
def test_controls_have_the_rank_and_leave_the_feature_alone(how, solved, probes):
    found = quick(solved, TASK, probes, how=how, features="carry", kinds=("random", "matched_variance"))
    controls = found.controls.set_index("edit")
    assert (controls["rank"] == 1).all()
    assert (controls.loc["matched_variance", "overlap"] < 1e-9).all()
    assert (controls.loc["random", "overlap"] < 0.3).all()


@pytest.mark.parametrize("how", ["projection", "mean", "hyperplane"])
def test_matched_controls_remove_as_much_as_the_feature_or_as_can_be_had(how):
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.standard_normal((400, 8)) * np.array([9.0, 3, 2, 1, 1, 1, 0.5, 0.1]) + 1)
    at = Reference(x, torch.zeros(400, 1), np.arange(400), Moments.of(x))
    about = x.numpy() - (0 if how == "projection" else x.numpy().mean(axis=0))
    for direction in range(8):
        weights = np.eye(8)[direction : direction + 1]
        site = Site(Probe("any", "binary", 0, 0, weights, -weights.sum(axis=1)), 1.0, True)
        own = probe_removal(how, site.probe.weights, site.probe.intercepts, at.moments)
        drawn = _drawn("matched_variance", how, site, at, own, 4, np.random.default_rng(1))
        assert (drawn.write[:, direction].abs() < 1e-9).all()
        wanted = float(own.mean_square(at.moments)[0])
        possible = np.linalg.eigvalsh(np.delete(np.delete(about.T @ about, direction, 0), direction, 1) / len(x))
        expected = np.clip(wanted, possible[0], possible[-1])
        np.testing.assert_allclose(drawn.mean_square(at.moments), expected, rtol=1e-3 if expected == wanted else 0.1)


def test_other_features_stand_at_the_same_token(solved, probes):
    """The operands' bit r + 1 is read where the carry out of column r is; the last carry stands one token on."""
    found = quick(solved, TASK, probes, features="carry", kinds=("other_features",))
    assert found.controls["same_position"].tolist() == pytest.approx([0.8, 0.8])
    batch, carry, other = sorted_batch(TASK), TASK.feature("carry"), TASK.feature("second_operand")
    values = carry.read(batch.tokens)
    edits = []
    for layer, place, _ in changes("projection", solved, TASK, carry, probes):
        probe = probes.weights[other.name, min(place + 1, 4), layer]
        edits.append((layer, values, place, change_by("projection", probe, np.zeros((1, WIDTH)), None)))
    exact, losses, count = by_hand(solved, batch, edits)
    np.testing.assert_array_equal(found.exact["carry", "other_features"][1], exact)
    assert found.loss["carry", "other_features"][1].mean() == pytest.approx(float(losses.sum() / count), abs=1e-5)


@pytest.mark.parametrize("n_components", [1, 3])
def test_shuffled_probes_are_those_of_scikit_learn(n_components):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((200, 6)) * np.array([1, 1, 1, 3, 0.2, 10]) + 1
    labels = generator.integers(2, size=(2, 200, n_components)).astype(float)
    site = Site(Probe("any", "multilabel", 0, 0, np.zeros((n_components, 6)), np.zeros(n_components)), 0.5, True)
    weights, intercepts = _fitted(site, torch.from_numpy(x).float(), torch.from_numpy(labels))
    for draw in range(2):
        for component in range(n_components):
            expected = LogisticRegression(C=0.5, tol=1e-10).fit(x, labels[draw, :, component])
            np.testing.assert_allclose(weights[draw, component], expected.coef_[0], atol=2e-3)
            np.testing.assert_allclose(intercepts[draw, component], expected.intercept_[0], atol=2e-3)


def test_the_same_seed_gives_the_same_and_kinds_do_not_disturb_each_other(solved, probes):
    both = quick(solved, TASK, probes, features="carry", kinds=("random", "shuffled_labels"))
    alone = quick(solved, TASK, probes, features="carry", kinds=("shuffled_labels",))
    np.testing.assert_array_equal(both.loss["carry", "shuffled_labels"], alone.loss["carry", "shuffled_labels"])
    other = quick(solved, TASK, probes, features="carry", kinds=("shuffled_labels",), seed=1)
    assert not np.array_equal(other.loss["carry", "shuffled_labels"], alone.loss["carry", "shuffled_labels"])
    small = quick(solved, TASK, probes, features="carry", kinds=("shuffled_labels",), batch_size=40)
    np.testing.assert_allclose(
        small.loss["carry", "shuffled_labels"], alone.loss["carry", "shuffled_labels"], atol=1e-5
    )


def test_removed_norm_and_variance_by_brute_force(solved, probes):
    found = quick(solved, TASK, probes, features="carry", kinds=())
    feature, batch = TASK.feature("carry"), sorted_batch(TASK)
    values = feature.read(batch.tokens)
    resid = eh.hooked(solved).residual(batch.tokens[:, :-1], [0, 1]).double().numpy()
    ratios = []
    for layer, place, change in changes("projection", solved, TASK, feature, probes):
        for row, position in enumerate(values.positions[:, place]):
            x = resid[layer][row, position]
            ratios.append(np.linalg.norm(x - change(x, row)) / np.linalg.norm(x))
    assert found.table.loc[1, "removed_norm"] == pytest.approx(np.mean(ratios), rel=1e-5)


def test_refit_of_each_kind():
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.standard_normal((500, 5))).float()
    continuous = x[:, :1].double().numpy() * 2 + 1
    found = refit("continuous", x[:300], continuous[:300], x[300:], continuous[300:])
    assert found.loss < 1e-3
    assert found.prior_loss == pytest.approx(np.mean((continuous[300:] - continuous[:225].mean()) ** 2), rel=1e-5)
    binary = (continuous > 1.5).astype(float)
    found = refit("binary", x[:300], binary[:300], x[300:], binary[300:])
    assert found.accuracy > 0.95
    assert found.prior_accuracy == pytest.approx(1 - binary[300:].mean())
    assert refit("binary", x[:300], np.zeros((300, 1)), x[300:], binary[300:]) is None
    assert refit("binary", x[:0], binary[:0], x, binary) is None


# ---- series, transplants ----


def test_along_a_series(run, series):
    options = {"n": N, "n_reference": N_REFERENCE, "controls": 2, "how": "leace", "features": "carry"}
    found = eh.ablation_series(run.series, TASK, series, **options)
    assert list(found.by_step) == list(STEPS)
    assert found.table.columns[0] == "step"
    for step in STEPS:
        alone = quick(run.series[step], TASK, series, 2, "leace", features="carry")
        rows = found.table[found.table["step"] == step].drop(columns=["step", "known_issue"]).reset_index(drop=True)
        pd.testing.assert_frame_equal(rows, alone.table)
    assert "checkpoint(s)" in found.headline()
    assert len(found.plot().axes) == 2
    one = eh.ablation_series(run.series, TASK, series, steps=[STEPS[0]], **options)
    assert list(one.by_step) == [STEPS[0]]
    with pytest.raises(errors.ArgumentError, match="step 7 was not probed"):
        eh.ablation_series(run.series, TASK, series, steps=[7], **options)
    with pytest.raises(errors.ArgumentError, match="probe_series"):
        eh.ablation_series(run.series, TASK, series.by_step[STEPS[0]], **options)


def test_a_transplant_equals_a_plain_pass_with_hooks(run, series):
    pre, post = (run.series[step] for step in STEPS)
    options = {"features": "carry", "n": N, "n_reference": N_REFERENCE}
    found = eh.transplant_features(pre, post, TASK, series, 2, **options)
    early, late = pre.load(), post.load()
    feature, batch = TASK.feature("carry"), sorted_batch(TASK)
    values = feature.read(batch.tokens)
    of_post = eh.hooked(late).residual(batch.tokens[:, :-1], [0, 1]).double().numpy()
    edits = []
    for layer, place, _ in changes("projection", late, TASK, feature, series.by_step[STEPS[-1]]):
        probe = series.by_step[STEPS[-1]].weights["carry", place, layer]
        projector = np.linalg.pinv(probe.weights) @ probe.weights

        def change(x, row, layer=layer, place=place, projector=projector):
            return x - projector @ (x - of_post[layer][row, values.positions[row, place]])

        edits.append((layer, values, place, change))
    table = found.table.set_index("edit")
    for edit, model, edits_of in (("pre", early, []), ("post", late, []), ("transplanted", early, edits)):
        exact, losses, count = by_hand(model, batch, edits_of)
        np.testing.assert_array_equal(found.exact["carry", edit][0], exact)
        assert table.loc[edit, "loss_nats"] == pytest.approx(float(losses.sum() / count), abs=1e-5)
    assert table.index.tolist() == ["pre", "post", "transplanted", "random", "matched_change"]
    changed = found.controls.set_index("edit")["changed_norm"]
    wanted = table.loc["transplanted", "changed_norm"]
    assert changed["matched_change"].tolist() == pytest.approx([wanted] * 2, rel=1e-3)
    assert "carry: loss" in found.headline()
    assert len(found.plot().axes) == 1


def test_a_whole_residual_stream_transplanted_gives_the_later_models_answers(solved):
    """Every direction after the last block, at every token that is read: what differs lies before it."""
    pre = eh.SmallModel(solved.config, seed=9).eval()
    pre.ln_final.load_state_dict(solved.ln_final.state_dict())
    pre.unembed.load_state_dict(solved.unembed.state_dict())
    at = 2 * TASK.bits + 1 + np.arange(TASK.bits + 2)
    everything = eh.Feature("everything", "multilabel", lambda tokens: np.zeros((len(tokens), len(at), WIDTH)), at)
    weights = {
        ("everything", place, 1): Probe("everything", "multilabel", place, 1, np.eye(WIDTH), np.zeros(WIDTH))
        for place in range(len(at))
    }
    rows = [{"feature": "everything", "place": place, "layer": 1, "is_best": True} for place in range(len(at))]
    probes = Probes(pd.DataFrame(rows), weights)
    found = eh.transplant_features(pre, solved, TASK, probes, 2, features=everything, n=N, n_reference=N_REFERENCE)
    np.testing.assert_allclose(found.loss["everything", "transplanted"], found.loss["everything", "post"], atol=1e-5)
    np.testing.assert_allclose(found.loss["everything", "random"][:1], found.loss["everything", "post"], atol=1e-5)
    assert found.table.set_index("edit").loc["pre", "loss_nats"] > 1
    narrow = eh.SmallModel(eh.SmallModelConfig.transformer_pp(2, 16).for_task(TASK))
    with pytest.raises(errors.ModelMismatchError, match="different shapes"):
        eh.transplant_features(narrow, solved, TASK, probes, features=everything, n=N, n_reference=N_REFERENCE)


# ---- other models and tasks ----


@pytest.mark.parametrize("wrap", [lambda model: model, bridge], ids=["plain", "bridge"])
def test_prompts_and_a_hugging_face_model(wrap):
    """Half of the prompts are measured on, each at its own answer, the other half is the reference."""
    model = tiny("GPTNeoX")
    tokens = torch.randint(50, (80, 7), generator=torch.Generator().manual_seed(0))
    task = eh.tasks.from_tokens(tokens, tokens[:, 0])
    feature = eh.Feature("first token is even", "binary", (tokens[:, :1] % 2 == 0).float(), [3])
    direction = np.random.default_rng(0).standard_normal((1, 32))
    probe = Probe(feature.name, "binary", 0, 0, direction, np.zeros(1))
    probes = Probes(
        pd.DataFrame([{"feature": feature.name, "place": 0, "layer": 0, "is_best": True}]),
        {(feature.name, 0, 0): probe},
    )
    found = eh.ablate_features(wrap(tiny("GPTNeoX")), task, probes, 2, features=feature)
    assert found.about["n"] == found.about["n_reference"] == 40
    assert found.about["shortcut"] == "layers"
    projector = np.linalg.pinv(direction) @ direction

    def edit(resid):
        resid = resid.clone()
        resid[:, 3] -= resid[:, 3] @ torch.from_numpy(projector).float()
        return resid

    with torch.no_grad(), editing_output(model.gpt_neox.layers[0], edit):
        log_p = model(tokens).logits[:, -1].log_softmax(-1)[torch.arange(80), tokens[:, 0]]
    loss = found.loss[feature.name, "feature"][0]
    for value in loss:
        assert (-log_p - value).abs().min() < 1e-4
    with pytest.raises(errors.ArgumentError, match=r"eh\.Feature"):
        eh.ablate_features(model, task, probes, 2)


# ---- bad input ----


def probes_of_width(width, feature="carry", layer=0, places=5, components=1):
    weights = {
        (feature, place, layer): Probe(
            feature, "binary", place, layer, np.ones((components, width)), np.zeros(components)
        )
        for place in range(places)
    }
    rows = [{"feature": feature, "place": place, "layer": layer, "is_best": True} for place in range(places)]
    return Probes(pd.DataFrame(rows), weights)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"how": "zero"}, errors.ArgumentError, "how='zero': use one of 'projection'"),
        ({"layers": "all"}, errors.ArgumentError, "layers='all'"),
        ({"kinds": ("noise",)}, errors.ArgumentError, "kinds='noise'"),
        ({"controls": -1}, errors.ArgumentError, "controls is -1"),
        ({"n": 0}, errors.ArgumentError, "n is 0"),
        ({"n_reference": 10}, errors.ArgumentError, "n_reference is 10"),
        ({"features": "queue"}, errors.ArgumentError, "has no feature 'queue'"),
        ({"features": "second_operand"}, errors.ArgumentError, "no probe of a feature 'second_operand'"),
        ({"probes": probes_of_width(16)}, errors.ModelMismatchError, "width 16 and this model's is 32"),
        ({"probes": probes_of_width(32, layer=2)}, errors.ModelMismatchError, "layer 2"),
        ({"probes": probes_of_width(32, "queue")}, errors.ArgumentError, "has no feature 'queue'"),
        ({"probes": probes_of_width(32, places=6)}, errors.ArgumentError, "has 5 places in this task"),
        ({"probes": probes_of_width(32, components=2)}, errors.ArgumentError, "has 1 components in this task"),
        ({"probes": 3}, errors.ArgumentError, "probes is a int"),
        ({"task": eh.tasks.Addition(4)}, errors.ArgumentError, "has 4 places in this task"),
        ({"task": ECHO}, errors.ArgumentError, "has no feature 'carry'"),
    ],
)
def test_bad_arguments(change, error, message, solved):
    arguments = {"probes": probes_of_width(32), "task": TASK, "controls": 2, "how": "mean", **change}
    with pytest.raises(error, match=message):
        quick(solved, **arguments)


def test_features_that_cannot_be_taken_out(solved):
    probes = probes_of_width(32, "mine", places=2)
    two_at_one = eh.Feature("mine", "binary", lambda tokens: np.ones((len(tokens), 2)), [11, 11])
    with pytest.raises(errors.ArgumentError, match="two places at one token"):
        quick(solved, TASK, probes, features=two_at_one)
    beyond = eh.Feature("mine", "binary", lambda tokens: np.ones((len(tokens), 2)), [18, -1])
    with pytest.raises(errors.ArgumentError, match="none of the 60 rows"):
        quick(solved, TASK, probes, features=beyond)  # the last token is never read
    nothing = eh.Feature("mine", "binary", lambda tokens: tokens["no"], [1, 2])
    with pytest.raises(errors.ArgumentError, match="'mine' cannot be read"):
        quick(solved, TASK, probes, features=nothing)
    rare = eh.Feature(
        "mine", "binary", lambda tokens: np.ones((len(tokens), 2)), lambda tokens: rare_positions(len(tokens))
    )
    with pytest.raises(errors.ArgumentError, match="no place of it is in 20 of the 150 reference rows"):
        quick(solved, TASK, probes, features=rare)
    flat = Probes(
        probes.table,
        {key: Probe("mine", "binary", key[1], 0, np.zeros((1, 32)), np.ones(1)) for key in probes.weights},
    )
    whole = eh.Feature("mine", "binary", lambda tokens: np.ones((len(tokens), 2)), [11, 12])
    with pytest.raises(errors.ArgumentError, match="no direction"):
        quick(solved, TASK, flat, features=whole)


def rare_positions(n):
    positions = np.full((n, 2), -1)
    positions[:10] = [11, 12]
    return positions


def test_a_model_whose_residual_stream_cannot_be_edited(solved):
    dead = eh.SmallModel(solved.config).eval()
    with torch.no_grad():
        dead.unembed.weight.zero_()
    with pytest.raises(errors.InterventionHasNoEffect):
        quick(dead, TASK, probes_of_width(32), features="carry")


def at_position_2(layer):
    """A feature that only later tokens could make use of, and a probe of it."""
    feature = eh.Feature("too_early", "binary", lambda tokens: tokens[:, [2]], [2])
    row = {"feature": "too_early", "place": 0, "layer": layer, "is_best": True, "validation_loss": 0.5, "penalty": 1.0}
    probe = Probe("too_early", "binary", 0, layer, np.eye(1, WIDTH), np.zeros(1))
    return feature, Probes(pd.DataFrame([row]), {("too_early", 0, layer): probe})


def test_a_feature_after_whose_places_nothing_is_read_is_refused(solved):
    feature, below = at_position_2(0)  # the last block still reads position 2
    read = quick(solved, TASK, below, features=feature, kinds=["random"])
    assert read.table["loss_nats"].nunique() == 3
    assert read.about["unread"] == []
    feature, last = at_position_2(1)
    with pytest.raises(errors.InterventionHasNoEffect, match=r"after layer 1 can change .* nothing that is read"):
        quick(solved, TASK, last, features=feature)


def test_of_several_features_those_that_nothing_reads_are_named(solved, probes):
    feature, last = at_position_2(1)
    both = Probes(pd.concat([probes.table, last.table], ignore_index=True), {**probes.weights, **last.weights})
    found = quick(solved, TASK, both, features=["carry", feature], kinds=["random"])
    assert found.about["unread"] == ["too_early"]
    assert "no answer reads what is done to too_early" in found.headline()
    assert found.table.groupby("feature")["loss_nats"].nunique().to_dict() == {"carry": 3, "too_early": 1}


# ---- statistics ----


@pytest.mark.parametrize("n", [1, 5, 12])
def test_sign_flips_are_those_of_scipy(n):
    differences = np.random.default_rng(n).integers(-3, 5, size=(3, n)).astype(float)
    expected = (
        [
            stats.permutation_test(
                (row, np.zeros(n)), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
            ).pvalue
            for row in differences
        ]
        if n > 1
        else [1.0] * 3
    )
    np.testing.assert_allclose(sign_flip_p(differences, seed=0), expected)


def test_sign_flips_by_draws_and_of_nothing():
    differences = np.random.default_rng(0).standard_normal(60) + 0.3
    found = float(sign_flip_p(differences, seed=0))
    assert found == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=0.01)
    assert float(sign_flip_p(np.full(60, 1.0), seed=0)) == pytest.approx(1 / 10_001)
    assert float(sign_flip_p(np.zeros(60), seed=0)) == 1
    assert np.isnan(sign_flip_p(np.zeros((2, 0)), seed=0)).all()
