"""Running the code blocks of Markdown pages, over a hub on the loopback address.

The hub serves the small trained series as every Pythia run, spread over the published steps, with a tokenizer that has
each digit as one token, and last a checkpoint that was shown some strings of digits said twice.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree, ignore_patterns

import pandas as pd
import pytest
import torch
from hub_server import Hub, serving, use_hub
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from emergent_heads.checkpoints.suites import PYTHIA_STEPS

SWEEP = """
import emergent_heads as eh
runs = eh.grid(eh.tasks.LinearMap, state_size=4, sparsity=2, n_layers=1, d_model=16, steps=5, seed=range(2))
"""

Block = tuple[str, str]
"""Language and code."""


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return re.findall(r"^```([\w-]+)[^\n]*\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def shortened(code: str, smaller: Mapping[str, str]) -> str:
    """The code with some of its numbers replaced, so that it takes seconds."""
    for text, small in smaller.items():
        code = code.replace(text, small)
    return code


def run_python(
    page: Path, smaller: Mapping[str, str], namespace: dict[str, object] | None = None, without: str | None = None
) -> dict[str, object]:
    """Runs the Python blocks of a page, one after the other in one namespace, which is given back.

    Blocks that hold `without` are left out.
    """
    namespace = {} if namespace is None else namespace
    for language, code in blocks_of(page):
        if language == "python" and (without is None or without not in code):
            exec(compile(shortened(code, smaller), str(page), "exec"), namespace)
    return namespace


def command_lines(page: Path, smaller: Mapping[str, str]) -> list[list[str]]:
    """The arguments of the page's `emergent-heads` lines."""
    lines = [line for language, code in blocks_of(page) if language == "bash" for line in code.splitlines()]
    return [shlex.split(shortened(line, smaller))[1:] for line in lines if line.startswith("emergent-heads ")]


def make_workplace(folder: Path, series: Path) -> Path:
    """A working folder with the files that the pages name; `runs/mine` is the series."""
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "mine").symlink_to(series)
    pd.DataFrame({"prompt": ["5 8 2 5 8", "1 9 6 1 9"], "target": [" 2", " 6"]}).to_csv(
        folder / "prompts.csv", index=False
    )
    (folder / "sweep.py").write_text(SWEEP)
    scores = {"model": ["14m"] * 3, "step": [1000, 2000, 3000], "lambada_openai": [0.1, 0.2, 0.3]}
    pd.DataFrame(scores).to_csv(folder / "scores.csv", index=False)
    return folder


@contextmanager
def pythia_hub(monkeypatch: pytest.MonkeyPatch, folders: list[Path], cache: Path) -> Iterator[Hub]:
    """A hub that serves these checkpoints, spread over the published steps, as every repository of EleutherAI."""
    spread = enumerate(PYTHIA_STEPS)
    revisions = {f"step{step}": folders[place * len(folders) // len(PYTHIA_STEPS)] for place, step in spread}

    def folder_of(repository: str, revision: str) -> Path | None:
        return revisions.get(revision)

    with serving(folder_of, lambda repository: list(revisions) if repository.startswith("EleutherAI/") else []) as hub:
        use_hub(monkeypatch, hub, cache)
        yield hub


def with_digits(series: Path, served: Path) -> list[Path]:
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
