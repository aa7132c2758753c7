"""Probes of models: their data, baselines, choices and folders, against scikit-learn and brute force."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import balanced_accuracy_score, log_loss, mean_squared_error, roc_auc_score
from tiny_models import HAS_HOOKED_TRANSFORMER, VOCABULARY, bridge, hooked_transformer, tiny

import emergent_heads as eh
from emergent_heads.analysis import probes as probes_module
from emergent_heads.analysis.baselines import BAG_TOKENS, _bag, _last_tokens, token_baselines
from emergent_heads.analysis.linear_readouts import Activations
from emergent_heads.analysis.probe_data import choose_features, draw_data
from emergent_heads.analysis.probe_fits import Fitting
from emergent_heads.errors import (
    ArgumentError,
    CheckpointError,
    NoCheckpointsError,
    NotFiniteError,
    RunFolderError,
    UnknownStepError,
)
from emergent_heads.models.hooked import hooked
from emergent_heads.models.untrained import untrained

PENALTIES = (0.01, 1.0)
QUICK = {"n_train": 300, "n_test": 100, "penalties": PENALTIES, "n_untrained": 1, "progress": False}
TASK = eh.tasks.Addition(6)


def small(task=TASK, seed=0, n_layers=2) -> eh.SmallModel:
    config = eh.SmallModelConfig.transformer_pp(n_layers=n_layers, d_model=16).for_task(task)
    return eh.SmallModel(config, seed=seed).eval()


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def probes(model):
    return eh.fit_probes(model, TASK, **QUICK)


@pytest.fixture(scope="module")
def data(model):
    """What `probes` was fitted to."""
    return data_of(model)


def data_of(model, task=TASK, features=None, n_train=300, n_test=100, seed=0):
    return draw_data(task, choose_features(task, features), hooked(model), n_train=n_train, n_test=n_test, seed=seed)


def site_of(data, feature, place):
    return next((site, target) for site in data.sites for target in site.targets if target.key == (feature, place))


def residual(model, data, site, layer):
    """The residual stream at a site, from a plain pass that keeps everything."""
    everything = hooked(model).residual(data.tokens, [layer])[0].numpy()
    return everything[site.rows, site.positions]


# ---- data ----


def test_no_sequence_is_in_two_parts(data):
    parts = np.split(data.tokens.numpy(), np.cumsum(data.sizes)[:2])
    train, validation, test = ({row.tobytes() for row in part} for part in parts)
    assert data.sizes == (300, 100, 100)
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert data.n_distinct == (len(train), len(validation), len(test))


@settings(deadline=None, max_examples=15)
@given(n_train=st.integers(40, 300), n_test=st.integers(10, 300), seed=st.integers(0, 99))
def test_parts_are_apart_at_any_size(n_train, n_test, seed):
    drawn = data_of(small(), features="carry", n_train=n_train, n_test=n_test, seed=seed)
    owners: dict[bytes, set[int]] = {}
    for row, part in zip(drawn.tokens.numpy(), np.repeat([0, 1, 2], drawn.sizes), strict=True):
        owners.setdefault(row.tobytes(), set()).add(part)
    assert len(drawn.tokens) == n_train + 2 * n_test
    assert {len(parts) for parts in owners.values()} == {1}


def test_rows_share_no_problem_with_training(data):
    trained_on = {row.tobytes() for row in TASK.batch(4000, seed=1).tokens.numpy()[:, : data.tokens.shape[1]]}
    assert not trained_on & {row.tobytes() for row in data.tokens.numpy()}


def test_labels_stand_where_the_feature_says(data):
    for feature in TASK.features:
        whole = np.array([TASK.solve(TASK.text(row)[:13])[0].numpy() for row in data.tokens[:20]])
        values = feature.read(whole)
        for place in range(values.positions.shape[1]):
            site, target = site_of(data, feature.name, place)
            np.testing.assert_array_equal(site.positions[:20], values.positions[:, place])
            np.testing.assert_array_equal(target.labels[:, :20].numpy(), values.labels[:, place].T)


def test_what_is_read_at_the_same_tokens_shares_a_site(data):
    keys = [{target.key for target in site.targets} for site in data.sites]
    assert {("carry", 0), ("first_operand", 1), ("second_operand", 1)} in keys


def test_tokens_that_nobody_reads_are_cut_off(data):
    last = max(int(site.positions.max()) for site in data.sites)
    assert data.tokens.shape[1] == last + 1 < TASK.length


def test_rows_without_the_place_are_left_out(model):
    def positions(tokens):
        return np.where(tokens[:, :1] == 1, 6, -1)

    feature = eh.Feature("some", "binary", lambda tokens: tokens[:, 1:2], positions)
    (site,) = data_of(model, features=feature).sites
    rows = np.flatnonzero(data_of(model).tokens.numpy()[:, 0] == 1)
    np.testing.assert_array_equal(site.rows, rows)
    assert site.ends == ((rows < 300).sum(), (rows < 400).sum())
    table = eh.fit_probes(model, TASK, feature, **QUICK).table
    assert (table["n_train"] == site.ends[0]).all()


def test_components_and_places_that_never_vary_are_left_out(model):
    def labels(tokens):
        return np.stack([tokens[:, :3], np.ones_like(tokens[:, :3]), np.zeros_like(tokens[:, :3])], axis=-1) * [
            [1, 1, 1],
            [1, 1, 0],
            [0, 1, 0],
        ]

    feature = eh.Feature("some", "multilabel", labels, [4, 5, 6])
    found = eh.fit_probes(model, TASK, feature, layers=[0], **QUICK)
    assert found.table["place"].tolist() == [0, 1]
    assert found.table["n_components"].tolist() == [1, 1]
    probe = found.probe("some", 0)
    assert probe.weights.shape == (3, 16)
    assert np.abs(probe.weights[0]).max() > 0
    assert not probe.weights[1:].any()
    assert probe.intercepts[1] > 5  # always 1
    assert probe.intercepts[2] < -5


# ---- probes ----


@pytest.mark.parametrize(("feature", "place", "layer"), [("carry", 1, 1), ("first_operand", 0, 0), ("carry", 3, -1)])
def test_a_probe_is_that_of_scikit_learn(model, probes, data, feature, place, layer):
    site, target = site_of(data, feature, place)
    x, labels = residual(model, data, site, layer), target.labels[0].numpy()
    row = probes.table.set_index(["feature", "place", "layer"]).loc[(feature, place, layer)]
    by_penalty = []
    for c in PENALTIES:
        peer = LogisticRegression(C=c, tol=1e-9, max_iter=5000).fit(x[site.train].astype(float), labels[site.train])
        by_penalty.append((log_loss(labels[site.validation], peer.predict_proba(x[site.validation])), c, peer))
    loss, c, peer = min(by_penalty, key=lambda each: each[0])
    p = peer.predict_proba(x[site.test])[:, 1]
    assert row["penalty"] == c
    assert row["validation_loss"] == pytest.approx(loss, abs=1e-3)
    assert row["loss"] == pytest.approx(log_loss(labels[site.test], p), abs=1e-3)
    assert row["accuracy"] == pytest.approx(np.mean((p > 0.5) == labels[site.test]), abs=0.011)
    assert row["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels[site.test], p > 0.5), abs=0.02)
    assert row["auc"] == pytest.approx(roc_auc_score(labels[site.test], p), abs=0.01)
    assert row["base_rate"] == pytest.approx(labels[site.train].mean())
    probe = probes.probe(feature, place, layer)
    assert np.linalg.norm(probe.weights - peer.coef_) <= 1e-2 * np.linalg.norm(peer.coef_)
    with np.errstate(over="ignore"):
        read = 1 / (1 + np.exp(-(x[site.test] @ probe.weights[0] + probe.intercepts[0])))
    assert log_loss(labels[site.test], read) == pytest.approx(row["loss"], abs=1e-4)


def test_a_probe_of_a_continuous_feature_is_that_of_scikit_learn(model):
    feature = eh.Feature("sum", "continuous", lambda tokens: tokens[:, :4].sum(1)[:, None] / 2, [13])
    found = eh.fit_probes(model, TASK, feature, **QUICK)
    data = data_of(model, features=feature)
    (site,), (target,) = data.sites, data.sites[0].targets
    labels = target.labels[0].numpy()
    for row in found.table.itertuples():
        x = residual(model, data, site, row.layer)
        peers = [Ridge(alpha=1 / c).fit(x[site.train].astype(float), labels[site.train]) for c in PENALTIES]
        peer = min(
            peers, key=lambda each: np.square(each.predict(x[site.validation]) - labels[site.validation]).mean()
        )
        assert row.loss == pytest.approx(mean_squared_error(labels[site.test], peer.predict(x[site.test])), rel=1e-3)
        assert row.r2 == pytest.approx(peer.score(x[site.test], labels[site.test]), abs=1e-3)
        assert np.isnan(row.auc)
    test = labels[site.test]
    assert found.table["prior_loss"].iloc[0] == pytest.approx(np.square(test - labels[site.train].mean()).mean())


def test_a_multilabel_probe_is_one_of_scikit_learn_for_each_component_that_varies():
    """The queue of a search stands at other positions from row to row."""
    task = eh.tasks.BreadthFirstSearch(6)
    model = small(task)
    found = eh.fit_probes(model, task, "queue", layers=[1], **QUICK)
    data = data_of(model, task, "queue")
    assert found.table["n_components"].max() == 6
    for row in found.table.itertuples():
        site, target = site_of(data, "queue", row.place)
        assert len(set(site.positions)) > 1
        x = residual(model, data, site, 1).astype(float)
        losses = []
        for label in target.labels.numpy():
            peers = [
                LogisticRegression(C=c, tol=1e-9, max_iter=5000).fit(x[site.train], label[site.train])
                for c in PENALTIES
            ]
            losses.append(
                [
                    [log_loss(label[part], peer.predict_proba(x[part]), labels=[0, 1]) for peer in peers]
                    for part in (site.validation, site.test)
                ]
            )
        validation, test = np.mean(losses, axis=0)
        assert row.n_components == len(losses)
        assert row.penalty == PENALTIES[validation.argmin()]
        assert row.validation_loss == pytest.approx(validation.min(), abs=1e-3)
        assert row.loss == pytest.approx(test[validation.argmin()], abs=1e-3)


def test_test_rows_decide_nothing():
    """Prompts whose labels differ in the test rows only give the same probes, penalties and best layers."""
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(200, 6))
    task = eh.tasks.from_tokens(tokens, tokens[:, 0])
    labels = (tokens[:, :1] + tokens[:, 1:2] > VOCABULARY).astype(float)
    model = small(eh.tasks.BreadthFirstSearch(8), seed=1)
    model = eh.SmallModel(replace(model.config, vocabulary_size=VOCABULARY), seed=1).eval()
    arguments = {**QUICK, "n_train": 140, "n_test": 30, "n_untrained": 0}
    first = eh.fit_probes(model, task, eh.Feature("a", "binary", labels, [4]), **arguments)
    chosen = draw_data(
        task,
        [eh.Feature("row", "continuous", np.arange(200.0)[:, None], [4])],
        hooked(model),
        n_train=140,
        n_test=30,
        seed=0,
    )
    (site,) = chosen.sites
    changed = labels.copy()
    rows = site.targets[0].labels[0, site.test].numpy().astype(int)
    changed[rows] = 1 - changed[rows]
    second = eh.fit_probes(model, task, eh.Feature("a", "binary", changed, [4]), **arguments)
    same = ["layer", "penalty", "validation_loss", "is_best", "base_rate"]
    pd.testing.assert_frame_equal(first.table[same], second.table[same])
    assert (first.table["loss"] != second.table["loss"]).all()
    for key, probe in first.weights.items():
        np.testing.assert_array_equal(probe.weights, second.weights[key].weights)


def test_the_best_layer_is_chosen_on_validation_rows(probes):
    for _, rows in probes.table.groupby(["feature", "place"]):
        assert rows["layer"].tolist() == [-1, 0, 1]
        assert rows["is_best"].sum() == 1
        assert rows.loc[rows["is_best"], "validation_loss"].item() == rows["validation_loss"].min()
    best = probes.best.set_index(["feature", "place"]).loc[("carry", 2), "layer"]
    assert probes.probe("carry", 2).layer == best


def test_activations_that_do_not_fit_into_memory_take_more_passes_and_change_nothing(model, probes, monkeypatch):
    passes = []
    of_engine = type(hooked(model)).residual
    monkeypatch.setattr(
        type(hooked(model)), "residual", lambda self, tokens, *rest: passes.append(1) or of_engine(self, tokens, *rest)
    )
    tight = eh.fit_probes(model, TASK, **{**QUICK, "memory_gb": 4e-5})  # one site of one layer is 3.2e-5
    n_tight = len(passes)
    passes.clear()
    eh.fit_probes(model, TASK, **QUICK)
    assert n_tight == 21 * len(passes)
    pd.testing.assert_frame_equal(tight.table, probes.table)


def test_the_same_seed_gives_the_same_probes(model, probes):
    pd.testing.assert_frame_equal(eh.fit_probes(model, TASK, **QUICK).table, probes.table)
    other = eh.fit_probes(model, TASK, **QUICK, seed=1)
    assert (other.table["loss"] != probes.table["loss"]).any()


def test_a_trained_feature_is_found_and_noise_is_not(model):
    """A label written into the residual stream is read; one that nothing knows is not."""
    noise = eh.Feature("noise", "binary", lambda tokens: _coins(tokens), [8])
    token = eh.Feature("token", "binary", lambda tokens: tokens[:, 8:9] == 1, [8])
    found = eh.fit_probes(model, TASK, [noise, token], n_train=2000, n_test=300, n_untrained=1, progress=False).best
    noise_row, token_row = found.iloc[0], found.iloc[1]
    assert token_row["loss"] < 0.01
    assert token_row["share_removed"] < 0.9  # the token says it as well: nothing was learned
    assert token_row["last_token_loss"] < 0.01
    assert noise_row["loss"] > 0.68
    assert noise_row["share_removed"] < 0.02


def _coins(tokens):
    sums = (tokens * 7 ** np.arange(tokens.shape[1])).sum(1)
    return ((sums * 2654435761 >> 13) % 2)[:, None]


# ---- baselines ----


def test_the_prior_is_the_frequency_of_the_training_rows(probes, data):
    for row in probes.best.itertuples():
        site, target = site_of(data, row.feature, row.place)
        labels = target.labels[0].numpy()
        wanted = log_loss(labels[site.test], np.full(len(labels[site.test]), labels[site.train].mean()), labels=[0, 1])
        assert row.prior_loss == pytest.approx(wanted, abs=1e-6)


def test_the_last_token_is_a_table_of_frequencies(data):
    losses = token_baselines(data, PENALTIES)
    for feature, place in [("carry", 1), ("carry", 3), ("first_operand", 2)]:
        site, target = site_of(data, feature, place)
        labels, last = target.labels[0].numpy(), data.tokens.numpy()[site.rows, site.positions]
        assert (last == _last_tokens(data, site)).all()
        prior = labels[site.train].mean()
        by_token: dict[int, Counter] = {}
        for token, label in zip(last[site.train], labels[site.train], strict=True):
            by_token.setdefault(int(token), Counter())[int(label)] += 1
        found = []
        for made_up in (1, 10, 100):
            p = [
                (by_token[token][1] + made_up * prior) / (by_token[token].total() + made_up)
                for token in map(int, last)
            ]
            found.append([log_loss(labels[part], np.array(p)[part]) for part in (site.validation, site.test)])
        assert losses[feature, place]["last_token_loss"] == pytest.approx(min(found)[1], abs=1e-6)


def test_a_token_never_seen_gets_the_prior():
    tokens = np.concatenate([np.zeros((60, 3), int), np.ones((60, 3), int), [[5, 5, 5], [6, 6, 6]]])
    tokens[:, 0] = np.arange(122) % 7  # so that prompts differ
    tokens[:, 1] = np.arange(122) // 7
    task = eh.tasks.from_tokens(tokens, tokens[:, 0])
    labels = (np.arange(122) % 2)[:, None]
    model = eh.SmallModel(eh.SmallModelConfig(1, 8, 2, vocabulary_size=20, context=3)).eval()
    found = eh.fit_probes(model, task, eh.Feature("a", "binary", labels, [2]), **{**QUICK, "n_untrained": 0})
    assert found.table["last_token_loss"].iloc[0] == pytest.approx(np.log(2), abs=0.05)


def test_the_bag_counts_what_stands_before(data):
    for feature, place in [("carry", 2), ("first_operand", 0)]:
        site, _ = site_of(data, feature, place)
        bag = _bag(data, site, _last_tokens(data, site))
        for number in (0, 7, len(site.rows) - 1):
            row = data.tokens.numpy()[site.rows[number], : site.positions[number] + 1].tolist()
            prompt, answer = row[:14], row[14:]  # `=` stands at 13
            wanted = [prompt.count(token) for token in range(4)]
            wanted += [answer.count(token) for token in (0, 1)] if answer else []
            wanted += [row[-1] == token for token in ((0, 1) if answer else (3,))]
            assert bag[number].tolist() == wanted


def test_the_bag_is_a_probe_on_these_counts(probes, data):
    site, target = site_of(data, "carry", 2)
    bag, labels = _bag(data, site, _last_tokens(data, site)), target.labels[0].numpy()
    found = []
    for c in PENALTIES:
        peer = LogisticRegression(C=c, tol=1e-9, max_iter=5000).fit(bag[site.train], labels[site.train])
        found.append([log_loss(labels[part], peer.predict_proba(bag[part])) for part in (site.validation, site.test)])
    row = probes.table.query("feature == 'carry' and place == 2").iloc[0]
    assert row["bag_loss"] == pytest.approx(min(found)[1], abs=1e-3)


def test_a_bag_of_a_large_vocabulary_keeps_the_frequent_tokens():
    random = np.random.default_rng(0)
    tokens = random.integers(1000, size=(300, 8))
    tokens[:, 3] = 7
    task = eh.tasks.from_tokens(tokens, tokens[:, 0])
    model = eh.SmallModel(eh.SmallModelConfig(1, 8, 2, vocabulary_size=1000, context=8)).eval()
    feature = eh.Feature("a", "binary", (tokens[:, :1] > 500).astype(int), [7])
    data = data_of(model, task, feature, n_train=200, n_test=50)
    (site,) = data.sites
    bag = _bag(data, site, _last_tokens(data, site))
    assert BAG_TOKENS <= bag.shape[1] <= 2 * BAG_TOKENS
    assert (bag >= 1).all(axis=0).any()  # the token that stands in every prompt is among those counted


def test_the_strongest_baseline_is_the_lowest_but_not_the_shuffled_one(probes):
    table = probes.table
    columns = ["prior_loss", "untrained_loss", "last_token_loss", "bag_loss"]
    np.testing.assert_array_equal(table["baseline_loss"], table[columns].min(axis=1))
    np.testing.assert_allclose(table["share_removed"], 1 - table["loss"] / table["baseline_loss"])
    assert (table["shuffled_loss"] > 0.9 * table["prior_loss"]).all()  # nothing can be read from them


def test_shuffled_labels_are_fitted_at_the_penalty_of_the_probe(model, probes, data):
    site, target = site_of(data, "carry", 1)
    row = probes.table.query("feature == 'carry' and place == 1 and layer == 1").iloc[0]
    probe, control = (held["carry", 1, 1] for held in (probes.weights, probes.shuffled))
    x = torch.from_numpy(residual(model, data, site, 1))
    real = target.labels[:, site.train]
    assert not np.allclose(probe.weights, control.weights)
    # Its intercept alone gives back how many of the labels are 1, as a probe's gradient is zero there.
    read = (x[site.train] @ torch.from_numpy(control.weights[0]) + float(control.intercepts[0])).sigmoid()
    assert float(read.mean()) == pytest.approx(float(real.mean()), abs=1e-4)
    norms = [float(each.weights.norm()) for each in Activations(x[site.train]).logistic(real, [row["penalty"]])]
    assert np.linalg.norm(probe.weights) == pytest.approx(norms[0], rel=1e-2)


def test_untrained_models_count_at_their_own_best_layer(model, probes, data):
    fitting = Fitting((-1, 0, 1), PENALTIES, 0, 1.0)
    fits = fitting.fit(untrained(hooked(model), 0), data, shuffled=False)
    of_place = [fit for fit in fits if fit.target.key == ("carry", 2)]
    wanted = min(of_place, key=lambda fit: fit.validation_loss).scores.loss
    assert probes.table.query("feature == 'carry' and place == 2")["untrained_loss"].iloc[0] == wanted
    both = eh.fit_probes(model, TASK, "carry", **{**QUICK, "n_untrained": 2})
    second = fitting.fit(untrained(hooked(model), 1), data, shuffled=False)
    other = min((fit for fit in second if fit.target.key == ("carry", 2)), key=lambda fit: fit.validation_loss)
    assert both.table.query("place == 2")["untrained_loss"].iloc[0] == pytest.approx((wanted + other.scores.loss) / 2)


def test_without_untrained_models_their_loss_is_missing(model):
    table = eh.fit_probes(model, TASK, "carry", **{**QUICK, "n_untrained": 0}).table
    assert table["untrained_loss"].isna().all()
    assert table["baseline_loss"].notna().all()


# ---- kinds of models ----


def kinds(folder):
    plain = tiny("Llama")
    yield "plain", plain
    yield "bridge", bridge(tiny("Llama"))
    if HAS_HOOKED_TRANSFORMER:
        yield "HookedTransformer", hooked_transformer(tiny("Llama"), folder)


def test_language_models_give_the_same_probes_whatever_their_kind(tmp_path):
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(260, 8))
    task = eh.tasks.from_tokens(tokens, tokens[:, 0])
    features = [
        eh.Feature("is large", "binary", tokens[:, 2:5] > 25, [2, 3, 4]),
        eh.Feature("before", "continuous", lambda rows: rows[:, 3:6] / 10, [4, 5, 6]),
        eh.Feature("bits", "multilabel", (tokens[:, 3:5, None] >> np.arange(3)) % 2, [4, 5]),
    ]
    arguments = {**QUICK, "n_train": 200, "n_test": 30}
    tables = {name: eh.fit_probes(model, task, features, **arguments).table for name, model in kinds(tmp_path)}
    first = tables.pop("plain")
    assert set(first["layer"]) == {-1, 0, 1, 2}
    own = first.query("feature == 'is large' and layer == -1")
    assert (own["accuracy"] > 0.8).all()
    for table in tables.values():
        of_tokens = ["feature", "place", "layer", "kind", "base_rate", "prior_loss", "last_token_loss", "bag_loss"]
        pd.testing.assert_frame_equal(table[of_tokens], first[of_tokens])
        for column in ("validation_loss", "loss", "shuffled_loss"):
            np.testing.assert_allclose(table[column], first[column], rtol=1e-2, atol=1e-3)


def test_untrained_models_have_the_shape_and_other_weights(tmp_path):
    tokens = torch.randint(VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(0))
    for name, raw in [*kinds(tmp_path), ("small", small(eh.tasks.MaximumSubarray(8)))]:
        model = hooked(raw)
        ids = tokens % model.vocabulary_size
        before = torch.get_rng_state()
        first, again, other = (untrained(model, seed) for seed in (0, 0, 1))
        assert torch.equal(torch.get_rng_state(), before), name
        assert first.shape == model.shape
        layers = [-1, *range(model.n_layers)]
        resid = {each: each.residual(ids, layers) for each in (model, first, again, other)}
        assert resid[first].shape == resid[model].shape
        assert torch.equal(resid[first], resid[again]), name
        assert not torch.allclose(resid[first], resid[model]), name
        assert not torch.allclose(resid[first], resid[other]), name
        assert torch.isfinite(resid[first]).all()


def test_prompts_are_divided_and_equal_ones_stay_together(model):
    random = np.random.default_rng(0)
    tokens = random.integers(2, size=(400, 6))  # at most 64 different prompts
    task = eh.tasks.from_tokens(tokens, tokens[:, 0])
    data = data_of(model, task, eh.Feature("a", "binary", tokens[:, :1], [5]), n_train=8000, n_test=1000)
    assert sum(data.sizes) == 400
    assert data.sizes[0] == pytest.approx(320, abs=20)
    parts = np.split(data.tokens.numpy(), np.cumsum(data.sizes)[:2])
    first, second, third = ({row.tobytes() for row in part} for part in parts)
    assert not (first & second) | (first & third) | (second & third)
    np.testing.assert_array_equal(data.sites[0].targets[0].labels[0].numpy(), data.tokens[:, 0].numpy())


# ---- series ----


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = eh.SmallModelConfig.transformer_pp(n_layers=2, d_model=16)
    folder = tmp_path_factory.mktemp("runs") / "add"
    return eh.train(
        config, TASK, folder, steps=6, seed=0, tokens_per_batch=256, checkpoints=[0, 2, 4], evaluate_every=6
    )


ARGUMENTS = {**QUICK, "layers": [0, 1]}


def test_a_series_is_its_checkpoints_probed_on_the_same_rows(run):
    found = eh.probe_series(run.series, TASK, "carry", **ARGUMENTS)
    assert found.steps == (0, 2, 4, 6)
    assert found.table["step"].unique().tolist() == [0, 2, 4, 6]
    first = eh.fit_probes(run.series[0], TASK, "carry", **ARGUMENTS)
    pd.testing.assert_frame_equal(found[0].table, first.table)
    last = eh.fit_probes(run.series[6], TASK, "carry", **ARGUMENTS)
    pd.testing.assert_frame_equal(found.last.table, last.table)
    assert found.about["plateau"] == pytest.approx(TASK.plateau)
    assert found.about["floor"] == TASK.floor


def test_steps_can_be_chosen(run):
    assert eh.probe_series(run.series, TASK, "carry", **ARGUMENTS, steps=[6, 2]).steps == (2, 6)


def test_a_stopped_call_goes_on(run, tmp_path, monkeypatch):
    whole = eh.probe_series(run.series, TASK, ["carry", "first_operand"], **ARGUMENTS, path=tmp_path / "whole")
    arguments = {**ARGUMENTS, "path": tmp_path / "part"}
    fit, fitted = Fitting.fit, []

    def stopping(self, model, *args, **kwargs):
        if kwargs["shuffled"]:
            fitted.append(model)
            if len(fitted) == 3:
                raise KeyboardInterrupt
        return fit(self, model, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Fitting, "fit", stopping)
        with pytest.raises(KeyboardInterrupt):
            eh.probe_series(run.series, TASK, ["carry", "first_operand"], **arguments)
    assert eh.open_probes(tmp_path / "part").steps == (0, 2)
    fitted.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            Fitting, "fit", lambda self, model, *args, **kw: fitted.append(kw) or fit(self, model, *args, **kw)
        )
        found = eh.probe_series(run.series, TASK, ["carry", "first_operand"], **arguments)
    assert len(fitted) == 2  # the two steps that were missing, and no baselines
    assert found.steps == whole.steps
    pd.testing.assert_frame_equal(found.table, whole.table)


def test_kept_probes_are_read_as_they_were(run, tmp_path):
    kept = eh.probe_series(run.series, TASK, "carry", **ARGUMENTS, path=tmp_path)
    found = eh.open_probes(tmp_path)
    pd.testing.assert_frame_equal(found.table, kept.table)
    assert found.about["task"] == repr(TASK)
    for step in kept.steps:
        for held, again in [(kept[step].weights, found[step].weights), (kept[step].shuffled, found[step].shuffled)]:
            assert held.keys() == again.keys()
            for key, probe in held.items():
                np.testing.assert_array_equal(probe.weights, again[key].weights)
                np.testing.assert_array_equal(probe.intercepts, again[key].intercepts)
                assert (probe.feature, probe.kind, probe.place, probe.layer) == (
                    again[key].feature,
                    again[key].kind,
                    again[key].place,
                    again[key].layer,
                )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_train": 310}, "n_train is 300 there and 310 here"),
        ({"seed": 3}, "seed is 0 there and 3 here"),
        ({"penalties": (1.0,)}, "penalties is"),
    ],
)
def test_a_folder_of_other_settings_is_refused(run, tmp_path, change, says):
    eh.probe_series(run.series, TASK, "carry", **ARGUMENTS, path=tmp_path, steps=[0])
    with pytest.raises(RunFolderError, match=says):
        eh.probe_series(run.series, TASK, "carry", **{**ARGUMENTS, **change}, path=tmp_path, steps=[0])
    assert eh.open_probes(tmp_path).steps == (0,)


def test_a_checkpoint_that_was_written_again_is_probed_again(tmp_path, monkeypatch):
    states = {0: small(seed=1), 1: small(seed=2)}
    series = eh.CheckpointSeries.from_loader([0, 1], states.__getitem__)
    names = {0: "a", 1: "b"}
    monkeypatch.setattr(series, "identity", names.__getitem__)
    first = eh.probe_series(series, TASK, "carry", **ARGUMENTS, path=tmp_path)
    series.unload()
    states[1], names[1] = small(seed=3), "c"
    second = eh.probe_series(series, TASK, "carry", **ARGUMENTS, path=tmp_path)
    pd.testing.assert_frame_equal(first[0].table, second[0].table)
    assert (first[1].table["loss"] != second[1].table["loss"]).any()


def test_checkpoints_that_cannot_be_used_are_passed_over(tmp_path):
    def load(step):
        if step in (0, 2):
            raise OSError("gone")
        model = small(seed=step)
        if step == 3:
            with torch.no_grad():
                next(model.blocks[0].parameters()).fill_(torch.nan)
        return model

    series = eh.CheckpointSeries.from_loader([0, 1, 2, 3], load)
    found = eh.probe_series(series, TASK, "carry", **ARGUMENTS)
    assert found.steps == (1,)
    assert sorted(found.problems) == [0, 2, 3]
    assert "gone" in found.problems[2]
    with pytest.raises(CheckpointError, match="no checkpoint of loader can be used; at step 0"):
        eh.probe_series(series, TASK, "carry", **ARGUMENTS, steps=[0, 2])


def test_a_folder_without_probes_is_told(tmp_path):
    with pytest.raises(NoCheckpointsError, match="holds no probes"):
        eh.open_probes(tmp_path)
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(NoCheckpointsError, match="not of a folder of probes"):
        eh.open_probes(tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps({"format": "emergent_heads probes", "format_version": 99}))
    with pytest.raises(RunFolderError, match="format version 99"):
        eh.open_probes(tmp_path)


# ---- what a result shows ----


def test_results_show_the_best_layers(probes, run, tmp_path):
    assert "Addition, 3 feature(s) at 18 place(s)" in repr(probes)
    assert "share_removed" in repr(probes)
    assert "r2" not in probes.shown()
    assert len(probes.shown()) == 18
    assert probes.features == ("carry", "first_operand", "second_operand")
    assert repr(probes.probe("carry", 0, 1)) == "Probe('carry', binary, place 0, layer 1, weights 1x16)"
    series = eh.probe_series(run.series, TASK, "carry", **ARGUMENTS)
    assert "4 checkpoint(s), steps 0 to 6" in repr(series)
    assert probes.save(tmp_path / "probes.csv").is_file()


def test_figures_map_layers_and_steps_against_places(probes, run):
    figure = probes.plot()
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == ["carry", "first operand", "second operand"]
    shown = np.asarray(maps[0].images[0].get_array())
    table = probes.table.query("feature == 'carry'").pivot(index="layer", columns="place", values="share_removed")
    np.testing.assert_allclose(shown, table.to_numpy()[::-1])  # the embedding is at the bottom
    assert maps[0].get_yticklabels()[-1].get_text() == "embedding"
    series = eh.probe_series(run.series, TASK, "carry", **ARGUMENTS)
    assert series.plot().axes[0].images[0].get_array().shape == (4, 6)


# ---- bad input ----


def binary(name="a", labels=lambda tokens: tokens[:, :1], positions=(4,)):
    return eh.Feature(name, "binary", labels, list(positions))


BAD = {
    "constant labels": ({"features": binary(labels=lambda tokens: 0 * tokens[:, :1])}, "'a': its labels are constant"),
    "position outside": ({"features": binary(positions=[99])}, "'a': position 99 is outside the sequence of 22"),
    "too few examples": (
        {"features": binary(), "n_train": 15},
        "n_train is 15; it must be a whole number, at least 20",
    ),
    "a rare place": (
        {"features": eh.Feature("rare", "binary", lambda t: t[:, :1], lambda t: np.full((len(t), 1), -1))},
        "'rare': too few examples",
    ),
    "unknown name": ({"features": "cary"}, "Addition has no feature 'cary'; nearest: carry"),
    "no names": ({"features": []}, "features is empty"),
    "a name twice": ({"features": ["carry", binary("carry")]}, "two features are called 'carry'"),
    "feature of another task": (
        {"features": eh.tasks.Addition(16).features[1]},
        "feature 'first_operand'",
    ),
    "unknown layer": ({"layers": [0, 2]}, "layer 2: this model has layers 0 to 1, and -1 for the embedding"),
    "layer below": ({"layers": [-2]}, "layer -2"),
    "no layers": ({"layers": []}, "layers is"),
    "one layer": ({"layers": 1}, "layers is 1"),
    "layers in words": ({"layers": "some"}, "layers is 'some'"),
    "no penalties": ({"penalties": []}, "penalties are values of C"),
    "a penalty of zero": ({"penalties": [0.0, 1.0]}, "penalties are values of C"),
    "no rows": ({"n_test": 0}, "n_test is 0"),
    "no memory": ({"memory_gb": 0}, "memory_gb must be above 0"),
    "untrained models": ({"n_untrained": -1}, "n_untrained is -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error(model, case):
    change, says = BAD[case]
    with pytest.raises(ArgumentError) as caught:
        eh.fit_probes(model, TASK, **{"features": "carry", **QUICK, **change})
    assert says in str(caught.value)


def test_a_task_without_features_asks_for_some(model):
    task = eh.tasks.LinearMap(state_size=4, sparsity=2, seed=0)
    with pytest.raises(ArgumentError, match="LinearMap has no features of its own: give some"):
        eh.fit_probes(model, task, **QUICK)
    with pytest.raises(ArgumentError, match="none is called 'carry'"):
        eh.fit_probes(model, task, "carry", **QUICK)


def test_a_model_of_another_task_is_told(model):
    with pytest.raises(ArgumentError, match="the model knows 5"):
        eh.fit_probes(model, eh.tasks.MaximumSubarray(8), **QUICK)


def test_a_task_with_too_few_problems_is_told(model):
    with pytest.raises(ArgumentError, match="too few"):
        eh.fit_probes(model, eh.tasks.Addition(1), "carry", **QUICK)


def test_too_few_prompts_are_told(model):
    tokens = np.random.default_rng(0).integers(2, size=(20, 8))
    with pytest.raises(ArgumentError, match="different sequences for training"):
        eh.fit_probes(model, eh.tasks.from_tokens(tokens, tokens[:, 0]), binary(), **QUICK)


def test_a_damaged_model_is_told():
    model = small()
    with torch.no_grad():
        next(model.blocks[1].parameters()).fill_(torch.inf)
    with pytest.raises(NotFiniteError, match="after layer 1 is NaN or infinite"):
        eh.fit_probes(model, TASK, "carry", **QUICK)


def test_wrong_steps_of_a_series_are_told(run):
    with pytest.raises(UnknownStepError):
        eh.probe_series(run.series, TASK, "carry", **ARGUMENTS, steps=[1])
    with pytest.raises(ArgumentError, match="steps is empty"):
        eh.probe_series(run.series, TASK, "carry", **ARGUMENTS, steps=[])
    with pytest.raises(ArgumentError, match="step 5 was not probed; the steps are 0"):
        _ = eh.probe_series(run.series, TASK, "carry", **ARGUMENTS, steps=[0])[5]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("cary", 0, None), "no probe of a feature 'cary'; nearest: carry"),
        (("carry", 9, None), "not probed at place 9; it was at 0, 1, 2, 3, 4, 5"),
        (("carry", 0, 7), "not probed at layer 7; it was at -1, 0, 1"),
    ],
)
def test_probes_that_are_not_there_are_told(probes, asked, says):
    with pytest.raises(ArgumentError) as caught:
        probes.probe(*asked)
    assert says in str(caught.value)


def test_default_penalties_reach_from_strong_to_weak():
    assert list(probes_module.PENALTIES) == sorted(probes_module.PENALTIES)


def test_probes_of_some_layers_choose_their_best_among_them():
    task = eh.tasks.Addition(5)
    model = eh.SmallModel(eh.SmallModelConfig.transformer_pp(2, 16, 2).for_task(task))
    probes = eh.fit_probes(model, task, ["carry"], n_train=200, n_test=100, n_untrained=0, progress=False)
    below = probes.at_layers([-1, 0])
    assert set(below.table["layer"]) == {-1, 0}
    for place, rows in probes.table.loc[probes.table["layer"] < 1].groupby("place"):
        best = int(rows.loc[rows["validation_loss"].idxmin(), "layer"])
        assert below.probe("carry", place).layer == best
        assert below.probe("carry", place) is probes.probe("carry", place, best)
    with pytest.raises(ArgumentError, match="layer 2 was not probed; it was at -1, 0, 1"):
        probes.at_layers([2])
