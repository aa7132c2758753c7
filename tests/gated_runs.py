"""Runs of a sweep that note each of their steps and can be held in the middle, for tests that kill their workers."""

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from emergent_heads.sweeps import RunSpec, SweepResult, grid, run_sweep
from emergent_heads.tasks import LinearMap

HELD_AT = 3
STEPS = 6
PATIENCE_SECONDS = 300
"""Far more than anything here takes; a test that hangs is to fail."""


@dataclass(frozen=True)
class Gated(LinearMap):
    """A linear map whose training writes a line for each step, and waits before step `HELD_AT` where it is to be held.

    Attributes:
        gate: folder with a file `hold-<seed>` for each run to be held. Such a run writes `held-<seed>`, which says
            where it is, and goes on when there is `go`.
    """

    state_size: int = 4
    sparsity: int | None = 2
    gate: str = ""

    def batch(self, n, *, seed, step=0, split="train", device="cpu"):
        if split == "train":
            with (Path(self.gate) / "steps.txt").open("a") as file:
                file.write(f"{seed} {step}\n")
            if step == HELD_AT and (Path(self.gate) / f"hold-{seed}").exists():
                (Path(self.gate) / f".held-{seed}").write_text(f"{os.getpid()} {_ray_node()}")
                (Path(self.gate) / f".held-{seed}").rename(Path(self.gate) / f"held-{seed}")
                wait_until((Path(self.gate) / "go").exists)
        return super().batch(n, seed=seed, step=step, split=split, device=device)


def _ray_node() -> str:
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().get_node_id() if ray is not None and ray.is_initialized() else ""


def wait_until(there: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not there():
        assert time.monotonic() < end, f"waited {PATIENCE_SECONDS} seconds"
        time.sleep(0.02)


@dataclass(frozen=True)
class Gate:
    """The gate of some runs.

    Attributes:
        folder: where it is.
        seeds: of the runs.
    """

    folder: Path
    seeds: int

    @classmethod
    def of(cls, folder: Path, seeds: int, hold: tuple[int, ...]) -> "Gate":
        folder.mkdir(parents=True)
        for seed in hold:
            (folder / f"hold-{seed}").touch()
        return cls(folder, seeds)

    @property
    def runs(self) -> list[RunSpec]:
        task = Gated(gate=str(self.folder), seed=0)
        shape = {"n_layers": 1, "d_model": 16, "n_heads": 2, "tokens_per_batch": 64, "n_held_out": 8}
        return grid(task, **shape, steps=STEPS, evaluate_every=2, checkpoints=[0], seed=range(self.seeds))

    def held(self, seed: int) -> tuple[int, str]:
        """Process and Ray node of a run, once it is held."""
        file = self.folder / f"held-{seed}"
        wait_until(file.exists)
        process, _, node = file.read_text().partition(" ")
        return int(process), node

    def let_go(self) -> None:
        (self.folder / "go").touch()

    def steps(self, seed: int) -> list[int]:
        """The steps that were trained of a run, by whatever process, in order."""
        lines = (self.folder / "steps.txt").read_text().splitlines()
        return [int(step) for line in lines for of, step in [line.split()] if int(of) == seed]

    def check(self, result: SweepResult, lost: tuple[int, ...], tmp_path: Path) -> None:
        """Nothing was lost but the held step of the runs in `lost`, and the table is that of an undisturbed sweep."""
        assert list(result.table["status"]) == ["not solved"] * self.seeds, result.failures
        once = list(range(STEPS))
        for seed in range(self.seeds):
            repeated = [*once[: HELD_AT + 1], *once[HELD_AT:]] if seed in lost else once
            assert self.steps(seed) == repeated, f"seed {seed}"
        here = run_sweep(self.runs, tmp_path / "here", workers=0, progress=False)
        pd.testing.assert_frame_equal(
            *(each.table.drop(columns="seconds") for each in (result, here)), rtol=1e-6, check_exact=False
        )


def sweeping(gate: Gate, path: Path, executor=None, **how) -> "Future[SweepResult]":
    """A sweep that runs in a thread, so that the test can disturb it."""
    future: Future[SweepResult] = Future()

    def run() -> None:
        try:
            future.set_result(run_sweep(gate.runs, path, executor, save_every_seconds=0, progress=False, **how))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
