"""Every code block of the README runs: Python in one namespace, `emergent-heads` lines through the command line.

The hub is a server on the loopback address. It serves the small trained series as every Pythia run, spread over the
published steps, with a tokenizer that has each digit as one token, and last a checkpoint that was shown some strings
of digits said twice.
"""

import re
import shlex
from pathlib import Path
from shutil import copytree, ignore_patterns

import pandas as pd
import pytest
import torch
from hub_server import serving, use_hub
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from emergent_heads import cli
from emergent_heads.checkpoints.suites import PYTHIA_STEPS

README = Path(__file__).parents[1] / "README.md"
SWEEP = """
import emergent_heads as eh
runs = eh.grid(eh.tasks.LinearMap, state_size=4, sparsity=2, n_layers=1, d_model=16, steps=5, seed=range(2))
"""
SMALLER = {
    "steps=900": "steps=24",
    "20, 600": "20, 24",
    "bits=16": "bits=6",
    "n_train=2000": "n_train=200",
    "--steps 900": "--steps 24",
    "--checkpoints 0 50 100 200 300 400 500 600": "--checkpoints 0",
    "--bits 16": "--bits 6",
    "--n-train 2000": "--n-train 200",
}
"""What is changed in the blocks so that the addition takes seconds; all else runs as it stands."""
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def served(emerging_series, tmp_path_factory) -> list[Path]:
    """The checkpoints the hub has."""
    return _with_digits(emerging_series, tmp_path_factory.mktemp("served"))


@pytest.fixture
def workplace(served, tmp_path, monkeypatch):
    """A working folder with the files the README names, and the hub in reach."""
    revisions = {f"step{step}": folder for step, folder in _spread(served)}
    (tmp_path / "work" / "runs").mkdir(parents=True)
    (tmp_path / "work" / "runs" / "mine").symlink_to(served[0].parent)
    monkeypatch.chdir(tmp_path / "work")
    pd.DataFrame({"prompt": ["5 8 2 5 8", "1 9 6 1 9"], "target": [" 2", " 6"]}).to_csv("prompts.csv", index=False)
    Path("sweep.py").write_text(SWEEP)
    scores = {"model": ["14m"] * 3, "step": [1000, 2000, 3000], "lambada_openai": [0.1, 0.2, 0.3]}
    pd.DataFrame(scores).to_csv("scores.csv", index=False)

    def folder_of(repository, revision):
        return revisions.get(revision)

    with serving(folder_of, lambda repository: list(revisions) if repository.startswith("EleutherAI/") else []) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        yield hub


def _spread(folders: list[Path]) -> list[tuple[int, Path]]:
    """The trained checkpoints in order, spread over the published steps."""
    return [(step, folders[place * len(folders) // len(PYTHIA_STEPS)]) for place, step in enumerate(PYTHIA_STEPS)]


def _with_digits(series: Path, served: Path) -> list[Path]:
    """Copies of the checkpoints whose tokenizer splits at spaces, so that " 7" is the token "7"."""
    folders = sorted(series.glob("step*"), key=lambda folder: int(folder.name.removeprefix("step")))
    vocabulary = AutoTokenizer.from_pretrained(folders[0]).get_vocab()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for folder in folders:
        copy = served / folder.name
        copy.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (copy / name).symlink_to(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(copy)
    last = served / "step1000"
    copytree(served / folders[-1].name, last, ignore=ignore_patterns("model.safetensors"))
    _taught(folders[-1], [vocabulary[digit] for digit in "0123456789"]).save_pretrained(last)
    return [*(served / folder.name for folder in folders), last]


def _taught(folder: Path, digits: list[int]):
    """The model of a checkpoint after some steps on strings of digits said twice."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        said = torch.tensor(digits)[torch.randint(10, (64, 8), generator=generator)]
        tokens = torch.cat([said, said], dim=1)
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _smaller(code: str) -> str:
    for text, smaller in SMALLER.items():
        code = code.replace(text, smaller)
    return code


def test_python_blocks_run_in_order(workplace):
    namespace: dict[str, object] = {}
    for language, code in BLOCKS:
        if language == "python":
            exec(compile(_smaller(code), str(README), "exec"), namespace)
    assert Path("heads.csv").is_file()
    assert "heads.csv.about.json" in {path.name for path in Path.cwd().iterdir()}


def test_command_lines_run(workplace, capsys):
    lines = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
    commands = [shlex.split(_smaller(line))[1:] for line in lines if line.startswith("emergent-heads ")]
    assert {command[0] for command in commands} == set(cli.COMMANDS) - {"demo"}
    for command in commands:
        assert cli.main(command) == 0, (command, capsys.readouterr().err)
    written = {path.name for path in Path.cwd().iterdir()}
    assert {"point.csv", "heads.csv", "heads.png", "recovery.csv", "curve.png"} <= written


def test_every_block_is_run_or_is_a_make_or_pip_line():
    for language, code in BLOCKS:
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
