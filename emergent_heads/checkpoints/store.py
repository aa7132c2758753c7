"""Fetched checkpoints in a folder of the library's own, shared by all processes that use the same folder (`Store`).

Whoever reads or fetches a checkpoint holds a *lease* on it, a locked file of its own. Counting what lies there,
reserving room, and deleting happen under one lock, so

* fetches never take more than their budget together: each reserves all its bytes before the first one comes;
* nobody deletes a checkpoint that another process reads or fetches;
* a checkpoint that several want is fetched by one of them, while the others wait for it;
* what a killed process read or reserved counts no longer: its locks ended with it.

The locks are `flock`, by filelock. Between machines they hold where the file system passes them on: NFS 4, NFS 3 with
its lock daemon, Lustre mounted with `flock`. Where it does not (`nolock`, `local_lock`, `localflock`), and where
filelock warns that there is no flock at all, each machine needs a folder of its own.
"""

import json
import os
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from emergent_heads.errors import OutputError, WaitingWarning
from emergent_heads.storage import write_json

MARKER = ".fetched_by_emergent_heads"  # empty while fetching, then what was fetched; its time is the last use
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class _Note:
    """What a lease says of itself, in a file beside its lock.

    Attributes:
        name: of the lease.
        at: folder of the checkpoint, relative to the store.
        who: machine and process.
        reserved: bytes of the fetch under way; None for who only reads.
        evict: whether the checkpoint goes when the last one leaves it.
    """

    name: str
    at: str
    who: str
    reserved: int | None
    evict: bool


@dataclass(frozen=True)
class Store:
    """Checkpoints as folders `<repository>/<key>`.

    Attributes:
        path: the folder that holds them. Only folders in it that have our marker are ever deleted.
        leases: the folder of locks and notes; not in `path`, which may be the hub's cache at the same time.
    """

    path: Path
    leases: Path

    def folder(self, repository: str, key: str) -> Path:
        return self.path / repository / key

    def whole(self, repository: str) -> dict[str, Path]:
        """What the whole checkpoints of a repository are called -> folder."""
        markers = (self.path / repository).glob(f"*/{MARKER}")
        return {called: marker.parent for marker in markers if (called := _text(marker))}

    def holds(self, repository: str, key: str) -> bool:
        """Whether a whole checkpoint is there, now; only a lease keeps it there."""
        return bool(_text(self.folder(repository, key) / MARKER))

    @contextmanager
    def lease(self, repository: str, key: str, *, evict: bool) -> "Iterator[Lease]":
        """A lease on a checkpoint, there or not, that keeps others from deleting it until the block ends.

        One at a time: two that each hold one while they wait for room for another may wait for ever.

        Args:
            repository, key: which checkpoint.
            evict: delete the checkpoint at the end, or have whoever still uses it do so.

        Raises:
            OutputError: the store cannot be written.
        """
        at = self.folder(repository, key).relative_to(self.path).as_posix()
        note = _Note(secrets.token_hex(8), at, _this_process(), None, evict)
        with self.locked():
            lock = FileLock(self._lock_path(note.name), thread_local=False)
            lock.acquire(timeout=0)
            self.write(note)
        try:
            yield Lease(self, note.name, self.path / at)
        finally:
            with self.locked():
                living = self.living()
                lock.release()
                self._end(self.note(note.name), living)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else counts, reserves or deletes until the block ends; short, never held while fetching or reading.

        Raises:
            OutputError: a file of the store cannot be written or deleted.
        """
        try:
            self.leases.mkdir(parents=True, exist_ok=True)
            with FileLock(self.leases / ".lock"):
                yield
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(
                f"cannot write checkpoints to {self.path}: {error.strerror or error}; set EMERGENT_HEADS_CACHE"
            ) from error

    # what follows is called with the store locked

    def note(self, name: str) -> _Note:
        return _Note(**json.loads(self._note_path(name).read_text()))

    def write(self, note: _Note) -> None:
        write_json(self._note_path(note.name), asdict(note))

    def living(self) -> list[_Note]:
        """The leases of living processes. Those of dead ones are ended as they would have ended them."""
        living, dead = [], []
        for path in self.leases.glob("*.json"):
            try:
                note = self.note(path.stem)
            except (ValueError, TypeError):  # its process was killed while writing it
                path.unlink()
                continue
            (living if _is_locked(self._lock_path(note.name)) else dead).append(note)
        for note in dead:
            self._end(note, living)
        return living

    def make_room(self, size: int, budget: float, at: str, others: Sequence[_Note]) -> bool:
        """Deletes what is not in use, the least recently used first, until `size` more bytes fit into the budget.

        False, and nothing deleted, where that is not enough.

        Args:
            size: bytes to come.
            budget: most bytes in the store.
            at: the folder they come into.
            others: leases of the others.
        """
        reserved: dict[str, int] = {}  # by folder in use
        for note in others:
            reserved[note.at] = max(reserved.get(note.at, 0), note.reserved or 0)
        taken: dict[str, int] = {}
        unused: list[tuple[bool, int, str]] = []  # whole or not, last use, folder: what is not whole goes first
        for marker in self.path.glob(f"*/*/{MARKER}"):
            place = marker.parent.relative_to(self.path).as_posix()
            if place != at:
                taken[place] = max(_size(marker.parent), reserved.get(place, 0))
                if place not in reserved:
                    unused.append((bool(_text(marker)), marker.stat().st_mtime_ns, place))
        if size + sum(taken[place] for place in taken.keys() & reserved.keys()) > budget:
            return False
        for *_, place in sorted(unused):
            if size + sum(taken.values()) <= budget:
                break
            _delete(self.path / place)
            taken[place] = _size(self.path / place)  # not 0 where a network file system keeps files that are open
        return size + sum(taken.values()) <= budget

    def _end(self, note: _Note, living: Sequence[_Note]) -> None:
        self._note_path(note.name).unlink(missing_ok=True)
        self._lock_path(note.name).unlink(missing_ok=True)
        others = [other for other in living if other.at == note.at and other.name != note.name]
        if note.evict and others:
            self.write(replace(others[0], evict=True))  # the last one deletes it
        elif note.evict:
            _delete(self.path / note.at)

    def _note_path(self, name: str) -> Path:
        return self.leases / f"{name}.json"

    def _lock_path(self, name: str) -> Path:
        return self.leases / f"{name}.lock"


@dataclass(frozen=True)
class Lease:
    """A hold on one checkpoint of a store; `Store.lease` gives it.

    Attributes:
        store: the store.
        name: of the lease.
        folder: where the checkpoint lies, or will lie.
    """

    store: Store
    name: str
    folder: Path

    def is_whole(self) -> bool:
        """Whether the checkpoint lies in the store, after waiting for a process that is fetching it."""
        return not self._my_turn(lambda others: True, "")

    def reserve(self, size: int, budget_gb: float | None) -> bool:
        """Whether to fetch the checkpoint into `folder`; False where another process has fetched it by now.

        Waits until nobody is fetching it, and until there is room.

        Args:
            size: bytes of all its files.
            budget_gb: most disk (10^9 bytes) that all checkpoints in the store may take; None for no bound.
        """

        def reserved(others: Sequence[_Note]) -> bool:
            note = self.store.note(self.name)
            if budget_gb is not None and not self.store.make_room(size, budget_gb * 1e9, note.at, others):
                return False
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / MARKER).touch()
            self.store.write(replace(note, reserved=size))
            return True

        return self._my_turn(reserved, f"room for {size / 1e9:.3g} GB within disk_budget_gb={budget_gb}")

    def complete(self, called: str) -> None:
        """Says that all files have come, under the name that offline use asks for."""
        with self.store.locked():
            shutil.rmtree(self.folder / ".cache", ignore_errors=True)  # where the client kept its notes
            (self.folder / MARKER).write_text(called)
            self.store.write(replace(self.store.note(self.name), reserved=None))

    def _my_turn(self, ready: Callable[[Sequence[_Note]], bool], what: str) -> bool:
        """Waits until the checkpoint is whole (False), or nobody is fetching it and `ready(others)` (True)."""
        waited, pause = 0.0, _FIRST_PAUSE_S
        while True:
            with self.store.locked():
                if _text(marker := self.folder / MARKER):
                    marker.touch()
                    return False
                others = [note for note in self.store.living() if note.name != self.name]
                at = self.store.note(self.name).at
                fetching = [note for note in others if note.at == at and note.reserved is not None]
                if not fetching and ready(others):
                    return True
            if waited <= _PATIENCE_S < waited + pause:
                self._say_that_it_waits(what, fetching, others)
            time.sleep(pause)
            waited, pause = waited + pause, min(1.5 * pause, _LONGEST_PAUSE_S)

    def _say_that_it_waits(self, what: str, fetching: Sequence[_Note], others: Sequence[_Note]) -> None:
        if fetching:
            why = f"{fetching[0].who} to fetch it"
        else:
            taken = {note: max(_size(self.store.path / note.at), note.reserved or 0) / 1e9 for note in others}
            users = sorted(f"{note.who} ({size:.3g} GB)" for note, size in taken.items() if size)
            why = f"{what}, which is in use by {', '.join(users)}"
        about = f"{self.folder.name} of {self.folder.parent.name} has waited {_PATIENCE_S:g} s for"
        warnings.warn(f"{about} {why}", WaitingWarning, stacklevel=2)


def _this_process() -> str:
    return f"{socket.gethostname()} process {os.getpid()}"


def _is_locked(path: Path) -> bool:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def _text(path: Path) -> str:
    """Content of a file, empty where there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, in which a fetch may rename them meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(place) / name).stat().st_size if name != MARKER else 0
    return total


def _delete(folder: Path) -> None:
    """Deletes a checkpoint of ours. The marker goes last, so what a killed process leaves is still known as ours."""
    marker = folder / MARKER
    if not marker.is_file():
        return
    marker.write_text("")  # from here on it is not whole
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != marker:
            path.unlink()
    if list(folder.iterdir()) == [marker]:
        marker.unlink()
        folder.rmdir()
