"""The checkpoints of a run, in order, wherever they come from."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args
from uuid import uuid4

from emergent_heads import notebook
from emergent_heads.checkpoints.directory import DirectorySource
from emergent_heads.checkpoints.files import FileSource, hub_source
from emergent_heads.checkpoints.hub import CachePolicy, HubSource
from emergent_heads.checkpoints.kinds import default_kind
from emergent_heads.checkpoints.known_issues import issue_to_mark, issues_of, mark_of, met
from emergent_heads.checkpoints.run import CHECKPOINTS, RunSource, is_small_run, read_manifest
from emergent_heads.errors import ArgumentError, CheckpointError, KnownBadCheckpointError, UnknownStepError
from emergent_heads.storage import KeptTables, cache_folder
from emergent_heads.workers import kept_by_worker

if TYPE_CHECKING:
    from emergent_heads.checkpoints.verification import Verification
    from emergent_heads.checkpoints.weights import Fingerprint
    from emergent_heads.models.hooked import HookedModel

ModelKind = Literal["bridge", "hooked_transformer", "huggingface", "small"]


class FolderSource(Protocol):
    """Where checkpoints come from that are Hugging Face folders in the end."""

    @property
    def name(self) -> str: ...
    @property
    def trust_remote_code(self) -> bool: ...
    def steps(self) -> tuple[int, ...]:
        """The steps there are, ascending."""
        ...

    def where(self, step: int) -> str:
        """Place of a step, for messages."""
        ...

    def fetched(self, step: int) -> AbstractContextManager[Path]:
        """Local folder with config, weights and, where there is one, tokenizer, while it is read."""
        ...

    def tokenizer_folders(self, folder: Path) -> tuple[Path, ...]:
        """Folders to look for a tokenizer in, in this order, where `folder` is that of a step."""
        ...

    def identity(self, step: int) -> str | None:
        """Key that changes when the weights of `step` do; None when unknown."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A model at a step of a series; light until `load` or `hooked` is called."""

    series: "CheckpointSeries"
    step: int

    def load(self, kind: ModelKind | None = None) -> Any:
        """A model of the caller's own with the weights of this step.

        Args:
            kind: "bridge" (`TransformerBridge`), "hooked_transformer" (transformer-lens 3.x) or "huggingface";
                None for the series' own kind. A run that the library trained gives "small" (`SmallModel`), which is
                also the default there, or "hooked_transformer". Files in TransformerLens' own format give what the
                installed transformer-lens makes of them: 3.x "hooked_transformer", 4.x "bridge".

        Returns:
            The model in float32, eval mode and without gradients, with the checkpoint's tokenizer where the kind
            carries one. A series from a loader function gives what the function returns, as it is. A run trained with
            an attention bias gives models that have the bias of that step.

        Raises:
            CheckpointError: the weights are missing, damaged or not finite; also noted in `series.problems`.
            UnsupportedModelError: the model cannot be had as this kind.
            HubError: the hub does not give it.
        """
        return self.series._load(self.step, kind)

    def hooked(self) -> "HookedModel":
        """The series' one resident model with the weights of this step; see `CheckpointSeries.hooked`."""
        return self.series.hooked(self.step)

    def tokenizer(self) -> Any | None:
        """The checkpoint's tokenizer; None when it has none."""
        return self.series._tokenizer(self.step)

    def __repr__(self) -> str:
        return f"Checkpoint({self.series.name}, step {self.step})"

    def _repr_html_(self) -> str:
        series = self.series
        known = series.knows_steps and self.step in series.steps
        fields = {
            "series": series.name,
            "tokens seen": series.tokens_seen(self.step) if known else None,
            "known issue": series.known_issue(self.step),
            "problem": series.problems.get(self.step),
        }
        return notebook.page(notebook.card(f"Checkpoint at step {self.step}", fields))


@dataclass(frozen=True, eq=False)
class Learned:
    """What a worker's copy of a series came to know, for the series itself.

    Attributes:
        problems: as those of the series.
        fingerprints: of the weights that were read, by step.
        steps_to_warn_of: those used whose published weights are known to be wrong.
    """

    problems: Mapping[int, str]
    fingerprints: "Mapping[int, Fingerprint]"
    steps_to_warn_of: frozenset[int]


@dataclass(eq=False, repr=False)
class CheckpointSeries:
    """The checkpoints of a run, in order.

    `series[step]` is by step, never by place; `series.first`, `series.last`, `series.steps`, `len` and iteration do
    what they say. Make one by `emergent_heads.suite`, `from_hub`, `from_directory`, `from_loader` or `from_run`.

    A series can be pickled, and so can its checkpoints: what it is and what is known of it go along, models do not.

    Attributes:
        source: where the checkpoints come from.
        kind: what `series[step].load()` gives.
        device: where the models go.
        seed, size: of the run, where they are known.
        allow_known_bad: whether published checkpoints whose weights are known to be wrong are used, with a warning,
            or refused; see `emergent_heads.known_issues`.
        problems: step -> what is wrong with its checkpoint, filled as steps are used. Missing, damaged and not finite
            ones cannot be used; identical ones can.
    """

    source: "FolderSource | FileSource | RunSource | LoaderSource"
    kind: ModelKind = field(default="bridge", kw_only=True)
    device: str = field(default="cpu", kw_only=True)
    seed: int | None = field(default=None, kw_only=True)
    size: str | None = field(default=None, kw_only=True)
    allow_known_bad: bool = field(default=True, kw_only=True)
    problems: dict[int, str] = field(default_factory=dict, init=False)
    _fingerprints: "dict[int, Fingerprint]" = field(default_factory=dict, init=False)
    _resident: Any = field(default=None, init=False)  # a Resident, or the model of a source that makes its own
    _hooked: "HookedModel | None" = field(default=None, init=False)
    _hooked_step: int | None = field(default=None, init=False)
    _warned: set[str] = field(default_factory=set, init=False)
    _to_warn_of: set[int] | None = field(default=None, init=False)  # steps, of a worker's copy, which warns of none
    _key: str = field(default_factory=lambda: uuid4().hex, init=False)  # the same in all copies

    def __post_init__(self) -> None:
        _check_kind(self.kind)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has, here or in another process: no models, and no evaluations but those that no file keeps."""
        state = {**vars(self), "source": _without_caches(self.source), "_hooked": None, "_resident": None}
        state |= {name: copy.copy(state[name]) for name in ("problems", "_fingerprints", "_warned")}
        state |= {"_hooked_step": None, "_to_warn_of": None}
        if not isinstance(self.source, LoaderSource):
            state.pop("evaluations", None)
        return state

    @classmethod
    def from_hub(
        cls,
        repository: str,
        pattern: str = "step{step}",
        *,
        kind: ModelKind | None = None,
        cache: CachePolicy = "keep",
        disk_budget_gb: float | None = None,
        trust_remote_code: bool = False,
        device: str = "cpu",
        allow_known_bad: bool = True,
    ) -> "CheckpointSeries":
        """Series of a Hugging Face repository whose revisions (branches or tags) carry the step.

        Args:
            repository: "owner/name".
            pattern: how a revision is named: `{step}` for the step, `{billions}` for the tokens seen in 10^9, and `*`
                for parts that do not matter: "stage1-step{step}-tokens{billions}B". Where it ends in ".pth" it is the
                path of files in TransformerLens' own format instead, one a checkpoint: "checkpoints/*_{step}.pth".
                The steps are read from the repository when first asked for.
            kind: what `series[step].load()` gives; by default "bridge", and for files what transformer-lens makes of
                them.
            cache: "keep" leaves checkpoints in the hub's cache; "evict" fetches into a folder of the library's own
                and deletes each checkpoint after its weights were read. What is in the hub's cache already is used
                and left alone.
            disk_budget_gb: most disk (10^9 bytes) for checkpoints fetched under a budget, over all series and all
                processes that share the folder; the least recently used go first, those in use never.
            trust_remote_code: run model code of the repository.
            device: where the models go.
            allow_known_bad: False refuses checkpoints whose published weights are known to be wrong, which searches
                then pass over; see `emergent_heads.known_issues`.

        Raises:
            ArgumentError: an argument makes no sense.
        """
        source = hub_source(
            repository,
            pattern,
            cache=cache,
            disk_budget_gb=disk_budget_gb,
            trust_remote_code=trust_remote_code,
        )
        return cls(source, kind=kind or default_kind(source), device=device, allow_known_bad=allow_known_bad)

    @classmethod
    def from_directory(
        cls,
        path: Path | str,
        *,
        kind: ModelKind = "bridge",
        trust_remote_code: bool = False,
        device: str = "cpu",
    ) -> "CheckpointSeries":
        """Series of the `step*/` or `checkpoint-*/` folders in `path`, as `save_pretrained` and Trainer write them.

        The hub is never asked.

        Raises:
            NoCheckpointsError: `path` is no folder or holds no checkpoints.
        """
        series = cls(DirectorySource(Path(path), trust_remote_code), kind=kind, device=device)
        _ = series.steps  # a wrong path is told here, not at the first use
        return series

    @classmethod
    def from_loader(
        cls, steps: Iterable[int], load: Callable[[int], Any], *, name: str = "loader", seed: int | None = None
    ) -> "CheckpointSeries":
        """Series of the models that `load(step)` returns, of any kind that `emergent_heads.hooked` reads.

        Raises:
            ArgumentError: no steps, or a step twice.
        """
        return cls(LoaderSource(_checked_steps(steps), load, name), seed=seed)

    @classmethod
    def from_run(cls, path: Path | str, *, kind: ModelKind | None = None, device: str = "cpu") -> "CheckpointSeries":
        """Series of a run folder: `manifest.json` and `checkpoints/`.

        The checkpoints are files `step_*.safetensors`, as the library's training writes them, or one Hugging Face
        folder `step_*/` each.

        Args:
            path: the run folder.
            kind: what `series[step].load()` gives; by default "small" for runs that the library trained, else
                "bridge".
            device: where the models go.

        Raises:
            NoCheckpointsError: `path` is no run folder, or its checkpoints are in another layout.
            RunFolderError: the run was made by a version of the library that wrote runs in another way.
        """
        path = Path(path)
        manifest = read_manifest(path)
        seed = manifest.get("seed") if isinstance(manifest.get("seed"), int) else None
        source: RunSource | DirectorySource
        if is_small_run(manifest):
            source, kind = RunSource(path), kind or "small"
        else:
            source = DirectorySource(path / CHECKPOINTS, run_name=path.resolve().name)
        series = cls(source, kind=kind or "bridge", device=device, seed=seed)
        _ = series.steps  # an empty run is told here, not at the first use
        return series

    @property
    def name(self) -> str:
        """Short name of the run."""
        return self.source.name

    @property
    def repository(self) -> str | None:
        """Where on the hub the checkpoints come from; None for those on the disk."""
        return getattr(self.source, "repository", None)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a checkpoint, ascending. A series from the hub asks the hub once."""
        return self.source.steps()

    @cached_property
    def evaluations(self) -> KeptTables:
        """Evaluations kept for reuse: over sessions where weights have an identity, else in memory with the series."""
        return KeptTables.open(None if isinstance(self.source, LoaderSource) else cache_folder() / "evaluations")

    @property
    def first(self) -> Checkpoint:
        return Checkpoint(self, self.steps[0])

    @property
    def last(self) -> Checkpoint:
        return Checkpoint(self, self.steps[-1])

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Checkpoint]:
        return (Checkpoint(self, step) for step in self.steps)

    def __contains__(self, step: object) -> bool:
        return step in self.steps

    def __getitem__(self, step: int) -> Checkpoint:
        if step not in self.steps:
            raise UnknownStepError(f"{self.name} has no checkpoint at step {step!r}; {self._nearest(step)}")
        return Checkpoint(self, int(step))

    @property
    def knows_steps(self) -> bool:
        """Whether the steps are known without asking the hub for them."""
        asks = isinstance(self.source, HubSource | FileSource) and getattr(self.source, "known_steps", None) is None
        return not asks or "steps" in self.__dict__

    def _repr_html_(self) -> str:
        steps: object = "not asked for yet"
        if self.knows_steps:
            steps = f"{len(self)}: {_some(self.steps)}"
        fields = {
            "steps": steps,
            "repository": self.repository,
            "size": self.size,
            "seed": self.seed,
            "models": f"{self.kind} on {self.device}",
            "problems": _some([f"step {step}: {said}" for step, said in sorted(self.problems.items())]) or None,
        }
        return notebook.page(notebook.card(f"CheckpointSeries {self.name}", fields))

    def __repr__(self) -> str:
        if not self.knows_steps:
            return f"CheckpointSeries({self.name}, steps not asked for yet)"
        return f"CheckpointSeries({self.name}, {len(self)} checkpoints, steps {self.steps[0]} to {self.steps[-1]})"

    def identity(self, step: int) -> str | None:
        """Key of a step's weights, stable over sessions and found without loading them; None when unknown."""
        return self.source.identity(self[step].step)

    def known_issue(self, step: int) -> str | None:
        """What is known to be wrong with a published checkpoint, in short: "wrong weights: EleutherAI/pythia#205".

        None where nothing is known, which proves nothing. `emergent_heads.known_issues` has the details.
        """
        return mark_of(self.repository, step) or None

    def check_known_issues(self, step: int) -> None:
        """Warns where the weights of `step` are known to be wrong, once per issue; every use of a step begins so.

        Raises:
            KnownBadCheckpointError: they are, and `allow_known_bad` is False; also noted in `problems`.
        """
        issue = issue_to_mark(self.repository, step)
        if issue is not None and issue.warns:
            warned = self._warned if self._to_warn_of is None else {issue.mark}
            try:
                met(issue, self.name, step, allowed=self.allow_known_bad, warned=warned)
            except KnownBadCheckpointError as error:
                raise self._noted(step, error) from error
            if self._to_warn_of is not None:
                self._to_warn_of.add(step)

    def tokens_seen(self, step: int) -> int | None:
        """Tokens the model had seen in training at `step`; None where the suite does not tell.

        From the tokens per step that its model card gives (exact), or from the checkpoint's name, which counts in
        whole 10^9 where it ends in "B". `emergent_heads.suites` says which, and the docstring of
        `emergent_heads.checkpoints.suites` where the numbers come from. A later stage of a training counts its own
        tokens where it counts its own steps.
        """
        step = self[step].step
        return self.source.tokens_seen(step) if isinstance(self.source, HubSource | FileSource) else None

    def verify(
        self, steps: Iterable[int] | None = None, *, weights: bool | None = None, progress: bool = True
    ) -> "Verification":
        """Compares the checkpoints with each other, to find those that are not what their names say.

        From the hub nothing but small index files is fetched: its hashes of the files tell checkpoints with the same
        weights, single shards that two checkpoints share, and missing revisions, weights, shards and configs. With
        the weights themselves also matrices that two checkpoints share, values that are not finite, and outliers in
        the norms along training (`emergent_heads.checkpoints.verification.deviations` has the rule).

        Args:
            steps: which; all by default.
            weights: whether to read the weights; by default where they lie on the disk. True fetches them from the
                hub, one checkpoint after the other and under the series' cache policy.
            progress: whether to show a bar.

        Raises:
            UnknownStepError: there is no such step.
            ArgumentError: no steps, or a series from a loader without `weights=True`.
            HubError: the hub does not answer.
        """
        from emergent_heads.checkpoints.verification import verify

        return verify(self, steps, weights=weights, progress=progress)

    def hooked(self, step: int) -> "HookedModel":
        """The one resident model of the series, with the weights of `step` swapped in.

        The next call replaces the weights in place, so use what it gives before asking for another step.

        Raises:
            CheckpointError: the weights are missing, damaged or not finite; also noted in `problems`.
            HubError: the hub does not give them.
        """
        step = self[step].step
        self.check_known_issues(step)
        if self._hooked is None or self._hooked_step != step:
            self._hooked_step = None  # a swap that fails leaves a mixture behind
            with self._noting_problems(step):
                if isinstance(self.source, LoaderSource):
                    self._hooked = self._hook_loaded(self.source, step)
                elif isinstance(self.source, RunSource | FileSource):
                    self._hooked = self._swap_in_made(self.source, step)
                else:
                    self._hooked = self._swap_in(self.source, step)
            self._hooked_step = step
        return self._hooked

    def unload(self) -> None:
        """Drops the resident model, which `hooked` makes anew when it is needed again."""
        self._resident = self._hooked = self._hooked_step = None

    def in_worker(self) -> "CheckpointSeries":
        """The copy of this series that all jobs of one worker share, with its resident model.

        It warns of no known issue: whoever sent it does, by `learn`.
        """
        series = kept_by_worker(self._key, self.for_worker)
        if isinstance(self.source, LoaderSource):
            series.evaluations.add(self.evaluations)  # which other workers may have made since
        return series

    def for_worker(self) -> "CheckpointSeries":
        """A copy of its own for one worker."""
        series = copy.copy(self)
        series._to_warn_of = set()
        return series

    def learned(self) -> Learned:
        """What is known so far, for `learn`."""
        return Learned(dict(self.problems), dict(self._fingerprints), frozenset(self._to_warn_of or ()))

    def learn(self, learned: Learned) -> None:
        """Takes over what a worker's copy came to know, and warns of what it used, once per issue."""
        for step in learned.fingerprints:
            self.problems.pop(step, None)
        self.problems.update(learned.problems)
        for step, fingerprint in learned.fingerprints.items():
            self._note_identical(step, fingerprint)
        for step in sorted(learned.steps_to_warn_of):
            self.check_known_issues(step)

    def _swap_in(self, source: FolderSource, step: int) -> "HookedModel":
        from emergent_heads.checkpoints.weights import Resident, architecture_of, load_tokenizer
        from emergent_heads.models.hooked import hooked

        with source.fetched(step) as folder:
            architecture = architecture_of(folder, source.trust_remote_code)
            resident = self._resident
            if isinstance(resident, Resident) and resident.architecture == architecture:
                resident.fill(folder)
            else:
                tokenizer = load_tokenizer(*source.tokenizer_folders(folder))
                self.unload()  # before the next model takes memory
                resident = Resident(folder, trust_remote_code=source.trust_remote_code, device=self.device)
                self._resident, self._hooked = resident, hooked(resident.model, tokenizer)
        self._note_identical(step, resident.fingerprint)
        assert self._hooked is not None
        return self._hooked

    def _swap_in_made(self, source: "RunSource | FileSource", step: int) -> "HookedModel":
        """For sources that make the model themselves."""
        from emergent_heads.models.hooked import hooked

        if self._resident is not None and self._hooked is not None:
            fingerprint = source.fill(self._resident, step)
        else:
            self._resident, fingerprint = source.load(step, self.device)
            self._hooked = hooked(self._resident)
        self._note_identical(step, fingerprint)
        return self._hooked

    def _hook_loaded(self, source: "LoaderSource", step: int) -> "HookedModel":
        from emergent_heads.models.hooked import hooked

        self.unload()
        model = source.load(step)
        self._note_loaded(step, model)
        return hooked(model)

    def _load(self, step: int, kind: ModelKind | None) -> Any:
        self.check_known_issues(step)
        if isinstance(self.source, LoaderSource):
            if kind is not None:
                raise ArgumentError(f"kind={kind!r}: the loader of {self.name} decides what it returns")
            with self._noting_problems(step):
                model = self.source.load(step)
                self._note_loaded(step, model)
            return model
        from emergent_heads.checkpoints.kinds import as_kind, check_kind
        from emergent_heads.checkpoints.weights import load_model, load_tokenizer

        kind = _check_kind(kind or self.kind)
        check_kind(kind)  # before anything is fetched for it
        if isinstance(self.source, RunSource):
            return self._load_small(self.source, step, kind)
        if isinstance(self.source, FileSource):
            return self._load_file(self.source, step, kind)
        if kind == "small":
            raise ArgumentError(f"kind='small' is for runs that the library trained; {self.name} is none")
        with self._noting_problems(step), self.source.fetched(step) as folder:
            model = load_model(folder, trust_remote_code=self.source.trust_remote_code, device=self.device)
            tokenizer = load_tokenizer(*self.source.tokenizer_folders(folder))
            self._note_loaded(step, model)
        return as_kind(model, kind, tokenizer)

    def _load_small(self, source: RunSource, step: int, kind: ModelKind) -> Any:
        if kind not in ("small", "hooked_transformer"):
            raise ArgumentError(
                f"kind={kind!r}: {self.name} was trained by the library, and its models load as 'small' "
                "(a SmallModel) or 'hooked_transformer'"
            )
        with self._noting_problems(step):
            model, fingerprint = source.load(step, self.device)
            self._note_identical(step, fingerprint)
        return model if kind == "small" else model.to_hooked_transformer()

    def _load_file(self, source: FileSource, step: int, kind: ModelKind) -> Any:
        from emergent_heads.checkpoints.transformerlens_format import check_kind

        check_kind(kind)
        with self._noting_problems(step):
            model, fingerprint = source.load(step, self.device)
            self._note_identical(step, fingerprint)
        return model

    def _tokenizer(self, step: int) -> Any | None:
        if isinstance(self.source, RunSource | FileSource):
            return self.source.tokenizer
        if isinstance(self.source, LoaderSource):
            return getattr(self.hooked(step), "tokenizer", None)
        from emergent_heads.checkpoints.weights import load_tokenizer

        with self._noting_problems(step), self.source.fetched(step) as folder:
            return load_tokenizer(*self.source.tokenizer_folders(folder))

    @contextmanager
    def _noting_problems(self, step: int) -> Iterator[None]:
        """Names series, step and place in errors about the weights, and notes them in `problems`."""
        self.problems.pop(step, None)  # it may have been repaired since the last try
        try:
            yield
        except CheckpointError as error:
            raise self._noted(step, error) from error

    def _noted(self, step: int, error: CheckpointError) -> CheckpointError:
        """The error with series, step and place in it, after it was noted in `problems`."""
        missing = [issue for issue in issues_of(self.repository, step) if issue.kind == "missing"]
        known = f"; known since {missing[0].reported}: {missing[0].report}" if missing else ""
        self.problems[step] = f"step {step} of {self.name} ({self.source.where(step)}): {error}{known}"
        return type(error)(self.problems[step])

    def _note_loaded(self, step: int, model: Any) -> None:
        from torch import nn

        from emergent_heads.checkpoints.weights import fingerprint

        if isinstance(model, nn.Module):
            self._note_identical(step, fingerprint(model))

    def _note_identical(self, step: int, fingerprint: "Fingerprint") -> None:
        """Notes every step but the first of those whose weights are the same."""
        self._fingerprints[step] = fingerprint
        first, *later = sorted([step, *self._twins(step)])
        for other in later:
            self.problems[other] = f"weights identical to step {first}"

    def _twins(self, step: int) -> list[int]:
        own = self._fingerprints[step]
        return [other for other, theirs in self._fingerprints.items() if other != step and theirs == own]

    def _nearest(self, step: object) -> str:
        try:
            near = sorted(self.steps, key=lambda other: abs(other - step))[:3]  # pyright: ignore[reportOperatorIssue]
        except TypeError:
            return f"a step is a number between {self.steps[0]} and {self.steps[-1]}"
        return "nearest: " + ", ".join(str(other) for other in sorted(near))


@dataclass(frozen=True)
class LoaderSource:
    """Checkpoints as whatever a function of the user's returns."""

    known_steps: tuple[int, ...]
    function: Callable[[int], Any]
    name: str

    def steps(self) -> tuple[int, ...]:
        return self.known_steps

    def where(self, step: int) -> str:
        return f"load({step})"

    def identity(self, step: int) -> str | None:
        return None

    def load(self, step: int) -> Any:
        """The function's model.

        Raises:
            CheckpointError: the function raised what a loader raises for weights it cannot have.
        """
        try:
            return self.function(step)
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            raise CheckpointError(f"the loader raised {type(error).__name__}: {error}") from error


def _without_caches(source: Any) -> Any:
    """The source with a full path, and without what it has read; commits that the hub told stay the same."""
    light = replace(source, path=source.path.absolute()) if hasattr(source, "path") else replace(source)
    if "_commits" in vars(source):
        vars(light)["_commits"] = source._commits
    return light


def _some(values: Sequence[object], most: int = 6) -> str:
    """The values, or of many the first and the last."""
    shown = list(map(str, values))
    return ", ".join(shown if len(shown) <= most else [*shown[: most // 2], "…", *shown[-most // 2 :]])


def _check_kind(kind: ModelKind) -> ModelKind:
    if kind not in get_args(ModelKind):
        raise ArgumentError(f"kind={kind!r}: use one of {', '.join(get_args(ModelKind))}")
    return kind


def _checked_steps(steps: Iterable[int]) -> tuple[int, ...]:
    given = [int(step) for step in steps]
    if not given:
        raise ArgumentError("steps is empty; give the steps that the loader can load")
    if len(set(given)) < len(given):
        raise ArgumentError("steps names a step twice")
    return tuple(sorted(given))
