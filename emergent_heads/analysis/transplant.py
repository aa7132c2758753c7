"""Does a feature help a model that does not use it yet? The later model's component is put into the earlier one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.ablation import Measured, Residuals, compared_rows, of_rows, probes_of
from emergent_heads.analysis.ablation_controls import Runs, edits_of
from emergent_heads.analysis.ablation_examples import choose_probed_features
from emergent_heads.analysis.ablation_scores import Scores
from emergent_heads.analysis.evaluation import model_name
from emergent_heads.analysis.probes import Probes, ProbeSeries
from emergent_heads.analysis.subspaces import (
    Moments,
    Removal,
    basis_removal,
    matched_bases,
    probe_removal,
    random_bases,
)
from emergent_heads.checkpoints.known_issues import marks_of
from emergent_heads.errors import ModelMismatchError, whole_number
from emergent_heads.models.hooked import Answers, hooked
from emergent_heads.models.residual_engine import Edit, ResidualTrace
from emergent_heads.randomness import numpy_generator
from emergent_heads.results import Result
from emergent_heads.tasks.features import Feature
from emergent_heads.tasks.task import PromptTask, SequenceTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False, eq=False)
class Transplant(Result):
    """What an earlier model gains by a later one's component along a feature's directions.

    Attributes:
        table: per `feature`, one row for each `edit`: "pre" and "post", the two models without edit; "transplanted";
            and the controls "random" and "matched_change" (see `transplant_features`). `n_runs`, `exact_match` and
            `loss_nats` with their intervals and p-values (of the difference from "transplanted") as in
            `Ablation.table`; `changed_norm`, the mean over places of the root mean square of the change, over that of
            the earlier model's residual stream.
        controls: one row per `feature`, `edit` and `run`.
        exact, loss: per feature and edit, `[run, row]`, as those of `Ablation`.
    """

    controls: pd.DataFrame
    exact: Mapping[tuple[str, str], np.ndarray] = field(default_factory=dict, kw_only=True)
    loss: Mapping[tuple[str, str], np.ndarray] = field(default_factory=dict, kw_only=True)

    def headline(self) -> str:
        said = []
        for feature, rows in self.table.groupby("feature", sort=False):
            loss = rows.set_index("edit")["loss_nats"]
            beside = ", ".join(f"{name.replace('_', ' ')} {loss[name]:.3f}" for name in loss.index[3:])
            said.append(
                f"{feature}: loss {loss['pre']:.3f} -> {loss['transplanted']:.3f} nats (post {loss['post']:.3f}"
                f"{'; controls: ' if beside else ''}{beside})"
            )
        return f"Transplant: {self.about['post']} into {self.about['pre']}, {'; '.join(said)}{self.caution}"

    def shown(self) -> pd.DataFrame:
        return self.table.loc[:, ["feature", "edit", "exact_match", "loss_nats", "changed_norm", "loss_p_value"]]

    def plot(self) -> "Figure":
        """Exact match (loss, where there is none) of both models, with the transplant, and with the controls."""
        from emergent_heads.plots import ablation as ablation_plots

        return ablation_plots.ablation(self.table, self.controls)


def transplant_features(
    pre: Any,
    post: Any,
    task: SequenceTask | PromptTask,
    probes: Probes | ProbeSeries,
    controls: int = 32,
    *,
    features: str | Feature | Sequence[str | Feature] | None = None,
    n: int = 1000,
    n_reference: int = 1000,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Transplant:
    """Puts the later model's component in each feature's subspace into the earlier one, in place of its own.

    The subspace is that of `post`'s best probe at each place, and the component goes after the same layer, at the same
    position: x_pre - Q Q^T (x_pre - x_post). Both models must share a basis, as checkpoints of one run do, as far as
    it has not turned between them. Controls: "random", subspaces of the same rank; "matched_change", subspaces of the
    same rank in which x_pre - x_post has the same mean square.

    Args:
        pre, post: models of the same shape, or checkpoints.
        task: as in `ablate_features`.
        probes: of `post`: those of its step, where it is a checkpoint and they are a series.
        controls: draws of each kind.
        features, n, n_reference, batch_size, seed, progress: as in `ablate_features`.

    Raises:
        ModelMismatchError: the models have different shapes, or the probes are of another one.
        ArgumentError, InterventionHasNoEffect: as `ablate_features`.
    """
    controls = whole_number("controls", controls, least=0)
    probes = probes_of(post, probes)
    later = hooked(post)
    chosen = choose_probed_features(task, probes, features, later)
    options: dict[str, Any] = {"n": n, "n_reference": n_reference, "seed": seed}
    of_post = Measured.open(later, task, probes, chosen, "probe", **options)
    post_scores, post_resid = _scores_and_residuals(of_post)
    post_reference = of_post.reference_resid
    shape = later.shape
    earlier = hooked(pre)  # from here on `later` may hold pre's weights
    if earlier.shape != shape:
        raise ModelMismatchError(
            f"the two models have different shapes ({earlier.shape} and {shape}): give two checkpoints of one model"
        )
    of_pre = Measured.open(earlier, task, probes, chosen, "probe", **options)
    drawn = {feature: _runs(of_pre, post_reference, feature, controls, seed) for feature in of_pre.sites}
    pre_scores, scores = _run(of_pre, post_resid, drawn, batch_size, progress)
    about = {
        "pre": model_name(pre),
        "post": model_name(post),
        "task": repr(task),
        "task_name": task.name,
        "features": [feature.name for feature in chosen],
        "controls": controls,
        "n": len(of_pre.test),
        "n_reference": len(of_pre.reference),
        "seed": seed,
        "known_issues": marks_of(pre, post),
    }
    return _result(of_pre, post_reference, drawn, pre_scores, post_scores, scores, about, seed)


def _scores_and_residuals(measured: Measured) -> tuple[Scores, Residuals]:
    """Of the rows to measure on, with nothing edited."""
    answers: list[Answers] = []

    def noted() -> Iterator[tuple[slice, ResidualTrace]]:
        for chunk, trace in measured.test_traces():
            answers.append(trace.answers)
            yield chunk, trace

    resid = measured.residuals(measured.test, noted())
    return Scores.of(answers, measured.test), resid


def _runs(measured: Measured, post: Residuals, feature: Feature, controls: int, seed: int) -> list[Runs]:
    """The transplant and its controls."""
    own: list[Removal] = []
    random: list[Removal] = []
    matched: list[Removal] = []
    for site, x, x_post in _at_sites(measured, post, feature):
        difference = Moments.of(x - x_post)
        removal = probe_removal("projection", site.probe.weights, site.probe.intercepts, difference)
        own.append(removal)
        if controls:
            rank, key = int(removal.ranks[0]), (feature.name, site.place, site.layer)
            generator = numpy_generator(seed, "random transplant", *key)
            random.append(basis_removal("projection", random_bases(controls, x.shape[1], rank, generator), difference))
            wanted = float(removal.mean_square(difference)[0])
            generator = numpy_generator(seed, "matched transplant", *key)
            bases = matched_bases(controls, rank, difference.second, wanted, generator)
            matched.append(basis_removal("projection", bases, difference))
    kinds = {"transplanted": own, "random": random, "matched_change": matched}
    return [
        Runs(kind, ("",) * len(removals[0]), removals, np.full(len(removals[0]), np.nan))
        for kind, removals in kinds.items()
        if removals
    ]


def _at_sites(measured: Measured, post: Residuals, feature: Feature):
    """Of each site, the reference rows' residual streams in both models."""
    positions = measured.reference.values(feature).positions
    for site in measured.sites[feature]:
        rows = torch.from_numpy(np.flatnonzero(positions[:, site.place] >= 0))
        key = (feature.name, site.place, site.layer)
        yield site, measured.reference_resid[key][rows].double(), post[key][rows].double()


def _run(
    measured: Measured,
    post: Residuals,
    drawn: Mapping[Feature, Sequence[Runs]],
    batch_size: int | None,
    progress: bool,
) -> tuple[Scores, dict[Feature, list[Scores]]]:
    like = measured.like()
    edits = {
        feature: [
            [
                _reaching(edit, [post[feature.name, place, edit.layer] for place in places])
                for edit, places in zip(
                    edits_of(runs.removals, sites, measured.test.values(feature).positions, like),
                    _places(sites),
                    strict=True,
                )
            ]
            for runs in drawn[feature]
        ]
        for feature, sites in measured.sites.items()
    }
    plain: list[Answers] = []
    answers: dict[Feature, list[list[Answers]]] = {feature: [[] for _ in runs] for feature, runs in drawn.items()}
    total = len(measured.test) * sum(len(runs.names) for of in drawn.values() for runs in of)
    with tqdm(total=total, desc="runs x rows", leave=False, **notebook.bar(progress)) as bar:
        for chunk, trace in measured.test_traces():
            plain.append(trace.answers)
            for feature, of_feature in edits.items():
                for kind, of_kind in enumerate(of_feature):
                    here = [of_rows(edit, chunk) for edit in of_kind]
                    answers[feature][kind].append(measured.engine.answers(trace, here, batch_size=batch_size))
                    bar.update(len(trace.tokens) * len(of_kind[0].read))
    scores = {feature: [Scores.of(parts, measured.test) for parts in kinds] for feature, kinds in answers.items()}
    return Scores.of(plain, measured.test), scores


def _places(sites: Sequence[Any]) -> list[list[int]]:
    """The places of each layer, as `edits_of` has them."""
    layers = sorted({site.layer for site in sites})
    return [[site.place for site in sites if site.layer == layer] for layer in layers]


def _reaching(edit: Edit, post: Sequence[Float[Tensor, "row d_model"]]) -> Edit:
    """The edit after which the component is that of another model, row by row."""
    x = torch.stack(list(post), dim=1).to(edit.read)
    return Edit(edit.layer, edit.positions, edit.read, edit.write, torch.einsum("rpd,npdk->nrpk", x, edit.read))


def _result(
    measured: Measured,
    post: Residuals,
    drawn: Mapping[Feature, Sequence[Runs]],
    pre_scores: Scores,
    post_scores: Scores,
    scores: Mapping[Feature, Sequence[Scores]],
    about: Mapping[str, Any],
    seed: int,
) -> Transplant:
    table: list[dict[str, Any]] = []
    controls: list[pd.DataFrame] = []
    exact: dict[tuple[str, str], np.ndarray] = {}
    loss: dict[tuple[str, str], np.ndarray] = {}
    for feature, runs in drawn.items():
        of_feature = scores[feature]
        own, before, after, *rest = compared_rows(pre_scores, [of_feature[0], post_scores, *of_feature[1:]], seed)
        sizes = _changed_norms(measured, post, feature, runs)
        rows = [("pre", before, 0.0), ("post", after, np.nan), ("transplanted", own, float(sizes[0].mean()))]
        for kind, row, size in zip(runs[1:], rest, sizes[1:], strict=True):
            rows.append((kind.kind, row, float(size.mean())))
        table += [{"feature": feature.name, "edit": edit, **row, "changed_norm": size} for edit, row, size in rows]
        every = {"pre": pre_scores, "post": post_scores}
        every |= {kind.kind: each for kind, each in zip(runs, of_feature, strict=True)}
        exact |= {(feature.name, edit): each.exact for edit, each in every.items()}
        loss |= {(feature.name, edit): each.loss for edit, each in every.items()}
        for kind, each, size in zip(runs[1:], of_feature[1:], sizes[1:], strict=True):
            columns = {
                "exact_match": each.exact.mean(axis=1),
                "loss_nats": each.loss.mean(axis=1),
                "changed_norm": size,
            }
            controls.append(
                pd.DataFrame(
                    {
                        "feature": feature.name,
                        "edit": kind.kind,
                        "run": range(len(size)),
                        **columns,
                        "changed_norm": size,
                    }
                )
            )
    empty = pd.DataFrame(columns=["feature", "edit", "run", "exact_match", "loss_nats", "changed_norm"])
    joined = pd.concat(controls, ignore_index=True) if controls else empty
    return Transplant(pd.DataFrame(table), joined, exact=exact, loss=loss, about=about)


def _changed_norms(
    measured: Measured, post: Residuals, feature: Feature, runs: Sequence[Runs]
) -> list[Float[np.ndarray, " run"]]:
    """Root mean square of the change over that of the residual stream, mean over sites, of each run."""
    totals = [torch.zeros(len(kind.names), dtype=torch.float64) for kind in runs]
    sites = list(_at_sites(measured, post, feature))
    for number, (_, x, x_post) in enumerate(sites):
        difference, size = Moments.of(x - x_post), x.square().sum(1).mean()
        for total, kind in zip(totals, runs, strict=True):
            total += (kind.removals[number].mean_square(difference) / size).sqrt()
    return [(total / len(sites)).numpy() for total in totals]
