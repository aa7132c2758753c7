"""What runs beside the weights when an nnsight model is run remotely; `nnsight.py` sends it and reads what comes back.

These functions cross the network as source text, with every request, and run where this package is not installed and
where the process that runs them holds no weights. So they know torch and nnsight's traces and nothing else, reach the
model only by the inputs and outputs of its modules (`.source` is not offered everywhere, and its labels follow the
source of transformers), and have no annotations that would have to be imported there.

A pattern cannot be replaced where it is computed, then: writing an attention's second output does nothing. What the
pattern is used for is replaced instead, the heads' outputs on their way into the output projection,
`z[dest, head] = sum over src of pattern[dest, src] * values[src, head]`, with the values from the module that computes
them. How that module lays them out differs between architectures; the layout whose `pattern @ values` is the model's
own `z` is taken, and how well it agrees comes back with the answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    Places = Mapping[str, Any]
    Batch = Mapping[str, Tensor]
    Layout = tuple[str, int]
    Packed = Float[Tensor, "prompt head entry"]


def answers(model: Any, places: Places, batch: Batch) -> dict[str, Tensor]:
    """How well each target is predicted."""
    logits = logits_at(model, places, batch)
    return read(logits, batch["targets"].to(logits.device))


def answers_and_patterns(model: Any, places: Places, batch: Batch, layers: Sequence[int]) -> dict[str, Any]:
    """Answers, and the patterns of these layers, by one pass."""
    with torch.no_grad():
        logits, patterns, _, _ = plain_pass(model, places, batch, layers)
    found = [packed(pattern) for pattern in patterns]
    return {**read(logits, batch["targets"].to(logits.device)), "patterns": found, "dtype": dtype_of(patterns, logits)}


def logits_at(model: Any, places: Places, batch: Batch) -> Float[Tensor, "prompt vocabulary"]:
    """Logits at the answers' positions."""
    with torch.no_grad():
        return plain_pass(model, places, batch, [])[0].cpu()


def residual_stream(
    model: Any, places: Places, batch: Batch, layers: Sequence[int]
) -> Float[Tensor, "layer prompt kept d_model"]:
    """Residual stream after each of these blocks, -1 for what enters the first, at the positions if there are any."""
    found = {}
    with torch.no_grad(), model.trace(batch["tokens"], use_cache=False) as tracer:
        for layer in sorted(set(layers)):
            if layer < 0:
                found[layer] = first(model.get(places["blocks"][0]).inputs[0])
            else:
                found[layer] = first(model.get(places["blocks"][layer]).output)
        tracer.stop()
    resid = torch.stack([found[layer].float().cpu() for layer in layers])
    if batch["positions"] is None:
        return resid
    return resid[:, torch.arange(resid.shape[1])[:, None], batch["positions"]]


def patched(model: Any, places: Places, batch: Batch, n_heads: int, job: Mapping[str, Any]) -> dict[str, Any]:
    """Answers of the model as it is and with patterns replaced, and whether replacing them works at all.

    `job` has `patterns`, per layer and packed; `masks` `[set, layer, head]`, which heads each run replaces together;
    `last_row_only`; `trial`, a pattern unlike any the model has, or None where that is known; `rows`, how many
    sequences are run together.
    """
    with torch.no_grad():
        logits, patterns, layouts, deviation = plain_pass(model, places, batch, range(len(places["blocks"])), n_heads)
        targets = batch["targets"].to(logits.device)
        found = {
            **read(logits, targets),
            "patterns": [packed(pattern) for pattern in patterns],
            "dtype": dtype_of(patterns, logits),
            "deviation": deviation,
        }
        if len(layouts) < len(patterns):
            return found  # it tells why
        if job["trial"] is not None:
            found["moved"], found["idle"] = trial(model, places, batch, n_heads, layouts, job["trial"])
        if not len(job["masks"]):
            return found
        new = [unpacked(pattern, batch["tokens"].shape[1]) for pattern in job["patterns"]]
        log_p, matched = [], []
        for part in job["masks"].split(max(1, job["rows"] // len(targets))):
            n = len(part)
            repeated = batch["tokens"].repeat(n, 1), batch["positions"].repeat(n)
            seen = run(model, places, *repeated, layouts, new, part, job["last_row_only"])
            answers = read(seen, targets.repeat(n))
            log_p.append(answers["log_p"].reshape(n, -1))
            matched.append(answers["matched"].reshape(n, -1))
        return {**found, "patched_log_p": torch.cat(log_p), "patched_matched": torch.cat(matched)}


def plain_pass(
    model: Any, places: Places, batch: Batch, layers: Sequence[int], n_heads: int = 0
) -> tuple[Float[Tensor, "prompt vocabulary"], list[Tensor | None], list[Layout], list[float]]:
    """One pass: logits at the answers, the layers' patterns and, given `n_heads`, the layouts of their values."""
    patterns, layouts, deviation = [], [], []
    with model.trace(batch["tokens"], use_cache=False):
        for layer in layers:
            made = model.get(places["values"][layer]).output if n_heads else None
            z = first(model.get(places["projections"][layer]).inputs[0]) if n_heads else None
            attention = model.get(places["attention"][layer]).output
            pattern = attention[1] if isinstance(attention, tuple) and len(attention) > 1 else None
            patterns.append(pattern)
            if made is not None and z is not None and pattern is not None:
                layout, error = best_layout(made, pattern, z, n_heads)
                layouts += [] if layout is None else [layout]
                deviation.append(error)
        unembedding = model.get(places["unembedding"])
        (resid, *others), named = unembedding.inputs
        unembedding.inputs = ((at(resid, batch["positions"]), *others), named)
        logits = model.output.logits[:, -1].float()
    return logits, patterns, layouts, deviation


def run(
    model: Any,
    places: Places,
    tokens: Int[Tensor, "row pos"],
    positions: Int[Tensor, " row"],
    layouts: Sequence[Layout],
    new: Sequence[Float[Tensor, "prompt head dest src"]],
    masks: Bool[Tensor, "set layer head"],
    last_row_only: bool,
) -> Float[Tensor, "row vocabulary"]:
    """Logits at the answers, with the patterns of each set's heads replaced; the rows are the prompts, set by set."""
    n, n_layers, n_heads = masks.shape
    layers = [layer for layer in range(n_layers) if masks[:, layer].any()]
    with model.trace(tokens, use_cache=False):
        for layer in layers:
            made = model.get(places["values"][layer]).output
            projection = model.get(places["projections"][layer])
            (z, *others), named = projection.inputs
            values = by_head(made, *layouts[layer], n_heads, z.shape[-1] // n_heads)
            pattern = new[layer].to(values.device, values.dtype).repeat(n, 1, 1, 1)
            heads = (pattern @ values).transpose(1, 2).flatten(2)
            chosen = masks[:, layer].to(z.device).repeat_interleave(len(tokens) // n, 0)
            chosen = chosen.repeat_interleave(z.shape[-1] // n_heads, -1)[:, None]
            if last_row_only:
                row = torch.arange(z.shape[1], device=z.device) == positions.to(z.device)[:, None]
                chosen = chosen & row[:, :, None]
            projection.inputs = ((torch.where(chosen, heads.to(z.dtype), z), *others), named)
        unembedding = model.get(places["unembedding"])
        (resid, *others), named = unembedding.inputs
        unembedding.inputs = ((at(resid, positions), *others), named)
        logits = model.output.logits[:, -1].float()
    return logits


def trial(
    model: Any,
    places: Places,
    batch: Batch,
    n_heads: int,
    layouts: Sequence[Layout],
    pattern: Float[Tensor, "dest src"],
) -> tuple[list[bool], list[bool]]:
    """Per layer: whether a pattern of its own in the last head moves the output, and whether weights of zero keep it.

    All rows are the longest prompt, so that only the edit can make a difference. One token has but one pattern.
    """
    n = len(layouts)
    longest = batch["positions"].argmax()
    tokens, positions = batch["tokens"][longest][None], batch["positions"][longest][None]
    masks = torch.zeros(n + 1, n, n_heads, dtype=torch.bool)
    for layer in range(n):
        masks[layer + 1, layer, -1] = True
    new = [pattern.expand(1, n_heads, *pattern.shape) for _ in range(n)]
    logits = run(model, places, tokens.repeat(n + 1, 1), positions.repeat(n + 1), layouts, new, masks, False)
    idle = []
    with model.trace(tokens, use_cache=False):
        for layer in range(n):
            written = model.get(places["projections"][layer]).output
            idle.append(int(positions) == 0 or bool((written == written[:, :1]).all()))
    rounding = 1e-6 * logits[0].abs().max()
    return [bool((logits[layer + 1] - logits[0]).abs().max() > rounding) for layer in range(n)], idle


def best_layout(
    made: Float[Tensor, "prompt src width"],
    pattern: Float[Tensor, "prompt head dest src"],
    z: Float[Tensor, "prompt dest z"],
    n_heads: int,
) -> tuple[Layout | None, float]:
    """The way to read values whose `pattern @ values` is nearest to `z`, and its largest error relative to `z`."""
    d_head = z.shape[-1] // n_heads
    found: tuple[Layout | None, float] = (None, float("inf"))
    for layout in layouts_of(made.shape[-1], n_heads, d_head):
        own = (pattern @ by_head(made, *layout, n_heads, d_head)).transpose(1, 2).flatten(2)
        error = float((own - z).abs().max() / z.abs().max().clamp_min(1e-30))
        if error < found[1]:
            found = (layout, error)
    return found


def layouts_of(width: int, n_heads: int, d_head: int) -> list[Layout]:
    """(layout, groups of heads that share values) that fit a module of this width."""
    heads = width // d_head
    if heads * d_head != width:
        return []
    if heads <= n_heads:
        return [("alone", heads)] if n_heads % heads == 0 else []
    groups = (heads - n_heads) // 2
    if heads != n_heads + 2 * groups or groups == 0 or n_heads % groups:
        return []
    return [("last", groups), ("within groups", groups)]


def by_head(
    made: Float[Tensor, "row src width"], layout: str, groups: int, n_heads: int, d_head: int
) -> Float[Tensor, "row head src d_head"]:
    """Values `[row, head, src, d_head]` from the output `[row, src, width]` of the module that makes them."""
    if layout == "within groups":
        values = made.unflatten(-1, (groups, -1, d_head))[..., -1, :]
    else:
        values = made[..., -groups * d_head :].unflatten(-1, (groups, d_head))
    return values.transpose(1, 2).repeat_interleave(n_heads // groups, 1)


def read(logits: Float[Tensor, "row vocabulary"], targets: Int[Tensor, " row"]) -> dict[str, Tensor]:
    """Log p of each target and whether it is the top token."""
    log_p = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    return {"log_p": log_p.cpu(), "matched": (logits.argmax(-1) == targets).cpu()}


def at(values: Float[Tensor, "row pos width"], positions: Int[Tensor, " row"]) -> Float[Tensor, "row 1 width"]:
    """One position of each row."""
    return values[torch.arange(len(values), device=values.device), positions.to(values.device)][:, None]


def first(value: Any) -> Tensor:
    """The value, or the first one of several."""
    return value[0] if isinstance(value, tuple) else value


def dtype_of(patterns: Sequence[Tensor | None], logits: Tensor) -> str:
    """Name of the dtype that the model computes in."""
    known = [pattern for pattern in patterns if pattern is not None]
    return str((known[0] if known else logits).dtype).removeprefix("torch.")


def packed(pattern: Float[Tensor, "prompt head dest src"] | None) -> Packed | None:
    """The lower triangle of patterns `[prompt, head, dest, src]`: all there is of causal ones, in half the bytes."""
    if pattern is None:
        return None
    length = pattern.shape[-1]
    return pattern[..., torch.ones(length, length, dtype=torch.bool, device=pattern.device).tril()].cpu()


def unpacked(pattern: Packed, length: int) -> Float[Tensor, "prompt head dest src"]:
    """Patterns from their lower triangles."""
    whole = pattern.new_zeros(*pattern.shape[:-1], length, length)
    whole[..., torch.ones(length, length, dtype=torch.bool).tril()] = pattern
    return whole
