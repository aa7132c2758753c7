"""Fitting probes against a scikit-learn loop over labels, layers and places: same rows, same penalties, one thread.

Prints ratios of CPU times (the machine may be shared), and how far the test losses are from scikit-learn's solution to
the last digits; its default solver, which the loop uses, often stops before it. Activations are read once and given to
both. `make bench` runs it.
"""

import time
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.linalg import LinAlgWarning
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, log_loss, roc_auc_score
from sklearn.preprocessing import OneHotEncoder

import emergent_heads as eh
from emergent_heads.analysis.baselines import _bag, _last_tokens, token_baselines
from emergent_heads.analysis.probe_data import ProbeData, Site, draw_data
from emergent_heads.analysis.probe_fits import Fitting
from emergent_heads.analysis.probes import PENALTIES
from emergent_heads.models.untrained import untrained
from emergent_heads.randomness import numpy_generator

pytestmark = pytest.mark.benchmark
N_TRAIN, N_TEST, SEED = 10_000, 1_000, 0


@dataclass(frozen=True)
class Activations:
    """The residual stream of one model at the sites that are timed, by layer and site."""

    data: ProbeData
    blocks: list[tuple[int, Site, torch.Tensor]]

    @classmethod
    def read(cls, model, data: ProbeData, layers) -> "Activations":
        return cls(data, list(Fitting(layers, PENALTIES, SEED, 8.0).blocks(model, data)))


def trained(task, folder, steps):
    config = eh.SmallModelConfig.transformer_pp(n_layers=4, d_model=64)
    return eh.train(config, task, folder, steps=steps, seed=0, learning_rate=3e-3, checkpoints=[steps - 10, steps])


def data_at(task, model, features, places) -> ProbeData:
    """Rows of a task with some sites only, so that the loop ends."""
    data = draw_data(task, [task.feature(name) for name in features], model, n_train=N_TRAIN, n_test=N_TEST, seed=SEED)
    sites = tuple(site for site in data.sites if site.targets[0].place in places)
    return ProbeData(data.tokens, data.answer_starts, data.sizes, data.n_distinct, sites)


# ---- ours ----


def ours(activations: Activations, *, shuffled: bool):
    """Seconds, and losses by `(feature, place, layer)`."""
    fitting = Fitting((0,), PENALTIES, SEED, 8.0)
    fits, begun = [], time.process_time()
    for layer, site, x in activations.blocks:
        fits += fitting.fit_site(layer, site, x, shuffled=shuffled)
    return time.process_time() - begun, fits


# ---- the loop ----


def fitted(x, labels, c, **how):
    return LogisticRegression(C=c, **{"max_iter": 1000, **how}).fit(x, labels)


def loop_over(x, site: Site, target, *, shuffled: bool, **how) -> float:
    """What a careful user writes for one feature, place and layer: the test loss."""
    labels = target.labels.numpy()
    models = [[fitted(x[site.train], label[site.train], c, **how) for c in PENALTIES] for label in labels]
    validation = [
        [log_loss(label[site.validation], each.predict_proba(x[site.validation])[:, 1], labels=[0, 1]) for each in row]
        for label, row in zip(labels, models, strict=True)
    ]
    chosen = int(np.mean(validation, axis=0).argmin())
    losses = []
    order = numpy_generator(SEED, "shuffled labels", site.number).permutation(site.ends[0])
    for label, row in zip(labels, models, strict=True):
        p = row[chosen].predict_proba(x[site.test])[:, 1]
        losses.append(log_loss(label[site.test], p, labels=[0, 1]))
        balanced_accuracy_score(label[site.test], p > 0.5)
        if 0 < label[site.test].mean() < 1:
            roc_auc_score(label[site.test], p)
        if shuffled:
            control = fitted(x[site.train], label[site.train][order], PENALTIES[chosen], **how)
            log_loss(label[site.test], control.predict_proba(x[site.test])[:, 1], labels=[0, 1])
    return float(np.mean(losses))


def loop(activations: Activations, *, shuffled: bool, **how) -> float:
    """Seconds of the loop."""
    begun = time.process_time()
    for _, site, block in activations.blocks:
        x = block.numpy() if how["solver"] == "lbfgs" else block.numpy().astype(float)  # in float32 Newton gives up
        for target in site.targets:
            loop_over(x, site, target, shuffled=shuffled, **how)
    return time.process_time() - begun


def gaps_to_exact(activations: Activations, fits) -> list[float]:
    """Our test losses against those of scikit-learn's solution in float64, at the penalties that were chosen."""
    gaps = []
    of_layer = {(layer, site.number): x for layer, site, x in activations.blocks}
    for fit in fits:
        site = next(site for site in activations.data.sites if fit.target in site.targets)
        x = of_layer[fit.layer, site.number].numpy().astype(float)
        losses = []
        for label in fit.target.labels.numpy():
            exact = fitted(x[site.train], label[site.train], fit.penalty, solver="newton-cholesky", tol=1e-9)
            losses.append(log_loss(label[site.test], exact.predict_proba(x[site.test])[:, 1], labels=[0, 1]))
        gaps.append(abs(float(np.mean(losses)) - fit.scores.loss))
    return gaps


def loop_over_tokens(data: ProbeData, **how) -> float:
    """Seconds of the loop for the baselines that see tokens only."""
    begun = time.process_time()
    for site in data.sites:
        last = _last_tokens(data, site)
        one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(last[site.train, None])
        for x in (_bag(data, site, last), one_hot.transform(last[:, None])):
            for target in site.targets:
                loop_over(x, site, target, shuffled=False, **how)
    return time.process_time() - begun


def report(capsys, name, seconds, peers, n, gaps, wanted):
    with capsys.disabled():
        print(
            f"\n{name}: {n} fits, ours {seconds:.2f} s ({1e3 * seconds / n:.1f} ms each), "
            f"test losses equal to {max(gaps):.0e} nats"
        )
        for solver, peer in peers.items():
            print(
                f"  scikit-learn, {solver}: {peer:.1f} s ({1e3 * peer / n:.0f} ms each), ours "
                f"{peer / seconds:.1f} times faster (wanted {wanted:g})"
            )


@pytest.fixture(autouse=True)
def _quietly():
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the loop's, though it may take 10 times the usual steps
        warnings.simplefilter("ignore", LinAlgWarning)
        yield


def test_binary_features_of_addition_with_their_baselines(tmp_path, capsys):
    task = eh.tasks.Addition(16)
    series = trained(task, tmp_path / "run", 150).series
    model = series.last.hooked()
    data = data_at(task, model, ["carry", "first_operand", "second_operand"], {7})
    assert sum(len(site.targets) for site in data.sites) >= 3
    read = Activations.read(model, data, (-1, 0, 1, 2, 3))
    fresh = [Activations.read(untrained(model, seed), data, (-1, 0, 1, 2, 3)) for seed in (0, 1)]

    seconds, fits = ours(read, shuffled=True)
    seconds += sum(ours(each, shuffled=False)[0] for each in fresh)
    begun = time.process_time()
    token_baselines(data, PENALTIES)
    seconds += time.process_time() - begun

    def peer(**how):
        return (
            loop(read, shuffled=True, **how)
            + sum(loop(each, shuffled=False, **how) for each in fresh)
            + loop_over_tokens(data, **how)
        )

    n_labels = sum(len(target.labels) for site in data.sites for target in site.targets)
    n = n_labels * (5 * (3 * len(PENALTIES) + 1) + 2 * len(PENALTIES))
    peers = {solver: peer(solver=solver) for solver in ("lbfgs", "newton-cholesky")}
    gaps = gaps_to_exact(read, fits)
    report(capsys, "Addition(16), binary features with their baselines", seconds, peers, n, gaps, 2)
    assert max(gaps) < 1e-3


def test_queue_and_adjacency_of_breadth_first_search(tmp_path, capsys):
    task = eh.tasks.BreadthFirstSearch(11)
    model = trained(task, tmp_path / "run", 60).series.last.hooked()
    data = data_at(task, model, ["queue", "adjacency_list"], {4})
    read = Activations.read(model, data, (3,))
    seconds = min(ours(read, shuffled=True)[0] for _ in range(3))
    _, fits = ours(read, shuffled=True)
    n = (len(PENALTIES) + 1) * sum(len(target.labels) for site in data.sites for target in site.targets)
    peers = {solver: loop(read, shuffled=True, solver=solver) for solver in ("lbfgs", "newton-cholesky")}
    gaps = gaps_to_exact(read, fits)
    report(capsys, "BreadthFirstSearch(11), queue and adjacency", seconds, peers, n, gaps, 5)
    assert max(gaps) < 1e-3
