"""Linear readouts against scikit-learn's, one label at a time, at the same penalty."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    log_loss,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)

from emergent_heads.analysis.linear_readouts import Activations, Readouts
from emergent_heads.analysis.readout_scores import auc, log_losses, scores, squared_errors

PENALTIES = (1e-4, 1e-2, 1.0, 100.0)


def correlated(n=400, d=12, seed=0):
    """Activations with directions of very different variance, far from the origin, as a residual stream has them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, d)) * np.geomspace(0.02, 4, d) @ random.normal(size=(d, d)) + random.normal(size=d)
    return x.astype(np.float32), random


def noisy(n=400, d=12, seed=0, shift=0.0):
    x, random = correlated(n, d, seed)
    z = (x - x.mean(0)) @ random.normal(size=(d, 3)) / 4 + shift
    return x, (random.random(z.shape) < 1 / (1 + np.exp(-z))).T.astype(np.float32)


def separable():
    x, random = correlated(seed=3)
    z = (x - x.mean(0)) @ random.normal(size=(12, 3))
    return x, (z > 0).T.astype(np.float32)


def with_useless_columns():
    x, labels = noisy(seed=4)
    return np.hstack([x, x[:, :3], np.full((len(x), 2), 7, np.float32), np.zeros((len(x), 1), np.float32)]), labels


def scaled(by, shift, seed):
    x, labels = noisy(seed=seed)
    return by * x + np.float32(shift), labels


def shuffled(x, labels):
    return x, np.random.default_rng(0).permuted(labels, axis=1)


CASES = {
    "noisy": noisy,
    "separable": separable,
    "few ones": lambda: noisy(600, seed=5, shift=-5.0),
    "columns that repeat or are constant": with_useless_columns,
    "fewer rows than columns": lambda: noisy(30, 48, seed=6),
    "large numbers": lambda: scaled(1000, 500, seed=7),
    "small numbers": lambda: scaled(1e-3, 0, seed=8),
    "counts": lambda: (np.random.default_rng(9).poisson(1.5, (400, 6)).astype(np.float32), noisy(seed=9)[1]),
    "shuffled": lambda: shuffled(*separable()),
}


def exact_logistic(x, labels, c):
    """scikit-learn's solution in float64, to the last digits."""
    return LogisticRegression(C=c, tol=1e-10, max_iter=10_000, solver="newton-cholesky").fit(x.astype(float), labels)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::scipy.linalg.LinAlgWarning")
def test_logistic_readouts_are_those_of_scikit_learn(case):
    x, labels = CASES[case]()
    found = Activations(torch.from_numpy(x)).logistic(torch.from_numpy(labels), PENALTIES)
    for c, readouts in zip(PENALTIES, found, strict=True):
        losses = log_losses(readouts(torch.from_numpy(x)), torch.from_numpy(labels))
        for label, weights, intercept, loss in zip(labels, *readouts_of(readouts), losses, strict=True):
            wanted = exact_logistic(x, label, c)
            norm = np.linalg.norm(wanted.coef_)
            assert np.linalg.norm(weights - wanted.coef_[0]) <= 1e-2 * norm
            # The intercept stands against the mean, where the activations are.
            assert intercept + x.mean(0) @ weights == pytest.approx(
                wanted.intercept_[0] + x.mean(0) @ wanted.coef_[0], abs=1e-2 * (1 + norm * x.std())
            )
            assert loss == pytest.approx(log_loss(label, wanted.predict_proba(x)[:, 1]), abs=1e-3)


def readouts_of(readouts: Readouts):
    return readouts.weights.numpy().astype(float), readouts.intercepts.numpy().astype(float)


@pytest.mark.parametrize("case", ["noisy", "columns that repeat or are constant", "fewer rows than columns", "counts"])
def test_ridge_readouts_are_those_of_scikit_learn(case):
    x, _ = CASES[case]()
    labels = np.random.default_rng(1).normal(size=(2, len(x))) + 3 + x[:, :2].T
    found = Activations(torch.from_numpy(x)).ridge(torch.from_numpy(labels), PENALTIES)
    for c, readouts in zip(PENALTIES, found, strict=True):
        errors = squared_errors(readouts(torch.from_numpy(x)), torch.from_numpy(labels))
        for label, weights, _, error in zip(labels, *readouts_of(readouts), errors, strict=True):
            wanted = Ridge(alpha=1 / c, tol=1e-12).fit(x.astype(float), label)
            np.testing.assert_allclose(weights, wanted.coef_, rtol=0, atol=1e-4 * np.linalg.norm(wanted.coef_))
            assert error == pytest.approx(mean_squared_error(label, wanted.predict(x)), rel=1e-3)


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(10, 80),
    d=st.integers(1, 10),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    c=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_logistic_readouts_are_at_the_lowest_point(n, d, seed, scale, c):
    random = np.random.default_rng(seed)
    x = torch.from_numpy((scale * random.normal(size=(n, d))).astype(np.float32))
    labels = torch.from_numpy(random.random((2, n)) < random.uniform(0.1, 0.9))
    labels[:, 0], labels[:, 1] = False, True
    (readouts,) = Activations(x).logistic(labels.float(), [c])

    # The gradient of the objective in float64, measured against that of readouts 1 % away.
    def gradient(weights):
        rest = (weights @ x.double().T + readouts.intercepts.double()[:, None]).sigmoid() - labels.double()
        return torch.cat([rest @ x.double() + weights / c, rest.sum(1, keepdim=True)], dim=1).norm(dim=1)

    away = readouts.weights.double() * 1.01
    assert (gradient(readouts.weights.double()) < 0.3 * gradient(away) + 1e-4 * n * scale).all()


def test_labels_are_solved_together_as_they_are_alone():
    x, labels = separable()
    activations = Activations(torch.from_numpy(x))
    together = activations.logistic(torch.from_numpy(labels), PENALTIES)
    for number, label in enumerate(labels):
        alone = activations.logistic(torch.from_numpy(label[None]), PENALTIES)
        for joint, single in zip(together, alone, strict=True):
            np.testing.assert_allclose(
                joint.weights[number], single.weights[0], atol=2e-3 * float(single.weights.norm())
            )


def test_each_label_can_have_a_penalty_of_its_own():
    x, labels = noisy()
    activations = Activations(torch.from_numpy(x))
    own = activations.logistic_at(torch.from_numpy(labels), [1e-4, 1.0, 100.0])
    for number, c in enumerate([1e-4, 1.0, 100.0]):
        wanted = exact_logistic(x, labels[number], c).coef_[0]
        assert np.linalg.norm(own.weights[number].numpy() - wanted) <= 1e-2 * np.linalg.norm(wanted)


def test_activations_that_say_nothing_give_the_frequencies():
    labels = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    (readouts,) = Activations(torch.full((4, 3), 2.5)).logistic(labels, [1.0])
    assert readouts(torch.full((1, 3), 2.5)).sigmoid().item() == pytest.approx(0.75, abs=1e-5)
    assert readouts.weights.abs().max() < 1e-6


# ---- scores ----


def test_scores_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    labels = (random.random((4, 200)) < [[0.5], [0.1], [0.9], [0.3]]).astype(np.float32)
    logits = (random.normal(size=(4, 200)) + labels).round(1).astype(np.float32)  # with ties
    found = scores(torch.from_numpy(logits), torch.from_numpy(labels), continuous=False)
    each = [(label, logit, logit > 0) for label, logit in zip(labels, logits, strict=True)]
    p = [1 / (1 + np.exp(-logit.astype(float))) for logit in logits]
    assert found.loss == pytest.approx(np.mean([log_loss(y, q) for y, q in zip(labels, p, strict=True)]), abs=1e-9)
    assert found.accuracy == pytest.approx(np.mean([accuracy_score(y, said) for y, _, said in each]))
    assert found.balanced_accuracy == pytest.approx(np.mean([balanced_accuracy_score(y, said) for y, _, said in each]))
    assert found.auc == pytest.approx(np.mean([roc_auc_score(y, z) for y, z, _ in each]))
    assert np.isnan(found.r2)


def test_scores_of_values_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    labels = random.normal(size=(2, 50)).astype(np.float32)
    read = (labels + random.normal(size=(2, 50))).astype(np.float32)
    found = scores(torch.from_numpy(read), torch.from_numpy(labels), continuous=True)
    assert found.loss == pytest.approx(np.mean([mean_squared_error(*each) for each in zip(labels, read, strict=True)]))
    assert found.r2 == pytest.approx(np.mean([r2_score(*each) for each in zip(labels, read, strict=True)]), abs=1e-5)
    assert np.isnan(found.auc)
    assert np.isnan(found.accuracy)


def test_components_whose_test_labels_are_alike_count_only_where_they_can():
    labels = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    read = torch.tensor([[2.0, 1.0, -1.0], [-1.0, 1.0, 2.0]])
    assert np.isnan(auc(read, labels)[0])
    found = scores(read, labels, continuous=False)
    assert found.auc == 1
    assert found.balanced_accuracy == 1
    assert found.accuracy == pytest.approx(5 / 6)
