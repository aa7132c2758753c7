"""A run's checkpoints as Hugging Face folders, which other libraries read."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

from emergent_heads.checkpoints.weights import without_progress_bar
from emergent_heads.errors import ArgumentError, OutputError, UnsupportedModelError
from emergent_heads.models.to_huggingface import huggingface_family, to_huggingface
from emergent_heads.storage import write_json
from emergent_heads.training.run import Run

RUN_FILE = "run.json"
"""The run's manifest, beside the checkpoints."""


def export_huggingface(run: Run, path: Path | str, steps: Iterable[int] | None = None) -> Path:
    """See `Run.export_huggingface`."""
    path, series = Path(path), run.series
    chosen = [series[step] for step in (series.steps if steps is None else sorted(set(steps)))]
    if not chosen:
        raise ArgumentError("no steps to export; name at least one, or leave steps out for all")
    family, bias = huggingface_family(run.config), run.settings.bias
    if bias is not None and (biased := [each.step for each in chosen if bias.strength_at(each.step)]):
        raise UnsupportedModelError(
            f"{run.name} was trained with an attention bias, which a {family} has no place for, and has it at "
            f"{len(biased)} of these steps, step {biased[0]} for one; name steps at which it has come down to zero"
        )
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise OutputError(f"{path} exists; name a folder that does not, so that nothing in it is mixed up")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            without_progress_bar(),
            tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary,
        ):
            unfinished = Path(temporary) / path.name
            for checkpoint in chosen:
                folder = unfinished / f"step{checkpoint.step}"
                model = checkpoint.load("small")
                to_huggingface(model).save_pretrained(folder)
                if model.tokenizer is not None:
                    model.tokenizer.save_pretrained(folder)
            write_json(unfinished / RUN_FILE, run.manifest)
            unfinished.rename(path)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; choose a folder you may write to"
        ) from error
    return path
