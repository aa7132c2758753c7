"""Which architectures can be ranked exactly, and by which kind of model; measured, and written as a page.

    python tests/architectures.py docs/architectures.md

writes what the installed version of transformer-lens gives and keeps what the page says of the other: run it in both
environments. "Exact" is judged against transformers' own attention, one prompt at a time without padding, with one
full forward pass for each patched head.
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tiny_models import HAS_HOOKED_TRANSFORMER, NAMES, VOCABULARY, tiny
from torch import Tensor, nn
from torch.nn import functional

import emergent_heads as eh
from emergent_heads import errors
from emergent_heads.checkpoints.series import CheckpointSeries, ModelKind
from emergent_heads.models.residual_engine import Edit, Reads

EXACT = "exact"
LENGTHS = (11, 7)
TOKENS = torch.randint(VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(3))
ENDS = torch.tensor(LENGTHS) - 1
PROMPTS = range(len(LENGTHS))
DIRECTION = torch.randn(32, generator=torch.Generator().manual_seed(5))
DIRECTION /= DIRECTION.norm()
SET = ((0, 0), (0, 3), (1, 1), (2, 2))  # heads patched together
EDITED_LAYER = 1
# Its eager attention adds the biases of ALiBi twice; its SDPA, which is what runs by default, once.
WRONG_WHEN_EAGER = ("Falcon ALiBi",)
_BLOCKS = ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers", "transformer.blocks")
_BLOCKS += ("biogpt.layers",)

# ---- the judge ----

OnSoftmax = Callable[[int, Tensor], Tensor]
"""Called with (layer, pattern `[head, dest, src]`) of one prompt; gives the pattern to use."""


class Reference:
    """A model of transformers whose softmax is replaced in `torch.nn.functional` while patterns are edited."""

    def __init__(self, name: str, seed: int) -> None:
        self.plain = tiny(name, seed)
        self.open = tiny(name, seed, attn_implementation="sdpa" if name in WRONG_WHEN_EAGER else "eager")
        self._has_attentions = name not in WRONG_WHEN_EAGER

    def log_p(self, prompt: int, model: nn.Module | None = None) -> Tensor:
        tokens = TOKENS[prompt : prompt + 1, : LENGTHS[prompt]]
        with torch.no_grad():
            return (model or self.open)(tokens, use_cache=False).logits[0, -1].log_softmax(-1)

    def patterns(self, prompt: int) -> list[Tensor]:
        """`[head, dest, src]` of each layer."""
        found: list[Tensor] = []
        with editing_softmax(LENGTHS[prompt], lambda _, pattern: found.append(pattern) or pattern):
            self.log_p(prompt)
        if self._has_attentions:
            with torch.no_grad():
                attentions = self.open(
                    TOKENS[prompt : prompt + 1, : LENGTHS[prompt]], output_attentions=True
                ).attentions
            for mine, theirs in zip(found, attentions, strict=True):
                torch.testing.assert_close(mine, theirs[0])
        return found

    def patched(self, prompt: int, new: Mapping[tuple[int, int], Tensor]) -> Tensor:
        """Log-probabilities with these heads' patterns replaced."""

        def replace(layer: int, pattern: Tensor) -> Tensor:
            pattern = pattern.clone()
            for at, head in new:
                if at == layer:
                    pattern[head] = new[at, head]
            return pattern

        with editing_softmax(LENGTHS[prompt], replace):
            return self.log_p(prompt)

    def residual(self, prompt: int) -> list[Tensor]:
        """What enters each block."""
        tokens = TOKENS[prompt : prompt + 1, : LENGTHS[prompt]]
        with torch.no_grad():
            return [each[0] for each in self.plain(tokens, output_hidden_states=True).hidden_states[:-1]]

    def without_direction(self, prompt: int) -> Tensor:
        """Log-probabilities with a direction taken out of a block's output, at the prompt's last position."""

        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            resid = (output[0] if isinstance(output, tuple) else output).clone()
            resid[:, -1] = without_direction(resid[:, -1])
            return (resid, *output[1:]) if isinstance(output, tuple) else resid

        handle = blocks(self.plain)[EDITED_LAYER].register_forward_hook(hook)
        try:
            return self.log_p(prompt, self.plain)
        finally:
            handle.remove()


def without_direction(resid: Tensor) -> Tensor:
    return resid - (resid @ DIRECTION)[..., None] * DIRECTION


def blocks(model: nn.Module) -> nn.ModuleList:
    for path in _BLOCKS:
        try:
            return model.get_submodule(path)  # pyright: ignore[reportReturnType]
        except AttributeError:
            continue
    raise LookupError(type(model).__name__)


@contextmanager
def editing_softmax(length: int, edit: OnSoftmax) -> Iterator[None]:
    """Passes what the n-th softmax over a sequence of this length gives through `edit`, as the pattern of layer n."""
    softmax, calls = functional.softmax, iter(range(1000))

    def edited(scores: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        pattern = softmax(scores, dim, *args, **kwargs)
        if pattern.dim() < 3 or pattern.shape[-2] != length or pattern.shape[-1] not in (length, length + 1):
            return pattern  # of a router, say
        pattern, sink = pattern.split([length, pattern.shape[-1] - length], dim=-1)
        return torch.cat([edit(next(calls), pattern.reshape(-1, length, length)).reshape(pattern.shape), sink], dim=-1)

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """By the formula in torch's documentation."""
        bias = torch.zeros(length, length).masked_fill(~torch.ones(length, length).bool().tril(), -torch.inf)
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        return functional.softmax(scores + (bias if attn_mask is None else attn_mask), dim=-1) @ value

    with (
        patch.object(functional, "softmax", edited),
        patch.object(functional, "scaled_dot_product_attention", attention),
    ):
        yield


@dataclass(frozen=True)
class Truth:
    """What the kinds are measured against: lists by prompt."""

    targets: Tensor
    log_p: list[Tensor]
    patterns: list[list[Tensor]]
    delta_p: np.ndarray  # [layer, head, prompt]
    together: Tensor  # log p of the target with a set of heads patched
    residual: list[list[Tensor]]
    ablated: Tensor  # log p of the target without a direction


@cache
def truth(name: str) -> Truth:
    pre, post = Reference(name, 0), Reference(name, 1)
    later = [post.patterns(prompt) for prompt in PROMPTS]
    log_p = [pre.log_p(prompt, pre.plain) for prompt in PROMPTS]
    targets = torch.stack([each.topk(2).indices[1] for each in log_p])  # the first may be sure
    heads = [(layer, head) for layer in range(len(later[0])) for head in range(len(later[0][0]))]

    def p_patched(prompt: int, head: tuple[int, int]) -> float:
        log_p = pre.patched(prompt, {head: later[prompt][head[0]][head[1]]})
        return float(log_p[targets[prompt]].exp())

    p = np.array([[p_patched(prompt, head) for prompt in PROMPTS] for head in heads])
    before = np.array([float(log_p[prompt][targets[prompt]].exp()) for prompt in PROMPTS])
    together = [pre.patched(i, {(layer, head): later[i][layer][head] for layer, head in SET}) for i in PROMPTS]
    return Truth(
        targets,
        log_p,
        [pre.patterns(prompt) for prompt in PROMPTS],
        (p - before).reshape(len(later[0]), -1, len(PROMPTS)),
        torch.stack([each[targets[prompt]] for prompt, each in enumerate(together)]),
        [pre.residual(prompt) for prompt in PROMPTS],
        torch.stack([pre.without_direction(prompt)[targets[prompt]] for prompt in PROMPTS]),
    )


# ---- the kinds of model ----


@cache
def checkpoints(name: str) -> CheckpointSeries:
    """Two checkpoints of an architecture, as folders."""
    folder = tempfile.mkdtemp(prefix=f"{name.replace(' ', '-')}-", dir=_FOLDERS.name)
    for seed in (0, 1):
        tiny(name, seed).save_pretrained(Path(folder) / f"step{seed}")
    return CheckpointSeries.from_directory(folder)


_FOLDERS = tempfile.TemporaryDirectory(prefix="architectures-")


@cache
def later_model(name: str) -> Any:
    """Whose patterns are put in: the plain model, for every kind."""
    return eh.hooked(checkpoints(name)[1].load("huggingface"))


def outcome(name: str, kind: ModelKind) -> str:
    """ "exact", or how it is refused: what stands in a cell of the page.

    Raises:
        AssertionError: it is not refused, and not exact.
    """
    series = checkpoints(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of HookedTransformer
        try:
            model = series[0].load(kind)
        except errors.UnsupportedModelError as error:
            return entry_of(error)
        try:
            eh.check_intervention(model := eh.hooked(model))
        except (errors.InterventionHasNoEffect, errors.UnsupportedModelError) as error:
            return entry_of(error)
        check_reads(model, truth(name))
        check_patches(model, later_model(name), truth(name))
        check_residual(model, truth(name))
    return EXACT


def entry_of(error: Exception) -> str:
    """The page's entry for an error; its message where nobody foresaw it."""
    return next((refusal.entry for refusal in REFUSALS if refusal.part in str(error)), f"unforeseen: {error}")


@dataclass(frozen=True)
class Refusal:
    """One way of being refused: part of the message, and what the page says of it."""

    part: str
    entry: str
    what: str
    instead: str = '`kind="huggingface"`'


_NOT_HERE = "not with this library"
REFUSALS = (
    Refusal("has no attention heads", "refused: no attention", "no layer has attention", _NOT_HERE),
    Refusal(
        "these layers have no attention",
        "refused: layers without attention",
        "some layers mix tokens in another way and have no pattern",
        _NOT_HERE,
    ),
    Refusal(
        "does not go through the interface",
        "refused: patterns not hooked",
        "the bridge leaves attention to a kernel that makes no pattern",
    ),
    Refusal(
        "uses its patterns before the hook",
        "refused: edits dropped",
        "the bridge calls `hook_pattern` after the pattern was used",
    ),
    Refusal(
        "keeps no values",
        "refused: no values of single heads",
        "the bridge keeps values compressed, so there is nothing that a new pattern would multiply",
    ),
    Refusal(
        "Unsupported architecture",
        "not loaded: no adapter",
        "transformer-lens has no bridge for this architecture",
    ),
    Refusal(
        "has no TransformerBridge",
        "not loaded: adapter fails",
        "the bridge does not fit this transformers, or this variant of the architecture",
    ),
    Refusal(
        "computes other logits",
        "not loaded: other logits",
        "transformer-lens computes other logits than transformers; the two are compared at loading",
    ),
    Refusal(
        "cannot convert",
        "not loaded: no conversion",
        "transformer-lens 3 converts it by official names only, or not at all",
        '`kind="bridge"` or `"huggingface"`',
    ),
)


def check_reads(model: Any, expected: Truth) -> None:
    logits = model.logits(TOKENS, ENDS)
    for prompt, length in enumerate(LENGTHS):
        close(logits[prompt].log_softmax(-1), expected.log_p[prompt])
        for layer, pattern in model.patterns(TOKENS).items():
            close(pattern[prompt, :, :length, :length], expected.patterns[prompt][layer])


def check_patches(model: Any, later: Any, expected: Truth) -> None:
    task = eh.tasks.from_tokens(TOKENS, expected.targets, LENGTHS)
    ranking = eh.rank_heads(model, later, task)
    np.testing.assert_allclose(ranking.delta_p, expected.delta_p, atol=1e-5, rtol=0)
    assert np.abs(expected.delta_p).max(axis=(1, 2)).min() > 1e-4, "in each layer, some head should matter"
    batch = task.batch(None, vocabulary_size=VOCABULARY, context=None)
    masks = torch.zeros(1, model.n_layers, model.n_heads, dtype=torch.bool)
    masks[0, [layer for layer, _ in SET], [head for _, head in SET]] = True
    patterns = list(later.patterns(batch.tokens).values())
    together = model.engine.patch_sets(model.engine.trace(batch), patterns, masks).log_p[0]
    close(together, expected.together)


def check_residual(model: Any, expected: Truth) -> None:
    resid = model.residual(TOKENS, [-1, 0, 1])
    for prompt, length in enumerate(LENGTHS):
        close(resid[:, prompt, :length], torch.stack(expected.residual[prompt][:3]))
    reads = Reads(ENDS[:, None], expected.targets[:, None])
    read = DIRECTION[None, None, :, None]
    edit = Edit(EDITED_LAYER, ENDS[:, None], read, read, torch.zeros(1, 1, 1, 1))
    engine = model.residual_engine
    found = engine.answers(engine.trace(TOKENS, reads), [edit]).log_p[0, :, 0]
    close(found, expected.ablated)
    before = torch.stack([log_p[expected.targets[prompt]] for prompt, log_p in enumerate(expected.log_p)])
    assert (expected.ablated - before).abs().max() > 1e-3, "the direction should matter"


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


# ---- the page ----

PLAIN, BRIDGE_3, BRIDGE_4, HOOKED_3 = COLUMNS = (
    "Plain transformers",
    "Bridge, 3.9",
    "Bridge, 4.x",
    "HookedTransformer, 3.9",
)
KINDS: dict[str, ModelKind] = {
    PLAIN: "huggingface",
    BRIDGE_3: "bridge",
    BRIDGE_4: "bridge",
    HOOKED_3: "hooked_transformer",
}
MEASURED_HERE = (PLAIN, BRIDGE_3, HOOKED_3) if HAS_HOOKED_TRANSFORMER else (PLAIN, BRIDGE_4)
_WRITTEN = "* measured with"
_PAGE = """# Architectures

Every architecture that transformers runs as a causal language model with an attention pattern a layer can be ranked,
as the plain Hugging Face model. The analyses of a series (`eh.rank_heads(series[a], series[b], ...)`, emergence,
probes, ablation) use that model by themselves. The table says what else can be used.

**exact** is a measurement: a small random model of the architecture, and a second one with other weights whose
patterns are put in. Prompts have different lengths and are longer than sliding windows. Compared are the logits, all
patterns, Δp of every head and prompt, log p with four heads patched together, the residual stream before each block,
and log p with a direction taken out of it. The judge is transformers' own attention, one prompt at a time without
padding, with one full forward pass for each patched head, the pattern replaced where its softmax returns. Δp agrees
to 1e-5. Each checkpoint was saved and loaded as one of a series, so what fused, tied or renamed weights become is
part of it. The two columns of bridges were

{versions}

{table}

## What the other entries mean

{refusals}

`kind` is an argument of every series, and `series[step].load("huggingface")` overrules it. A refused model is never
ranked: edits that do nothing raise `InterventionHasNoEffect`.

## How patterns are reached in a plain model

Most models of transformers run their attention by a function registered by name; while patterns are read or edited,
the library's function is in its place. Models with attention code of their own (GPT-Neo, Bloom, Falcon, MPT, XGLM)
run that code, and the library intercepts the product of pattern and values in it. Which of the two is used is decided
by measurement when a model is first used: where the registered function does not give the heads' outputs that the
model has by itself, the model's own code is run.

Two things to know:

* **Falcon with ALiBi.** In transformers {transformers}, its eager attention adds the position biases twice, its SDPA
  (what runs by default) once. The library follows the model as it was loaded. Don't load it with
  `attn_implementation="eager"`.
* **Attention sinks (gpt-oss).** A pattern is what multiplies the values, so its rows sum to less than one; the rest
  went to the sink.

## Measure it again

From a checkout, in an environment with each version of transformer-lens:

```bash
python tests/architectures.py docs/architectures.md
```

It writes what the installed version gives and keeps what the page says of the other.
"""


def read_page(page: str) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The table by architecture and column, and the versions it was measured with, by line."""
    lines = page.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("| Architecture")), None)
    if start is None:
        return {}, []
    columns = [cell.strip() for cell in lines[start].strip("|").split("|")]
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = dict(zip(columns[1:], cells, strict=True))
    return rows, [line for line in lines if line.startswith(_WRITTEN)]


def write_page(path: Path) -> None:
    """Measures what the installed version of transformer-lens gives, and keeps the rest of the page."""
    known, versions = read_page(path.read_text() if path.exists() else "")
    table = [f"| Architecture | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name in NAMES:
        measured = {column: outcome(name, KINDS[column]) for column in MEASURED_HERE}
        cells = dict.fromkeys(COLUMNS, "") | known.get(name, {}) | measured
        table.append(f"| {name} | {' | '.join(cells[column] for column in COLUMNS)} |")
    lens = f"transformer-lens {version('transformer-lens')}"
    here = f"{_WRITTEN} {lens}, transformers {version('transformers')} and torch {version('torch').split('+')[0]}."
    major = lens.split(".")[0]
    others = [line for line in versions if not line.startswith(f"{_WRITTEN} {major}.")]
    legend = ["| Entry | What happens | What to do |", "|---|---|---|"]
    legend += [f"| {refusal.entry} | {refusal.what} | {refusal.instead} |" for refusal in REFUSALS]
    text = _PAGE.format(
        versions="\n".join(sorted([here, *others])),
        table="\n".join(table),
        refusals="\n".join(legend),
        transformers=version("transformers"),
    )
    path.write_text(text)


if __name__ == "__main__":
    logging.disable()  # transformers' remarks on configs with a vocabulary of 50
    torch.set_num_threads(1)
    write_page(Path(sys.argv[1]))
