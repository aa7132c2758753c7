"""Series on the local disk: a folder that holds one folder per checkpoint. The hub is never asked."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from emergent_heads.errors import ArgumentError, CheckpointError, NoCheckpointsError

_STEP_FOLDER = re.compile(r"(?:step|checkpoint)\D*(\d+)")
LAYOUTS = "step*/ or checkpoint-*/, the number at the end being the step, each a folder written by save_pretrained"


@dataclass(frozen=True)
class DirectorySource:
    """Checkpoints as `step*/` or `checkpoint-*/` folders in `path`."""

    path: Path
    trust_remote_code: bool = False
    run_name: str | None = None

    @property
    def name(self) -> str:
        return self.run_name or self.path.resolve().name

    @cached_property
    def _folders(self) -> dict[int, Path]:
        if not self.path.is_dir():
            raise NoCheckpointsError(f"{self.path} is no folder; name the folder that holds the checkpoints")
        found: dict[int, Path] = {}
        for folder in sorted(self.path.iterdir()):
            match = _STEP_FOLDER.fullmatch(folder.name)
            if match is None or not folder.is_dir():
                continue
            step = int(match[1])
            if step in found:
                raise ArgumentError(f"{self.path}: {found[step].name} and {folder.name} are both step {step}")
            found[step] = folder
        if not found:
            raise NoCheckpointsError(f"{self.path} holds no checkpoints; {self._what_is_read()}")
        return found

    def _what_is_read(self) -> str:
        if (self.path / "config.json").is_file():
            return f"it is one model itself; name the folder above it, with {LAYOUTS}"
        return f"what is read: {LAYOUTS}"

    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self._folders))

    def where(self, step: int) -> str:
        return str(self._folders[step])

    def folder(self, step: int) -> Path:
        """The folder with config, weights and, where there is one, tokenizer."""
        return self._folders[step]

    @contextmanager
    def fetched(self, step: int) -> Iterator[Path]:
        """The same folder: it is the user's, and stays."""
        yield self._folders[step]

    def tokenizer_folders(self, folder: Path) -> tuple[Path, ...]:
        """Where to look for a tokenizer; Trainer leaves it beside the step folders when it knows only one."""
        return folder, self.path

    def identity(self, step: int) -> str | None:
        """Path, sizes and times of config and weights: changes when a file is written again."""
        from emergent_heads.checkpoints.weights import weight_files

        folder = self._folders[step].resolve()
        try:
            stats = [(path.name, path.stat()) for path in (folder / "config.json", *weight_files(folder))]
        except (CheckpointError, OSError):
            return None
        return f"{folder} " + " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)
