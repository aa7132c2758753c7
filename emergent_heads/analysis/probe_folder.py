"""A folder that keeps the probes of a series, checkpoint by checkpoint, so that a stopped call goes on.

`settings.json` says what they are of, `baselines.parquet` holds what is found once, and each checkpoint has a table
`step_00000000.parquet` and weights `step_00000000.safetensors`. Everything is written under a temporary name and
renamed; the table comes last, so a checkpoint that has one is complete.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from emergent_heads.errors import NoCheckpointsError, RunFolderError
from emergent_heads.storage import as_read_back, atomic_path, versions, write_json

_FORMAT = "emergent_heads probes"
_FORMAT_VERSION = 1
_SETTINGS = "settings.json"
_BASELINES = "baselines.parquet"
_STEP = re.compile(r"step_(\d+)\.parquet")


@dataclass(frozen=True)
class ProbeFolder:
    """Probes kept in the folder `path`, all by the same `settings`."""

    path: Path
    settings: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path | str, settings: Mapping[str, Any]) -> "ProbeFolder":
        """The folder, made where there is none, for probes by these settings.

        Raises:
            RunFolderError: it holds probes by other settings.
            OutputError: it cannot be written.
        """
        path, settings = Path(path), as_read_back(settings)
        if (path / _SETTINGS).is_file():
            folder = cls.read_only(path)
            different = [
                f"{name} is {folder.settings.get(name)!r} there and {settings.get(name)!r} here"
                for name in sorted({*folder.settings, *settings})
                if folder.settings.get(name) != settings.get(name)
            ]
            if different:
                raise RunFolderError(
                    f"{path} holds probes by other settings: {'; '.join(different)}. Use these settings, or another "
                    "folder"
                )
            return folder
        content = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "settings": settings, "versions": versions()}
        write_json(path / _SETTINGS, content)
        return cls(path, settings)

    @classmethod
    def read_only(cls, path: Path | str) -> "ProbeFolder":
        """The folder as it is.

        Raises:
            NoCheckpointsError: it holds no probes.
            RunFolderError: they were kept by a version of the library that wrote them in another way.
        """
        path = Path(path)
        try:
            content = json.loads((path / _SETTINGS).read_text())
        except FileNotFoundError as error:
            raise NoCheckpointsError(f"{path} holds no probes: it has no {_SETTINGS}") from error
        except (OSError, ValueError) as error:
            raise NoCheckpointsError(f"{path / _SETTINGS} cannot be read ({error})") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise NoCheckpointsError(f"{path / _SETTINGS} is not of a folder of probes")
        if content.get("format_version") != _FORMAT_VERSION:
            raise RunFolderError(
                f"{path} holds probes in format version {content.get('format_version')}; this version of the library "
                f"reads format version {_FORMAT_VERSION}. Probe into another folder"
            )
        return cls(path, content["settings"])

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps whose probes are complete, ascending.

        Raises:
            NoCheckpointsError: there are none yet.
        """
        found = sorted(int(match[1]) for file in self.path.iterdir() if (match := _STEP.fullmatch(file.name)))
        if not found:
            raise NoCheckpointsError(f"{self.path} holds no probes yet: none of the checkpoints is done")
        return tuple(found)

    @property
    def baselines(self) -> pd.DataFrame | None:
        """What was kept by `keep_baselines`."""
        path = self.path / _BASELINES
        return pd.read_parquet(path) if path.is_file() else None

    def keep_baselines(self, table: pd.DataFrame) -> None:
        with atomic_path(self.path / _BASELINES) as temporary:
            table.to_parquet(temporary, index=False)

    def keep(self, step: int, table: pd.DataFrame, arrays: Mapping[str, np.ndarray], identity: str | None) -> None:
        """Keeps a checkpoint's probes.

        Args:
            step: of the checkpoint.
            table: of the probes.
            arrays: their weights.
            identity: key of the checkpoint's weights, if it has one.
        """
        weights, rows = self._paths(step)
        rows.unlink(missing_ok=True)  # the old table must not stand beside new weights
        with atomic_path(weights) as temporary:
            save_file(dict(arrays), temporary, metadata={"identity": identity or ""})
        with atomic_path(rows) as temporary:
            table.to_parquet(temporary, index=False)

    def read(self, step: int, identity: str | None) -> tuple[pd.DataFrame, dict[str, np.ndarray]] | None:
        """What `keep` kept; None where there is nothing, it cannot be read, or the checkpoint is another one now."""
        weights, rows = self._paths(step)
        if not (weights.is_file() and rows.is_file()):
            return None
        try:
            with safe_open(weights, framework="np") as stored:
                if (stored.metadata() or {}).get("identity") != (identity or ""):
                    return None
            return self.kept(step)
        except (OSError, ValueError, SafetensorError):
            return None

    def kept(self, step: int) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
        """What `keep` kept, whatever the checkpoint is now."""
        weights, rows = self._paths(step)
        with safe_open(weights, framework="np") as stored:
            return pd.read_parquet(rows), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118

    def _paths(self, step: int) -> tuple[Path, Path]:
        name = f"step_{step:08d}"
        return self.path / f"{name}.safetensors", self.path / f"{name}.parquet"
