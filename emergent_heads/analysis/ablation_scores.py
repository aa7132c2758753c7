"""What a model answers with something taken out of it, and how that compares with taking out something else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from emergent_heads.analysis.ablation_examples import Examples
from emergent_heads.analysis.linear_readouts import Activations, Readouts
from emergent_heads.models.hooked import Answers
from emergent_heads.statistics import bootstrap_means, share_interval, sign_flip_p

_PENALTIES = (1e-2, 1.0, 100.0)
_VALIDATION_SHARE = 0.25
_DRAWS_SPAN = (0.025, 0.975)


@dataclass(frozen=True, eq=False)
class Scores:
    """How runs did on each row.

    Attributes:
        exact: `[run, row]`, whether all tokens of the answer are the first choice, each given the true ones before.
        loss: `[run, row]`, so that the mean over rows is the mean over all tokens that count, in nats.
    """

    exact: Bool[np.ndarray, "run row"]
    loss: Float[np.ndarray, "run row"]

    @classmethod
    def of(cls, parts: Sequence[Answers], examples: Examples) -> "Scores":
        """From the answers of runs `[run, row, read]`, in parts with some of the rows each."""
        log_p = torch.cat([part.log_p for part in parts], dim=-2).double().numpy()
        matched = torch.cat([part.matched for part in parts], dim=-2).numpy()
        counts = examples.in_loss.sum(axis=1)
        loss = np.where(examples.in_loss, -log_p, 0.0).sum(axis=-1) / counts.mean()
        exact = (matched | ~examples.in_answer).all(axis=-1)
        return cls(np.atleast_2d(exact), np.atleast_2d(loss))


def compared(feature: Scores, others: Sequence[Scores], *, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Rows of the table: of the feature's own run, and of each kind of runs it is compared with.

    Exact match and loss with intervals over the rows (of several runs, of their mean) and over the runs; p-values of
    the difference to the feature's run, paired over the rows, and by the feature's rank among the runs.
    """
    every = [feature, *others]
    exact = np.stack([scores.exact.mean(axis=0) for scores in every])
    loss = np.stack([scores.loss.mean(axis=0) for scores in every])
    _, low, high = bootstrap_means(np.concatenate([exact, loss]), seed=seed)
    exact_p, loss_p = sign_flip_p(np.stack([exact - exact[0], loss - loss[0]]), seed=seed)
    rows = []
    for index, scores in enumerate(every):
        row = _of_runs(scores, low[[index, index + len(every)]], high[[index, index + len(every)]])
        if index:
            row |= {"p_value": exact_p[index], "loss_p_value": loss_p[index]}
            row |= _rank_p(feature, scores) if len(scores.exact) > 1 else {}
        rows.append(row)
    return rows[0], rows[1:]


def _of_runs(scores: Scores, low: Float[np.ndarray, " 2"], high: Float[np.ndarray, " 2"]) -> dict[str, Any]:
    of_run, loss_of_run = scores.exact.mean(axis=1), scores.loss.mean(axis=1)
    row: dict[str, Any] = {
        "n_runs": len(of_run),
        "exact_match": of_run.mean(), "exact_match_low": low[0], "exact_match_high": high[0],
        "loss_nats": loss_of_run.mean(), "loss_low": low[1], "loss_high": high[1],
    }  # fmt: skip
    if len(of_run) == 1:  # a share of the rows, so it has an exact interval
        share = share_interval(int(scores.exact.sum()), scores.exact.size)
        return {**row, "exact_match_low": share.low, "exact_match_high": share.high}
    for name, values in (("exact_match", of_run), ("loss", loss_of_run)):
        row[f"{name}_runs_low"], row[f"{name}_runs_high"] = np.quantile(values, _DRAWS_SPAN)
    return row


def _rank_p(feature: Scores, runs: Scores) -> dict[str, float]:
    """Share of the runs, the feature's own counted, that do at least as badly."""
    n = len(runs.exact)
    as_bad = (runs.exact.mean(axis=1) <= feature.exact.mean()).sum()
    as_lossy = (runs.loss.mean(axis=1) >= feature.loss.mean()).sum()
    return {"p_value_runs": (1 + as_bad) / (1 + n), "loss_p_value_runs": (1 + as_lossy) / (1 + n)}


@dataclass(frozen=True)
class Refitted:
    """How well a fresh probe reads a feature at one place, and how well its prior alone does.

    Attributes:
        loss, prior_loss: nats, or mean squared error, mean over components.
        accuracy, prior_accuracy: NaN for continuous features.
    """

    loss: float
    prior_loss: float
    accuracy: float
    prior_accuracy: float


def refit(
    kind: str,
    x: Float[Tensor, "row d"],
    labels: Float[np.ndarray, "row component"],
    test_x: Float[Tensor, "test_row d"],
    test_labels: Float[np.ndarray, "test_row component"],
) -> Refitted | None:
    """Fits a probe on some rows and reads others; the penalty is chosen on the last quarter of the first.

    None where no label varies, or there is nothing to fit or to read.
    """
    n_train = len(x) - int(_VALIDATION_SHARE * len(x))
    train, validation = labels[:n_train], labels[n_train:]
    if not (len(train) and len(validation) and len(test_labels)):
        return None
    varies = train.min(axis=0) < train.max(axis=0)
    if not varies.any():
        return None
    of_train, of_validation, of_test = (
        torch.from_numpy(np.ascontiguousarray(each[:, varies].T)).to(x) for each in (train, validation, test_labels)
    )
    solver = Activations(x[:n_train])
    continuous = kind == "continuous"
    path = solver.ridge(of_train, _PENALTIES) if continuous else solver.logistic(of_train, _PENALTIES)
    losses = [_losses(readouts, x[n_train:], of_validation, continuous) for readouts in path]
    best = path[int(torch.tensor(losses).argmin())]
    prior = Readouts(torch.zeros_like(best.weights), _prior(of_train, continuous).to(best.intercepts))
    accuracies = [float("nan")] * 2
    if not continuous:
        accuracies = [
            float(((readouts(test_x.to(readouts.weights)) > 0) ^ (of_test > 0.5)).logical_not().double().mean())
            for readouts in (best, prior)
        ]
    return Refitted(
        _losses(best, test_x, of_test, continuous),
        _losses(prior, test_x, of_test, continuous),
        *accuracies,
    )


def _prior(labels: Float[Tensor, "component row"], continuous: bool) -> Float[Tensor, " component"]:
    means = labels.double().mean(1)
    return means if continuous else torch.logit(means)


def _losses(readouts: Readouts, x: Tensor, labels: Float[Tensor, "component row"], continuous: bool) -> float:
    read = readouts(x.to(readouts.weights))
    if continuous:
        return float((read - labels).square().mean())
    return float(torch.nn.functional.binary_cross_entropy_with_logits(read, labels.to(read)))
