"""Every code block of the README runs: Python in one namespace, `emergent-heads` lines through the command line."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import blocks_of, command_lines, make_workplace, pythia_hub, run_python, with_digits

from emergent_heads import cli

README = Path(__file__).parents[1] / "README.md"
SMALLER = {
    "steps=900": "steps=24",
    "20, 600": "20, 24",
    "bits=16": "bits=6",
    "n_train=2000": "n_train=200",
    "--steps 900": "--steps 24",
    "--checkpoints 0 50 100 200 300 400 500 600": "--checkpoints 0",
    "--bits 16": "--bits 6",
    "--n-train 2000": "--n-train 200",
    "n_activations=200_000": "n_activations=2000",
}
"""What is changed in the blocks so that the addition takes seconds; all else runs as it stands."""


@pytest.fixture(scope="module")
def served(emerging_series, tmp_path_factory) -> list[Path]:
    """The checkpoints the hub has."""
    return with_digits(emerging_series, tmp_path_factory.mktemp("served"))


@pytest.fixture
def workplace(served, tmp_path, monkeypatch):
    """A working folder with the files the README names, and the hub in reach."""
    monkeypatch.chdir(make_workplace(tmp_path / "work", served[0].parent))
    with pythia_hub(monkeypatch, served, tmp_path / "cache") as hub:
        yield hub


def test_python_blocks_run_in_order(workplace):
    run_python(README, SMALLER, without=None if find_spec("sae_lens") else "eh.sae.train")
    assert Path("heads.csv").is_file()
    assert "heads.csv.about.json" in {path.name for path in Path.cwd().iterdir()}


def test_command_lines_run(workplace, capsys):
    commands = command_lines(README, SMALLER)
    assert {command[0] for command in commands} == set(cli.COMMANDS) - {"demo"}
    for command in commands:
        assert cli.main(command) == 0, (command, capsys.readouterr().err)
    written = {path.name for path in Path.cwd().iterdir()}
    assert {"point.csv", "heads.csv", "heads.png", "recovery.csv", "curve.png"} <= written


def test_every_block_is_run_or_is_a_make_or_pip_line():
    for language, code in blocks_of(README):
        assert language in ("python", "bash")
        for line in code.splitlines() if language == "bash" else ():
            assert line.split()[0] in ("make", "pip", "emergent-heads"), line


def test_the_make_targets_are_there():
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([\w-]+)", README.read_text(), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_the_pictures_are_there():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README.read_text())
    assert pictures
    for picture in pictures:
        assert (README.parent / picture).read_bytes().startswith(b"\x89PNG")
