"""Processes that use checkpoints in a store.

This one uses one, and says how far it is:

    python store_user.py FOLDER REPOSITORY KEY '{"evict": true, "fetch": 1000, "budget_gb": 2e-6}'

It prints "leased", with `fetch` (bytes) "reserved" or "there already", then "whole"; before each next thing it waits
for a line on its standard input.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path

from emergent_heads.checkpoints.store import Store


def say(what: str) -> None:
    print(what, flush=True)
    sys.stdin.readline()


def main(folder: str, repository: str, key: str, options: str) -> None:
    wanted = {"evict": False, "fetch": None, "budget_gb": None, **json.loads(options)}
    store = Store(Path(folder) / "checkpoints", Path(folder) / "leases")
    with store.lease(repository, key, evict=wanted["evict"]) as lease:
        say("leased")
        if wanted["fetch"] is not None:
            if lease.reserve(wanted["fetch"], wanted["budget_gb"]):
                (lease.folder / "weights").write_bytes(bytes(wanted["fetch"] // 2))
                say("reserved")
                (lease.folder / "weights").write_bytes(bytes(wanted["fetch"]))
                lease.complete(key)
            else:
                say("there already")
        say("whole")
    print("left", flush=True)


def read_all(
    begin: Barrier,
    environment: Mapping[str, str],
    repository: str,
    steps: Sequence[int],
    options: Mapping[str, object],
) -> None:
    """Reads checkpoints of a hub whose weights are bytes of the step, one after the other."""
    import emergent_heads as eh

    os.environ.update(environment)
    source = eh.CheckpointSeries.from_hub(repository, **options).source
    begin.wait(timeout=60)
    for step in steps:
        with source.fetched(step) as folder:
            for _ in range(5):  # as long as a reader reads, all of it is there
                assert set((folder / "model.safetensors").read_bytes()) == {step}
                assert json.loads((folder / "config.json").read_text())["step"] == step


if __name__ == "__main__":
    main(*sys.argv[1:])
