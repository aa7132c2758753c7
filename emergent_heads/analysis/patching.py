"""Two checkpoints and the prompts they share: what every patching analysis starts from."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from emergent_heads.analysis.evaluation import model_name
from emergent_heads.checkpoints.known_issues import marks_of
from emergent_heads.errors import ArgumentError, ModelMismatchError, PromptError
from emergent_heads.models.engine import Head, Trace
from emergent_heads.models.hooked import Answers, HookedModel, hooked
from emergent_heads.tasks.task import PromptBatch, PromptTask

# Prompts traced together: a trace holds every layer's residual stream, so this bounds memory, not speed.
_TRACE_ELEMENTS = 2**26


@dataclass(frozen=True, eq=False)
class Pair:
    """The earlier model, ready to be patched, with what is needed of the later one.

    Attributes:
        model: the pre model.
        batch: the prompts in use.
        pre, post: how each model answers them.
        pre_patterns, post_patterns: per layer, on the CPU.
        about: for a result's `.about`.
    """

    model: HookedModel
    batch: PromptBatch
    pre: Answers
    post: Answers
    pre_patterns: list[Float[Tensor, "prompt head dest src"]]
    post_patterns: list[Float[Tensor, "prompt head dest src"]]
    about: dict[str, Any]
    whole_trace: Trace | None = None  # kept where all prompts fit into one

    @property
    def p_pre(self) -> Float[np.ndarray, " prompt"]:
        return np.exp(self.pre.log_p.double().numpy())  # by numpy, as for patched answers: equal logs, equal p

    @property
    def p_post(self) -> Float[np.ndarray, " prompt"]:
        return np.exp(self.post.log_p.double().numpy())

    def traces(self) -> Iterator[tuple[slice, Trace, list[Float[Tensor, "prompt head dest src"]]]]:
        """Passes of pre over the prompts, in pieces that fit into memory, with post's patterns on the same device."""
        for piece in _pieces(self.model, self.batch):
            trace = self.whole_trace or self.model.engine.trace(self.batch.select(piece))
            yield slice(piece[0], piece[-1] + 1), trace, [p[piece].to(self.model.device) for p in self.post_patterns]


def open_pair(
    pre: Any,
    post: Any,
    task: PromptTask,
    *,
    prompts: str = "all",
    rows: str = "all",
    every_head: bool = False,
    batch_size: int | None = None,
) -> Pair:
    """Runs both models over the task's prompts; the later one first, so that one resident model serves both.

    Args:
        pre, post: the checkpoint before and at the point of emergence: handles of a series, or models of any
            supported kind.
        task: the capability.
        prompts: "all", or "flipped" for those that pre gets wrong and post right.
        rows: "all" or "last", checked here and kept in `.about`.
        every_head: every head will be patched alone, which a model that is run remotely does by the request of its
            first pass.
        batch_size: largest number of sequences run together then.

    Raises:
        ModelMismatchError: the models have different shapes.
        PromptError: no prompt is left.
    """
    check_choice("prompts", prompts, ("all", "flipped"))
    check_choice("rows", rows, ("all", "last"))
    later = hooked(post)
    shape = later.shape
    batch = task.batch(later.tokenizer, vocabulary_size=later.vocabulary_size, context=later.context)
    after, post_patterns = _joined(later.answers_and_patterns(batch.select(piece)) for piece in _pieces(later, batch))
    model = hooked(pre)  # from here on `later` may hold pre's weights
    _check_same_shape(model.shape, shape)
    if every_head:
        model.foresee_patches(post_patterns, rows, batch_size)
    traces = (model.engine.trace(batch.select(piece)) for piece in _pieces(model, batch))
    whole = next(traces) if len(_pieces(model, batch)) == 1 else None
    before, pre_patterns = _joined((trace.answers, trace.patterns) for trace in ([whole] if whole else traces))
    if prompts == "flipped":
        kept = np.nonzero((~before.matched & after.matched).numpy())[0]
        if not len(kept):
            raise PromptError(
                f"none of the {len(batch)} prompts is wrong in pre and right in post "
                f"(right in pre: {int(before.matched.sum())}, in post: {int(after.matched.sum())}); "
                'use prompts="all", or other checkpoints'
            )
        before, after = (Answers(answers.log_p[kept], answers.matched[kept]) for answers in (before, after))
        batch, whole = batch.select(kept), None
        pre_patterns, post_patterns = ([layer[kept] for layer in of] for of in (pre_patterns, post_patterns))
    about = {
        "pre": model_name(pre),
        "post": model_name(post),
        "task": repr(task),
        "task_name": task.name,
        "prompts": prompts,
        "rows": rows,
        "n_prompts": len(batch),
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "p_pre": float(before.log_p.double().exp().mean()),
        "p_post": float(after.log_p.double().exp().mean()),
        "share_matched_pre": float(before.matched.double().mean()),
        "share_matched_post": float(after.matched.double().mean()),
        "known_issues": marks_of(pre, post),
    }
    return Pair(model, batch, before, after, pre_patterns, post_patterns, about, whole)


def head_patterns(
    model: Any, batch: PromptBatch, heads: Sequence[Head], *, shape: tuple[int, ...]
) -> dict[int, dict[int, Float[Tensor, "prompt dest src"]]]:
    """Patterns of some heads over the prompts, by layer and head, on the CPU; no others are kept.

    Args:
        model: a handle of a series, or a model of any supported kind.
        batch: the prompts.
        heads: `(layer, head)`.
        shape: numbers of layers and of heads per layer that the model must have.

    Raises:
        ModelMismatchError: the model has other numbers of layers or heads.
    """
    model = hooked(model)
    if (found := (model.n_layers, model.n_heads)) != tuple(shape):
        raise ModelMismatchError(
            f"this model has {found[0]} layers of {found[1]} heads, and the heads are of one with {shape[0]} layers "
            f"of {shape[1]}: give a checkpoint of the same model"
        )
    layers = sorted({layer for layer, _ in heads})
    parts: dict[Head, list[Tensor]] = {head: [] for head in sorted(heads)}
    for piece in _pieces(model, batch):
        patterns = model.patterns(batch.tokens[piece], layers)
        for layer, head in parts:
            parts[layer, head].append(patterns[layer][:, head].cpu().clone())
    return {layer: {head: torch.cat(of) for (at, head), of in parts.items() if at == layer} for layer in layers}


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ArgumentError where `value` is none of the choices."""
    if value not in choices:
        raise ArgumentError(f"{name}={value!r}: use one of {', '.join(map(repr, choices))}")


def _joined(
    parts: Iterable[tuple[Answers, Sequence[Float[Tensor, "prompt head dest src"]]]],
) -> tuple[Answers, list[Float[Tensor, "prompt head dest src"]]]:
    """Answers and patterns of all pieces, on the CPU."""
    answers, patterns = zip(*((part, [pattern.cpu() for pattern in layers]) for part, layers in parts), strict=True)
    joined = Answers(torch.cat([part.log_p for part in answers]), torch.cat([part.matched for part in answers]))
    return joined, [torch.cat(layer) for layer in zip(*patterns, strict=True)]


def _pieces(model: HookedModel, batch: PromptBatch) -> list[np.ndarray]:
    """Row numbers of the prompts, in pieces whose traces fit into memory."""
    n, length = batch.tokens.shape
    if model.is_remote:
        return [np.arange(n)]
    per_prompt = length * model.n_layers * (4 * model.d_model + model.n_heads * length)
    return np.array_split(np.arange(n), -(-n * per_prompt // _TRACE_ELEMENTS))


def _check_same_shape(pre: dict[str, int], post: dict[str, int]) -> None:
    if different := [f"{name} {pre[name]} in pre, {post[name]} in post" for name in pre if pre[name] != post[name]]:
        raise ModelMismatchError(
            f"the two models have different shapes ({'; '.join(different)}): give two checkpoints of one model"
        )
