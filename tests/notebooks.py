"""Runs the notebooks of `examples/` and says what is wrong with one as it is kept.

A notebook runs in a fresh kernel, in an empty folder, with caches of its own and no network: what it needs beside the
package, it has to make itself. The one that is written for the hub gets a server with stand-ins.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hub_server import serving
from indirect_object_models import served_as_pythia

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS_HUB = frozenset({"02_pythia_ioi_ten_seeds"})
NEEDS_MODULE = {"08_sae_latents": "sae_lens"}
"""What a notebook needs of an extra that not every environment of the tests has."""
INSTALL = "try:\n    import emergent_heads\nexcept ImportError:\n    %pip install -q emergent-heads"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_LIMIT_S = 300  # against cells that hang; none takes a tenth of it
MOST_BYTES = 1_500_000

_PATHS = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|usr|opt|var|private|content|Users)/[\w.-]|site-packages")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")
_WARNING = re.compile(r"\b\w*Warning\b:|\bWARNING\b")


def notebooks() -> list[Path]:
    return sorted(EXAMPLES.glob("*.ipynb"))


@contextmanager
def environment(notebook: Path, scratch: Path, stand_ins: Path | None = None) -> Iterator[dict[str, str]]:
    """Variables for the kernel; the hub is up while the block runs.

    Args:
        notebook: which notebook is to run.
        scratch: empty folder for caches.
        stand_ins: what `indirect_object_models.train_all` gave, for a notebook that needs the hub.
    """
    # MPLBACKEND would keep figures out of the notebook; the kernel's own programs are found first.
    variables = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | {
        "EMERGENT_HEADS_CACHE": str(scratch / "emergent_heads"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(scratch / "huggingface"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "IPYTHONDIR": str(scratch / "ipython"),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",  # for commands in cells; bars of the notebook itself do not heed it
    }
    if notebook.stem not in NEEDS_HUB:
        yield variables
        return
    assert stand_ins is not None, f"{notebook.name} needs the stand-ins for the hub"
    with serving(*served_as_pythia(stand_ins, scratch / "served")) as hub:
        yield variables | hub.environment(scratch)


def run(notebook: Path, scratch: Path, stand_ins: Path | None = None) -> dict[str, Any]:
    """The notebook with the outputs of a fresh run; see `environment` for the arguments.

    Raises:
        CellExecutionError: a cell failed; the message holds the cell and its traceback.
    """
    import nbformat
    from nbclient import NotebookClient

    cells = nbformat.read(notebook, as_version=4)
    folder = scratch / "here"
    folder.mkdir(parents=True)
    with environment(notebook, scratch, stand_ins) as variables:
        client = NotebookClient(
            cells,
            timeout=CELL_LIMIT_S,
            kernel_name="python3",
            record_timing=False,
            store_widget_state=False,
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute(env=variables)
    return tidied(json.loads(nbformat.writes(cells)))


def tidied(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """Without what changes from run to run and machine to machine, so that a rerun shows in few lines of a diff."""
    cells = []
    for place, cell in enumerate(notebook["cells"]):
        tags = cell["metadata"].get("tags")
        kept = {**cell, "id": f"cell-{place:02d}", "metadata": {"tags": tags} if tags else {}}
        if "outputs" in kept:
            kept["outputs"] = [_lasting(output) for output in kept["outputs"] if not _is_bar(output)]
        cells.append(kept)
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def _is_bar(output: Mapping[str, Any]) -> bool:
    """Whether it is a progress bar, which is gone from the page when it is done but stays in the file."""
    return "application/vnd.jupyter.widget-view+json" in output.get("data", {})


def _lasting(output: Mapping[str, Any]) -> dict[str, Any]:
    return {**output, "metadata": {}} if "metadata" in output else dict(output)


def written(notebook: Mapping[str, Any]) -> str:
    """The text of the file."""
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def code_cells(notebook: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shown_by(cell: Mapping[str, Any]) -> list[str]:
    """What kinds of output a cell has."""
    return sorted({kind for output in cell["outputs"] for kind in output.get("data", [output.get("name", "error")])})


def faults(notebook: Mapping[str, Any]) -> list[str]:
    """What is wrong with a notebook as it is kept, one sentence each."""
    return [*_faults_of_form(notebook), *_faults_of_outputs(notebook)]


def _faults_of_form(notebook: Mapping[str, Any]) -> Iterator[str]:
    first, second = notebook["cells"][:2]
    text = "".join(first["source"])
    if first["cell_type"] != "markdown" or not text.startswith("# "):
        yield "the first cell is no text with a title"
    if not re.search(r"\b(seconds|minutes?)\b", text):
        yield "the first cell does not say how long it takes"
    if "colab" not in second["metadata"].get("tags", []) or "".join(second["source"]) != INSTALL:
        yield f"the second cell is not tagged 'colab' or is not:\n{INSTALL}"
    if notebook["metadata"] != METADATA:
        yield f"its metadata is {notebook['metadata']}, not {METADATA}"
    for place, cell in enumerate(notebook["cells"]):
        if set(cell["metadata"]) - {"tags"}:
            yield f"cell {place} has the metadata {sorted(cell['metadata'])}"
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"it was not run once from top to bottom: its cells are numbered {counts}"
    if len(written(notebook)) > MOST_BYTES:
        yield f"it has more than {MOST_BYTES} characters"


def _faults_of_outputs(notebook: Mapping[str, Any]) -> Iterator[str]:
    if not any(cell["outputs"] for cell in code_cells(notebook)):
        yield "it has no outputs"
    for place, cell in enumerate(notebook["cells"]):
        if found := _PATHS.search("".join(cell["source"])):
            yield f"cell {place} names a place on one machine: {found[0]}"
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                yield f"cell {place} failed: {output['ename']}"
            if output.get("name") == "stderr":
                yield f"cell {place} writes to stderr: {_text(output)[:200]}"
            for what, pattern in (("a path", _PATHS), ("an address", _ADDRESS), ("a warning", _WARNING)):
                if found := pattern.search(_text(output)):
                    yield f"cell {place} shows {what}: {found[0]}"


def _text(output: Mapping[str, Any]) -> str:
    parts = [output.get("text", []), *(value for kind, value in output.get("data", {}).items() if "image" not in kind)]
    return "\n".join(part if isinstance(part, str) else "".join(part) for part in parts)
