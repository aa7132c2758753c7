"""One store of checkpoints under several processes: what they take together, wait for, and leave behind."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hub_server import serving, use_hub
from store_user import read_all

import emergent_heads as eh
from emergent_heads.checkpoints import store as module
from emergent_heads.checkpoints.store import MARKER, Store
from emergent_heads.errors import HubError, OutputError, WaitingWarning

REPOSITORY = "models--me--tiny"
SIZE = 1000
SEED = 0


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "checkpoints", tmp_path / "leases")


class User:
    """A process that runs `store_user.py`."""

    def __init__(self, store: Store, key: str, **options: object) -> None:
        script = Path(__file__).with_name("store_user.py")
        arguments = [sys.executable, str(script), str(store.path.parent), REPOSITORY, key, json.dumps(options)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def until(self, what: str) -> "User":
        while (said := self.says()) != what:
            assert said, f"the process ended before it said {what!r}"
            self.go_on()
        return self

    def leave(self) -> None:
        self.go_on()
        self.until("left")
        assert self.process.wait() == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def user(store) -> Iterator[Callable[..., User]]:
    users: list[User] = []

    def start(key: str, **options: object) -> User:
        users.append(User(store, key, **options))
        return users[-1]

    yield start
    for each in users:
        each.kill()
        each.process.stdin.close()
        each.process.stdout.close()


def plant(store: Store, key: str, size: int = SIZE, *, whole: bool = True, used: int = 0) -> Path:
    """A checkpoint that was used last at a time; not whole, where its fetch was broken off."""
    folder = store.folder(REPOSITORY, key)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(size))
    (folder / MARKER).write_text(key if whole else "")
    os.utime(folder / MARKER, (used, used))
    return folder


def keys(store: Store) -> set[str]:
    return {marker.parent.name for marker in store.path.glob(f"*/*/{MARKER}")}


def reserve(store: Store, key: str, *, size: int = SIZE, budget: float, evict: bool = False) -> bool:
    with store.lease(REPOSITORY, key, evict=evict) as lease:
        return lease.reserve(size, budget / 1e9)


@contextmanager
def at_first_pause(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> Iterator[list[float]]:
    """Calls `do` when the process pauses for the first time; gives the pauses."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            do()

    with monkeypatch.context() as patched:
        patched.setattr(module.time, "sleep", pause)
        yield pauses


# one process


def test_room_is_made_by_the_least_recently_used_that_nobody_uses(store):
    """Against a plain statement of the rule, on random stores."""
    random = np.random.default_rng(SEED)
    for case in range(40):
        repository = store.path / REPOSITORY
        names = [f"{case}-{place}" for place in range(int(random.integers(1, 7)))]
        sizes = dict(zip(names, random.integers(1, 9, len(names)) * 100, strict=True))
        whole = dict(zip(names, random.random(len(names)) < 0.7, strict=True))
        used = dict(zip(names, random.permutation(len(names)), strict=True))
        for name in names:
            plant(store, name, int(sizes[name]), whole=bool(whole[name]), used=int(used[name]))
        in_use = {name for name in names if random.random() < 0.3}
        notes = [module._Note(name, f"{REPOSITORY}/{name}", "someone", None, False) for name in in_use]
        size, budget = int(random.integers(1, 9)) * 100, int(random.integers(9, 30)) * 100

        order = sorted(set(names) - in_use, key=lambda name: (whole[name], used[name]))
        gone = next(
            (
                set(order[:n])
                for n in range(len(order) + 1)
                if size + sum(sizes[name] for name in set(names) - set(order[:n])) <= budget
            ),
            None,
        )
        with store.locked():
            made = store.make_room(size, budget, f"{REPOSITORY}/new", notes)
        assert made == (gone is not None)
        assert keys(store) == set(names) - (gone or set())
        for name in list(repository.iterdir()):
            module._delete(name)


def test_only_folders_with_our_marker_are_deleted(store):
    foreign = store.folder(REPOSITORY, "snapshots")
    foreign.mkdir(parents=True)
    (foreign / "weights").write_bytes(bytes(5 * SIZE))
    assert reserve(store, "a", budget=SIZE, evict=True)
    assert (foreign / "weights").is_file()


def test_leases_leave_nothing_but_the_lock(store):
    with store.lease(REPOSITORY, "a", evict=True) as lease:
        assert not lease.is_whole()
        assert lease.reserve(SIZE, None)
        (lease.folder / ".cache").mkdir()
        lease.complete("a")
        assert store.whole(REPOSITORY) == {"a": lease.folder}
        assert [path.name for path in lease.folder.iterdir()] == [MARKER]
    assert [path.name for path in store.leases.iterdir()] == [".lock"]
    assert keys(store) == set()


def test_what_a_killed_process_began_to_write_is_no_lease(store):
    store.leases.mkdir()
    (store.leases / ".half-written.json").write_text("")
    (store.leases / "other.json").write_text("{}")
    assert reserve(store, "a", budget=SIZE)
    assert [path.name for path in store.leases.iterdir()] == [".lock"]


def test_a_deletion_that_was_broken_off_is_finished_later(store, monkeypatch):
    folder = plant(store, "a")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rmdir", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        patched.setattr(Path, "unlink", lambda path, **options: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            module._delete(folder)
    assert store.whole(REPOSITORY) == {}
    assert keys(store) == {"a"}  # known as ours, and counted
    assert reserve(store, "b", budget=SIZE, evict=True)
    assert keys(store) == set()


def test_files_that_stay_after_deletion_are_counted(store, monkeypatch):
    """As on a network file system where a file is open elsewhere."""
    plant(store, "a")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda path, **options: None)
        with store.locked():
            assert not store.make_room(SIZE, SIZE, f"{REPOSITORY}/b", [])
    assert keys(store) == {"a"}


def test_a_store_that_cannot_be_written(store):
    store.leases.write_text("a file is in the way")
    with pytest.raises(OutputError, match=f"cannot write checkpoints to {store.path}: .*set EMERGENT_HEADS_CACHE"):
        reserve(store, "a", budget=SIZE)


# two processes


def test_a_checkpoint_in_use_is_not_deleted_and_its_room_is_waited_for(store, user, monkeypatch):
    plant(store, "a")
    reader = user("a").until("leased")

    def leave() -> None:
        assert keys(store) == {"a"}
        reader.go_on()
        reader.until("whole").leave()

    with at_first_pause(monkeypatch, leave) as pauses:
        assert reserve(store, "b", budget=1.5 * SIZE)
    assert pauses
    assert keys(store) == {"b"}


def test_a_reservation_counts_before_its_bytes_come(store, user, monkeypatch):
    fetcher = user("a", fetch=SIZE, budget_gb=1.9e-9 * SIZE).until("reserved")
    assert (store.folder(REPOSITORY, "a") / "weights").stat().st_size == SIZE // 2

    def leave() -> None:
        fetcher.go_on()
        fetcher.until("whole").leave()

    with at_first_pause(monkeypatch, leave) as pauses:
        assert reserve(store, "b", budget=1.9 * SIZE)
    assert pauses
    assert keys(store) == {"b"}


@pytest.mark.parametrize("state", ["leased", "reserved", "whole"])
@pytest.mark.parametrize("evict", [True, False])
def test_a_killed_process_blocks_nobody(store, user, monkeypatch, state, evict):
    dead = user("a", fetch=SIZE, budget_gb=1e-9 * SIZE, evict=evict).until(state)
    dead.kill()
    with at_first_pause(monkeypatch, pytest.fail):
        with store.locked():
            assert store.living() == []
        kept = {"leased": set(), "reserved": {"a"}, "whole": {"a"}}[state]  # half a fetch may still be resumed
        assert keys(store) == (set() if evict else kept)
        assert reserve(store, "b", budget=SIZE)
    assert not (store.folder(REPOSITORY, "a") / "weights").exists()


def test_a_checkpoint_that_two_want_is_fetched_by_one(store, user, monkeypatch):
    fetcher = user("a", fetch=SIZE, evict=True).until("reserved")

    def complete() -> None:
        fetcher.go_on()
        fetcher.until("whole")

    with store.lease(REPOSITORY, "a", evict=True) as lease:
        with at_first_pause(monkeypatch, complete) as pauses:
            assert lease.is_whole()
        assert pauses
        assert not lease.reserve(SIZE, 1e-9 * SIZE)
        fetcher.leave()
        assert (lease.folder / "weights").stat().st_size == SIZE  # the other one has left, but we have not
    assert keys(store) == set()


def test_a_fetch_that_its_process_did_not_live_to_end_is_taken_over(store, user, monkeypatch):
    fetcher = user("a", fetch=SIZE).until("reserved")
    with store.lease(REPOSITORY, "a", evict=False) as lease:
        with at_first_pause(monkeypatch, fetcher.kill):
            assert not lease.is_whole()
        assert lease.reserve(SIZE, 1e-9 * SIZE)


@pytest.mark.parametrize("last_evicts", [True, False])
def test_the_last_one_that_leaves_evicts(store, user, last_evicts):
    plant(store, "a")
    first, last = user("a", evict=True).until("leased"), user("a", evict=last_evicts).until("leased")
    first.go_on()
    first.until("whole").leave()
    assert keys(store) == {"a"}
    last.go_on()
    last.until("whole").leave()
    assert keys(store) == set()


def test_who_waits_long_says_so_once_and_for_whom(store, user, monkeypatch):
    reader = user("a", fetch=SIZE).until("whole")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if sum(pauses) > 3 * module._PATIENCE_S and reader.process.poll() is None:
            reader.kill()

    monkeypatch.setattr(module.time, "sleep", pause)
    with pytest.warns(WaitingWarning) as caught:
        assert reserve(store, "b", budget=1.5 * SIZE)
    (warning,) = caught
    assert str(warning.message) == (
        f"b of {REPOSITORY} has waited 60 s for room for 1e-06 GB within disk_budget_gb=1.5e-06, which is in use by "
        f"{module._this_process().rpartition(' ')[0]} {reader.process.pid} (1e-06 GB)"
    )
    assert max(pauses) <= 2


# workers on a hub


STEPS = tuple(range(1, 7))
WEIGHTS = 200_000
NAME = "me/tiny"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> dict[tuple[str, str], Path]:
    folders = {}
    for step in STEPS:
        folder = tmp_path_factory.mktemp(f"step{step}")
        (folder / "config.json").write_text(json.dumps({"step": step}))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes([step]) * WEIGHTS)
        folders[NAME, f"step{step}"] = folder
    return folders


def one_checkpoint(served) -> int:
    return sum(path.stat().st_size for path in served[NAME, "step1"].iterdir())


def store_in(cache: Path) -> Store:
    return Store(cache / "emergent_heads" / "checkpoints", cache / "emergent_heads" / "checkpoint_leases")


def bytes_in(cache: Path) -> int:
    """Bytes of checkpoints, whole or on their way; without the marker and what the hub's client notes.

    With the store locked, so that nothing is deleted while it is counted; a file that is renamed counts once.
    """
    sizes = {}
    with (store := store_in(cache)).locked():
        for folder, _, names in os.walk(store.path):
            for name in names:
                if name not in (MARKER, ".gitignore", "CACHEDIR.TAG") and not name.endswith((".lock", ".metadata")):
                    with suppress(FileNotFoundError):
                        status = (Path(folder) / name).stat()
                        sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


@contextmanager
def watching(cache: Path) -> Iterator[list[int]]:
    """The bytes in the store, over and over until the block ends."""
    seen, done = [bytes_in(cache)], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(bytes_in(cache))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def run_workers(hub, folder: Path, orders: list[list[int]], **options: object) -> None:
    """One process for each order of steps; they begin together."""
    context = multiprocessing.get_context("forkserver")  # torch is imported once for all
    context.set_forkserver_preload(["emergent_heads.checkpoints.weights", "huggingface_hub"])
    begin = context.Barrier(len(orders))
    workers = [
        context.Process(target=read_all, args=(begin, hub.environment(folder), NAME, order, options))
        for order in orders
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join(timeout=120)
        assert [worker.exitcode for worker in workers] == [0] * len(workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


@pytest.mark.parametrize(("cache_policy", "room_for"), [("keep", 2.4), ("evict", 1)])
def test_workers_together_keep_the_budget_and_finish(served, tmp_path, cache_policy, room_for):
    budget = room_for * one_checkpoint(served)

    def slow_folder(repository: str, revision: str) -> Path | None:
        time.sleep(0.01)  # so that fetches last long enough to meet
        return served.get((repository, revision))

    orders = [[1, 2, 3, 4], [3, 4, 5, 6], [6, 5, 2, 1]]
    with serving(slow_folder, lambda name: [revision for _, revision in served]) as hub, watching(tmp_path) as seen:
        run_workers(hub, tmp_path, orders, cache=cache_policy, disk_budget_gb=budget / 1e9)
        assert len(STEPS) <= hub.fetched("model.safetensors") <= 12
    assert WEIGHTS < max(seen) <= budget
    left = bytes_in(tmp_path)
    assert left == 0 if cache_policy == "evict" else WEIGHTS < left <= budget
    assert [path.name for path in store_in(tmp_path).leases.iterdir()] == [".lock"]


def test_each_checkpoint_is_fetched_once_where_the_budget_allows(served, tmp_path):
    with serving(served) as hub:
        orders = [[1, 2, 3], [1, 2, 3], [3, 2, 1]]
        run_workers(hub, tmp_path, orders, disk_budget_gb=10 * one_checkpoint(served) / 1e9)
        assert hub.fetched("model.safetensors") == 3


def test_a_fetch_that_fails_leaves_no_reservation(served, tmp_path, monkeypatch):
    budget = 1.5 * one_checkpoint(served)
    with serving(served) as hub:
        use_hub(monkeypatch, hub, tmp_path)
        source = eh.CheckpointSeries.from_hub(NAME, disk_budget_gb=budget / 1e9).source
        hub.fail("model.safetensors", truncate=True)
        with pytest.raises(HubError), source.fetched(1):
            pass
        hub.faults.clear()
        with source.fetched(2) as folder:
            assert (folder / "model.safetensors").stat().st_size == WEIGHTS
        assert bytes_in(tmp_path) <= budget


def test_files_and_bytes_reserved_are_those_that_come(served, tmp_path, monkeypatch):
    """A budget of exactly one checkpoint is enough for one after the other."""
    with serving(served) as hub, watching(tmp_path) as seen:
        use_hub(monkeypatch, hub, tmp_path)
        source = eh.CheckpointSeries.from_hub(NAME, disk_budget_gb=one_checkpoint(served) / 1e9).source
        for step in (1, 2, 3):
            with source.fetched(step):
                assert bytes_in(tmp_path) == one_checkpoint(served)
    assert max(seen) <= one_checkpoint(served)
