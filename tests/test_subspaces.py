"""Subspaces and removals, against NumPy, SciPy and the `concept-erasure` package."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg
from sklearn.linear_model import LogisticRegression

from emergent_heads.analysis.subspaces import (
    Moments,
    Removal,
    basis_removal,
    complement,
    erasure,
    matched_bases,
    overlap,
    probe_removal,
    random_bases,
)

WIDTH = 12


def data(rows=300, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((rows, WIDTH)) @ generator.standard_normal((WIDTH, WIDTH)) + 2


def rows_of(seed, n=3):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((n, WIDTH)) * 10.0 ** generator.integers(-3, 4, (n, 1)), generator


def removed(removal, x):
    return removal.apply(torch.from_numpy(x))[0].numpy()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.sampled_from(["projection", "hyperplane", "mean"]))
def test_probe_removals_are_projections(seed, n, how):
    """Onto where SciPy says, whatever the rows' lengths, with a repeated, a nearly parallel and a zero row added."""
    weights, generator = rows_of(seed, n)
    intercepts = generator.standard_normal(n)
    x = data(seed=seed)
    doubled = np.concatenate([weights, 3 * weights[:1], weights[:1] * (1 + 1e-6), np.zeros((1, WIDTH))])
    offsets = np.concatenate([intercepts, 3 * intercepts[:1], intercepts[:1] * (1 + 1e-6), [0.7]])
    moments = Moments.of(torch.from_numpy(x))
    removal = probe_removal(how, doubled, offsets, moments)
    assert removal.ranks.tolist() == [n]
    basis = linalg.orth(weights.T / linalg.norm(weights, axis=1))
    projector = basis @ basis.T
    if how == "hyperplane":
        point = -linalg.pinv(weights) @ intercepts
    else:
        point = x.mean(axis=0) if how == "mean" else np.zeros(WIDTH)
    after = removed(removal, x)
    np.testing.assert_allclose(after, x - (x - point) @ projector, atol=1e-5)
    np.testing.assert_allclose(removed(removal, after), after, atol=1e-8)  # nothing is left to be removed
    if how == "hyperplane":
        sizes = linalg.norm(weights, axis=1)
        np.testing.assert_allclose((after @ weights.T + intercepts) / sizes, 0, atol=1e-5)


def test_several_probes_go_together():
    weights = np.stack([rows_of(seed, 2)[0] for seed in range(4)])
    weights[2, 1] = weights[2, 0]
    intercepts = np.ones((4, 2))
    x = torch.from_numpy(data())
    moments = Moments.of(x)
    together = probe_removal("hyperplane", weights, intercepts, moments)
    assert together.ranks.tolist() == [2, 2, 1, 2]
    for draw, after in enumerate(together.apply(x)):
        alone = probe_removal("hyperplane", weights[draw], intercepts[draw], moments)
        torch.testing.assert_close(after, alone.apply(x)[0])


def test_probes_without_a_direction_remove_nothing():
    x = data()
    removal = probe_removal("hyperplane", np.zeros((2, WIDTH)), np.ones(2), Moments.of(torch.from_numpy(x)))
    assert removal.ranks.tolist() == [0]
    np.testing.assert_array_equal(removed(removal, x), x)


def labels_of(x, n, seed=1):
    generator = np.random.default_rng(seed)
    noisy = x @ generator.standard_normal((WIDTH, n)) + 4 * generator.standard_normal((len(x), n))
    return (noisy > np.median(noisy, axis=0)).astype(float)


@pytest.mark.parametrize("n", [1, 3])
def test_erasure_equals_the_concept_erasure_package(n):
    package = pytest.importorskip("concept_erasure", reason="the package concept-erasure is not installed")
    x, labels = data(), labels_of(data(), n)
    fitter = package.LeaceFitter(
        WIDTH, n, shrinkage=False, constrain_cov_trace=False, dtype=torch.float64, svd_tol=1e-9
    )
    fitter.update(torch.from_numpy(x), torch.from_numpy(labels))
    removal = erasure(torch.from_numpy(x), torch.from_numpy(labels)[None], Moments.of(torch.from_numpy(x)))
    np.testing.assert_allclose(removed(removal, x), fitter.eraser(torch.from_numpy(x)).numpy(), atol=1e-10)


def test_after_erasure_no_linear_probe_beats_its_prior():
    x, labels = data(1000), labels_of(data(1000), 1)
    before = LogisticRegression(C=1e3).fit(x, labels[:, 0])
    assert before.score(x, labels[:, 0]) > 0.65
    moments = Moments.of(torch.from_numpy(x))
    after = removed(erasure(torch.from_numpy(x), torch.from_numpy(labels)[None], moments), x)
    probe = LogisticRegression(C=1e3, tol=1e-10).fit(after, labels[:, 0])
    assert np.abs(probe.coef_ * after.std(axis=0)).max() < 1e-4
    np.testing.assert_allclose(after.mean(axis=0), x.mean(axis=0), atol=1e-10)  # and the mean stays
    # Least change: a projection on the probe's hyperplane, or on the mean, leaves more to be read.
    moved = np.square(after - x).sum()
    difference = x[labels[:, 0] == 1].mean(axis=0) - x[labels[:, 0] == 0].mean(axis=0)
    in_the_way = removed(probe_removal("mean", difference[None], np.zeros(1), moments), x)
    assert moved < np.square(in_the_way - x).sum()


def test_erasure_with_fewer_rows_than_dimensions_and_constant_labels():
    x = data(8)
    labels = np.stack([np.arange(8) % 2, np.zeros(8)], axis=1).astype(float)
    removal = erasure(torch.from_numpy(x), torch.from_numpy(labels)[None], Moments.of(torch.from_numpy(x)))
    assert removal.ranks.tolist() == [1]
    after = removed(removal, x)
    np.testing.assert_allclose(after[labels[:, 0] == 1].mean(axis=0), after[labels[:, 0] == 0].mean(axis=0), atol=1e-8)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_matched_bases_have_the_wanted_mean_square(rank, place):
    """Anything between the sums of the smallest and of the largest eigenvalues (Ky Fan)."""
    x = torch.from_numpy(data())
    squares = Moments.of(x).second
    values = torch.linalg.eigvalsh(squares)
    smallest, largest = float(values[:rank].sum()), float(values[-rank:].sum())
    wanted = smallest ** (1 - place) * largest**place
    bases = matched_bases(5, rank, squares, wanted, np.random.default_rng(0))
    torch.testing.assert_close(bases.mT @ bases, torch.eye(rank, dtype=torch.float64).expand(5, -1, -1))
    found = (x @ bases).square().sum(2).mean(1)
    torch.testing.assert_close(found, torch.full((5,), wanted, dtype=torch.float64), rtol=1e-4, atol=0)
    assert len({round(float(overlap_of), 6) for overlap_of in (bases[:1].mT @ bases).square().sum((1, 2))}) == 5


def test_matched_bases_come_as_near_as_they_can():
    x = torch.from_numpy(data())
    squares = Moments.of(x).second
    largest = float(torch.linalg.eigvalsh(squares)[-2:].sum())
    bases = matched_bases(3, 2, squares, 10 * largest, np.random.default_rng(0))
    found = (x @ bases).square().sum(2).mean(1)
    assert (found > 0.95 * largest).all()
    assert (found < 1.0001 * largest).all()


def test_random_bases_are_uniform():
    bases = random_bases(4000, 6, 2, np.random.default_rng(0))
    torch.testing.assert_close(bases.mT @ bases, torch.eye(2, dtype=torch.float64).expand(4000, -1, -1))
    mean = (bases @ bases.mT).mean(0)
    torch.testing.assert_close(mean, torch.eye(6, dtype=torch.float64) / 3, atol=0.02, rtol=0)


def test_sizes_are_those_of_the_change():
    x = torch.from_numpy(data())
    moments = Moments.of(x)
    generator = np.random.default_rng(0)
    read, write = (torch.from_numpy(generator.standard_normal((2, WIDTH, 3))) for _ in range(2))
    oblique = Removal(read, write, torch.ones(2, 3, dtype=torch.float64), torch.tensor([3, 3]))
    for removal in (oblique, basis_removal("mean", random_bases(4, WIDTH, 2, generator), moments)):
        change = x - removal.apply(x)
        torch.testing.assert_close(removal.mean_square(moments), change.square().sum(2).mean(1))
        torch.testing.assert_close(removal.relative_size(x), (change.norm(dim=2) / x.norm(dim=1)).mean(1))
        kept = torch.stack([torch.cov(after.T, correction=0).trace() for after in removal.apply(x)])
        share = 1 - kept / torch.cov(x.T, correction=0).trace()
        torch.testing.assert_close(removal.variance_share(moments), share)


def test_complement_and_overlap():
    moments = Moments.of(torch.from_numpy(data()))
    basis = torch.eye(WIDTH, dtype=torch.float64)
    own = basis_removal("projection", basis[None, :, :2], moments)
    rest = complement(own)
    assert rest.shape == (WIDTH, WIDTH - 2)
    torch.testing.assert_close(rest @ rest.T, torch.diag(torch.tensor([0.0] * 2 + [1.0] * (WIDTH - 2)).double()))
    others = torch.stack([basis[:, 1:3], basis[:, 4:6], basis[:, :2]])
    assert overlap(basis_removal("projection", others, moments), own).tolist() == pytest.approx([0.5, 0, 1])
    nothing = probe_removal("mean", np.zeros((1, WIDTH)), np.zeros(1), moments)
    assert complement(nothing).shape == (WIDTH, WIDTH)
