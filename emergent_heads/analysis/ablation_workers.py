"""The runs of an ablation by workers: each opens the model once and does a part of the controls' runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from emergent_heads.analysis.sending import SentModel
from emergent_heads.jobs import Executor, Job, run_jobs, values
from emergent_heads.models.hooked import Answers, hooked
from emergent_heads.models.residual_engine import Edit, Reads, ResidualEngine, ResidualTrace
from emergent_heads.workers import kept_by_worker

_MOST_IN_JOB = 64  # runs; each job begins with a plain pass over the rows


def traces_of(
    engine: ResidualEngine,
    inputs: Int[Tensor, "row pos"],
    reads: Reads,
    ends: Int[np.ndarray, " row"],
    up_to: int | None = None,
) -> Iterator[tuple[slice, ResidualTrace]]:
    """Passes over rows, in pieces, each up to the last of its rows' ends."""
    size = engine.rows_per_trace(int(np.ceil(ends.mean())))
    for start in range(0, len(inputs), size):
        rows = slice(start, min(start + size, len(inputs)))
        here = Reads(reads.positions[rows], reads.targets[rows])
        yield rows, engine.trace(inputs[rows, : int(ends[rows].max())], here, up_to=up_to)


def of_rows(edit: Edit, rows: slice) -> Edit:
    """The edit of some of the rows."""
    target = edit.target if edit.target.shape[1] == 1 else edit.target[:, rows]
    return replace(edit, positions=edit.positions[rows], target=target)


@dataclass(frozen=True, eq=False)
class Crew:
    """Who does the runs.

    Attributes:
        model: which they are done on.
        executor, workers: as in `run_jobs`.
    """

    model: SentModel
    executor: Executor | None
    workers: int | None

    def answers(
        self,
        inputs: Int[Tensor, "row pos"],
        reads: Reads,
        ends: Int[np.ndarray, " row"],
        kinds: Sequence[Sequence[Edit]],
        *,
        batch_size: int | None,
        progress: bool,
    ) -> list[Answers]:
        """The answers `[run, row, read]` of some kinds of runs, each given by its edits.

        Args:
            inputs, reads, ends: as in `traces_of`.
            kinds: the edits, one per edited layer, all of the same runs.
            batch_size: largest number of sequences run together.
            progress: whether to show a bar.
        """
        sent = _SentRows(self.model, inputs, reads, ends, batch_size)
        kind_of: dict[Job, int] = {}
        for kind, edits in enumerate(kinds):
            n = len(edits[0].read)
            for start in range(0, n, _MOST_IN_JOB):
                part = [_on(edit.runs(start, start + _MOST_IN_JOB), "cpu") for edit in edits]
                kind_of[Job(f"runs from {start}", sent.answers, (part,), size=len(part[0].read))] = kind
        how: dict[str, Any] = {"workers": self.workers, "modules": self.model.modules, "progress": progress}
        ended = dict(values(run_jobs(kind_of, self.executor, title="control runs", unit="run", **how)))
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in kinds]
        for job, kind in kind_of.items():
            found[kind].append(ended[job])
        return [Answers(*(torch.cat(part) for part in zip(*parts, strict=True))) for parts in found]


@dataclass(frozen=True, eq=False)
class _SentRows:
    """What a worker needs for all its jobs."""

    model: SentModel
    inputs: Int[Tensor, "row pos"]
    reads: Reads
    ends: Int[np.ndarray, " row"]
    batch_size: int | None
    key: str = field(default_factory=lambda: uuid4().hex)

    def open(self) -> ResidualEngine:
        return hooked(SentModel.arrived_together(self.model)[0]).residual_engine

    def answers(self, edits: Sequence[Edit]) -> tuple[Tensor, Tensor]:
        """The job of some runs."""
        engine = kept_by_worker(self.key, self.open)
        parts: list[Answers] = []
        for rows, trace in traces_of(engine, self.inputs, self.reads, self.ends):
            here = [_on(of_rows(edit, rows), trace.tokens.device) for edit in edits]
            parts.append(engine.answers(trace, here, batch_size=self.batch_size))
        return torch.cat([part.log_p for part in parts], dim=-2), torch.cat([part.matched for part in parts], dim=-2)


def _on(edit: Edit, device: torch.device | str) -> Edit:
    """The edit on a device, with memory of its own, as a view would be pickled with all that it is a view of."""
    moved = {name: getattr(edit, name).to(device).clone() for name in ("positions", "read", "write", "target")}
    return replace(edit, **moved)
