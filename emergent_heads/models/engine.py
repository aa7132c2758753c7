"""The engine that patches attention patterns: the numbers of one full forward pass per head, with less work.

* Work before the patched layer is done once: a run starts at the patched layer from the cached residual stream.
* A head's new pattern changes only what that head writes, `(P_post - P_pre) @ V @ W_O`, so queries, keys and the other
  heads of that layer are not run again, nor the MLP of that layer where attention and MLP are parallel (GPT-NeoX).
* In the last block, only the answer's position goes through the output projection and the MLP.
* Several heads are run as one batch, and only the answer's position is unembedded, for many runs at once.

The shortcuts are checked once per model against the plain run with the edited pattern, and are not used where they do
not reproduce it (attention whose output is gated or normalised, say).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from emergent_heads.errors import ArgumentError, InterventionHasNoEffect
from emergent_heads.models.hooked import Answers, HookedModel, listed, read_answers
from emergent_heads.models.hooks import (
    StandIns,
    at_positions,
    editing_input,
    editing_output,
    keep_copy_in,
    keep_in,
    without_running,
)
from emergent_heads.randomness import torch_generator
from emergent_heads.tasks.task import PromptBatch

Head = tuple[int, int]
"""`(layer, head)`."""

# Numbers in the widest activation of a batch, and in the logits of one: enough for full matrix speed.
_BATCH_ELEMENTS = 2**24
_LOGIT_ELEMENTS = 2**25

_Part = TypeVar("_Part")


@dataclass(frozen=True, eq=False)
class Trace:
    """One forward pass over a batch, kept so that patched runs can start at any layer.

    Every list has one entry a layer. `mlp_out` is None where the MLP reads the attention's output.
    """

    batch: PromptBatch
    logits: Float[Tensor, "prompt vocabulary"]
    resid_pre: list[Float[Tensor, "prompt pos d_model"]]
    attention_out: list[Float[Tensor, "prompt pos d_model"]]
    mlp_out: list[Float[Tensor, "prompt pos d_model"] | None]
    patterns: list[Float[Tensor, "prompt head dest src"]]
    values: list[Float[Tensor, "prompt head src d_head"]]

    @property
    def answers(self) -> Answers:
        """What the pass answers, nothing patched."""
        return read_answers(self.logits, self.batch.targets)


class PatchEngine:
    """Patched runs of one model; `model.engine` makes and keeps it.

    Making one runs the model on a few tokens, to see that its patterns can be edited and which shortcuts hold.

    Attributes:
        uses_shortcuts: whether they do.
        conclusive: whether the trial could tell. It cannot where output projections are zero, as at step 0 of some
            runs; nothing is taken for granted then, and the engine is made anew for the next weights.

    Raises:
        InterventionHasNoEffect: editing the patterns of some layer does not change the output.
    """

    def __init__(self, model: HookedModel) -> None:
        self._model = model
        self._last = model.n_layers - 1
        self._stand_ins = StandIns()
        self._parallel = [mlp is not None for mlp in model.mlp]  # until it is known, every MLP's output is kept
        self.uses_shortcuts = self.conclusive = False
        self._try_out()

    def trace(self, batch: PromptBatch) -> Trace:
        """One forward pass that keeps what patched runs start from."""
        model, batch = self._model, batch.to(self._model.device)
        resid: dict[int, Tensor] = {}
        attention: dict[int, Tensor] = {}
        mlp: dict[int, Tensor] = {}
        patterns: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}

        def keep_attention(layer: int, pattern: Tensor, value: Tensor) -> None:
            patterns[layer], values[layer] = pattern, value

        with model.evaluating(), ExitStack() as stack:
            stack.enter_context(model.on_pattern(keep_attention))
            for layer in range(model.n_layers):
                stack.enter_context(editing_input(model.blocks[layer], keep_in(resid, layer)))
                stack.enter_context(editing_output(model.attention[layer], keep_in(attention, layer)))
                if self._parallel[layer]:
                    stack.enter_context(editing_output(model.mlp[layer], keep_copy_in(mlp, layer)))
            logits = model.logits_at(batch.tokens, batch.positions)
        layers = range(model.n_layers)
        model.check_all_seen(patterns, layers)
        kept = ([found[layer] for layer in layers] for found in (resid, attention, patterns, values))
        resid_pre, attention_out, all_patterns, all_values = kept
        mlp_out = [mlp.get(layer) for layer in layers]
        return Trace(batch, logits, resid_pre, attention_out, mlp_out, all_patterns, all_values)

    def patch_heads(
        self,
        trace: Trace,
        patterns: Sequence[Float[Tensor, "prompt head dest src"]],
        heads: Sequence[Head],
        *,
        rows: str = "all",
        batch_size: int | None = None,
    ) -> Answers:
        """The answers with one head's pattern replaced, for each of these heads: `[head, prompt]`.

        Args:
            trace: pass of this model over the prompts.
            patterns: per layer, the patterns to take the new ones from.
            heads: `(layer, head)`, each patched alone.
            rows: "all" replaces whole patterns, "last" only the row of each prompt's answer position.
            batch_size: largest number of sequences run together; halved by itself when memory runs out.
        """
        if not self.uses_shortcuts:
            masks = torch.zeros(len(heads), self._model.n_layers, self._model.n_heads, dtype=torch.bool)
            for index, (layer, head) in enumerate(heads):
                masks[index, layer, head] = True
            return self.patch_sets(trace, patterns, masks, rows=rows, batch_size=batch_size)
        size = self._per_batch(trace, batch_size)
        order: list[int] = []
        final: list[Tensor] = []
        for layer in sorted({layer for layer, _ in heads}):
            places = [place for place, (at, _) in enumerate(heads) if at == layer]
            new = self._rows_to_patch(trace, layer, patterns[layer], rows)
            in_layer = [heads[place][1] for place in places]

            def run(start: int, stop: int, layer: int = layer, in_layer: list[int] = in_layer, new: Tensor = new):
                return self._run_heads(trace, layer, in_layer[start:stop], new)

            final += in_batches(run, len(places), size)
            order += places
        return self._read(torch.cat(final), trace.batch, order)

    def patch_sets(
        self,
        trace: Trace,
        patterns: Sequence[Float[Tensor, "prompt head dest src"]],
        masks: Bool[Tensor, "set layer head"],
        *,
        rows: str = "all",
        batch_size: int | None = None,
    ) -> Answers:
        """The answers with all heads of a set patched together, for each set: `[set, prompt]`.

        Args:
            trace: pass of this model over the prompts.
            patterns: per layer, the patterns to take the new ones from.
            masks: which heads each set holds.
            rows, batch_size: as in `patch_heads`.
        """
        # Sets that start late are run together, so that each batch starts as late as it can.
        first = [int(layers[0]) if len(layers := mask.any(-1).nonzero()[:, 0]) else self._last for mask in masks]
        order = sorted(range(len(masks)), key=first.__getitem__, reverse=True)
        masks = masks.to(self._model.device)

        def run(start: int, stop: int) -> Tensor:
            chosen = order[start:stop]
            return self._run_sets(min(first[place] for place in chosen), trace, patterns, masks[chosen], rows)

        final = torch.cat(in_batches(run, len(masks), self._per_batch(trace, batch_size)))
        return self._read(final, trace.batch, order)

    # ---- runs, up to the unembedding: each gives the final residual stream at the answers' positions ----

    def _run_heads(
        self, trace: Trace, layer: int, heads: list[int], new: Float[Tensor, "prompt head dest src"]
    ) -> Float[Tensor, "head prompt d_model"]:
        model, batch, n = self._model, trace.batch, len(heads)
        change = (new[:, heads] - trace.patterns[layer][:, heads]) @ trace.values[layer][:, heads]
        z = change.new_zeros(n, len(batch), new.shape[2], model.n_heads, change.shape[-1])
        for index, head in enumerate(heads):
            z[index, :, :, head] = change[:, index]
        written = model.project(layer, z.flatten(-2)) - model.project(layer, z.new_zeros(z[0, 0, 0].numel()))
        attention_out = (trace.attention_out[layer] + written).flatten(0, 1)
        with model.evaluating(), ExitStack() as stack:
            stack.enter_context(self._starting_at(layer, trace.resid_pre[layer].repeat(n, 1, 1)))
            stack.enter_context(self._stand_ins.returning(model.attention[layer], attention_out))
            if (mlp_out := trace.mlp_out[layer]) is not None:
                stack.enter_context(self._stand_ins.returning(model.mlp[layer], mlp_out.repeat(n, 1, 1)))
            return self._final_resid(batch, n, mlp_runs=mlp_out is None or layer < self._last)

    def _run_sets(
        self,
        layer: int,
        trace: Trace,
        patterns: Sequence[Float[Tensor, "prompt head dest src"]],
        masks: Bool[Tensor, "set layer head"],
        rows: str,
    ) -> Float[Tensor, "set prompt d_model"]:
        """Plain runs from `layer` on, with the patterns replaced where attention computes them."""
        model, batch, n = self._model, trace.batch, len(masks)

        def put_in(at: int, pattern: Tensor, _values: Tensor) -> Tensor | None:
            if not masks[:, at].any():
                return None
            replaced = masks[:, None, at, :, None, None] & self._row_mask(batch, rows)[None, :, None, :, None]
            own = pattern.unflatten(0, (n, len(batch)))
            return torch.where(replaced, patterns[at].to(pattern), own).flatten(0, 1)

        with model.evaluating(), ExitStack() as stack:
            stack.enter_context(self._starting_at(layer, trace.resid_pre[layer].repeat(n, 1, 1)))
            stack.enter_context(model.on_pattern(put_in))
            return self._final_resid(batch, n)

    def _final_resid(self, batch: PromptBatch, n: int, mlp_runs: bool = True) -> Float[Tensor, "run prompt d_model"]:
        """Runs the batch `n` times over, under the hooks that are set, up to the unembedding."""
        model, positions = self._model, batch.positions.repeat(n)
        found: dict[int, Tensor] = {}
        with ExitStack() as stack:
            if self.uses_shortcuts:
                # Outputs of one position are added to the residual stream at every position: right at the answer's,
                # meaningless at the others, which nobody reads.
                stack.enter_context(model.on_z(self._last, lambda z: at_positions(z, positions)))
                if mlp_runs and (mlp := model.mlp[self._last]) is not None:
                    stack.enter_context(editing_input(mlp, lambda resid: at_positions(resid, positions)))
            stack.enter_context(editing_input(model.unembedding, lambda resid: at_positions(resid, positions)))
            stack.enter_context(editing_input(model.unembedding, keep_in(found, 0)))
            stack.enter_context(without_running(model.unembedding))
            model.run(batch.tokens.repeat(n, 1))
        return found[0][:, 0].unflatten(0, (n, len(batch)))

    def _read(self, final: Float[Tensor, "run prompt d_model"], batch: PromptBatch, order: Sequence[int]) -> Answers:
        """Unembeds many runs at once and puts them back in order (`order[i]` is the place of run i)."""
        per_pass = max(1, _LOGIT_ELEMENTS // (self._model.vocabulary_size * len(batch)))
        # Unembedded many at a time, for one pass over the large matrix; read one run at a time, while in the cache.
        logits = (run for part in final.split(per_pass) for run in self._unembed(part))
        parts = [read_answers(run, batch.targets) for run in logits]
        place = torch.empty(len(order), dtype=torch.long)
        place[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
        log_p, matched = (torch.stack(of)[place] for of in zip(*parts, strict=True))
        return Answers(log_p, matched)

    def _unembed(self, final: Float[Tensor, "run prompt d_model"]) -> Float[Tensor, "run prompt vocabulary"]:
        """Logits, by the model's own way from the unembedding on (soft caps and scales included)."""
        model, rows = self._model, final.flatten(0, 1)
        with model.evaluating(), ExitStack() as stack:
            stack.enter_context(self._stand_ins.passing_through(model.blocks))
            stack.enter_context(editing_input(model.unembedding, lambda _: rows[:, None]))
            logits = model.run(torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device))
        return logits[:, -1].float().unflatten(0, final.shape[:2])

    # ---- parts of runs ----

    @contextmanager
    def _starting_at(self, layer: int, resid: Float[Tensor, "row pos d_model"]) -> Iterator[None]:
        """Blocks before `layer` pass their input through; block `layer` gets `resid`."""
        blocks = self._model.blocks
        with self._stand_ins.passing_through(blocks[:layer]), editing_input(blocks[layer], lambda _: resid):
            yield

    def _rows_to_patch(self, trace: Trace, layer: int, new: Tensor, rows: str) -> Tensor:
        new = new.to(self._model.device)
        return torch.where(self._row_mask(trace.batch, rows)[:, None, :, None], new, trace.patterns[layer])

    def _row_mask(self, batch: PromptBatch, rows: str) -> Bool[Tensor, "prompt dest"]:
        if rows == "all":
            return torch.ones_like(batch.tokens, dtype=torch.bool)
        return torch.arange(batch.tokens.shape[1], device=batch.tokens.device) == batch.positions[:, None]

    def _per_batch(self, trace: Trace, batch_size: int | None) -> int:
        """How many heads or sets run together, so that at most `batch_size` sequences do."""
        n, length = trace.batch.tokens.shape
        if batch_size is None:
            batch_size = _BATCH_ELEMENTS // (length * 4 * self._model.d_model)
        elif batch_size < 1:
            raise ArgumentError(f"batch_size={batch_size}: give a positive number of sequences")
        return max(1, batch_size // n)

    # ---- what the model is tried on when the engine is made ----

    def _try_out(self) -> None:
        """One plain pass, one with the last head of each layer edited in a row of its own, and three by shortcut."""
        model, tokens = self._model, self._model.sample_tokens(1, 7)
        end = torch.tensor([tokens.shape[1] - 1], device=model.device)
        with ExitStack() as stack:
            stack.enter_context(without_running(model.unembedding))
            modules = (*model.blocks, *model.attention, *(mlp for mlp in model.mlp if mlp is not None))
            stack.enter_context(self._stand_ins.noting_outputs(modules))
            trace = self.trace(PromptBatch(tokens, end, tokens[:, 0], ((),)))
        new = [_random_pattern(pattern) for pattern in trace.patterns]
        masks = torch.zeros(model.n_layers + 1, model.n_layers, model.n_heads, dtype=torch.bool, device=model.device)
        for layer in range(model.n_layers):
            masks[layer + 1, layer, -1] = True  # row 0 stays as it is
        z: dict[int, Tensor] = {}
        attention: dict[int, Tensor] = {}
        mlp_in: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for layer in range(model.n_layers):
                stack.enter_context(model.on_z(layer, keep_in(z, layer)))
                stack.enter_context(editing_output(model.attention[layer], keep_in(attention, layer)))
                if model.mlp[layer] is not None:
                    stack.enter_context(editing_input(model.mlp[layer], keep_in(mlp_in, layer)))
            plain = self._run_sets(0, trace, new, masks, "all")
        self.conclusive = self._every_layer_matters(plain, z, trace)
        self._parallel = [
            self.conclusive
            and layer in mlp_in
            and _moved(attention[layer][layer + 1], attention[layer][0], 1e-4, trace.resid_pre[layer][0])
            and not _moved(mlp_in[layer][layer + 1], mlp_in[layer][0])
            for layer in range(model.n_layers)
        ]
        mlp_out = [out if parallel else None for out, parallel in zip(trace.mlp_out, self._parallel, strict=True)]
        self.uses_shortcuts = self.conclusive and self._shortcuts_hold(replace(trace, mlp_out=mlp_out), new, plain)

    def _every_layer_matters(self, plain: Float[Tensor, "set 1 d_model"], z: dict[int, Tensor], trace: Trace) -> bool:
        """Whether the edit of each layer moves the output; False where only weights of zero keep it from doing so."""
        still = [layer for layer in range(self._model.n_layers) if not _moved(plain[layer + 1], plain[0])]
        if dead := [layer for layer in still if not self._weights_drop_it(layer, z.get(layer), trace)]:
            raise InterventionHasNoEffect(
                f"editing the attention patterns of layer {listed(dead)} does not change the output of this "
                f"{self._model.kind}: it uses its patterns before the hook is called, so patching it would do "
                f"nothing{self._model.way_out}"
            )
        return not still

    def _weights_drop_it(self, layer: int, z: Tensor | None, trace: Trace) -> bool:
        """Whether the edit does reach the heads' outputs, and only an output projection of (almost) zeros hides it."""
        if z is None or not _moved(z[layer + 1], z[0]):
            return False
        edited, plain = (self._model.project(layer, z[row]) for row in (layer + 1, 0))
        return not _moved(edited, plain, like=trace.resid_pre[layer][0] + plain)

    def _shortcuts_hold(self, trace: Trace, new: Sequence[Tensor], plain: Float[Tensor, "set 1 d_model"]) -> bool:
        """Whether the shortcut in the first, middle and last layer gives what the plain run gives."""
        model = self._model
        layers = sorted({0, model.n_layers // 2, self._last})
        self.uses_shortcuts = True
        try:
            short = torch.cat([self._run_heads(trace, layer, [model.n_heads - 1], new[layer]) for layer in layers])
        except RuntimeError:  # shapes that do not go together: a block that does something of its own
            return False
        expected = plain[[layer + 1 for layer in layers]]
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-4}.get(model.dtype, 5e-2)
        return torch.allclose(short, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def _moved(edited: Tensor, plain: Tensor, share: float | None = None, like: Tensor | None = None) -> bool:
    """Whether two rows of one batch differ by more than a share of the largest number in `like` (default: `plain`).

    The default share is the rounding that depends on a row's place in the batch.
    """
    if share is None:
        share = {torch.float64: 1e-12, torch.float32: 1e-6}.get(plain.dtype, 0.0)
    return not bool(((edited - plain).abs() <= share * (plain if like is None else like).abs().max()).all())


def _random_pattern(like: Float[Tensor, "prompt head dest src"]) -> Float[Tensor, "prompt head dest src"]:
    """Causal patterns unlike any model's own."""
    generator = torch_generator(0, "random pattern")
    pattern = torch.rand(like.shape, generator=generator).to(like).tril()
    return pattern / pattern.sum(-1, keepdim=True)


def in_batches(run: Callable[[int, int], _Part], n: int, size: int) -> list[_Part]:
    """`run(start, stop)` over slices of at most `size`, which is halved when memory runs out."""
    done: list[_Part] = []
    start = 0
    while start < n:
        stop = min(start + size, n)
        try:
            done.append(run(start, stop))
        except (RuntimeError, MemoryError) as error:
            if stop - start == 1 or not _is_out_of_memory(error):
                raise
            size = (stop - start) // 2
            continue
        start = stop
    return done


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
