"""Are the latents that carry a feature used? What they write is subtracted, next to the ablation of the probe.

The probe's ablation takes a direction out of the residual stream; this one takes out what the autoencoder says that
some latents put there, row by row: x - sum_j amount_j(x) * W_dec[j]. Where a latent is not active, nothing changes.
Everything else is that of `ablate_features`: the same rows, the same places, the same scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.ablation import (
    CONTROLS,
    Ablation,
    Measured,
    ablate_features,
    compared_rows,
    probes_of,
)
from emergent_heads.analysis.ablation_controls import FEWEST_ROWS, Control
from emergent_heads.analysis.ablation_examples import Examples, Site, choose_probed_features
from emergent_heads.analysis.ablation_scores import Scores, refit
from emergent_heads.analysis.patching import check_choice
from emergent_heads.analysis.probes import Probes, ProbeSeries
from emergent_heads.analysis.subspaces import How
from emergent_heads.errors import ArgumentError, InterventionHasNoEffect, whole_number
from emergent_heads.models.hooked import Answers, hooked
from emergent_heads.models.residual_engine import Edit
from emergent_heads.randomness import numpy_generator
from emergent_heads.sae.autoencoder import SparseAutoencoder, latent_names
from emergent_heads.sae.comparison import LatentComparison, layer_for
from emergent_heads.tasks.features import Feature
from emergent_heads.tasks.task import PromptTask, SequenceTask

LatentControl = Literal["turned_latents", "matched_latents", "other_latents"]
_NEAREST = 8
"""Of how many latents, the nearest in mean square, a matched one is drawn."""
LATENT_CONTROLS: tuple[LatentControl, ...] = get_args(LatentControl)
Latents = LatentComparison | Mapping[str, int | Sequence[int] | Mapping[int, int | Sequence[int]]]


@dataclass(frozen=True, repr=False, eq=False)
class LatentAblation(Ablation):
    """What a model loses with latents subtracted, and with the probe's subspace taken out at the same places.

    Attributes:
        table: the rows of `Ablation.table` for the probes at the autoencoder's layer ("none", "feature" and its
            controls), and for each feature the rows "latents" and its controls "turned_latents", "matched_latents",
            "other_latents" (see `ablate_latents`) with the same columns. The p-values of the controls of latents are
            of the difference to "latents", and those of "latents" of the difference to no edit.
        controls: the same for single runs; `name` lists the latents of a run, by place where they differ.
        latents: by feature and place, what was subtracted.
    """

    latents: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict, kw_only=True)

    def headline(self) -> str:
        said = []
        for feature, rows in self.table.groupby("feature", sort=False):
            of = rows.set_index("edit")["exact_match"]
            beside = of.reindex(LATENT_CONTROLS).dropna()
            controls = f" (controls {beside.min():.2f} to {beside.max():.2f})" if len(beside) else ""
            said.append(
                f"{feature}: exact match {of['none']:.3f} -> {of['latents']:.3f} without latents{controls}, "
                f"{of['feature']:.3f} without the probe's subspace"
            )
        about = self.about
        where = f"{about['model']}, {about['n']} rows of {about['task_name']}"
        return f"LatentAblation of {where}: {'; '.join(said)}{self.caution}"


def ablate_latents(
    model: Any,
    task: SequenceTask | PromptTask,
    probes: Probes | ProbeSeries,
    latents: Latents,
    sae: SparseAutoencoder,
    controls: int = 32,
    how: How = "projection",
    *,
    features: str | Feature | Sequence[str | Feature] | None = None,
    n_latents: int = 1,
    kinds: Sequence[LatentControl] = LATENT_CONTROLS,
    probe_kinds: Sequence[Control] = CONTROLS,
    n: int = 1000,
    n_reference: int = 1000,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> LatentAblation:
    """Subtracts what latents write at a feature's places, and takes the probe's subspace out there for comparison.

    Controls of the latents, at the same places: "turned_latents", the same amounts on every row, written along other
    directions (the span of the decoder rows turned at random, lengths and angles kept); "matched_latents", as many
    other latents, for each one of those whose contribution is nearest in mean square on the reference rows;
    "other_latents", as many drawn from all others that are active there.

    Args:
        model: of any supported kind, or a checkpoint.
        task: what the model does; one that brings no features needs them in `features`.
        probes: of this model; those at the autoencoder's layer are used.
        latents: what to subtract: the result of `compare_features` (the best latents of each place), or by feature a
            latent, several, or such by place.
        sae: the autoencoder whose latents these are.
        controls: draws of each random kind, for latents and probes.
        how: what becomes of the component in the probe's subspace, as in `ablate_features`.
        features: names, or features; None for all that `latents` holds.
        n_latents: how many of the best latents of each component and place, where `latents` is a comparison.
        kinds: of controls of the latents.
        probe_kinds: of controls of the probe.
        n, n_reference, batch_size, seed, progress: as in `ablate_features`.

    Raises:
        ArgumentError: an unknown choice, a latent that does not exist, or what `ablate_features` refuses.
        InterventionHasNoEffect: none of the latents is active where the feature stands, so nothing is subtracted; or
            no answer is read after these places, so that nothing could change.
        ModelMismatchError: probes or autoencoder of a model of another shape.
    """
    for kind in kinds:
        check_choice("kinds", kind, LATENT_CONTROLS)
    controls = whole_number("controls", controls, least=0)
    the_model, probes = hooked(model), probes_of(model, probes)
    probes = probes.at_layers([layer_for(sae, the_model, probes)])
    wanted = _checked(latents, sae, n_latents)
    chosen = choose_probed_features(task, probes, list(wanted) if features is None else features, the_model)
    if missing := [feature.name for feature in chosen if feature.name not in wanted]:
        raise ArgumentError(f"no latents are given for feature {missing[0]!r}; there are some for {', '.join(wanted)}")
    options: dict[str, Any] = {"n": n, "n_reference": n_reference, "seed": seed}
    of_probes = ablate_features(
        model, task, probes, controls, how, features=chosen, kinds=probe_kinds, batch_size=batch_size,
        progress=progress, **options,
    )  # fmt: skip
    measured = Measured.open(the_model, task, probes, chosen, "probe", **options)
    plans = []
    for feature, sites in measured.sites.items():
        plans.append(_Plan.of(feature, sites, wanted[feature.name], measured, sae, kinds, controls, seed))
    plain, by_plan = _run(measured, plans, sae, batch_size, progress)
    return _result(of_probes, plans, plain, by_plan, measured, sae, seed)


def _checked(latents: Latents, sae: SparseAutoencoder, n_latents: int) -> dict[str, dict[int | None, tuple[int, ...]]]:
    """By feature and place; by None where they are the same at all places."""
    found: dict[str, dict[int | None, tuple[int, ...]]] = {}
    if isinstance(latents, LatentComparison):
        n_latents = whole_number("n_latents", n_latents, least=1)
        found = {name: {**latents.latents_of(name, n_latents)} for name in latents.about["features"]}
    elif isinstance(latents, Mapping):
        for name, given in latents.items():
            by_place = given if isinstance(given, Mapping) else {None: given}
            found[name] = {place: _numbers(name, some) for place, some in by_place.items()}
    else:
        raise ArgumentError(
            f"latents is a {type(latents).__name__}; give what compare_features returned, or latents by feature"
        )
    for name, by_place in found.items():
        for latent in {latent for some in by_place.values() for latent in some}:
            if not 0 <= latent < sae.d_sae:
                raise ArgumentError(f"latent {latent} of {name!r}: the autoencoder has latents 0 to {sae.d_sae - 1}")
    return found


def _numbers(name: str, given: int | Sequence[int]) -> tuple[int, ...]:
    some = [given] if isinstance(given, (int, np.integer)) else list(given)
    if not some:
        raise ArgumentError(f"no latents are given for {name!r}")
    return tuple(dict.fromkeys(whole_number(f"a latent of {name!r}", each, least=0) for each in some))


# ---- what is subtracted ----


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of one kind.

    Attributes:
        kind: "latents", or a kind of control.
        latents: `[run, place, rank]`, -1 where a place has fewer.
        write: `[run, place, d, rank]`, along what their amounts are subtracted; zero for -1.
    """

    kind: str
    latents: Int[Tensor, "run place rank"]
    write: Float[Tensor, "run place d rank"]

    @classmethod
    def of(cls, kind: str, latents: Int[Tensor, "run place rank"], sae: SparseAutoencoder) -> "_Runs":
        rows = sae.W_dec.cpu()[latents.clamp_min(0)] * (latents >= 0)[..., None]
        return cls(kind, latents, rows.mT.contiguous())

    def edit(
        self, layer: int, positions: Int[Tensor, "row place"], amounts: Float[Tensor, "row place kept"], kept: Tensor
    ) -> Edit:
        """x - write @ amounts, as an edit that reads nothing; `kept` lists the latents of `amounts`, ascending."""
        of_run = torch.searchsorted(kept, self.latents.clamp_min(kept[0]))  # [run, place, rank]
        found = [amounts[:, place, of_run[:, place]].transpose(0, 1) for place in range(of_run.shape[1])]
        write = self.write.to(amounts)
        return Edit(layer, positions, torch.zeros_like(write), write, -torch.stack(found, dim=2))

    def changes(self, x: Float[Tensor, "row d"], place: int, sae: SparseAutoencoder) -> Float[Tensor, "run row d"]:
        """What is subtracted from rows at one place."""
        amounts = sae.amounts(x).cpu()[:, self.latents[:, place].clamp_min(0)].transpose(0, 1)
        return amounts.double() @ self.write[:, place].mT.double()

    def names(self) -> tuple[str, ...]:
        return tuple(_name(of_run.tolist()) for of_run in self.latents)

    def ranks(self) -> Float[np.ndarray, " run"]:
        return (self.latents >= 0).double().sum(2).mean(1).numpy()

    def overlaps(self, own: "_Runs") -> Float[np.ndarray, " run"]:
        """Mean over places of the share of the own span that lies in each run's."""
        ours, theirs = _spans(self.write), _spans(own.write)
        shared = (ours.mT @ theirs).square().sum((2, 3)) / theirs.square().sum((2, 3)).clamp_min(1)
        return shared.mean(1).numpy()


def _name(by_place: Sequence[Sequence[int]]) -> str:
    said = [latent_names([latent for latent in latents if latent >= 0]) for latents in by_place]
    return said[0] if len(set(said)) == 1 else "; ".join(said)


def _spans(write: Float[Tensor, "run place d rank"]) -> Float[Tensor, "run place d rank"]:
    """Orthonormal bases, zero columns beyond the rank."""
    span, sizes, _ = torch.linalg.svd(write.double(), full_matrices=False)
    return span * (sizes > 1e-6 * sizes[..., :1].clamp_min(1e-30))[..., None, :]


@dataclass(frozen=True, eq=False)
class _Plan:
    """One feature to be taken out.

    Attributes:
        feature: it.
        sites: where.
        runs: what is subtracted in every run, the own latents first.
        reference: at each site the residual stream of the reference rows that have the place, and which rows they are.
    """

    feature: Feature
    sites: Sequence[Site]
    runs: Sequence[_Runs]
    reference: Sequence[tuple[Float[Tensor, "row d"], Int[np.ndarray, " row"]]]

    def said(self) -> dict[int, tuple[int, ...]]:
        """The own latents by place."""
        rows = self.runs[0].latents[0].tolist()
        return {
            site.place: tuple(latent for latent in latents if latent >= 0)
            for site, latents in zip(self.sites, rows, strict=True)
        }

    @cached_property
    def kept(self) -> Int[Tensor, " kept"]:
        """All latents of any run, ascending."""
        latents = torch.cat([runs.latents.flatten() for runs in self.runs])
        return latents[latents >= 0].unique()

    @classmethod
    def of(
        cls,
        feature: Feature,
        sites: Sequence[Site],
        wanted: Mapping[int | None, tuple[int, ...]],
        measured: Measured,
        sae: SparseAutoencoder,
        kinds: Sequence[LatentControl],
        controls: int,
        seed: int,
    ) -> "_Plan":
        sites = [site for site in sites if site.place in wanted or None in wanted]
        if not sites:
            raise ArgumentError(
                f"latents are given for other places of {feature.name!r} than those that were probed and are in "
                f"{FEWEST_ROWS} reference rows"
            )
        own = [wanted.get(site.place, wanted.get(None, ())) for site in sites]
        reference = [_reference(measured, feature, site) for site in sites]
        runs = [_Runs.of("latents", _padded([own]), sae)]
        pools = [_Pool.of(x, latents, sae) for (x, _), latents in zip(reference, own, strict=True)]
        for kind in dict.fromkeys(kinds) if controls else ():
            generator = numpy_generator(seed, kind, feature.name)
            if kind == "turned_latents":
                same = runs[0].latents.repeat(controls, 1, 1)
                runs.append(_Runs(kind, same, _turned(runs[0].write[0], controls, generator)))
            elif all(pool.others for pool in pools):
                matched = kind == "matched_latents"
                drawn = [[pool.draw(generator, matched=matched) for pool in pools] for _ in range(controls)]
                runs.append(_Runs.of(kind, _padded(drawn), sae))
        return cls(feature, sites, runs, reference)


def _reference(measured: Measured, feature: Feature, site: Site) -> tuple[Tensor, Int[np.ndarray, " row"]]:
    rows = np.flatnonzero(measured.reference.values(feature).positions[:, site.place] >= 0)
    x = measured.reference_resid[feature.name, site.place, site.layer]
    return x[torch.from_numpy(rows)], rows


@dataclass(frozen=True, eq=False)
class _Pool:
    """The other latents that are active at one place, and how near each is to the own ones in mean square."""

    own: tuple[int, ...]
    others: tuple[int, ...]
    log_squares: Float[np.ndarray, " latent"]

    @classmethod
    def of(cls, x: Float[Tensor, "row d"], own: tuple[int, ...], sae: SparseAutoencoder) -> "_Pool":
        amounts = sae.amounts(x).double().cpu()
        squares = (amounts.square().mean(0) * sae.W_dec.cpu().double().square().sum(1)).numpy()
        others = tuple(int(latent) for latent in np.flatnonzero(squares > 0) if latent not in own)
        return cls(own, others, np.log(np.maximum(squares, 1e-300)))

    def draw(self, generator: np.random.Generator, *, matched: bool) -> tuple[int, ...]:
        """As many others, each once while there are enough; of the nearest ones where they are to match."""
        found: list[int] = []
        for latent in self.own:
            left = [other for other in self.others if other not in found] or list(self.others)
            if matched:
                left.sort(key=lambda other: abs(self.log_squares[other] - self.log_squares[latent]))
                left = left[:_NEAREST]
            found.append(left[int(generator.integers(len(left)))])
        return tuple(found)


def _padded(runs: Sequence[Sequence[tuple[int, ...]]]) -> Int[Tensor, "run place rank"]:
    rank = max(len(latents) for of_run in runs for latents in of_run)
    return torch.tensor([[[*latents, *[-1] * (rank - len(latents))] for latents in of_run] for of_run in runs])


def _turned(
    write: Float[Tensor, "place d rank"], n: int, generator: np.random.Generator
) -> Float[Tensor, "run place d rank"]:
    """The same columns turned at random: their lengths and angles stay as they are, so each row's change its size."""
    _, factor = torch.linalg.qr(write.double())
    drawn = torch.from_numpy(generator.standard_normal((n, *write.shape)))
    return (torch.linalg.qr(drawn).Q @ factor).to(write)


# ---- runs ----


@dataclass(frozen=True, eq=False)
class _Found:
    """What the runs of one plan gave: scores of each kind, and the residual stream at its sites in the test rows."""

    scores: Sequence[Scores]
    x: Float[Tensor, "row place d"]


def _run(
    measured: Measured, plans: Sequence[_Plan], sae: SparseAutoencoder, batch_size: int | None, progress: bool
) -> tuple[Scores, list[_Found]]:
    plain: list[Answers] = []
    answers: list[list[list[Answers]]] = [[[] for _ in plan.runs] for plan in plans]
    seen: list[list[Tensor]] = [[] for _ in plans]
    total = len(measured.test) * sum(len(runs.latents) for plan in plans for runs in plan.runs)
    with tqdm(total=total, desc="runs x rows", leave=False, **notebook.bar(progress)) as bar:
        for chunk, trace in measured.test_traces():
            plain.append(trace.answers)
            for number, plan in enumerate(plans):
                layer = plan.sites[0].layer
                at = torch.from_numpy(measured.test.values(plan.feature).positions[chunk])
                at = at[:, [site.place for site in plan.sites]].to(trace.tokens.device)
                x = trace.at(layer, at)
                seen[number].append(x.cpu())
                amounts = torch.stack([sae.amounts(of_place)[:, plan.kept] for of_place in x.unbind(1)], dim=1).to(x)
                for kind, runs in enumerate(plan.runs):
                    edit = runs.edit(layer, at, amounts, plan.kept)
                    answers[number][kind].append(measured.engine.answers(trace, [edit], batch_size=batch_size))
                    bar.update(len(x) * len(runs.latents))
    found = []
    for number, plan in enumerate(plans):
        x = torch.cat(seen[number])
        _check_active(plan, x, measured.test, sae)
        found.append(_Found([Scores.of(parts, measured.test) for parts in answers[number]], x))
    return Scores.of(plain, measured.test), found


def _check_active(plan: _Plan, x: Tensor, examples: Examples, sae: SparseAutoencoder) -> None:
    positions = examples.values(plan.feature).positions
    for index, site in enumerate(plan.sites):
        rows = torch.from_numpy(np.flatnonzero(positions[:, site.place] >= 0))
        if len(rows) and plan.runs[0].changes(x[rows, index], index, sae).any():
            return
    raise InterventionHasNoEffect(
        f"latents {plan.runs[0].names()[0]} are not active at any place of {plan.feature.name!r} in the "
        f"{len(examples)} rows, so nothing is subtracted; choose latents that carry it, by compare_features"
    )


# ---- numbers ----


def _result(
    of_probes: Ablation,
    plans: Sequence[_Plan],
    plain: Scores,
    by_plan: Sequence[_Found],
    measured: Measured,
    sae: SparseAutoencoder,
    seed: int,
) -> LatentAblation:
    table, controls = [of_probes.table], [of_probes.controls]
    exact, loss = dict(of_probes.exact), dict(of_probes.loss)
    for plan, found in zip(plans, by_plan, strict=True):
        name = plan.feature.name
        own, unedited, *others = compared_rows(plain, found.scores, seed)
        own |= {column: unedited[column] for column in ("p_value", "loss_p_value")}
        own |= _refitted(plan, found.x, measured, sae)
        rows = []
        for runs, scores, row in zip(plan.runs, found.scores, (own, *others), strict=True):
            norms, shares = _sizes(plan, runs, found.x, measured, sae)
            sizes = {"rank": runs.ranks(), "removed_norm": norms, "removed_variance": shares}
            rows.append(
                {"feature": name, "edit": runs.kind, **row, **{size: values.mean() for size, values in sizes.items()}}
            )
            exact[name, runs.kind], loss[name, runs.kind] = scores.exact, scores.loss
            if runs.kind != "latents":
                of_runs = {"feature": name, "edit": runs.kind, "run": np.arange(len(runs.latents))}
                of_runs |= {"name": runs.names(), **sizes, "overlap": runs.overlaps(plan.runs[0])}
                of_runs |= {"exact_match": scores.exact.mean(axis=1), "loss_nats": scores.loss.mean(axis=1)}
                controls.append(pd.DataFrame(of_runs).reindex(columns=of_probes.controls.columns))
        table.append(pd.DataFrame(rows).reindex(columns=of_probes.table.columns))
    order = {plan.feature.name: number for number, plan in enumerate(plans)}
    joined = pd.concat([part for part in table if len(part)], ignore_index=True)
    joined = joined.sort_values("feature", key=lambda names: names.map(order), kind="stable").reset_index(drop=True)
    said = {plan.feature.name: plan.said() for plan in plans}
    about = {**of_probes.about, "autoencoder": repr(sae), "latents": said, "layer": sae.layer}
    return LatentAblation(
        joined,
        pd.concat([part for part in controls if len(part)] or controls[:1], ignore_index=True),
        exact=exact,
        loss=loss,
        latents=said,
        about=about,
    )


def _sizes(
    plan: _Plan, runs: _Runs, x: Tensor, measured: Measured, sae: SparseAutoencoder
) -> tuple[Float[np.ndarray, " run"], Float[np.ndarray, " run"]]:
    """Of each run, the mean of |change| / |residual stream| over test rows and places, and mean share of variance."""
    positions = measured.test.values(plan.feature).positions
    norms, shares, count = torch.zeros(len(runs.latents), dtype=torch.float64), [], 0
    for index, (site, (reference, _)) in enumerate(zip(plan.sites, plan.reference, strict=True)):
        rows = torch.from_numpy(np.flatnonzero(positions[:, site.place] >= 0))
        here = x[rows, index]
        norms += (runs.changes(here, index, sae).norm(dim=2) / here.double().norm(dim=1).clamp_min(1e-30)).sum(1)
        count += len(rows)
        left = reference.double() - runs.changes(reference, index, sae)
        shares.append(1 - left.var(1, correction=0).sum(1) / reference.double().var(0, correction=0).sum())
    return (norms / max(count, 1)).numpy(), torch.stack(shares).mean(0).numpy()


def _refitted(plan: _Plan, x: Tensor, measured: Measured, sae: SparseAutoencoder) -> dict[str, float]:
    """How well a fresh probe reads the feature with the latents subtracted; means over places."""
    test, reference = (examples.values(plan.feature) for examples in (measured.test, measured.reference))
    own, found = plan.runs[0], []
    for index, (site, (at, at_rows)) in enumerate(zip(plan.sites, plan.reference, strict=True)):
        rows = np.flatnonzero(test.positions[:, site.place] >= 0)
        here = x[torch.from_numpy(rows), index]
        fit_x, test_x = ((part.double() - own.changes(part, index, sae)[0]).float() for part in (at, here))
        labels = reference.labels[at_rows, site.place], test.labels[rows, site.place]
        if (fitted := refit(plan.feature.kind, fit_x, labels[0], test_x, labels[1])) is not None:
            found.append(fitted)
    columns = ("loss", "accuracy", "prior_loss", "prior_accuracy")
    names = ("refit_loss", "refit_accuracy", "prior_loss", "prior_accuracy")
    return {
        name: float(np.mean([getattr(each, column) for each in found])) if found else float("nan")
        for name, column in zip(names, columns, strict=True)
    }
