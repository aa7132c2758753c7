"""What all tests share: one thread, no network, a cache folder of their own, and one small trained series."""

import os
import signal
import socket
from pathlib import Path

# Set before the libraries that read them are imported, and inherited by processes that tests start.
os.environ |= {
    "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing answers there; tests of the hub put their own server in its place
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}

import pytest
import torch
from filelock import FileLock

from emergent_heads.experiments.small_language_model import Recipe, train_series

torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# More repetition and a higher learning rate than the demo's recipe: repeats sooner, for tests.
EARLY = Recipe(seed=0, steps=450, rows=24, repeated_rows=22, learning_rate=0.012)
SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def _no_network():
    """A connection that leaves this machine is an error; the loopback address and Unix sockets are not."""
    connect = socket.socket.connect

    def guarded(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test tried to reach {address[0]}")
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """Kept evaluations and models of one test are not seen by the next, nor by the user."""
    monkeypatch.setenv("EMERGENT_HEADS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def emerging_series(tmp_path_factory) -> Path:
    """Folder of a small series, `step0` to `step450`, in which in-context repetition emerges; trained once a session.

    Read it by `CheckpointSeries.from_directory`. Don't write to it.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # which all workers share
    with FileLock(root / "emerging_series.lock"):
        return train_series(root / "emerging_series", EARLY)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public evaluation tables beside the checkout; the test is skipped where there is none."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"no tables of public evaluations at {SHARED / 'data'}")
    return SHARED / "data"
