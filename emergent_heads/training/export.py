"""A run's checkpoints as Hugging Face folders, which other libraries read."""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from emergent_heads.checkpoints.weights import without_progress_bar
from emergent_heads.errors import ArgumentError, OutputError, UnsupportedModelError
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.models.to_huggingface import huggingface_family, to_huggingface
from emergent_heads.storage import as_read_back, write_json
from emergent_heads.training.run import Run
from emergent_heads.training.settings import TrainingSettings

RUN_FILE = "run.json"
"""The run's manifest, beside the checkpoints."""


def export_huggingface(run: Run, path: Path | str, steps: Iterable[int] | None = None) -> Path:
    """See `Run.export_huggingface`."""
    path, series = Path(path), run.series
    chosen = [series[step] for step in (series.steps if steps is None else sorted(set(steps)))]
    folders = {f"step{checkpoint.step}": checkpoint for checkpoint in chosen}
    check_export(run.config, run.settings, [each.step for each in chosen], path)
    if path.is_dir() and any(path.iterdir()):
        if _is_export(path, run, folders):
            return path
        raise OutputError(f"{path} holds an export of another run or of other steps; name another folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            without_progress_bar(),
            tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary,
        ):
            unfinished = Path(temporary) / path.name
            for name, checkpoint in folders.items():
                model = checkpoint.load("small")
                to_huggingface(model).save_pretrained(unfinished / name)
                if model.tokenizer is not None:
                    model.tokenizer.save_pretrained(unfinished / name)
            write_json(unfinished / RUN_FILE, run.manifest)
            unfinished.rename(path)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; choose a folder you may write to"
        ) from error
    return path


def check_export(config: SmallModelConfig, training: TrainingSettings, steps: Sequence[int], path: Path) -> None:
    """Checks what can be known before a run is trained: whether its checkpoints can be exported to `path`.

    Raises:
        ArgumentError: no steps. UnsupportedModelError: the model is neither GPT-NeoX nor Llama, or has an attention
            bias at one of the steps. OutputError: the folder holds something else.
    """
    if not steps:
        raise ArgumentError("no steps to export; name at least one, or leave steps out for all")
    family, bias = huggingface_family(config), training.bias
    if bias is not None and (biased := [step for step in steps if bias.strength_at(step)]):
        raise UnsupportedModelError(
            f"a run with an attention bias, which a {family} has no place for, has it at {len(biased)} of the steps "
            f"to export, step {biased[0]} for one; name steps at which it is zero, or train without"
        )
    if path.exists() and not (path / RUN_FILE).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise OutputError(f"{path} exists and is no export of a run; name a folder that does not exist")


def _is_export(path: Path, run: Run, folders: Iterable[str]) -> bool:
    """Whether the folder holds just these checkpoints of this run."""
    try:
        known = json.loads((path / RUN_FILE).read_text())
    except (OSError, ValueError):
        return False
    return known == as_read_back(run.manifest) and {each.name for each in path.iterdir()} == {RUN_FILE, *folders}
