"""Series on the hub whose checkpoints are files of one revision, in TransformerLens' own format."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emergent_heads.checkpoints.hub import MAIN, CachePolicy, HubRepository, HubSource, Needs, in_hub_cache, offline
from emergent_heads.checkpoints.naming import Named, check_pattern, named_steps
from emergent_heads.errors import ArgumentError, CheckpointError, NoCheckpointsError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from emergent_heads.checkpoints.weights import Fingerprint

SUFFIX = ".pth"
_CONFIG = "config.json"
# TransformerLens' own rule for what its labels count (`get_checkpoint_labels`).
_LABELS_OF_TOKENS_EXCEED = 10**9


@dataclass(frozen=True)
class FileSource(HubRepository):
    """Checkpoints as files `checkpoints/*_{step}.pth` of the repository's main revision.

    What the number in a name counts is for the repository to say: TransformerLens takes it for tokens where the last
    exceeds 10^9, else for steps.

    Attributes:
        pattern: path of a file, with `{step}` for the number and `*` for parts that do not matter.
        tokens_per_step: tokens of one step, where the number counts steps.
    """

    pattern: str = "checkpoints/*_{step}.pth"
    tokens_per_step: int | None = None

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if not self.pattern.endswith(SUFFIX):
            raise ArgumentError(f"pattern={self.pattern!r}: the files of a series end in {SUFFIX}")
        if not re.fullmatch(r"[\w./-]*", self._folder):
            raise ArgumentError(f"pattern={self.pattern!r}: only the name of the file may be open, not its folder")
        super().__post_init__()

    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self._files))

    def tokens_seen(self, step: int) -> int | None:
        named = self._files[step].tokens
        if named is not None:
            return named
        if max(self._files) > _LABELS_OF_TOKENS_EXCEED:
            return step
        return None if self.tokens_per_step is None else step * self.tokens_per_step

    def where(self, step: int) -> str:
        return f"{self.repository}, file {self._files[step].name}"

    def identity(self, step: int) -> str | None:
        """Repository, commit and file, found without fetching weights."""
        return f"{self.repository}@{self._commit(MAIN)}/{self._files[step].name}"

    def hashes(self, step: int) -> dict[str, str]:
        """Path of the step's file -> hash of its content, by one question to the hub for all steps."""
        name = self._files[step].name
        return {name: self._hashes_of_all[name]}

    def load(self, step: int, device: "torch.device | str" = "cpu") -> "tuple[nn.Module, Fingerprint]":
        """A new model with the weights of `step` and the weights' fingerprint.

        Raises:
            CheckpointError: the file is damaged or does not fit the config. UnsafeWeightsError: reading it would run
                code. UnsupportedModelError: the installed transformer-lens cannot make the model. HubError: the hub
                does not give it.
        """
        from emergent_heads.checkpoints.transformerlens_format import new_model

        model = new_model(self.config, device, self.tokenizer)
        return model, self.fill(model, step)

    def fill(self, model: "nn.Module", step: int) -> "Fingerprint":
        """Replaces the weights of `model` by those of `step`, and gives their fingerprint.

        Raises:
            As `load`. The model is then a mixture until the next call that succeeds.
        """
        from emergent_heads.checkpoints.transformerlens_format import fill
        from emergent_heads.checkpoints.weights import stored_in

        with self.fetched(step) as path, stored_in(path) as stored:
            return fill(model, stored, old_layout=self._has_old_layout)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's shape in TransformerLens' words."""
        path = self._snapshot(self._commit(MAIN)) / _CONFIG
        if not path.is_file():
            if offline():
                raise self._not_here(f"{_CONFIG} of {self.repository}")
            path = self._download(_CONFIG, MAIN, MAIN, in_hub_cache())  # by name, which leaves the commit for offline
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{_CONFIG} is damaged ({error})") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{_CONFIG} is damaged (no JSON object)")
        return config

    @cached_property
    def tokenizer(self) -> Any | None:
        """The tokenizer of the repository that the config names; None where it names none."""
        from emergent_heads.checkpoints.weights import load_tokenizer

        name = self.config.get("tokenizer_name")
        folder = HubRepository(name).tokenizer_folder() if name else None
        return load_tokenizer(folder) if folder else None

    @property
    def _has_old_layout(self) -> bool:
        return "_old" in self.repository and "architecture" not in self.config

    # which files there are

    @property
    def _folder(self) -> str:
        """The folder of the files, "" for the top of the repository."""
        return self.pattern.rpartition("/")[0]

    @cached_property
    def _files(self) -> dict[int, Named]:
        """Step -> path of the file, for the files that fit the pattern."""
        paths = self._bytes
        found = named_steps(self.pattern, {path: path for path in paths}, self.repository)
        if not found:
            place = "the local cache (HF_HUB_OFFLINE is set)" if offline() else "the hub"
            raise NoCheckpointsError(
                f"{place} has no file of {self.repository} that fits pattern={self.pattern!r}; "
                f"files there are: {', '.join(list(paths)[:5]) or 'none'}"
            )
        return found

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """Path -> size of the files in the folder, from the hub in one call; offline those that lie here."""
        commit = self._commit(MAIN)
        if not offline():
            return self._sizes(MAIN, commit, self._folder or None)
        snapshot = self._snapshot(commit)
        here = [path.relative_to(snapshot).as_posix() for path in (snapshot / self._folder).glob(f"*{SUFFIX}")]
        return dict.fromkeys([*here, *self._own_copies()], 0)

    @cached_property
    def _hashes_of_all(self) -> dict[str, str]:
        return self._hashes(MAIN, self._commit(MAIN), self._folder or None)

    # fetching

    @contextmanager
    def fetched(self, step: int) -> Iterator[Path]:
        """The file of a step while it is read."""
        name, commit = self._files[step].name, self._commit(MAIN)
        if (kept := self._snapshot(commit) / name).is_file():
            yield kept
            return
        needs = Needs(MAIN, commit, {name: self._bytes[name]})
        with self._in_store(f"{commit}-{step}", name, self.where(step), lambda: needs) as own:
            if own is None and offline():
                raise self._not_here(self.where(step))
            yield own / name if own else self._download(name, MAIN, commit, in_hub_cache())


def hub_source(
    repository: str,
    pattern: str,
    *,
    cache: CachePolicy = "keep",
    disk_budget_gb: float | None = None,
    trust_remote_code: bool = False,
    known_steps: tuple[int, ...] | None = None,
    tokens_per_step: int | None = None,
    tokenizer_repository: str | None = None,
) -> HubSource | FileSource:
    """The checkpoints of a repository: files where `pattern` ends in ".pth", else revisions."""
    if not pattern.endswith(SUFFIX):
        return HubSource(
            repository,
            cache,
            disk_budget_gb,
            pattern,
            known_steps,
            trust_remote_code,
            tokens_per_step,
            tokenizer_repository,
        )
    if known_steps is not None:
        raise ArgumentError(f"pattern={pattern!r}: the steps of files are read from the repository; give no steps")
    return FileSource(repository, cache, disk_budget_gb, pattern, tokens_per_step)
