"""A GPT-NeoX of 67,000 parameters that learns to repeat what it has read, trained in seconds on one core.

The text is the Python standard library, which every machine has. Most rows of a batch are a passage of it said over
and over, so that within some hundred steps attention heads form that look up what followed a token before
(induction heads). The run is saved as ordinary Hugging Face folders, `step0/`, `step50/`, ..., so the series can be
read as any other; nothing in the analysis knows that it was made here.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from emergent_heads import notebook
from emergent_heads.errors import ArgumentError
from emergent_heads.randomness import derive_seed, numpy_generator
from emergent_heads.storage import write_json
from emergent_heads.tasks.encoded_text import STANDARD_LIBRARY, TextSource, train_tokenizer
from emergent_heads.tasks.text import passages

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import GPTNeoXForCausalLM

TRAINING_FILE = "training.json"


@dataclass(frozen=True)
class Recipe:
    """What decides a training, bit for bit on one machine.

    Attributes:
        seed: initial weights and order of the data.
        steps: optimiser steps.
        save_every: steps between two saved checkpoints.
        context: tokens in a row.
        rows: rows in a batch.
        repeated_rows: rows of them that are one passage said over and over; the fewer they are, the later the heads
            form. The other rows are plain text.
        passage: shortest and longest passage, in tokens.
        vocabulary_size: tokens of the byte-pair encoding trained on the text.
        n_layers: layers, of `n_heads` heads each, side by side with an MLP of width `d_model`.
        learning_rate: of AdamW, reached in `warmup_steps` steps.
    """

    seed: int = 0
    steps: int = 550
    save_every: int = 50
    context: int = 64
    rows: int = 32
    repeated_rows: int = 24
    passage: tuple[int, int] = (8, 32)
    vocabulary_size: int = 128
    n_layers: int = 2
    d_model: int = 64
    n_heads: int = 4
    learning_rate: float = 0.008
    warmup_steps: int = 100

    def __post_init__(self) -> None:
        if self.steps < 1 or self.save_every < 1:
            raise ArgumentError(f"steps and save_every must be at least 1, not {self.steps} and {self.save_every}")


def train_series(path: Path | str, recipe: Recipe, *, progress_row: int | None = None) -> Path:
    """Trains one run and saves its checkpoints to the folders `path/step0`, `path/step50`, ...

    The folder appears when the run is finished, so a killed training leaves nothing that looks like a run; a finished
    run of the same recipe is left as it is. Use one torch thread: two are slower at this size.

    Args:
        path: folder of the run.
        recipe: what to train.
        progress_row: row of the terminal for a progress bar; None for no bar.

    Returns:
        The folder. Beside the checkpoints, `training.json` holds the recipe, the loss (nats per token) at each saved
        step and how often each token was seen.

    Raises:
        ArgumentError: the folder holds a run of another recipe, or something else.
    """
    path = Path(path)
    if path.exists():
        _check_same_recipe(path, recipe)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        unfinished = Path(temporary) / path.name
        _train(unfinished, recipe, progress_row)
        unfinished.rename(path)
    return path


def tokens_seen(path: Path | str, *, at_least: int = 50) -> list[int]:
    """The tokens that the run in `path` saw at least so often in training, as ids."""
    counts = json.loads((Path(path) / TRAINING_FILE).read_text())["token_counts"]
    return [token for token, count in enumerate(counts) if count >= at_least]


def standard_library_text(n_characters: int = 1_000_000) -> str:
    """The beginning of the Python standard library's top-level modules, in ASCII: more than a training reads."""
    return "".join(TextSource((STANDARD_LIBRARY,), separator=None).documents())[:n_characters]


def batches(text: Int[np.ndarray, " token"], recipe: Recipe) -> Iterator[Int[np.ndarray, "row pos"]]:
    """One batch of token ids per step: `repeated_rows` rows of a passage over and over, then rows of plain text."""
    draw = numpy_generator(recipe.seed, "small language model", "batches")
    shortest, longest = recipe.passage
    for _ in range(recipe.steps):
        starts = draw.integers(len(text) - recipe.context, size=recipe.rows)
        lengths = draw.integers(shortest, longest + 1, size=recipe.rows)
        lengths[recipe.repeated_rows :] = recipe.context
        yield passages(text, starts, lengths, recipe.context)


def _train(folder: Path, recipe: Recipe, progress_row: int | None) -> None:
    import torch
    from tqdm.auto import tqdm

    text = standard_library_text()
    tokenizer = train_tokenizer([text], recipe.vocabulary_size, end_of_text=None)
    encoded = np.array(tokenizer.backend_tokenizer.encode(text).ids)
    model = _new_model(recipe)
    optimizer = _optimizer(model, recipe)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.warmup_steps))
    counts = np.zeros(recipe.vocabulary_size, dtype=int)
    losses: dict[int, float] = {}

    def save(step: int) -> None:
        model.save_pretrained(folder / f"step{step}")
        tokenizer.save_pretrained(folder / f"step{step}")

    save(0)
    bar = tqdm(
        batches(encoded, recipe),
        total=recipe.steps,
        desc=f"seed {recipe.seed}",
        unit="step",
        position=progress_row,
        **notebook.bar(progress_row is not None),
    )
    for step, tokens in enumerate(bar, start=1):
        rows = torch.from_numpy(tokens)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counts += np.bincount(tokens.ravel(), minlength=recipe.vocabulary_size)
        if step % recipe.save_every == 0 or step == recipe.steps:
            losses[step] = loss.item()
            save(step)
    write_json(
        folder / TRAINING_FILE, {"recipe": asdict(recipe), "token_counts": counts.tolist(), "loss_nats": losses}
    )


def _new_model(recipe: Recipe) -> "GPTNeoXForCausalLM":
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=recipe.vocabulary_size,
        hidden_size=recipe.d_model,
        num_hidden_layers=recipe.n_layers,
        num_attention_heads=recipe.n_heads,
        intermediate_size=recipe.d_model,
        max_position_embeddings=recipe.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        initializer_range=recipe.d_model**-0.5,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):  # the initialisation of transformers takes no generator
        torch.manual_seed(derive_seed(recipe.seed, "small language model", "weights"))
        return GPTNeoXForCausalLM(config)


def _optimizer(model: "GPTNeoXForCausalLM", recipe: Recipe) -> "Optimizer":
    import torch

    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)


def _check_same_recipe(path: Path, recipe: Recipe) -> None:
    try:
        found = json.loads((path / TRAINING_FILE).read_text())["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path} exists and holds no finished training run; name another folder") from error
    wanted = json.loads(json.dumps(asdict(recipe)))
    other = [
        f"{name} {found.get(name)} there, {value} now" for name, value in wanted.items() if found.get(name) != value
    ]
    if other:
        raise ArgumentError(f"{path} holds a run of another recipe ({'; '.join(other)}); name another folder")
