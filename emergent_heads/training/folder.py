"""The folder of a run on disk, so that a killed training leaves one that is read, and that goes on where it stopped.

All that a training needs to go on (weights, optimizer state, what was measured) is in one file, renamed into place;
tables and checkpoints that are ahead of it or behind it after a kill are written again, with the same content.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from emergent_heads.checkpoints.run import (
    ATTENTION_BIAS,
    CHECKPOINTS,
    MANIFEST,
    RUN_FORMAT,
    RUN_FORMAT_VERSION,
    TOKENIZER_FILES,
    checkpoint_path,
    is_small_run,
    read_manifest,
)
from emergent_heads.errors import NoCheckpointsError, OutputError, RunFolderError, RunInUseError
from emergent_heads.storage import as_read_back, atomic_path, versions, write_json
from emergent_heads.training.evaluation import Evaluation
from emergent_heads.training.settings import differences

RunStatus = Literal["unfinished", "finished", "solved", "diverged"]
METRICS = "metrics.parquet"
POSITIONS = "positions.parquet"
RESUME = "resume.safetensors"
INITIAL = "initial.safetensors"
"""Holds the weights carried over from an earlier run, until the run is done: it then needs that one no more."""
_LOCK = ".lock"
_METRICS_COLUMNS = (
    "step",
    "seconds",
    "tokens",
    "learning_rate",
    "attention_bias",
    "train_loss_nats",
    "loss_nats",
    "accuracy",
    "exact_match",
    "share_learned",
)


@dataclass(eq=False)
class History:
    """What has been measured of a run so far.

    Attributes:
        step: optimiser steps done.
        seconds: spent on them, by the clock, over all sittings.
        solved_step: first evaluated step that was solved.
        rows: of the metrics, one per evaluation.
        position_losses, position_accuracies: `[pos]` each, one per evaluation.
        train_losses: of the steps since the last evaluation.
    """

    step: int = 0
    seconds: float = 0.0
    solved_step: int | None = None
    rows: list[dict[str, float]] = field(default_factory=list)
    position_losses: list[np.ndarray] = field(default_factory=list)
    position_accuracies: list[np.ndarray] = field(default_factory=list)
    train_losses: list[float] = field(default_factory=list)

    def add(self, evaluation: Evaluation, **numbers: float) -> dict[str, float]:
        """Adds an evaluation of the present step and gives its row."""
        train_loss = float(np.mean(self.train_losses)) if self.train_losses else float("nan")
        known = {"step": self.step, "seconds": self.seconds, "train_loss_nats": train_loss}
        values = {**known, **numbers, **evaluation.metrics()}
        self.rows.append({name: values[name] for name in _METRICS_COLUMNS})
        self.position_losses.append(evaluation.position_loss_nats)
        self.position_accuracies.append(evaluation.position_accuracy)
        self.train_losses.clear()
        return self.rows[-1]

    def first_lost_step(self) -> int | None:
        """First step since the last evaluation whose training loss was not finite."""
        lost = np.flatnonzero(~np.isfinite(self.train_losses))
        return self.step - len(self.train_losses) + int(lost[0]) + 1 if len(lost) else None

    def metrics(self) -> pd.DataFrame:
        table = pd.DataFrame(self.rows, columns=list(_METRICS_COLUMNS))
        return table.astype({"step": "int64", "tokens": "int64"})

    def positions(self, is_answer: np.ndarray) -> pd.DataFrame:
        """One row per evaluation and token but the first; `is_answer` `[pos]` says which are answers."""
        n = len(self.rows)
        return pd.DataFrame(
            {
                "step": np.repeat([int(row["step"]) for row in self.rows], len(is_answer)),
                "position": np.tile(np.arange(1, len(is_answer) + 1), n),
                "is_answer": np.tile(is_answer, n),
                "loss_nats": np.concatenate(self.position_losses) if n else np.empty(0),
                "accuracy": np.concatenate(self.position_accuracies) if n else np.empty(0),
            }
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the plain numbers of `numbers`, exactly."""
        columns = {
            name: torch.tensor([row[name] for row in self.rows], dtype=torch.float64) for name in _METRICS_COLUMNS
        }
        return {
            **{f"metrics.{name}": column for name, column in columns.items()},
            "positions.loss_nats": torch.from_numpy(np.stack(self.position_losses)),
            "positions.accuracy": torch.from_numpy(np.stack(self.position_accuracies)),
            "train_losses": torch.tensor(self.train_losses, dtype=torch.float64),
        }

    def numbers(self) -> dict[str, Any]:
        return {"step": self.step, "seconds": self.seconds, "solved_step": self.solved_step}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> "History":
        """The history that `tensors` and `numbers` were made of."""
        columns = {name: tensors[f"metrics.{name}"].tolist() for name in _METRICS_COLUMNS}
        return cls(
            **numbers,
            rows=[dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
            position_losses=list(tensors["positions.loss_nats"].numpy()),
            position_accuracies=list(tensors["positions.accuracy"].numpy()),
            train_losses=tensors["train_losses"].tolist(),
        )


@dataclass(frozen=True)
class ResumePoint:
    """What a training needs to go on.

    Attributes:
        weights: the model's state.
        moments: the optimizer's running means, by `<parameter>.exp_avg` and `<parameter>.exp_avg_sq`.
        history: what was measured.
    """

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    history: History


@dataclass(frozen=True)
class RunFolder:
    """One run's folder.

    Attributes:
        path: the folder.
        wanted: what the run to be is made of: `config`, `task`, `seed` and `training`, as plain values, and
            `init_from` where it starts from the weights of an earlier run.
    """

    path: Path
    wanted: Mapping[str, Any]

    def status(self) -> RunStatus | None:
        """How far the run in the folder is; None when there is none yet.

        Raises:
            RunFolderError: the folder holds something else, a run made by other settings, or one of another version.
        """
        try:
            manifest = read_manifest(self.path)
        except NoCheckpointsError as error:
            if not self.path.exists():
                return None
            # What a killed process wrote before the manifest, or one that is writing it right now.
            early = {INITIAL, ATTENTION_BIAS, *TOKENIZER_FILES}
            if self.path.is_dir() and all(at.name in early or at.name.startswith(".") for at in self.path.iterdir()):
                return None
            raise RunFolderError(f"{self.path} exists and is no run folder; name another folder") from error
        if not is_small_run(manifest):
            raise RunFolderError(f"{self.path} holds a run that was not trained by this library; name another folder")
        wanted = {"init_from": None, **as_read_back(self.wanted)}
        there = {name: manifest.get(name) for name in wanted}
        if different := differences(there, wanted):
            listed = "; ".join(different[:8]) + (f"; and {len(different) - 8} more" if len(different) > 8 else "")
            raise RunFolderError(
                f"{self.path} holds a run made by other settings ({listed}); name another folder, or use the settings "
                "it was begun with"
            )
        return manifest["status"]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training into the folder; a killed one holds it no longer.

        Raises:
            RunInUseError: another process is training there. OutputError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / _LOCK)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RunInUseError(
                f"another process is training into {self.path}; wait until it is done, or name another folder"
            ) from error
        except OSError as error:
            raise OutputError(
                f"cannot write {self.path}: {error.strerror or error}; choose a folder you may write to"
            ) from error
        try:
            yield
        finally:
            lock.release()

    def begin(
        self,
        about: Mapping[str, Any],
        pattern: Tensor | None,
        carried: Mapping[str, Tensor] | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Writes what is known before the first step; the manifest last, which makes the folder a run."""
        if carried is not None:
            _write_tensors(self.path / INITIAL, carried)
        if pattern is not None:
            _write_tensors(self.path / ATTENTION_BIAS, {"pattern": pattern})
        if tokenizer is not None:
            self._save_tokenizer(tokenizer)
        self._write_manifest("unfinished", about, History())

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Checks that the task's tokenizer is the one the run was begun with; None is none.

        Raises:
            RunFolderError: it is not, as where another version of `tokenizers` makes another one of the same text.
        """
        if tokenizer is None:
            return
        path = self.path / TOKENIZER_FILES[0]
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{path} is damaged ({error}); train into another folder") from error
        if known != json.loads(tokenizer.backend_tokenizer.to_str()):
            raise RunFolderError(
                f"{self.path} was begun with another tokenizer of the same text, so token ids mean something else "
                "now; use the version of `tokenizers` it was begun with, or train into another folder"
            )

    def clear_leftovers(self) -> None:
        """Removes what a killed process had not renamed yet."""
        for folder in (self.path, self.path / CHECKPOINTS):
            for leftover in folder.glob(".*-*.*") if folder.is_dir() else ():
                leftover.unlink(missing_ok=True)

    def save_checkpoint(self, step: int, weights: Mapping[str, Tensor]) -> None:
        _write_tensors(checkpoint_path(self.path, step), weights)

    def save_resume_point(self, point: ResumePoint, is_answer: np.ndarray) -> None:
        """Writes the point to go on from, then the tables up to it."""
        tensors = {f"weights.{name}": tensor for name, tensor in point.weights.items()}
        tensors |= {f"moments.{name}": tensor for name, tensor in point.moments.items()}
        tensors |= {f"history.{name}": tensor for name, tensor in point.history.tensors().items()}
        _write_tensors(self.path / RESUME, tensors, json.dumps(point.history.numbers()))
        self._write_tables(point.history, is_answer)

    def resume_point(self) -> ResumePoint | None:
        """The newest point to go on from; None when there is none yet.

        Raises:
            RunFolderError: the file is damaged.
        """
        path = self.path / RESUME
        if not path.is_file():
            return None
        groups: dict[str, dict[str, Tensor]] = {"weights": {}, "moments": {}, "history": {}}
        try:
            with safe_open(path, framework="pt") as file:
                numbers = json.loads(file.metadata()["numbers"])
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    group, _, rest = name.partition(".")
                    groups[group][rest] = file.get_tensor(name)
            history = History.restore(groups["history"], numbers)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{path} is damaged ({error}); delete it to begin the run anew") from error
        return ResumePoint(groups["weights"], groups["moments"], history)

    def finish(self, status: RunStatus, about: Mapping[str, Any], history: History, is_answer: np.ndarray) -> None:
        """Writes the tables, then the manifest, which makes the run finished, and drops what only a resume needs."""
        self._write_tables(history, is_answer)
        self._write_manifest(status, about, history)
        for needless in (RESUME, INITIAL):
            (self.path / needless).unlink(missing_ok=True)

    def _save_tokenizer(self, tokenizer: Any) -> None:
        """As transformers reads it, each file renamed into place."""
        try:
            with TemporaryDirectory(prefix=".tokenizer-", dir=self.path) as temporary:
                tokenizer.save_pretrained(temporary)
                for name in TOKENIZER_FILES:
                    (Path(temporary) / name).replace(self.path / name)
        except OSError as error:
            raise OutputError(f"cannot write the tokenizer to {self.path}: {error.strerror or error}") from error

    def _write_tables(self, history: History, is_answer: np.ndarray) -> None:
        for name, table in ((METRICS, history.metrics()), (POSITIONS, history.positions(is_answer))):
            with atomic_path(self.path / name) as temporary:
                table.to_parquet(temporary, index=False)

    def _write_manifest(self, status: RunStatus, about: Mapping[str, Any], history: History) -> None:
        content = {
            "format": RUN_FORMAT,
            "format_version": RUN_FORMAT_VERSION,
            "status": status,
            "steps_done": history.step,
            "seconds": history.seconds,
            "solved_step": history.solved_step,
            **about,
            **self.wanted,
            "versions": versions(),
        }
        write_json(self.path / MANIFEST, content)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], numbers: str | None = None) -> None:
    # Copies, because safetensors refuses tensors that share memory, as tied ones do.
    content = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    with atomic_path(path) as temporary:
        temporary.write_bytes(save(content, {"numbers": numbers} if numbers else None))
