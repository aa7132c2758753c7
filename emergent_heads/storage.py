"""Files: tables with a side file that says where they come from, atomic writes, and kept evaluations.

Everything is written to a temporary name in the same folder and renamed, so a killed process leaves either the old
file or the new one.
"""

import hashlib
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from emergent_heads.errors import OutputError

_TABLE_WRITERS: dict[str, Callable[[pd.DataFrame, Path], object]] = {
    ".csv": lambda table, path: table.to_csv(path, index=False),
    ".parquet": lambda table, path: table.to_parquet(path, index=False),
    ".json": lambda table, path: table.to_json(path, orient="records", indent=1),
}
TABLE_SUFFIXES = tuple(_TABLE_WRITERS)
_TABLE_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".csv": pd.read_csv,
    ".parquet": pd.read_parquet,
    ".json": lambda path: pd.read_json(path, orient="records"),
    ".jsonl": lambda path: pd.read_json(path, orient="records", lines=True),
    ".tsv": lambda path: pd.read_csv(path, sep="\t"),
}


@contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Gives a temporary path beside `path`; renames it onto `path` when the block ends well, removes it otherwise.

    Raises:
        OutputError: the folder cannot be made or written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; choose a folder you may write to"
        ) from error
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner reads
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path | str, suffixes: Sequence[str] = TABLE_SUFFIXES) -> Path:
    """The path of a file to be, checked before any work is done for it.

    Raises:
        OutputError: the suffix is none of `suffixes`, or the folder does not take files.
    """
    path = Path(path)
    if path.suffix not in suffixes:
        raise OutputError(
            f"cannot tell the format of {path} from its suffix {path.suffix!r}: use {', '.join(suffixes)}"
        )
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {path}: {folder} does not take files; choose a folder you may write to")
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder; name a file in it")
    return path


def save_table(table: pd.DataFrame, path: Path | str, about: Mapping[str, Any] | None = None) -> Path:
    """Writes `table` in the format of the suffix, and `about` with versions to the side file `<path>.about.json`."""
    path = check_writable(path)
    with atomic_path(path) as temporary:
        _TABLE_WRITERS[path.suffix](table, temporary)
    write_json(path.with_name(path.name + ".about.json"), {**(about or {}), "versions": versions()})
    return path


def read_table(path: Path | str) -> pd.DataFrame:
    """Reads a table by its suffix: .csv, .tsv, .parquet, .json or .jsonl.

    Raises:
        OutputError: unknown suffix. FileNotFoundError: no such file.
    """
    path = Path(path)
    if path.suffix not in _TABLE_READERS:
        raise OutputError(
            f"cannot tell the format of {path} from its suffix {path.suffix!r}: use {', '.join(_TABLE_READERS)}"
        )
    return _TABLE_READERS[path.suffix](path)


def write_json(path: Path | str, content: object) -> Path:
    """Writes JSON; numpy scalars, arrays, tuples and paths are turned into plain values."""
    path = Path(path)
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, default=_plain, allow_nan=True) + "\n")
    return path


def as_read_back(content: object) -> Any:
    """`content` as it is read back from where `write_json` wrote it."""
    return json.loads(json.dumps(content, default=_plain))


def versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on, and the commit of the working folder if it is a git checkout."""
    packages = ("emergent-heads", "torch", "transformers", "transformer-lens", "numpy")
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {**found, "python": platform.python_version(), "git_commit": _git_commit()}


def digest(*parts: object) -> str:
    """SHA-256 of arrays, tensors, bytes and anything with a stable `str`; 32 hexadecimal digits."""
    sha = hashlib.sha256()
    for part in parts:
        if hasattr(part, "detach"):
            part = part.detach().cpu().numpy()  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(part, np.ndarray):
            sha.update(f"{part.dtype}{part.shape}".encode())
            sha.update(np.ascontiguousarray(part).tobytes())
        else:
            sha.update(part if isinstance(part, bytes) else str(part).encode())
        sha.update(b"\x1f")
    return sha.hexdigest()[:32]


def cache_folder() -> Path:
    """Where kept evaluations go: `$EMERGENT_HEADS_CACHE`, else `emergent_heads` in the user's cache folder."""
    if own := os.environ.get("EMERGENT_HEADS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "emergent_heads"


@dataclass(frozen=True)
class KeptTables:
    """Small tables kept under a key, in `folder` and over sessions; in memory only where `folder` is None.

    A folder that cannot be written costs the reuse between sessions, never the result.
    """

    folder: Path | None
    _memory: dict[str, pd.DataFrame]

    @classmethod
    def open(cls, folder: Path | str | None) -> "KeptTables":
        return cls(Path(folder) if folder is not None else None, {})

    def get(self, key: str) -> pd.DataFrame | None:
        if key in self._memory:
            return self._memory[key].copy()
        if self.folder is None or not (path := self._path(key)).exists():
            return None
        try:
            self._memory[key] = pd.read_parquet(path)
        except (OSError, ValueError):  # unreadable: as if it had not been kept
            return None
        return self._memory[key].copy()

    def put(self, key: str, table: pd.DataFrame) -> None:
        self._memory[key] = table.copy()
        if self.folder is not None:
            try:
                with atomic_path(self._path(key)) as temporary:
                    table.to_parquet(temporary, index=False)
            except OutputError:
                pass

    def add(self, other: "KeptTables") -> None:
        """Takes over the tables that `other` has in memory."""
        self._memory.update(other._memory)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.parquet"


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def _git_commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, cwd=Path.cwd(), check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
