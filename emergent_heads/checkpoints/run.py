"""The checkpoints of a run folder that the library's own training made.

A run is a folder: `manifest.json`, `metrics.parquet`, `positions.parquet`, `checkpoints/step_00000000.safetensors`,
and of a run on text `tokenizer.json` and `tokenizer_config.json`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emergent_heads.errors import CheckpointError, NoCheckpointsError, RunFolderError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from emergent_heads.checkpoints.weights import Fingerprint
    from emergent_heads.models.small import SmallModel

RUN_FORMAT = "emergent_heads run"
RUN_FORMAT_VERSION = 1
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
ATTENTION_BIAS = "attention_bias.safetensors"
"""Holds the pattern of a run that was trained with an attention bias."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_CHECKPOINT_FILE = re.compile(r"step_(\d+)\.safetensors")


def checkpoint_path(run: Path, step: int) -> Path:
    """The file of the checkpoint at `step`."""
    return run / CHECKPOINTS / f"step_{step:08d}.safetensors"


def read_manifest(run: Path) -> dict[str, Any]:
    """The manifest of a run folder of this library, or of Hugging Face checkpoints with a manifest beside them.

    Raises:
        NoCheckpointsError: `run` has no `manifest.json`, or it cannot be read.
        RunFolderError: the folder was made by a version of the library that wrote runs in another way.
    """
    try:
        manifest = json.loads((run / MANIFEST).read_text())
    except FileNotFoundError as error:
        raise NoCheckpointsError(f"{run} is no run folder: it has no manifest.json") from error
    except (OSError, ValueError) as error:
        raise NoCheckpointsError(f"{run / MANIFEST} cannot be read ({error})") from error
    if not isinstance(manifest, dict):
        raise NoCheckpointsError(f"{run / MANIFEST} is no manifest of a run")
    version = manifest.get("format_version")
    if is_small_run(manifest) and version != RUN_FORMAT_VERSION:
        made_by = (manifest.get("versions") or {}).get("emergent-heads")
        raise RunFolderError(
            f"{run} is a run folder of format version {version}, made by emergent-heads {made_by}; this version reads "
            f"format version {RUN_FORMAT_VERSION}. Read it with that version, or train into another folder"
        )
    return manifest


def is_small_run(manifest: Mapping[str, Any]) -> bool:
    """Whether the manifest is that of a run trained by the library."""
    return manifest.get("format") == RUN_FORMAT


@dataclass(frozen=True)
class RunSource:
    """Checkpoints of a run folder as `SmallModel`s."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.path)

    @cached_property
    def tokenizer(self) -> Any | None:
        """The transformers tokenizer of a run on text; None of any other.

        Raises:
            TokenizerError: its files cannot be read.
        """
        from emergent_heads.checkpoints.weights import load_tokenizer

        return load_tokenizer(self.path)

    def steps(self) -> tuple[int, ...]:
        """The steps there are, ascending.

        Raises:
            NoCheckpointsError: there are none.
        """
        folder = self.path / CHECKPOINTS
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        steps = sorted(int(match[1]) for name in names if (match := _CHECKPOINT_FILE.fullmatch(name)))
        if not steps:
            raise NoCheckpointsError(f"{folder} holds no checkpoints; the run was not trained that far")
        return tuple(steps)

    def where(self, step: int) -> str:
        return str(checkpoint_path(self.path, step))

    def identity(self, step: int) -> str | None:
        """Path, size and time of the file: changes when it is written again."""
        path = checkpoint_path(self.path, step).resolve()
        try:
            stat = path.stat()
        except OSError:
            return None
        return f"{path} {stat.st_size}:{stat.st_mtime_ns}"

    def load(self, step: int, device: "torch.device | str" = "cpu") -> "tuple[SmallModel, Fingerprint]":
        """A new model with the weights of `step`, in eval mode and without gradients, and the weights' fingerprint.

        The model of a run on text has the run's tokenizer.

        A run trained with an attention bias gives models that have the bias of that step:
        `model.set_attention_bias(None)` takes it away.

        Raises:
            CheckpointError: the file is missing, damaged, of another shape or not finite.
            ArgumentError: the run's configuration names a mixer that is not registered.
        """
        from emergent_heads.models.small import SmallModel, SmallModelConfig

        model = SmallModel(SmallModelConfig(**self.manifest["config"])).to(device)
        model.eval().requires_grad_(False)
        model.tokenizer = self.tokenizer
        return model, self.fill(model, step)

    def fill(self, model: "SmallModel", step: int) -> "Fingerprint":
        """Replaces the weights of `model` by those of `step`, and gives their fingerprint.

        Raises:
            CheckpointError: the file is missing, damaged, of another shape or not finite. The model is then a mixture
                until the next call that succeeds.
        """
        from emergent_heads.checkpoints.weights import copy_state

        with self._tensors(step) as stored:
            numbers = copy_state(stored, model)
        if self._bias is not None:
            self._bias.put_on(model, self._pattern, step)
        return numbers

    @contextmanager
    def _tensors(self, step: int) -> "Iterator[Any]":
        from emergent_heads.checkpoints.weights import stored_in

        path = checkpoint_path(self.path, step)
        if not path.is_file():
            raise CheckpointError("the file is missing")
        with stored_in(path) as stored:
            yield stored

    @cached_property
    def _bias(self) -> Any:
        from emergent_heads.models.attention_bias import AttentionBias

        return AttentionBias.read(self.manifest["training"].get("attention_bias"))

    @cached_property
    def _pattern(self) -> "Tensor":
        from emergent_heads.checkpoints.weights import stored_in

        path = self.path / ATTENTION_BIAS
        if not path.is_file():
            raise CheckpointError(
                f"{ATTENTION_BIAS} is missing, which holds the pattern that the run was trained with"
            )
        with stored_in(path) as stored:
            return stored["pattern"]()
