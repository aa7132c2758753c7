"""Are the checkpoints of a series what their names say? Compared by the hashes of their files, and by their tensors.

Published series have steps that serve another step's weights, single shards of the final model in an early step, and
steps without weights (see `known_issues`). Most of it shows in the hashes that the hub tells of its files, without
fetching any of them; a wrong shard that was saved anew shows in the norms of its tensors.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.checkpoints.directory import DirectorySource
from emergent_heads.checkpoints.files import FileSource
from emergent_heads.checkpoints.hub import HubSource
from emergent_heads.checkpoints.known_issues import issues_of, steps_in_words
from emergent_heads.checkpoints.run import RunSource, checkpoint_path
from emergent_heads.checkpoints.weights import (
    StoredWeights,
    named_state,
    shard_names,
    stored_in,
    stored_weights,
    weight_entry,
)
from emergent_heads.errors import ArgumentError, CheckpointError
from emergent_heads.results import Result, without_empty_marks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from emergent_heads.checkpoints.series import CheckpointSeries, LoaderSource

Status = Literal[
    "missing revision",
    "no weights",
    "missing shard",
    "no config",
    "unreadable",
    "not finite",
    "identical",
    "shared",
    "outlier",
    "known issue",
    "harmless",
    "ok",
]
"""What is wrong with a checkpoint, the gravest first."""

OUTLIER_AT = 5.0
"""Deviation from which on a tensor's norm is an outlier."""
FEWEST_STEPS = 8
"""Checkpoints that a judgement on norms needs."""
_NEAR = 10  # steps on either side whose residuals tell the noise
_LEAST_NOISE = 0.002  # of the norm: what rounding and a quiet stretch of training may hide
_CONFIG = "config.json"
_NO_NORMS = pd.DataFrame(
    {"step": pd.Series(dtype=int), "tensor": pd.Series(dtype=str), "rms": pd.Series(dtype=float)}
).assign(deviation=pd.Series(dtype=float))


@dataclass(frozen=True, repr=False, eq=False)
class Verification(Result):
    """What was found by comparing the checkpoints of a series.

    Attributes:
        table: one row per step: `step`; `place`; `status` (see `Status`, the gravest of what was found); `what` is
            wrong, in words; `identical_to`, the steps with the same weights; `shared_with`, steps that have some of
            its files or tensors; `max_deviation` of the weight norms (NaN where they were not read), and
            `known_issue`, what is reported of the step.
        norms: one row per step and matrix, where weights were read: `step`, `tensor`, `rms` (root mean square of its
            entries) and `deviation` (see `deviations`; NaN at the ends).
    """

    norms: pd.DataFrame = field(default_factory=lambda: _NO_NORMS, kw_only=True)

    @property
    def ok(self) -> bool:
        """Whether every checkpoint is free of faults, found here or reported; harmless ones don't count."""
        return bool(self.table["status"].isin(["ok", "harmless"]).all())

    @property
    def faults(self) -> pd.DataFrame:
        """The rows of the table with a fault."""
        return self.table.loc[~self.table["status"].isin(["ok", "harmless"])].reset_index(drop=True)

    def headline(self) -> str:
        counts = self.table["status"].value_counts()
        said = ", ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts.get(status))
        return f"Verification of {self.about['series']}, {len(self.table)} checkpoints by {self.about['by']}: {said}"

    def shown(self) -> pd.DataFrame:
        rows = self.table if self.ok else self.faults
        return without_empty_marks(rows.loc[:, ["step", "status", "what", "known_issue"]])

    def plot(self) -> "Figure":
        """Norm of each matrix over the steps, as a multiple of its median, with the outliers marked.

        Raises:
            ArgumentError: no weights were read.
        """
        if self.norms.empty:
            raise ArgumentError("no weights were read, so there are no norms to draw; use verify(weights=True)")
        from emergent_heads.plots import verification as verification_plots

        return verification_plots.weight_norms(self.norms, outlier_at=OUTLIER_AT)


@dataclass
class _Seen:
    """What was seen of one checkpoint.

    Attributes:
        step, place: which it is.
        files: names of its weight files -> hash.
        tensors: names of its tensors -> what was read of them, where weights were read.
        faults: kind and words of each fault.
        identical_to, shared_with: other steps.
    """

    step: int
    place: str
    files: Mapping[str, str] = field(default_factory=dict)
    tensors: "Mapping[str, _Tensor]" = field(default_factory=dict)
    faults: list[tuple[Status, str]] = field(default_factory=list)
    identical_to: list[int] = field(default_factory=list)
    shared_with: set[int] = field(default_factory=set)

    @property
    def key(self) -> object:
        """Equal for checkpoints with the same weights; None where nothing is known of them."""
        return tuple(sorted((name, each.digest) for name, each in self.tensors.items())) or tuple(self.files.values())

    @property
    def status(self) -> Status:
        """The gravest of its faults."""
        order = get_args(Status)
        return order[min((order.index(status) for status, _ in self.faults), default=order.index("ok"))]


@dataclass(frozen=True)
class _Tensor:
    """Hash, root mean square and whether it is a matrix of a tensor."""

    digest: str
    rms: float
    is_matrix: bool


def verify(
    series: "CheckpointSeries",
    steps: Iterable[int] | None = None,
    *,
    weights: bool | None = None,
    progress: bool = True,
) -> Verification:
    """Compares the checkpoints of a series with each other; see `CheckpointSeries.verify`."""
    chosen = list(series.steps) if steps is None else sorted({series[step].step for step in steps})
    if not chosen:
        raise ArgumentError("steps is empty; give steps of the series, or None for all")
    source: Any = series.source
    at_hand = isinstance(source, DirectorySource | RunSource)
    read = at_hand if weights is None else weights
    by_loader = not isinstance(source, HubSource | FileSource | DirectorySource | RunSource)
    if by_loader and not read:
        raise ArgumentError(f"{series.name} has no files to compare, only a loader; use weights=True")
    look = _Looking(source)
    seen = []
    for step in tqdm(chosen, desc=f"verify {series.name}", unit="checkpoint", leave=False, **notebook.bar(progress)):
        one = _Seen(step, source.where(step))
        look.at(one)
        if read and not one.faults:
            look.read(one)
        seen.append(one)
    _find_identical(seen, series.repository)
    _find_shared_files(seen)
    _find_shared_tensors(seen)
    norms = _norms(seen)
    _find_outliers(seen, norms)
    _add_known(seen, series.repository)
    by = " and ".join([*([] if by_loader else ["the hashes of their files"]), *(["their tensors"] if read else [])])
    about = {"analysis": "verification", "series": series.name, "repository": series.repository, "by": by}
    about |= {"outlier_at": OUTLIER_AT, "steps": chosen}
    return Verification(_table(seen, norms, series.repository), norms=norms, about=about)


def deviations(steps: Sequence[int], norms: Float[np.ndarray, "step tensor"]) -> Float[np.ndarray, "step tensor"]:
    """How far each norm lies from the line between its two neighbours, in units of what is usual there.

    With x = log norm and t = log(1 + step), the residual is x_i minus the straight line from (t_{i-1}, x_{i-1}) to
    (t_{i+1}, x_{i+1}). Its unit is the sum of half the difference of the two neighbours, so that steep stretches don't
    count; 1.4826 times the median of the absolute residuals of up to 10 checkpoints on either side, the neighbours
    left out (their median absolute deviation, scaled to a standard deviation); and 0.002. `OUTLIER_AT` is 5: on series
    that this library trained no deviation was above 1.5, and a half of the weights taken from the end of training read
    5 to 100, unless near the end, where it hardly differs. Norms that are nothing but noise would give a false alarm
    in about one of five series (30 matrices, 20 to 40 checkpoints). Neighbours of a wrong checkpoint can read high.

    Args:
        steps: ascending.
        norms: of each tensor at each step.

    Returns:
        Absolute deviations; NaN for the first and the last step, for tensors that are zero somewhere near, and
        everywhere with fewer than 8 steps.
    """
    found = np.full(norms.shape, np.nan)
    if len(steps) < FEWEST_STEPS:
        return found
    t = np.log1p(np.asarray(steps, dtype=float))
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.where((norms > 0) & np.isfinite(norms), np.log(norms), np.nan)
    weight = ((t[1:-1] - t[:-2]) / (t[2:] - t[:-2]))[:, None]
    residuals = np.abs(x[1:-1] - ((1 - weight) * x[:-2] + weight * x[2:]))
    half = np.abs(x[2:] - x[:-2]) / 2
    places = np.arange(len(residuals))
    for place in places:
        others = residuals[(np.abs(places - place) > 1) & (np.abs(places - place) <= _NEAR)]
        known = np.isfinite(others).any(axis=0)
        noise = np.zeros(norms.shape[1])
        noise[known] = 1.4826 * np.nanmedian(others[:, known], axis=0)
        found[place + 1] = residuals[place] / (half[place] + noise + _LEAST_NOISE)
    return found


# ---- looking ----


@dataclass
class _Looking:
    """Looks at checkpoints of one source, wherever they are."""

    source: "HubSource | FileSource | DirectorySource | RunSource | LoaderSource"
    _shards: dict[str, list[str]] = field(default_factory=dict)  # hash of an index -> the shards that it lists

    def at(self, seen: _Seen) -> None:
        """Fills in `files` and the faults that file names and hashes tell."""
        source = self.source
        if isinstance(source, HubSource):
            self._at_revision(source, seen)
        elif isinstance(source, FileSource):
            seen.files = source.hashes(seen.step)
        elif isinstance(source, DirectorySource):
            folder = source.folder(seen.step)
            names = [path.name for path in folder.iterdir() if path.is_file()]
            wanted = self._wanted(seen, names, lambda entry: shard_names(folder / entry))
            seen.files = {name: _file_hash(folder / name) for name in wanted}
        elif isinstance(source, RunSource):
            path = checkpoint_path(source.path, seen.step)
            seen.files = {path.name: _file_hash(path)}

    def _at_revision(self, source: HubSource, seen: _Seen) -> None:
        try:
            hashes = source.hashes(seen.step)
        except CheckpointError:
            seen.faults.append(("missing revision", "the hub has no such revision"))
            return

        def listed(entry: str) -> list[str]:
            if (key := hashes[entry]) not in self._shards:  # the same file at every step, as a rule
                with TemporaryDirectory() as folder:
                    self._shards[key] = shard_names(source.fetch_into(Path(folder), seen.step, entry))
            return self._shards[key]

        seen.files = {name: hashes[name] for name in self._wanted(seen, list(hashes), listed)}

    def _wanted(self, seen: _Seen, names: Sequence[str], listed: Any) -> list[str]:
        """The weight files among `names`; notes what is missing."""
        if _CONFIG not in names:
            seen.faults.append(("no config", f"no {_CONFIG}"))
        entry = weight_entry(names)
        if entry is None:
            seen.faults.append(("no weights", "no weights"))
            return []
        if not entry.endswith(".index.json"):
            return [entry]
        try:
            shards = listed(entry)
        except CheckpointError as error:
            seen.faults.append(("unreadable", str(error)))
            return []
        if missing := [name for name in shards if name not in names]:
            seen.faults.append(("missing shard", f"{', '.join(missing)} missing, which {entry} lists"))
        return [name for name in shards if name in names]

    def read(self, seen: _Seen) -> None:
        """Fills in `tensors`, one tensor at a time, and notes what is not finite."""
        try:
            with self._opened(seen.step) as stored:
                seen.tensors = {name: self._measured(seen, name, load()) for name, load in sorted(stored.items())}
        except CheckpointError as error:
            seen.faults.append(("unreadable", str(error)))

    @contextmanager
    def _opened(self, step: int) -> Iterator[StoredWeights]:
        """The stored tensors of a step while they are read; what was fetched for it goes as the cache policy says."""
        source = self.source
        if isinstance(source, HubSource | DirectorySource):
            with source.fetched(step) as folder, stored_weights(folder) as stored:
                yield stored
        elif isinstance(source, FileSource):
            with source.fetched(step) as path, stored_in(path) as stored:
                yield stored
        elif isinstance(source, RunSource):
            with stored_in(checkpoint_path(source.path, step)) as stored:
                yield stored
        else:
            model = source.load(step)
            if not isinstance(model, nn.Module):
                raise CheckpointError(f"the loader gave a {type(model).__name__}, whose tensors cannot be read")
            state = named_state(model)
            yield {name: (lambda tensor=tensor: tensor) for name, tensor in state.items()}

    @torch.no_grad()
    def _measured(self, seen: _Seen, name: str, tensor: Tensor) -> _Tensor:
        tensor = tensor.detach().cpu()
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(content.data)
        rms = float("nan")
        if tensor.is_floating_point() and tensor.ndim:  # a single number is a buffer, such as minus infinity for masks
            norm = float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)))
            if not np.isfinite(norm) and not bool(torch.isfinite(tensor).all()):
                seen.faults.append(("not finite", f"{name} holds NaN or infinite values"))
            rms = norm / max(1, tensor.numel()) ** 0.5
        return _Tensor(digest.hexdigest(), rms, tensor.is_floating_point() and tensor.ndim >= 2)


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


# ---- comparing ----


def _find_identical(seen: Sequence[_Seen], repository: str | None) -> None:
    """Notes the checkpoints that have the same weights as others."""
    groups: dict[object, list[int]] = {}
    for place, one in enumerate(seen):
        if one.key:
            groups.setdefault(one.key, []).append(place)
    for places in groups.values():
        if len(places) == 1:
            continue
        steps = [seen[place].step for place in places]
        apart = places[-1] - places[0] >= len(places)
        harmless = _harmless(repository, steps)
        for place in places:
            one = seen[place]
            one.identical_to = [step for step in steps if step != one.step]
            what = f"weights identical to those of step {steps_in_words(one.identical_to)}"
            what += ", with others between" if apart else ", next to it"
            one.faults.append(("harmless", f"{what} ({harmless})") if harmless else ("identical", what))


def _harmless(repository: str | None, steps: Sequence[int]) -> str | None:
    """The report that says why these steps are rightly the same."""
    known = [issue for step in steps for issue in issues_of(repository, step) if issue.kind == "harmless"]
    return next((issue.mark for issue in known if all(step in issue.steps for step in steps)), None)


def _find_shared_files(seen: Sequence[_Seen]) -> None:
    """Notes single files that checkpoints with other weights have too."""
    owners: dict[str, list[_Seen]] = {}
    for one in seen:
        for digest in dict.fromkeys(one.files.values()):
            owners.setdefault(digest, []).append(one)
    for one in seen:
        for name, digest in one.files.items():
            others = [other.step for other in owners[digest] if other is not one]
            if others := [step for step in others if step not in one.identical_to]:
                one.shared_with.update(others)
                one.faults.append(("shared", f"{name} is also that of step {steps_in_words(others)}"))


def _find_shared_tensors(seen: Sequence[_Seen]) -> None:
    """Notes matrices that come back exactly as they were, after others in between: no training does that."""
    counts: dict[int, Counter[int]] = {place: Counter() for place in range(len(seen))}
    names = dict.fromkeys(name for one in seen for name, each in one.tensors.items() if each.is_matrix)
    for name in names:
        have = [(place, one.tensors[name].digest) for place, one in enumerate(seen) if name in one.tensors]
        order = {place: at for at, (place, _) in enumerate(have)}
        same: dict[str, list[int]] = {}
        for place, digest in have:
            same.setdefault(digest, []).append(place)
        for places in same.values():
            if order[places[-1]] - order[places[0]] >= len(places):  # another value stands between
                for place in places:
                    counts[place].update(other for other in places if other != place)
    for place, others in counts.items():
        one, total = seen[place], sum(each.is_matrix for each in seen[place].tensors.values())
        for other, n in others.items():
            step = seen[other].step
            if step not in one.identical_to and step not in one.shared_with:
                one.shared_with.add(step)
                one.faults.append(("shared", f"{n} of {total} matrices are exactly those of step {step}"))


def _norms(seen: Sequence[_Seen]) -> pd.DataFrame:
    """One row per step and matrix that all checkpoints read have."""
    read = [one for one in seen if one.tensors]
    if not read:
        return _NO_NORMS
    names = [
        name
        for name, first in read[0].tensors.items()
        if all(name in one.tensors and one.tensors[name].is_matrix for one in read) and first.is_matrix
    ]
    steps = [one.step for one in read]
    values = np.array([[one.tensors[name].rms for name in names] for one in read], dtype=float)
    values = values.reshape(len(steps), len(names))
    return pd.DataFrame(
        {
            "step": np.repeat(steps, len(names)),
            "tensor": names * len(steps),
            "rms": values.ravel(),
            "deviation": deviations(steps, values).ravel(),
        }
    )


def _find_outliers(seen: Sequence[_Seen], norms: pd.DataFrame) -> None:
    far = norms.loc[norms["deviation"] >= OUTLIER_AT].sort_values("deviation", ascending=False)
    for one in seen:
        rows = far.loc[far["step"] == one.step]
        if len(rows):
            tensor, deviation = rows["tensor"].iloc[0], rows["deviation"].iloc[0]
            what = f"norms of {len(rows)} matrices leave their neighbours', most {tensor} (deviation {deviation:.1f})"
            one.faults.append(("outlier", f"{what}; a neighbour may be the cause"))


def _add_known(seen: Sequence[_Seen], repository: str | None) -> None:
    for one in seen:
        for issue in issues_of(repository, one.step):
            if issue.warns:
                one.faults.append(("known issue", f"reported: {issue.mark}"))


def _table(seen: Sequence[_Seen], norms: pd.DataFrame, repository: str | None) -> pd.DataFrame:
    most: dict[int, float] = {}
    for step, deviation in norms[["step", "deviation"]].dropna().itertuples(index=False):
        most[step] = max(deviation, most.get(step, 0.0))
    return pd.DataFrame(
        [
            {
                "step": one.step,
                "place": one.place,
                "status": one.status,
                "what": "; ".join(what for _, what in one.faults),
                "identical_to": steps_in_words(one.identical_to),
                "shared_with": steps_in_words(sorted(one.shared_with)),
                "max_deviation": most.get(one.step, np.nan),
                "known_issue": "; ".join(
                    issue.mark for issue in issues_of(repository, one.step) if issue.kind != "published scores"
                ),
            }
            for one in seen
        ]
    )
