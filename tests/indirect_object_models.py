"""Ten small GPT-NeoX models that come to tell who is given the thing, as stand-ins for the ten seeds of a Pythia size.

They are language models of nothing but the sentences of `eh.tasks.indirect_object`, trained together (`torch.vmap`)
and different in their seed only: 26,000 parameters, two layers of four heads. First they learn the templates, then
that one of the two names follows (right half of the time), and then, each at a step of its own, which one; by the end
one or the other seed has not got there. Their checkpoints are spread over the published steps, and step 1 and step 2
have the weights of step 0, as in the published repositories.
"""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hub_server import FolderOf, RevisionsOf
from jaxtyping import Int
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.func import functional_call, stack_module_state
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from emergent_heads.checkpoints.suites import PYTHIA_STEPS, SUITES
from emergent_heads.randomness import derive_seed, numpy_generator
from emergent_heads.tasks.words import NAMES, PLACES, TEMPLATES, THINGS

SUITE = "pythia-160m"
STEPS, ROWS, WARMUP, LEARNING_RATE = 600, 32, 50, 0.008
SAME_AS_FIRST = (1, 2)
SHARED = "shared"

_PIECES = [re.findall(r"\{\w+\}|\w+|[^\w\s]", template + " {indirect_object}") for template in TEMPLATES]
_SLOTS = sorted({piece for pieces in _PIECES for piece in pieces if piece.startswith("{")})
_IN_TEMPLATES = {piece for pieces in _PIECES for piece in pieces}.difference(_SLOTS)
WORDS = ("[UNK]", *sorted(_IN_TEMPLATES | {*NAMES, *PLACES, *THINGS}))
_LENGTH = max(map(len, _PIECES))
_PADDING = -100  # what cross_entropy leaves out
_ID = {word: place for place, word in enumerate(WORDS)} | {slot: -1 - place for place, slot in enumerate(_SLOTS)}
_TEMPLATES = np.array([[_ID[piece] for piece in pieces] + [_PADDING] * (_LENGTH - len(pieces)) for pieces in _PIECES])
_NAMES, _PLACES, _THINGS = (np.array([_ID[word] for word in words]) for words in (NAMES, PLACES, THINGS))


def train_all(path: Path) -> Path:
    """Trains the models of all seeds; `path` appears when they are done and is left as it is when it is there."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        unfinished = Path(temporary) / path.name
        unfinished.mkdir()
        _write_shared(unfinished / SHARED)
        _train(unfinished)
        unfinished.rename(path)
    return path


def served_as_pythia(trained: Path, made: Path) -> tuple[FolderOf, RevisionsOf]:
    """What `hub_server.serving` takes: each seed under its published name, folders made in `made` when asked for."""
    seed_of = {repository: seed for seed, repository in SUITES[SUITE].repositories.items()}
    step_of = {f"step{step}": step for step in PYTHIA_STEPS} | {"main": PYTHIA_STEPS[-1]}

    def folder_of(repository: str, revision: str) -> Path | None:
        folder = made / repository / revision
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=made) as temporary:
                _write(trained, seed_of[repository], step_of[revision], Path(temporary) / "new")
                _take_place(Path(temporary) / "new", folder)
        return folder

    return folder_of, lambda repository: list(step_of) if repository in seed_of else []


def _take_place(new: Path, folder: Path) -> None:
    try:
        new.rename(folder)
    except OSError:
        if not folder.exists():  # else another request was first
            raise


def _write(trained: Path, seed: int, step: int, folder: Path) -> None:
    place = 0 if step in SAME_AS_FIRST else PYTHIA_STEPS.index(step)
    with safe_open(trained / f"seed{seed}.safetensors", "pt") as tensors:
        weights = {name: tensors.get_slice(name)[place] for name in tensors.keys()}  # noqa: SIM118 (no dict)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in (trained / SHARED).iterdir():
        (folder / file.name).symlink_to(file)


def _write_shared(folder: Path) -> None:
    """Config and tokenizer, which all checkpoints have in common."""
    config = _new_model(0).config
    config.dtype = torch.float16
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: _ID[word] for word in WORDS}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=WORDS[0]).save_pretrained(folder)


def _train(folder: Path) -> None:
    seeds = list(SUITES[SUITE].repositories)
    weights, logits_of = _stacked([_new_model(seed) for seed in seeds])
    optimizer = torch.optim.AdamW(weights.values(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    draws = [numpy_generator(seed, "indirect object", "sentences") for seed in seeds]
    saved_at = [round(place * STEPS / (len(PYTHIA_STEPS) - 1)) for place in range(len(PYTHIA_STEPS))]
    saved: dict[str, list[Tensor]] = {name: [] for name in weights}
    for step in range(STEPS + 1):
        if step in saved_at:
            for name, weight in weights.items():
                saved[name].append(weight.detach().half())
        tokens = torch.from_numpy(np.stack([sentences(draw) for draw in draws]))
        logits = logits_of(weights, tokens.clamp_min(0))
        loss = torch.nn.functional.cross_entropy(logits[:, :, :-1].flatten(0, 2), tokens[:, :, 1:].flatten())
        (loss * len(seeds)).backward()  # about the gradient of each model's own loss
        _clip(weights)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for row, seed in enumerate(seeds):
        own = {name: torch.stack([weight[row] for weight in of]) for name, of in saved.items()}
        save_file(own, folder / f"seed{seed}.safetensors")


def sentences(draw: np.random.Generator) -> Int[np.ndarray, "row pos"]:
    """Sentences with their answers, each padded at its end."""
    indirect_object = draw.integers(len(NAMES), size=ROWS)
    subject = (indirect_object + draw.integers(1, len(NAMES), size=ROWS)) % len(NAMES)
    first_is_subject = draw.random(ROWS) < 0.5
    said = {
        "{first}": _NAMES[np.where(first_is_subject, subject, indirect_object)],
        "{second}": _NAMES[np.where(first_is_subject, indirect_object, subject)],
        "{subject}": _NAMES[subject],
        "{place}": _PLACES[draw.integers(len(PLACES), size=ROWS)],
        "{thing}": _THINGS[draw.integers(len(THINGS), size=ROWS)],
        "{indirect_object}": _NAMES[indirect_object],
    }
    rows = _TEMPLATES[draw.integers(len(TEMPLATES), size=ROWS)]
    for slot, words in said.items():
        rows = np.where(rows == _ID[slot], words[:, None], rows)
    return rows


def _new_model(seed: int) -> GPTNeoXForCausalLM:
    width = 32
    config = GPTNeoXConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        initializer_range=width**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):  # the initialisation of transformers takes no generator
        torch.manual_seed(derive_seed(seed, "indirect object", "weights"))
        return GPTNeoXForCausalLM(config)


def _stacked(
    seeds: list[GPTNeoXForCausalLM],
) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor], Tensor], Tensor]]:
    """Weights `[seed, ...]` by name, and what gives the logits of all models, each on its own rows."""
    weights, buffers = stack_module_state(list(seeds))
    ahead = torch.triu(torch.ones(_LENGTH, _LENGTH, dtype=torch.bool), 1)
    mask = torch.zeros(1, 1, _LENGTH, _LENGTH).masked_fill(ahead, torch.finfo(torch.float32).min)

    def logits(weights: dict[str, Tensor], buffers: dict[str, Tensor], tokens: Tensor) -> Tensor:
        inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
        return functional_call(seeds[0], (weights, buffers), kwargs=inputs).logits

    stacked = torch.vmap(logits)
    return weights, lambda weights, tokens: stacked(weights, buffers, tokens)


def _clip(weights: dict[str, Tensor]) -> None:
    """Gradients of each model to the norm 1 at most."""
    gradients = [weight.grad for weight in weights.values() if weight.grad is not None]
    norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
    for gradient in gradients:
        gradient *= (1 / norms).clamp_max(1).reshape(-1, *[1] * (gradient.ndim - 1))
