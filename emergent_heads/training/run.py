"""A run that was trained by the library: its folder, read."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from emergent_heads import notebook
from emergent_heads.checkpoints.run import is_small_run, read_manifest
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.errors import ArgumentError, NoCheckpointsError
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.tasks.settings import described, from_settings
from emergent_heads.tasks.task import SequenceTask
from emergent_heads.training.folder import METRICS, POSITIONS, History, RunStatus
from emergent_heads.training.settings import TrainingSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_OF_MODEL = ("mixer", "n_layers", "d_model", "n_heads", "d_mlp", "positions")


@dataclass(frozen=True, repr=False)
class Run:
    """One training of one small model, as its folder stood when it was opened.

    Attributes:
        path: the folder.
        manifest: what the run is made of and how it ended, as plain values: `config`, `task`, `seed`, `training`,
            `init_from` (of a run that started from another), `status`, `steps_done`, `solved_step`, `diverged_step`,
            `plateau`, `floor`, `device`, `versions`.
    """

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> "Run":
        """The run in the folder `path`, finished or not.

        Raises:
            NoCheckpointsError: `path` is no run folder of this library.
            RunFolderError: it was made by a version of the library that wrote runs in another way.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if not is_small_run(manifest):
            raise NoCheckpointsError(
                f"{path} holds a run that was not trained by this library; read its checkpoints by "
                "CheckpointSeries.from_run"
            )
        return cls(path, manifest)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.resolve().name

    @property
    def config(self) -> SmallModelConfig:
        """Configuration of the model."""
        return SmallModelConfig(**self.manifest["config"])

    @property
    def settings(self) -> TrainingSettings:
        """How it was trained."""
        return TrainingSettings(**self.manifest["training"])

    @property
    def task_settings(self) -> dict[str, Any]:
        """The task's name, under "task", and its fields."""
        return self.manifest["task"]

    @cached_property
    def task(self) -> SequenceTask:
        """The task, made again from its settings.

        Raises:
            ArgumentError: a task of the user's own, which the library cannot make, or a text that is no more what it
                was.
        """
        try:
            return from_settings(self.task_settings)
        except ArgumentError as error:
            raise ArgumentError(f"{self.name} was trained on a task that cannot be made again: {error}") from error

    @property
    def seed(self) -> int:
        return self.manifest["seed"]

    @property
    def init_from(self) -> dict[str, Any] | None:
        """The run whose weights this one started from: `run`, `step`, what was `carry`-ed, and its `digest`."""
        return self.manifest.get("init_from")

    @property
    def status(self) -> RunStatus:
        """How it ended: "finished" (all steps done), "solved" (stopped for that) or "diverged"; or "unfinished"."""
        return self.manifest["status"]

    @property
    def solved_step(self) -> int | None:
        """First evaluated step at which the task was solved (see `TrainingSettings.solved_at`); None for never."""
        return self.manifest["solved_step"]

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per evaluation; of an unfinished run, those up to the last point it can be resumed from.

        `step`; `seconds` of training up to it, by the clock; `tokens` seen; the `learning_rate` of the last update;
        the strength of the `attention_bias`; `train_loss_nats`, the mean over the steps since the row before; and on
        held-out sequences `loss_nats`, `accuracy` over answer tokens, `exact_match` of whole answers, and
        `share_learned`, the share of answer positions with an accuracy of at least 0.95.
        """
        return self._table(METRICS, History().metrics())

    @cached_property
    def positions(self) -> pd.DataFrame:
        """One row per evaluation and token of the sequence but the first: held-out `loss_nats` and `accuracy` there.

        `position` is the token's place, from 1; the model predicts it at the place before. `is_answer` says whether
        it belongs to the answer.
        """
        return self._table(POSITIONS, History().positions(np.zeros(0, dtype=bool)))

    @cached_property
    def series(self) -> CheckpointSeries:
        """The run's checkpoints.

        Raises:
            NoCheckpointsError: there are none yet.
        """
        return CheckpointSeries.from_run(self.path)

    def plot(self) -> "Figure":
        """Held-out and training loss over the steps, between the task's plateau and floor, and the share learned."""
        from emergent_heads.plots import training as training_plots

        return training_plots.training_curve(
            self.metrics, plateau=self.manifest["plateau"], floor=self.manifest["floor"], solved_step=self.solved_step
        )

    def export_huggingface(self, path: Path | str, steps: Iterable[int] | None = None) -> Path:
        """Writes the checkpoints as Hugging Face folders `path/step0/`, `path/step1/`, ..., with the same logits.

        Each holds `config.json`, `model.safetensors` and, of a run on text, the tokenizer, so that
        `AutoModelForCausalLM.from_pretrained(path / "step1")` and `CheckpointSeries.from_directory(path)` read them;
        `path/run.json` is the run's manifest. A model as `SmallModelConfig.gpt_neox` makes it becomes a GPT-NeoX, one
        as `SmallModelConfig.transformer_pp` makes it a Llama. The folder appears when all is written, and one that
        holds the same export already is left as it is.

        Args:
            path: a folder that does not exist yet, or is empty.
            steps: which checkpoints; None for all.

        Returns:
            The folder.

        Raises:
            UnsupportedModelError: the model is neither, or has an attention bias at one of the steps.
            UnknownStepError: the run has no such checkpoint.
            CheckpointError: one cannot be read.
            OutputError: the folder holds something else, or cannot be written.
        """
        from emergent_heads.training.export import export_huggingface

        return export_huggingface(self, path, steps)

    def __repr__(self) -> str:
        model = SmallModelConfig(**self.manifest["config"])
        mixers = model.mixer if isinstance(model.mixer, str) else "/".join(model.mixer)
        start = f"from {self._start}, " if self._start else ""
        text = (
            f"Run({self.name}: {self.task_settings['task']}, {mixers}, n_layers={model.n_layers}, "
            f"d_model={model.d_model}, seed {self.seed}, {start}{self._ended()}"
        )
        if len(self.metrics):
            last = self.metrics.iloc[-1]
            text += f", loss {last['loss_nats']:.4f} nats (floor {self.manifest['floor']:.4f})"
        return text + ")"

    def _repr_html_(self) -> str:
        model = {name: value for name, value in self.manifest["config"].items() if name in _OF_MODEL}
        fields = {
            "task": described(self.task_settings),
            "model": ", ".join(f"{name}={value}" for name, value in model.items()),
            "seed": self.seed,
            "starts from": self._start,
            "status": self._ended(),
            "plateau, floor": f"{self.manifest['plateau']:.4f}, {self.manifest['floor']:.4f} nats",
            "path": self.path,
        }
        last = self.metrics.iloc[-1:].drop(columns=["seconds", "attention_bias"], errors="ignore")
        return notebook.page(notebook.card(f"Run {self.name}", fields), notebook.rows(last))

    @property
    def _start(self) -> str | None:
        if (start := self.init_from) is None:
            return None
        return f"{start['run']} step {start['step']} ({start['carry']})"

    def _ended(self) -> str:
        if self.status == "diverged":
            return f"diverged at step {self.manifest['diverged_step']}"
        solved = "" if self.solved_step is None else f", solved at step {self.solved_step}"
        return f"{self.status} at step {self.manifest['steps_done']}{solved}"

    def _table(self, name: str, empty: pd.DataFrame) -> pd.DataFrame:
        return pd.read_parquet(self.path / name) if (self.path / name).is_file() else empty


def open_run(path: Path | str) -> Run:
    """The run in the folder `path`; as `Run.open`."""
    return Run.open(path)
