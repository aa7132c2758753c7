"""Is a feature used? Its subspace is taken out of the residual stream, and others like it for comparison.

Directional ablation as in "Quiet Feature Learning in Algorithmic Tasks" (arXiv 2505.03997), but at each example's own
positions, by projections on orthonormal bases, so that features with several directions are taken out exactly, and
with controls matched in rank or in removed variance. The residual stream is edited wherever the feature stands, all at
once, in one pass over the true sequence: whether all tokens of the answer are right given the true ones before them is
whether greedy decoding under the same edits gives the answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.ablation_controls import (
    FEWEST_ROWS,
    Ablated,
    Control,
    Reference,
    Runs,
    edits_of,
    plan,
    reference_at,
)
from emergent_heads.analysis.ablation_examples import (
    Examples,
    Site,
    check_fit,
    choose_probed_features,
    draw_examples,
    sites_of,
)
from emergent_heads.analysis.ablation_scores import Refitted, Scores, compared, refit
from emergent_heads.analysis.ablation_workers import Crew, of_rows, traces_of
from emergent_heads.analysis.evaluation import model_name
from emergent_heads.analysis.patching import check_choice
from emergent_heads.analysis.probes import Probes, ProbeSeries
from emergent_heads.analysis.sending import SentModel, check_series_travel, check_task_travels, modules_of
from emergent_heads.analysis.subspaces import How, Moments, Removal, erasure, probe_removal
from emergent_heads.checkpoints.known_issues import mark_steps, marks_of
from emergent_heads.checkpoints.series import Checkpoint, CheckpointSeries, Learned
from emergent_heads.errors import ArgumentError, EmergentHeadsError, InterventionHasNoEffect, whole_number
from emergent_heads.jobs import Executor, Job, run_jobs, values
from emergent_heads.models.hooked import Answers, HookedModel, hooked, listed
from emergent_heads.models.residual_engine import Edit, ResidualEngine, ResidualTrace
from emergent_heads.results import Result, without_empty_marks
from emergent_heads.tasks.features import Feature
from emergent_heads.tasks.task import PromptTask, SequenceTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Layers = Literal["probe", "later"]
CONTROLS: tuple[Control, ...] = get_args(Control)
_MOST_KEPT = 2**26  # numbers of reference passes that are kept
_SOLVED = 0.05  # below this exact match the loss says more


@dataclass(frozen=True, repr=False, eq=False)
class Ablation(Result):
    """What a model loses with a feature taken out of its residual stream.

    Attributes:
        table: per `feature`, one row for each `edit`: "none", "feature", and the controls "random",
            "matched_variance", "shuffled_labels", "other_features" (see `ablate_features`). `n_runs`; mean `rank` of
            what is removed at a place; `exact_match` with an interval over the rows (`..._low`, `..._high`; exact for
            one run, bootstrap for the mean of several) and over the runs (`exact_match_runs_low`, `..._high`: their
            middle 95 %); `loss_nats` likewise. `removed_norm`, the mean of |change| / |residual stream| over rows and
            places, and `removed_variance`, the share of its variance (both of the unedited stream). `p_value` that the
            feature's exact match differs from this row's (two-sided, signs flipped over rows) and `p_value_runs`, the
            share of the runs that do at least as badly, the feature's counted; `loss_p_value`, `loss_p_value_runs`.
            For "none" and "feature": `refit_loss`, `refit_accuracy` of a fresh probe at the edited places against
            `prior_loss`, `prior_accuracy` (means over places).
        controls: one row per `feature`, `edit` and `run`: `name` of the other feature, `rank`, `exact_match`,
            `loss_nats`, `removed_norm`, `removed_variance`, `overlap` (mean share of the feature's subspace that lies
            in this one), `same_position` (of another feature: share of places where it is read at the same token).
        exact: per feature and edit, `[run, row]`: whether the answer is right.
        loss: per feature and edit, `[run, row]`, in nats: their mean over rows is the mean over tokens.
    """

    controls: pd.DataFrame
    exact: Mapping[tuple[str, str], np.ndarray] = field(default_factory=dict, kw_only=True)
    loss: Mapping[tuple[str, str], np.ndarray] = field(default_factory=dict, kw_only=True)

    def headline(self) -> str:
        about = self.about
        said = "; ".join(_said(*of_feature) for of_feature in self.table.groupby("feature", sort=False))
        if unread := about.get("unread"):
            said += f"; no answer reads what is done to {', '.join(unread)}"
        where = f"{about['model']}, {about['n']} rows of {about['task_name']}"
        return f"Ablation ({about['how']}) of {where}: {said}{self.caution}"

    def shown(self) -> pd.DataFrame:
        columns = ["feature", "edit", "exact_match", "loss_nats", "removed_norm", "removed_variance", "p_value"]
        return self.table.loc[:, [*columns, "p_value_runs", "refit_accuracy", "prior_accuracy"]]

    def plot(self) -> "Figure":
        """Exact match (loss, where there is none) without edit, with the feature taken out, and with the controls."""
        from emergent_heads.plots import ablation as ablation_plots

        return ablation_plots.ablation(self.table, self.controls)


def _said(feature: object, rows: pd.DataFrame) -> str:
    """A sentence part such as "carry: exact match 1.000 -> 0.480 (controls 0.98)"."""
    rows = rows.set_index("edit")
    column, name, unit = ("exact_match", "exact match", "")
    if rows.loc["none", "exact_match"] < _SOLVED:
        column, name, unit = ("loss_nats", "loss", " nats")
    controls = rows.drop(index=["none", "feature"])[column].map("{:.2f}".format)
    span = sorted(set(controls), key=float)
    beside = f" (controls {' to '.join(dict.fromkeys((span[0], span[-1])))})" if span else ""
    return f"{feature}: {name} {rows.loc['none', column]:.3f} -> {rows.loc['feature', column]:.3f}{unit}{beside}"


def ablate_features(
    model: Any,
    task: SequenceTask | PromptTask,
    probes: Probes | ProbeSeries,
    controls: int = 32,
    how: How = "projection",
    *,
    features: str | Feature | Sequence[str | Feature] | None = None,
    layers: Layers = "probe",
    kinds: Sequence[Control] = CONTROLS,
    n: int = 1000,
    n_reference: int = 1000,
    batch_size: int | None = None,
    seed: int = 0,
    executor: Executor | None = None,
    workers: int | None = 0,
    progress: bool = True,
) -> Ablation:
    """Takes each feature's subspace out of the residual stream, and matched controls.

    The subspace is spanned by the rows of the feature's probe at each of its places, after the layer of the best probe
    there. All places are edited at once, each where it stands in the example at hand.

    Controls, at the same places and layers: "random", subspaces of the same rank; "matched_variance", subspaces of the
    same rank, orthogonal to the feature's, in which the removed component has the same mean square, each of them or as
    nearly as it can be had (see `matched_bases`; what is achieved stands in `.controls`); "shuffled_labels", the same
    procedure with the labels in random order; "other_features", each of the others that the probes hold.

    Args:
        model: of any supported kind, or a checkpoint.
        task: what the model does. One that brings no features, or a task of prompts, needs them in `features`; half of
            its prompts are measured on and the other half is the reference.
        probes: of this model, by `fit_probes` or `probe_series`: those of the checkpoint's step, or of the last step.
        controls: draws of each random kind.
        how: what becomes of the component in the subspace. "projection": it is removed, the subspace through the
            origin. "mean": its mean over reference rows takes its place. "hyperplane": it is put where the probe reads
            0, its decision boundary (random subspaces are put at the mean). "leace": the least change after which no
            linear probe beats its prior (arXiv 2306.03819), fitted on reference rows; the probes then only say where.
        features: names, or features; None for all that have probes.
        layers: "later" also edits after all later layers that were probed, each by its own probe.
        kinds: of controls.
        n: rows to measure on.
        n_reference: rows of another split, to which means, LEACE and the controls are fitted; give several times as
            many as the model is wide.
        batch_size: largest number of sequences run together; by default chosen from the model's width.
        seed: of rows, controls and bootstrap.
        executor: anything whose `submit(function, *arguments)` gives futures: the runs of the controls are divided
            among its workers, each of which opens the model once; losses then agree to float32's rounding, as batches
            are others. What is taken out is found here. A checkpoint is loaded by the workers themselves, another
            model is pickled.
        workers: processes of this machine in its place; 0 does all runs in this process, None takes one for each core.
        progress: whether to show a bar.

    Raises:
        ArgumentError: an unknown choice, a feature without probes or of another task, nothing to take out, both an
            executor and workers, or a model that cannot be sent to another process.
        ModelMismatchError: probes of a model of another shape.
        InterventionHasNoEffect: the model's residual stream cannot be edited, or no answer is read after the places
            of the features, so that nothing done there can change one. Where that is so for some of several features,
            `.about["unread"]` and the headline name them.
    """
    check_choice("how", how, get_args(How))
    check_choice("layers", layers, get_args(Layers))
    for kind in kinds:
        check_choice("kinds", kind, CONTROLS)
    controls = whole_number("controls", controls, least=0)
    n, n_reference = whole_number("n", n, least=1), whole_number("n_reference", n_reference, least=FEWEST_ROWS)
    probes = probes_of(model, probes)
    here = executor is None and workers == 0
    crew = None if here else Crew(SentModel.of(model, "the model", executor), executor, workers)
    name, known, model = model_name(model), marks_of(model), hooked(model)
    chosen = choose_probed_features(task, probes, features, model)
    measured = Measured.open(model, task, probes, chosen, layers, n=n, n_reference=n_reference, seed=seed)
    unread = unread_features(measured, "probes")
    others = _others(task, probes, features) if "other_features" in kinds else {}
    plans = []
    for feature, sites in measured.sites.items():
        reference = reference_at(feature, sites, measured.reference, measured.reference_resid)
        rest = {other: probes for other in others if other.name != feature.name}
        options: dict[str, Any] = {"how": how, "kinds": tuple(dict.fromkeys(kinds)), "controls": controls}
        own = _own_removals(measured, feature, reference, how)
        plans.append(plan(feature, sites, reference, own, rest, measured.reference, **options, seed=seed))
    found = _run(measured, plans, batch_size, progress, crew)
    about = {
        "model": name,
        "task": repr(task),
        "task_name": task.name,
        "features": [feature.name for feature in chosen],
        "layers": {
            feature.name: {f"place {site.place}": site.layer for site in sites if site.last}
            for feature, sites in measured.sites.items()
        },
        "edited_layers": layers,
        "how": how,
        "controls": controls,
        "n": len(measured.test),
        "n_reference": len(measured.reference),
        "left_out_places": measured.left_out,
        "unread": unread,
        "shortcut": measured.engine.shortcut,
        "seed": seed,
        "known_issues": known,
    }
    return _result(measured, plans, found, about, seed)


# ---- what is measured on ----


Residuals = Mapping[tuple[str, int, int], torch.Tensor]
"""The residual stream `[row, d_model]` by feature, place and layer; of rows without the place it means nothing."""


@dataclass(frozen=True, eq=False)
class Measured:
    """A model, rows to measure it on, and where its features are.

    Attributes:
        model, engine: the model.
        test, reference: rows to measure on, and others to fit on.
        sites: of each feature, with enough reference rows.
        left_out: by feature, the places that too few reference rows have.
    """

    model: HookedModel
    engine: ResidualEngine
    test: Examples
    reference: Examples
    sites: Mapping[Feature, Sequence[Site]]
    left_out: Mapping[str, list[int]]

    @classmethod
    def open(
        cls,
        model: HookedModel,
        task: SequenceTask | PromptTask,
        probes: Probes,
        features: Sequence[Feature],
        layers: Layers,
        *,
        n: int,
        n_reference: int,
        seed: int,
    ) -> "Measured":
        """Draws the rows and reads the features in them."""
        engine = model.residual_engine
        test, reference = draw_examples(task, model, n, n_reference, seed)
        sites: dict[Feature, list[Site]] = {}
        left_out: dict[str, list[int]] = {}
        for feature in features:
            every = sites_of(probes, feature.name, layers)
            check_fit(feature, test.values(feature), every)
            n_rows = (reference.values(feature).positions >= 0).sum(axis=0)
            sites[feature] = [site for site in every if n_rows[site.place] >= FEWEST_ROWS]
            if few := sorted({site.place for site in every if n_rows[site.place] < FEWEST_ROWS}):
                left_out[feature.name] = few
            if not sites[feature]:
                raise ArgumentError(
                    f"feature {feature.name!r}: no place of it is in {FEWEST_ROWS} of the {len(reference)} reference "
                    "rows; give more of them (n_reference, or prompts)"
                )
        return cls(model, engine, test, reference, sites, left_out)

    def test_traces(self) -> Iterator[tuple[slice, ResidualTrace]]:
        """Passes over the rows to measure on, in pieces, each up to the last position that matters."""
        return self._traces(self.test, self.test.last_reads, None)

    def reference_traces(self) -> Iterator[tuple[slice, ResidualTrace]]:
        """Passes over the reference rows, in pieces, up to the last layer and position of any feature."""
        yield from self._kept_traces or self._made_reference_traces()

    @cached_property
    def reference_resid(self) -> Residuals:
        """The residual stream of the reference rows at all sites."""
        return self.residuals(self.reference, self.reference_traces())

    def residuals(self, examples: Examples, traces: Iterable[tuple[slice, ResidualTrace]]) -> Residuals:
        """The residual stream at all sites, on the CPU."""
        found: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        for chunk, trace in traces:
            for feature, sites in self.sites.items():
                positions = torch.from_numpy(examples.values(feature).positions[chunk]).to(self.model.device)
                for site in sites:
                    here = trace.at(site.layer, positions[:, [site.place]])[:, 0]
                    found.setdefault((feature.name, site.place, site.layer), []).append(here.cpu())
        return {key: torch.cat(parts) for key, parts in found.items()}

    def like(self) -> torch.Tensor:
        """A tensor of the model's kind."""
        return torch.zeros(0, device=self.model.device, dtype=self.model.dtype)

    @cached_property
    def _kept_traces(self) -> list[tuple[slice, ResidualTrace]]:
        """Passes over the reference rows, where memory holds all of them."""
        numbers = self.reference.inputs.numel() * self.model.d_model * 3 * (self.model.n_layers + 1)
        return list(self._made_reference_traces()) if numbers <= _MOST_KEPT else []

    def _made_reference_traces(self) -> Iterator[tuple[slice, ResidualTrace]]:
        last = max(site.layer for of_feature in self.sites.values() for site in of_feature)
        return self._traces(self.reference, np.zeros(len(self.reference), dtype=int), last)

    def _traces(
        self, examples: Examples, ends: np.ndarray, up_to: int | None
    ) -> Iterator[tuple[slice, ResidualTrace]]:
        ends = self.ends(examples, ends)
        reads = examples.reads if up_to is None else examples.reads.nothing()
        return traces_of(self.engine, examples.inputs, reads, ends, up_to)

    def ends(self, examples: Examples, ends: np.ndarray) -> np.ndarray:
        """`ends` or the last place of any feature in each row, and one more: how far a pass has to go."""
        places = [examples.values(feature).positions for feature in self.sites]
        return 1 + np.maximum(ends, np.concatenate(places, axis=1).max(axis=1))


def probes_of(model: Any, probes: Probes | ProbeSeries) -> Probes:
    """The probes of a model, of those of a series: of a checkpoint's step, else of the last step."""
    if isinstance(probes, ProbeSeries):
        return probes[model.step] if isinstance(model, Checkpoint) else probes.last
    if not isinstance(probes, Probes):
        raise ArgumentError(f"probes is a {type(probes).__name__}; give what fit_probes or probe_series returned")
    return probes


def _others(
    task: Any, probes: Probes, features: str | Feature | Sequence[str | Feature] | None
) -> dict[Feature, Probes]:
    """Every feature that the probes hold and that can be read: the task's own, and the caller's."""
    given = [features] if isinstance(features, Feature) else [] if isinstance(features, str) else features or []
    known = {each.name: each for each in getattr(task, "features", ())}
    known |= {each.name: each for each in given if isinstance(each, Feature)}
    probed = dict.fromkeys(feature for feature, _, _ in probes.weights)
    return {known[name]: probes for name in probed if name in known}


# ---- what is taken out ----


def _own_removals(measured: Measured, feature: Feature, reference: Sequence[Reference], how: How) -> list[Removal]:
    """What takes the feature out at each site.

    LEACE goes layer by layer, each fitted with the layers below edited already (Belrose et al. 2023, section 5).
    """
    sites = measured.sites[feature]
    if how != "leace":
        return [
            probe_removal(how, site.probe.weights, site.probe.intercepts, at.moments)
            for site, at in zip(sites, reference, strict=True)
        ]
    found: list[Removal] = []
    for layer in sorted({site.layer for site in sites}):  # the order of the sites
        here = [number for number, site in enumerate(sites) if site.layer == layer]
        new = _with_layers_below_edited(measured, feature, found, here) if found else None
        for index, number in enumerate(here):
            at = reference[number]
            x = at.x if new is None else new[index, torch.from_numpy(at.rows)]
            found.append(erasure(x, at.labels[None], Moments.of(x)))
    return found


def _with_layers_below_edited(
    measured: Measured, feature: Feature, found: Sequence[Removal], here: Sequence[int]
) -> torch.Tensor:
    """The residual stream of the reference rows at these sites of one layer, `[site, row, d_model]`."""
    sites, like = measured.sites[feature], measured.like()
    positions = measured.reference.values(feature).positions
    nothing = found[0].unchanged()
    below = edits_of(found, sites[: len(found)], positions, like)
    edits = [*below, *edits_of([nothing] * len(here), [sites[number] for number in here], positions, like)]
    parts = []
    for chunk, trace in measured.reference_traces():
        seen = measured.engine.edited(trace, [of_rows(edit, chunk) for edit in edits])[-1]
        parts.append(seen[0].transpose(0, 1).cpu())
    return torch.cat(parts, dim=1)


# ---- runs ----


@dataclass(frozen=True, eq=False)
class _Found:
    """What the runs of one feature gave.

    Attributes:
        scores: of each of its kinds of runs.
        removed_norms: of each of them, per run.
        refits: without edit and with the feature taken out, at each place.
    """

    scores: Sequence[Scores]
    removed_norms: Sequence[np.ndarray]
    refits: tuple[list[Refitted], list[Refitted]]


def _run(
    measured: Measured, plans: Sequence[Ablated], batch_size: int | None, progress: bool, crew: Crew | None
) -> tuple[Scores, list[_Found]]:
    """The scores without edit, and what was found of each feature; controls are run by the crew, if there is one."""
    like = measured.like()
    edits = [
        [edits_of(runs.removals, of.sites, measured.test.values(of.feature).positions, like) for runs in of.runs]
        for of in plans
    ]
    plain: list[Answers] = []
    answers: list[list[list[Answers]]] = [[[] for _ in of.runs] for of in plans]
    test_resid: list[list[torch.Tensor]] = [[] for _ in plans]
    edited: list[list[torch.Tensor]] = [[] for _ in plans]
    if crew is not None:
        _by_crew(crew, measured, edits, answers, batch_size, progress)
    own = slice(None) if crew is None else slice(1)
    total = len(measured.test) * sum(len(runs.names) for of in plans for runs in of.runs[own])
    with tqdm(total=total, desc="runs x rows", leave=False, **notebook.bar(progress)) as bar:
        for chunk, trace in measured.test_traces():
            plain.append(trace.answers)
            for number, of in enumerate(plans):
                here = [[of_rows(edit, chunk) for edit in each] for each in edits[number]]
                for kind, of_kind in enumerate(here[own]):
                    answers[number][kind].append(measured.engine.answers(trace, of_kind, batch_size=batch_size))
                    bar.update(len(trace.tokens) * len(of.runs[kind].names))
                test_resid[number].append(_at_sites(trace, here[0]))
                edited[number].append(_edited(measured.engine, trace, here[0]))
    reference_edited = _edited_reference(measured, plans, like)
    found = []
    for number, of in enumerate(plans):
        x, new = torch.cat(test_resid[number], dim=1), torch.cat(edited[number], dim=1)
        norms = [_removed_norms(of, runs, measured.test, x) for runs in of.runs]
        refits = _refits(measured, of, x, new, reference_edited[number])
        found.append(_Found([Scores.of(parts, measured.test) for parts in answers[number]], norms, refits))
    return Scores.of(plain, measured.test), found


def _by_crew(
    crew: Crew,
    measured: Measured,
    edits: Sequence[Sequence[Sequence[Edit]]],
    answers: Sequence[Sequence[list[Answers]]],
    batch_size: int | None,
    progress: bool,
) -> None:
    """Adds the answers of all kinds of controls to those of each feature."""
    examples = measured.test
    kinds = [(number, kind) for number, of in enumerate(edits) for kind in range(1, len(of))]
    found = crew.answers(
        examples.inputs,
        examples.reads,
        measured.ends(examples, examples.last_reads),
        [edits[number][kind] for number, kind in kinds],
        batch_size=batch_size,
        progress=progress,
    )
    for (number, kind), of_kind in zip(kinds, found, strict=True):
        answers[number][kind].append(of_kind)


def unread_features(measured: "Measured", readers: str) -> list[str]:
    """Features that stand only where no answer reads an edit, so that none can change an answer.

    After the last block a position is read by its own prediction alone; below, by those of later positions too.

    Args:
        measured: the features' sites, and the examples.
        readers: what the sites come from, for the message.

    Raises:
        InterventionHasNoEffect: so it is for all of them.
    """
    reads, last = measured.test.reads.positions.numpy()[:, None], measured.model.n_layers - 1
    unread: list[str] = []
    for feature, sites in measured.sites.items():
        at = measured.test.values(feature).positions[:, [site.place for site in sites], None]
        is_last = np.array([site.layer == last for site in sites])[None, :, None]
        if not ((at >= 0) & np.where(is_last, reads == at, reads >= at)).any():
            unread.append(feature.name)
    if len(unread) == len(measured.sites):
        layers = listed(sorted({site.layer for sites in measured.sites.values() for site in sites}))
        raise InterventionHasNoEffect(
            f"no edit at the places of {', '.join(unread)} after layer {layers} can change an answer: nothing that is "
            f"read comes after them. Take {readers} of a layer below, or a feature at the tokens where the answer is "
            "predicted"
        )
    return unread


def _at_sites(trace: ResidualTrace, edits: Sequence[Edit]) -> torch.Tensor:
    """The plain residual stream at the sites, `[site, row, d_model]`, on the CPU."""
    return torch.cat([trace.at(edit.layer, edit.positions) for edit in edits], dim=1).transpose(0, 1).cpu()


def _edited(engine: ResidualEngine, trace: ResidualTrace, edits: Sequence[Edit]) -> torch.Tensor:
    """The same right after each edit."""
    if len(edits) == 1:  # nothing comes before it
        new = [edits[0].new_values(trace.at(edits[0].layer, edits[0].positions)[None])]
    else:
        new = engine.edited(trace, edits)
    return torch.cat([each[0] for each in new], dim=1).transpose(0, 1).cpu()


def _edited_reference(measured: Measured, plans: Sequence[Ablated], like: torch.Tensor) -> list[torch.Tensor]:
    """The residual stream of the reference rows right after each edit of the feature, `[site, row, d_model]`."""
    positions = [measured.reference.values(of.feature).positions for of in plans]
    edits = [edits_of(of.runs[0].removals, of.sites, at, like) for of, at in zip(plans, positions, strict=True)]
    found: list[list[torch.Tensor]] = [[] for _ in plans]
    alone = [len(each) == 1 for each in edits]
    for number, of in enumerate(plans):
        if alone[number]:
            at_sites = [measured.reference_resid[of.feature.name, site.place, site.layer] for site in of.sites]
            x = torch.stack(at_sites, dim=1).to(like)
            found[number].append(edits[number][0].new_values(x[None])[0].transpose(0, 1).cpu())
    if not all(alone):
        for chunk, trace in measured.reference_traces():
            for number, each in enumerate(edits):
                if not alone[number]:
                    here = [of_rows(edit, chunk) for edit in each]
                    found[number].append(_edited(measured.engine, trace, here))
    return [torch.cat(parts, dim=1) for parts in found]


# ---- numbers ----


def _removed_norms(of: Ablated, runs: Runs, examples: Examples, x: torch.Tensor) -> np.ndarray:
    """Mean over rows and sites of |change| / |residual stream|, of each run."""
    positions = examples.values(of.feature).positions
    total, count = torch.zeros(len(runs.names), dtype=torch.float64), 0
    for site, removal, here in zip(of.sites, runs.removals, x, strict=True):
        rows = torch.from_numpy(np.flatnonzero(positions[:, site.place] >= 0))
        if len(rows):
            total += removal.relative_size(here[rows]) * len(rows)
            count += len(rows)
    return (total / max(count, 1)).numpy()


def _refits(
    measured: Measured, of: Ablated, x: torch.Tensor, new: torch.Tensor, reference_new: torch.Tensor
) -> tuple[list[Refitted], list[Refitted]]:
    """Fresh probes after the last edited layer of each place, without edit and with the feature taken out."""
    test = measured.test.values(of.feature)
    plain: list[Refitted] = []
    edited: list[Refitted] = []
    for number, (site, at) in enumerate(zip(of.sites, of.reference, strict=True)):
        if not site.last:
            continue
        rows = np.flatnonzero(test.positions[:, site.place] >= 0)
        test_labels, row = test.labels[rows, site.place], torch.from_numpy(rows)
        labels = at.labels.numpy()
        for found, fit_x, test_x in (
            (plain, at.x, x[number, row]),
            (edited, reference_new[number, torch.from_numpy(at.rows)], new[number, row]),
        ):
            if (fitted := refit(of.feature.kind, fit_x, labels, test_x, test_labels)) is not None:
                found.append(fitted)
    return plain, edited


def _result(
    measured: Measured,
    plans: Sequence[Ablated],
    found: tuple[Scores, list[_Found]],
    about: Mapping[str, Any],
    seed: int,
) -> Ablation:
    plain, by_feature = found
    table, controls = [], []
    exact: dict[tuple[str, str], np.ndarray] = {}
    loss: dict[tuple[str, str], np.ndarray] = {}
    for of, results in zip(plans, by_feature, strict=True):
        name = of.feature.name
        own, *others = compared_rows(plain, results.scores, seed)
        unedited = {"rank": 0.0, "removed_norm": 0.0, "removed_variance": 0.0, **_means(results.refits[0])}
        table.append({"feature": name, "edit": "none", **others[0], **unedited})
        for index, (runs, scores, norms) in enumerate(
            zip(of.runs, results.scores, results.removed_norms, strict=True)
        ):
            ranks, shares = of.ranks(runs), of.variance_shares(runs)
            row = own if index == 0 else others[index]
            sizes = {"rank": ranks.mean(), "removed_norm": norms.mean(), "removed_variance": shares.mean()}
            table.append({"feature": name, "edit": runs.kind, **row, **sizes})
            exact[name, runs.kind], loss[name, runs.kind] = scores.exact, scores.loss
            if index:
                controls.append(
                    pd.DataFrame(
                        {
                            "feature": name,
                            "edit": runs.kind,
                            "run": np.arange(len(runs.names)),
                            "name": runs.names,
                            "rank": ranks,
                            "exact_match": scores.exact.mean(axis=1),
                            "loss_nats": scores.loss.mean(axis=1),
                            "removed_norm": norms,
                            "removed_variance": shares,
                            "overlap": of.overlaps(runs),
                            "same_position": runs.same_position,
                        }
                    )
                )
            else:
                table[-1] |= _means(results.refits[1])
        exact[name, "none"], loss[name, "none"] = plain.exact, plain.loss
    columns = ["feature", "edit", "run", "name", "rank", "exact_match", "loss_nats", "removed_norm"]
    empty = pd.DataFrame(columns=[*columns, "removed_variance", "overlap", "same_position"])
    return Ablation(
        pd.DataFrame(table).reindex(columns=_COLUMNS),
        pd.concat(controls, ignore_index=True) if controls else empty,
        exact=exact,
        loss=loss,
        about=about,
    )


_COLUMNS = [
    "feature", "edit", "n_runs", "rank",
    "exact_match", "exact_match_low", "exact_match_high", "exact_match_runs_low", "exact_match_runs_high",
    "loss_nats", "loss_low", "loss_high", "loss_runs_low", "loss_runs_high",
    "removed_norm", "removed_variance",
    "p_value", "p_value_runs", "loss_p_value", "loss_p_value_runs",
    "refit_loss", "refit_accuracy", "prior_loss", "prior_accuracy",
]  # fmt: skip


def compared_rows(plain: Scores, scores: Sequence[Scores], seed: int) -> list[dict[str, Any]]:
    """Rows of the table: of the first of `scores`, of no edit, and of the others, these compared with the first."""
    own, others = compared(scores[0], [plain, *scores[1:]], seed=seed)
    return [own, *others]


def _means(refits: Sequence[Refitted]) -> dict[str, float]:
    """Means over places."""
    names = {"refit_loss": "loss", "refit_accuracy": "accuracy"}
    names |= {"prior_loss": "prior_loss", "prior_accuracy": "prior_accuracy"}
    if not refits:
        return dict.fromkeys(names, float("nan"))
    return {column: float(np.mean([getattr(each, name) for each in refits])) for column, name in names.items()}


# ---- along a series ----


@dataclass(frozen=True, repr=False, eq=False)
class AblationSeries(Result):
    """What the checkpoints of a series lose with a feature taken out.

    Attributes:
        table: as that of `Ablation`, with the column `step` before and `known_issue` (of the published weights) last.
        by_step: the ablation of each step, ascending.
        problems: steps passed over, with the reason.
    """

    by_step: Mapping[int, Ablation]
    problems: Mapping[int, str] = field(default_factory=dict, kw_only=True)

    def headline(self) -> str:
        last = self.by_step[max(self.by_step)]
        said = "; ".join(_said(*of_feature) for of_feature in last.table.groupby("feature", sort=False))
        return (
            f"AblationSeries ({self.about['how']}) of {self.about['series']}, {len(self.by_step)} checkpoint(s); at "
            f"step {max(self.by_step)}: {said}"
        )

    def shown(self) -> pd.DataFrame:
        columns = ["step", "feature", "edit", "exact_match", "loss_nats", "loss_p_value", "known_issue"]
        return without_empty_marks(self.table.loc[:, columns])

    def plot(self) -> "Figure":
        """Loss and exact match over the steps, without edit, with each feature taken out, and with the controls."""
        from emergent_heads.plots import ablation as ablation_plots

        return ablation_plots.ablation_series(self.table)


def ablation_series(
    series: CheckpointSeries,
    task: SequenceTask | PromptTask,
    probes: ProbeSeries,
    *,
    steps: Sequence[int] | None = None,
    executor: Executor | None = None,
    workers: int | None = 0,
    **options: Any,
) -> AblationSeries:
    """Takes features out of the checkpoints of a series, each by its own probes: are they used before the loss moves?

    While nothing is solved exact match is 0 whatever is taken out; the loss tells.

    Args:
        series: the checkpoints.
        task: as in `ablate_features`.
        probes: by `probe_series`.
        steps: which; None for all that were probed.
        executor: anything whose `submit(function, *arguments)` gives futures: each checkpoint is a job. What comes out
            is the same.
        workers: processes of this machine in its place; 0 does it in this process, None takes one for each core.
        options: of `ablate_features`.

    Raises:
        ArgumentError: a step that was not probed, what `ablate_features` refuses, both an executor and workers, or
            something that cannot be sent to another process.
    """
    if not isinstance(probes, ProbeSeries):
        raise ArgumentError(f"probes is a {type(probes).__name__}; give what probe_series returned")
    by_step: dict[int, Ablation] = {}
    problems: dict[int, str] = {}
    of_steps = {step: probes[step] for step in (probes.steps if steps is None else sorted(set(steps)))}
    for step, outcome in _ablated(series, task, of_steps, options, executor, workers):
        if isinstance(outcome, Ablation):
            by_step[step] = outcome
        else:
            problems[step] = outcome
    by_step, problems = dict(sorted(by_step.items())), dict(sorted(problems.items()))
    if not by_step:
        said = "; ".join(problems.values()) or "steps is empty"
        raise ArgumentError(f"no checkpoint of {series.name} could be used: {said}")
    table = pd.concat([each.table.assign(step=step) for step, each in by_step.items()], ignore_index=True)
    table.insert(0, "step", table.pop("step"))
    first = next(iter(by_step.values()))
    known = {name: mark for each in by_step.values() for name, mark in each.about["known_issues"].items()}
    about = {**first.about, "series": series.name, "steps": list(by_step), "problems": problems, "known_issues": known}
    return AblationSeries(mark_steps(table, series.repository), by_step, problems=problems, about=about)


def _ablated(
    series: CheckpointSeries,
    task: SequenceTask | PromptTask,
    probes: Mapping[int, Probes],
    options: Mapping[str, Any],
    executor: Executor | None,
    workers: int | None,
) -> Iterator[tuple[int, Ablation | str]]:
    """The ablation of each step, or why its checkpoint cannot be used, in whatever order."""
    if executor is None and workers == 0:
        for step, of_step in probes.items():
            yield step, _ablate_step(series, step, task, of_step, options)
        return
    check_series_travel(executor, [series])
    check_task_travels(executor, task, {"features": options.get("features")})
    jobs = {
        Job(f"step {step}", _ablate_in_worker, (series, step, task, of_step, {**options, "progress": False})): step
        for step, of_step in probes.items()
    }
    how: dict[str, Any] = {"workers": workers, "modules": modules_of([series], [task])}
    progress = options.get("progress", True)
    for job, (outcome, learned) in values(
        run_jobs(jobs, executor, title="ablations", unit="checkpoint", progress=progress, **how)
    ):
        series.learn(learned)
        yield jobs[job], outcome


def _ablate_in_worker(
    series: CheckpointSeries,
    step: int,
    task: SequenceTask | PromptTask,
    probes: Probes,
    options: Mapping[str, Any],
) -> tuple[Ablation | str, Learned]:
    """The job of a checkpoint."""
    series = series.in_worker()
    return _ablate_step(series, step, task, probes, options), series.learned()


def _ablate_step(
    series: CheckpointSeries,
    step: int,
    task: SequenceTask | PromptTask,
    probes: Probes,
    options: Mapping[str, Any],
) -> Ablation | str:
    try:
        checkpoint = series[step]
        hooked(checkpoint)
    except EmergentHeadsError as error:
        return str(error)
    return ablate_features(checkpoint, task, probes, **options)
