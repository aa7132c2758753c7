"""Series whose reads can be counted, for workers of every kind; what they are made of must be importable."""

import os
import signal
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tiny_models import VOCABULARY, tiny

import emergent_heads as eh
from emergent_heads.checkpoints.run import RunSource
from emergent_heads.checkpoints.series import CheckpointSeries, LoaderSource
from emergent_heads.errors import HubError

N_STEPS = 8
DAMAGED, REPEATED = 3, 1  # the second has the weights of step 0
LOG, FAILS = "loads.txt", "fails"


def noted(folder: Path, step: int) -> None:
    """Appends a line, in one write, so that workers do not mix theirs."""
    with (folder / LOG).open("a") as file:
        file.write(f"{os.getpid()} {step}\n")


def loads(folder: Path) -> Counter:
    """How often each step was read, by any worker."""
    return Counter(step for _, step in loads_by_process(folder).elements())


def loads_by_process(folder: Path) -> Counter:
    """How often each process read each step."""
    if not (folder / LOG).exists():
        return Counter()
    lines = (folder / LOG).read_text().splitlines()
    return Counter((int(pid), int(step)) for pid, step in map(str.split, lines))


def blended(step: int):
    """A model on the way from one random model to another, whose answers it comes to give."""
    share = 0.0 if step == REPEATED else step / (N_STEPS - 1)
    model, end = tiny("GPTNeoX", 0), tiny("GPTNeoX", 1)
    with torch.no_grad():
        for own, other in zip(model.parameters(), end.parameters(), strict=True):
            own.lerp_(other, share)
    return model


def load(folder: Path, step: int):
    noted(folder, step)
    if (folder / FAILS).exists():
        raise HubError(f"{folder.name} does not answer")
    if step == DAMAGED:
        raise ValueError("the weights are damaged")
    return blended(step)


def blended_series(folder: Path, name: str = "blended", seed: int | None = None) -> CheckpointSeries:
    folder.mkdir(parents=True, exist_ok=True)
    return CheckpointSeries.from_loader(range(N_STEPS), partial(load, folder), name=name, seed=seed)


@dataclass(frozen=True)
class Published(LoaderSource):
    """Models that are said to be of a repository with known issues."""

    repository: str = "EleutherAI/pythia-2.8b"


def published_series(folder: Path, **options) -> CheckpointSeries:
    """Steps 0 to 512 of a run whose weights are known to be wrong, and one that is sound."""
    return CheckpointSeries(Published((0, 512, 143_000 - 1000), partial(load_any, folder), "published"), **options)


def load_any(folder: Path, step: int):
    noted(folder, step)
    return blended(0)


def prompts(seed: int, name: str, right: int = N_STEPS - 1):
    """Prompts whose answers are those of the blended model at step `right`."""
    tokens = torch.randint(VOCABULARY, (12, 6), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        targets = blended(right)(tokens).logits[:, -1].argmax(-1)
    return eh.tasks.from_tokens(tokens, targets, name=name)


class DeadlyRun(RunSource):
    """A run folder whose reads are counted, and one of whose checkpoints kills the first process that reads it."""

    def fill(self, model, step):
        noted(self.path, step)
        try:
            (self.path / f"kills_at_{step}").unlink()
        except FileNotFoundError:
            return super().fill(model, step)
        os.kill(os.getpid(), signal.SIGKILL)


def deadly_series(run: Path) -> CheckpointSeries:
    return CheckpointSeries(DeadlyRun(run), kind="small")
