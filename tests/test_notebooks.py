"""Every notebook of `examples/` runs from nothing, and what is kept of it is what a reader should see.

The notebook written for the hub talks to a server on the loopback address, which serves small models in which the
capability was trained (see `indirect_object_models`).
"""

import json
import os
from pathlib import Path

import notebooks
import pytest
from filelock import FileLock
from indirect_object_models import train_all

ALL = [pytest.param(path, id=path.stem) for path in notebooks.notebooks()]


@pytest.fixture(scope="session")
def indirect_object_models(tmp_path_factory) -> Path:
    """Folder of the stand-ins for the ten seeds; trained once a session."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # which all workers share
    with FileLock(root / "indirect_object_models.lock"):
        return train_all(root / "indirect_object_models")


@pytest.fixture
def kernels():
    """Skips where notebooks cannot be run."""
    pytest.importorskip("nbclient", reason="the dev extra is not installed")
    pytest.importorskip("ipywidgets", reason="the notebook extra is not installed")  # bars warn without it


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("path", ALL)
def test_runs_from_nothing_and_shows_what_is_kept(path, tmp_path, request):
    if path.stem in notebooks.NEEDS_MODULE:
        module = notebooks.NEEDS_MODULE[path.stem]
        pytest.importorskip(module, reason=f"the notebook needs {module}, which is not installed")
    needs_hub = path.stem in notebooks.NEEDS_HUB
    stand_ins = request.getfixturevalue("indirect_object_models") if needs_hub else None
    fresh = notebooks.run(path, tmp_path / "run", stand_ins)
    assert notebooks.faults(fresh) == []
    kept = json.loads(path.read_text())
    shown, shown_there = (
        [(cell["source"], notebooks.shown_by(cell)) for cell in notebooks.code_cells(notebook)]
        for notebook in (fresh, kept)
    )
    assert shown == shown_there, f"run `make notebooks` to keep what {path.name} shows now"


@pytest.mark.usefixtures("kernels")
def test_a_cell_that_fails_fails_the_run(tmp_path):
    from nbclient.exceptions import CellExecutionError

    notebook = _notebook()
    notebook["cells"][2]["source"] = "1 / 0"
    path = tmp_path / "failing.ipynb"
    path.write_text(notebooks.written(notebooks.tidied(notebook)))
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebooks.run(path, tmp_path / "run")


@pytest.mark.parametrize("path", ALL)
def test_what_is_kept_is_for_readers(path):
    assert notebooks.faults(json.loads(path.read_text())) == []


@pytest.mark.parametrize("path", ALL)
def test_a_rerun_would_change_only_what_is_shown(path):
    kept = path.read_text()
    assert notebooks.written(notebooks.tidied(json.loads(kept))) == kept


def test_notebooks_that_need_the_hub_are_there():
    assert {path.stem for path in notebooks.notebooks()} >= notebooks.NEEDS_HUB


def _notebook(*outputs: dict) -> dict:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Title\n", "Takes 5 seconds."]},
        _code(1, notebooks.INSTALL, tags=["colab"]),
        _code(2, "1 + 1", *outputs),
    ]
    return {"cells": cells, "metadata": notebooks.METADATA, "nbformat": 4, "nbformat_minor": 5}


def _code(count: int, source: str, *outputs: dict, tags: list[str] | None = None) -> dict:
    metadata = {"tags": tags} if tags else {}
    return {
        "cell_type": "code",
        "execution_count": count,
        "metadata": metadata,
        "outputs": list(outputs),
        "source": source,
    }


def _shown(text: str) -> dict:
    return {"output_type": "execute_result", "data": {"text/plain": [text]}, "metadata": {}}


def test_a_good_notebook_has_no_faults():
    assert notebooks.faults(_notebook(_shown("2"))) == []


@pytest.mark.parametrize(
    ("output", "fault"),
    [
        ({"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}, "failed: ValueError"),
        ({"output_type": "stream", "name": "stderr", "text": ["Loading\n"]}, "writes to stderr: Loading"),
        ({"output_type": "stream", "name": "stdout", "text": ["x.py:3: UserWarning: no\n"]}, "shows a warning"),
        (_shown("saved to /home/me/heads.csv"), "shows a path: /home/m"),
        (_shown("PosixPath('/tmp/heads.csv')"), "shows a path: /tmp/h"),
        (_shown("<object object at 0x7f3a2b1c>"), "shows an address"),
    ],
)
def test_outputs_not_for_readers_are_faults(output, fault):
    (found,) = notebooks.faults(_notebook(output))
    assert fault in found


def test_faults_of_form():
    notebook = _notebook(_shown("2"))
    notebook["cells"][0]["source"] = ["No title"]
    notebook["cells"][1] = _code(1, "%pip install emergent-heads")
    notebook["cells"][2]["execution_count"] = 7
    notebook["cells"][2]["metadata"] = {"execution": {"iopub.execute_input": "2020-01-01"}}
    notebook["metadata"] = {"kernelspec": {"name": "mine"}}
    said = "\n".join(notebooks.faults(notebook))
    for fault in ("title", "how long", "second cell", "its metadata", "cell 2 has the metadata", "[1, 7]"):
        assert fault in said
    assert "no outputs" in "\n".join(notebooks.faults(_notebook()))


def test_tidying_keeps_sources_outputs_and_tags():
    bar = _shown("small:   0%|          | 0/10 [00:00<?, ?checkpoint/s]")
    bar["data"]["application/vnd.jupyter.widget-view+json"] = {"model_id": "1958a6ef21ca40f19278c172dbbf4a89"}
    notebook = _notebook(bar, _shown("2"))
    notebook["cells"][2]["metadata"] = {"execution": {"iopub.execute_input": "2020-01-01"}}
    notebook["metadata"] = {"language_info": {"version": "3.99"}}
    tidy = notebooks.tidied(notebook)
    assert notebooks.faults(tidy) == []
    assert [cell["source"] for cell in tidy["cells"]] == [cell["source"] for cell in notebook["cells"]]
    assert tidy["cells"][2]["outputs"] == [_shown("2")]
