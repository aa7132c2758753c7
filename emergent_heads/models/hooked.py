"""What the analyses need of a model, and the engine that patches attention patterns.

Any hooked model offers the same few things: logits at given positions, the attention patterns of its heads, logits
with some heads' patterns replaced, the residual stream, and logits with an edit of it. `hooked(model)` gives this
interface for the kinds of model in use; the kinds differ only in where their modules are and how a pattern is reached
(`huggingface.py`, `transformerlens.py`).

The engine obtains the same numbers as one full forward pass per head, with less work:

* work before the patched layer is done once: a run starts at the patched layer from the cached residual stream;
* a head's new pattern changes only what that head writes, `(P_post - P_pre) @ V @ W_O`, so queries, keys and the other
  heads of that layer are not run again, nor the MLP of that layer where attention and MLP are parallel (GPT-NeoX);
* in the last block, only the answer's position goes through the output projection and the MLP, and only that position
  is unembedded;
* several heads are run as one batch.

These shortcuts are checked once per model against the plain run with the edited pattern, and are not used where they
do not reproduce it (attention with gates or normalised outputs, say).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from emergent_heads.errors import (
    ArgumentError,
    InterventionHasNoEffect,
    NotFiniteError,
    UnsupportedModelError,
)
from emergent_heads.randomness import torch_generator
from emergent_heads.tasks.task import PromptBatch

OnPattern = Callable[[int, Tensor, Tensor], Tensor | None]
"""Called at each layer with (layer, pattern `[row, head, dest, src]`, values `[row, head, src, d_head]`); a tensor it
returns takes the pattern's place."""

# Widest activations of a batch, in numbers: large enough for full matrix speed, small enough for any machine.
_BATCH_ELEMENTS = 2**24


class Answers(NamedTuple):
    """How well the target is predicted at each prompt's answer position, on the CPU."""

    log_p: Float[Tensor, "... prompt"]
    matched: Bool[Tensor, "... prompt"]


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
        return _read(self.logits, self.batch.targets)


class HookedModel(ABC):
    """The interface that every analysis uses; make one with `hooked(model)`.

    Attributes:
        kind: the kind of model, in words.
        n_layers, n_heads, d_model, vocabulary_size: its shape.
        context: longest sequence it takes, None without a limit.
        tokenizer: a transformers tokenizer, or None.
    """

    kind: str
    n_layers: int
    n_heads: int
    d_model: int
    vocabulary_size: int
    context: int | None
    tokenizer: Any

    # Where the kind keeps its modules, one per layer.
    _module: nn.Module
    _blocks: Sequence[Any]
    _attention: Sequence[Any]
    _mlp: Sequence[Any]  # None where a block has no module of its own for it
    _unembedding: nn.Module

    def __init__(self) -> None:
        self._pattern_checked = False
        self._residual_checked = False
        self._parallel: list[bool] | None = None
        self._shortcuts: bool | None = None
        self._n_outputs: dict[nn.Module, int] = {}

    # ---- what a kind must supply ----

    @abstractmethod
    def _forward(self, tokens: Int[Tensor, "row pos"]) -> Float[Tensor, "row kept vocabulary"]:
        """Logits of a plain forward pass (of the positions that the unembedding lets through)."""

    @abstractmethod
    def _on_pattern(self, callback: OnPattern) -> AbstractContextManager[None]:
        """Calls `callback` at every layer's attention."""

    @abstractmethod
    def _on_z(self, layer: int, callback: Callable[[Tensor], Tensor | None]) -> AbstractContextManager[None]:
        """Calls `callback` with the heads' outputs `[row, pos, head * d_head]` as they enter the output projection."""

    @abstractmethod
    def _project(self, layer: int, z: Float[Tensor, "*rows z"]) -> Float[Tensor, "*rows d_model"]:
        """The attention's output projection, bias included."""

    # ---- reading ----

    @property
    def device(self) -> torch.device:
        return next(self._module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self._module.parameters()).dtype

    @property
    def shape(self) -> dict[str, int]:
        """What must agree between two models whose patterns are exchanged."""
        return {name: getattr(self, name) for name in ("n_layers", "n_heads", "d_model", "vocabulary_size")}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in self.shape.items())
        return f"{type(self).__name__}({self.kind}: {sizes})"

    def logits(
        self, tokens: Int[Tensor, "prompt pos"], positions: Int[Tensor, " prompt"]
    ) -> Float[Tensor, "prompt vocabulary"]:
        """Next-token logits at one position of each prompt, float32. Only that position is unembedded."""
        with self._evaluating():
            return self._logits_at(tokens.to(self.device), positions.to(self.device))

    def answers(self, batch: PromptBatch) -> Answers:
        """Log-probability of each prompt's target and whether it is the top token."""
        batch = batch.to(self.device)
        return _read(self.logits(batch.tokens, batch.positions), batch.targets)

    def answers_and_patterns(self, batch: PromptBatch) -> tuple[Answers, list[Float[Tensor, "prompt head dest src"]]]:
        """`answers` and every layer's patterns, by one forward pass."""
        batch = batch.to(self.device)
        logits, patterns = self._logits_and_patterns(batch.tokens, batch.positions, range(self.n_layers))
        return _read(logits, batch.targets), [patterns[layer] for layer in range(self.n_layers)]

    def patterns(
        self, tokens: Int[Tensor, "prompt pos"], layers: Sequence[int] | None = None
    ) -> dict[int, Float[Tensor, "prompt head dest src"]]:
        """Post-softmax attention patterns of these layers (default: all)."""
        tokens = tokens.to(self.device)
        wanted = range(self.n_layers) if layers is None else self._checked_layers(layers)
        return self._logits_and_patterns(tokens, tokens.new_zeros(len(tokens)), wanted)[1]

    def residual(
        self,
        tokens: Int[Tensor, "prompt pos"],
        layers: Sequence[int],
        positions: Int[Tensor, "prompt kept"] | None = None,
    ) -> Float[Tensor, "layer prompt kept d_model"]:
        """Residual stream after each of these blocks (`resid_post`), at given positions of each prompt or at all."""
        tokens = tokens.to(self.device)
        found: dict[int, Tensor] = {}
        with self._evaluating(), ExitStack() as stack:
            for layer in self._checked_layers(layers):
                stack.enter_context(editing_output(self._blocks[layer], keep_in(found, layer)))
            self._logits_at(tokens, tokens.new_zeros(len(tokens)))
        resid = torch.stack([found[layer] for layer in layers])
        if positions is None:
            return resid
        prompts = torch.arange(len(tokens), device=self.device)[:, None]
        return resid[:, prompts, positions.to(self.device)]

    # ---- editing ----

    def trace(self, batch: PromptBatch) -> Trace:
        """One forward pass that keeps what patched runs start from.

        Raises:
            InterventionHasNoEffect: some layer shows no attention pattern.
        """
        self.check_pattern_edits()
        self._shortcuts_hold()  # tells which layers' MLP outputs are worth keeping
        return self._trace(batch.to(self.device))

    def patch_heads(
        self,
        trace: Trace,
        layer: int,
        heads: Sequence[int],
        patterns: Float[Tensor, "prompt head dest src"],
        *,
        rows: str = "all",
        batch_size: int | None = None,
    ) -> Answers:
        """The answers with one head's pattern replaced, for each of these heads of a layer: `[head, prompt]`.

        Args:
            trace: pass of this model over the prompts.
            layer: the layer of the heads.
            heads: heads of that layer, each patched alone.
            patterns: the layer's patterns to take the new ones from (all heads).
            rows: "all" replaces whole patterns, "last" only the row of each prompt's answer position.
            batch_size: largest number of sequences run together; halved by itself when memory runs out.
        """
        new = patterns.to(self.device)
        if rows == "last":
            last = torch.arange(new.shape[2], device=self.device) == trace.batch.positions[:, None]
            new = torch.where(last[:, None, :, None], new, trace.patterns[layer])
        if not self._shortcuts_hold():
            masks = torch.zeros(len(heads), self.n_layers, self.n_heads, dtype=torch.bool)
            masks[range(len(heads)), layer, list(heads)] = True
            by_layer = list(trace.patterns)
            by_layer[layer] = new
            return self.patch_sets(trace, by_layer, masks, batch_size=batch_size)

        def run(start: int, stop: int) -> Answers:
            return self._patch_heads_by_shortcut(trace, layer, list(heads[start:stop]), new)

        return _in_batches(run, len(heads), self._per_batch(trace, batch_size))

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
        first = [int(layers[0]) if len(layers := mask.any(-1).nonzero()[:, 0]) else self.n_layers for mask in masks]
        order = sorted(range(len(masks)), key=first.__getitem__, reverse=True)
        masks = masks.to(self.device)

        def run(start: int, stop: int) -> Answers:
            chosen = order[start:stop]
            layer = min(first[index] for index in chosen)
            return self._patch_sets_from(layer, trace, patterns, masks[chosen], rows)

        answers = _in_batches(run, len(masks), self._per_batch(trace, batch_size))
        back = torch.empty(len(order), dtype=torch.long)
        back[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
        return Answers(answers.log_p[back], answers.matched[back])

    def logits_with_patterns(
        self,
        tokens: Int[Tensor, "prompt pos"],
        positions: Int[Tensor, " prompt"],
        patterns: Mapping[tuple[int, int], Float[Tensor, "prompt dest src"]],
    ) -> Float[Tensor, "prompt vocabulary"]:
        """Logits with the patterns of these `(layer, head)` replaced, by one plain forward pass without shortcuts."""
        self.check_pattern_edits()

        def replace(layer: int, pattern: Tensor, _values: Tensor) -> Tensor | None:
            heads = [head for at, head in patterns if at == layer]
            if not heads:
                return None
            pattern = pattern.clone()
            for head in heads:
                pattern[:, head] = patterns[layer, head].to(pattern)
            return pattern

        with self._evaluating(), self._on_pattern(replace):
            return self._logits_at(tokens.to(self.device), positions.to(self.device))

    def pattern_gradients(self, batch: PromptBatch) -> list[Float[Tensor, "prompt head dest src"]]:
        """Gradient of each prompt's p(target) with respect to every head's pattern, by layer: one backward pass."""
        self.check_pattern_edits()
        batch = batch.to(self.device)
        offsets: list[Tensor] = []

        def add_offset(_layer: int, pattern: Tensor, _values: Tensor) -> Tensor:
            offsets.append(torch.zeros_like(pattern, requires_grad=True))
            return pattern + offsets[-1]

        with self._evaluating(), torch.enable_grad(), self._on_pattern(add_offset):
            logits = self._logits_at(batch.tokens, batch.positions)
            p = logits.softmax(-1).gather(-1, batch.targets[:, None]).sum()
            return list(torch.autograd.grad(p, offsets))

    def logits_with_residual(
        self,
        tokens: Int[Tensor, "prompt pos"],
        positions: Int[Tensor, " prompt"],
        edits: Mapping[int, Callable[[Float[Tensor, "prompt pos d_model"]], Float[Tensor, "prompt pos d_model"]]],
    ) -> Float[Tensor, "prompt vocabulary"]:
        """Logits with the residual stream after each of these blocks (`resid_post`) passed through an edit."""
        self.check_residual_edits()
        return self._logits_with_residual(tokens.to(self.device), positions.to(self.device), edits)

    # ---- checks ----

    def check_pattern_edits(self) -> None:
        """Checks once that a changed pattern changes the output, layer by layer.

        Raises:
            InterventionHasNoEffect: it does not, at some layer.
        """
        if self._pattern_checked:
            return
        # One row per layer, whose patterns are zeroed at that layer only, beside an untouched row.
        tokens = self._sample_tokens(1, 6).expand(self.n_layers + 1, -1).contiguous()
        z: dict[int, Tensor] = {}
        seen: set[int] = set()

        def zero_own_layer(layer: int, pattern: Tensor, _values: Tensor) -> Tensor:
            seen.add(layer)
            keep = torch.arange(len(pattern), device=pattern.device) != layer + 1
            return pattern * keep[:, None, None, None].to(pattern)

        with self._evaluating(), ExitStack() as stack:
            stack.enter_context(self._on_pattern(zero_own_layer))
            for layer in range(self.n_layers):
                stack.enter_context(self._on_z(layer, keep_in(z, layer)))
            logits = self._logits_at(tokens, torch.full((len(tokens),), tokens.shape[1] - 1, device=self.device))
            if missing := sorted(set(range(self.n_layers)) - seen):
                raise InterventionHasNoEffect(self._no_pattern_message(missing))
            dead = [
                layer
                for layer in range(self.n_layers)
                if torch.equal(logits[layer + 1], logits[0]) and not self._weights_drop_it(layer, z.get(layer))
            ]
        if dead:
            raise InterventionHasNoEffect(
                f"setting the attention patterns of layer {_listed(dead)} to zero does not change the output of this "
                f"{self.kind}: it uses its patterns before the hook is called, so patching it would do nothing. "
                "Use the plain Hugging Face model, or another transformer-lens version"
            )
        self._pattern_checked = True

    def check_residual_edits(self) -> None:
        """Checks once that an edit of the residual stream changes the output, layer by layer.

        Raises:
            InterventionHasNoEffect: it does not, at some layer.
        """
        if self._residual_checked:
            return
        tokens = self._sample_tokens(1, 6)
        last = torch.full((1,), tokens.shape[1] - 1, device=self.device)
        plain = self.logits(tokens, last)
        generator = torch_generator(0, "residual check")
        bump = torch.randn(self.d_model, generator=generator).to(self.device, self.dtype)
        for layer in range(self.n_layers):
            if torch.equal(self._logits_with_residual(tokens, last, {layer: lambda resid: resid + bump}), plain):
                raise InterventionHasNoEffect(
                    f"adding to the residual stream after layer {layer} does not change the output of this {self.kind}"
                )
        self._residual_checked = True

    # ---- inside ----

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """No gradients, no dropout; the model's own mode comes back afterwards."""
        training = self._module.training
        if training:
            self._module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            if training:
                self._module.train()

    def _logits_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits at one position per row, by a forward pass that unembeds nothing else."""
        self._check_tokens(tokens)
        with editing_input(self._unembedding, lambda resid: _at(resid, positions)):
            return self._forward(tokens)[:, -1].float()

    def _logits_and_patterns(
        self, tokens: Tensor, positions: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        found: dict[int, Tensor] = {}

        def keep(layer: int, pattern: Tensor, _values: Tensor) -> None:
            if layer in layers:
                found[layer] = pattern

        with self._evaluating(), self._on_pattern(keep):
            logits = self._logits_at(tokens, positions)
        if missing := sorted(set(layers) - set(found)):
            raise InterventionHasNoEffect(self._no_pattern_message(missing))
        return logits, {layer: found[layer] for layer in sorted(found)}

    def _logits_with_residual(self, tokens: Tensor, positions: Tensor, edits: Mapping[int, Callable]) -> Tensor:
        with self._evaluating(), ExitStack() as stack:
            for layer in self._checked_layers(list(edits)):
                stack.enter_context(editing_output(self._blocks[layer], edits[layer]))
            return self._logits_at(tokens, positions)

    def _trace(self, batch: PromptBatch) -> Trace:
        resid: dict[int, Tensor] = {}
        attention: dict[int, Tensor] = {}
        mlp: dict[int, Tensor] = {}
        patterns: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}

        def keep_attention(layer: int, pattern: Tensor, value: Tensor) -> None:
            patterns[layer], values[layer] = pattern, value

        with self._evaluating(), ExitStack() as stack:
            stack.enter_context(self._on_pattern(keep_attention))
            for layer in range(self.n_layers):
                stack.enter_context(editing_input(self._blocks[layer], keep_in(resid, layer)))
                stack.enter_context(self._noting_outputs(self._blocks[layer]))
                stack.enter_context(editing_output(self._attention[layer], keep_in(attention, layer)))
                stack.enter_context(self._noting_outputs(self._attention[layer]))
                if (module := self._mlp[layer]) is not None:
                    stack.enter_context(editing_output(module, keep_in(mlp, layer)))
                    stack.enter_context(self._noting_outputs(module))
            logits = self._logits_at(batch.tokens, batch.positions)
        every = range(self.n_layers)
        return Trace(
            batch,
            logits,
            [resid[layer] for layer in every],
            [attention[layer] for layer in every],
            [mlp.get(layer) if self._parallel and self._parallel[layer] else None for layer in every],
            [patterns[layer] for layer in every],
            [values[layer] for layer in every],
        )

    def _patch_heads_by_shortcut(self, trace: Trace, layer: int, heads: list[int], new: Tensor) -> Answers:
        n, batch = len(heads), trace.batch
        change = (new[:, heads] - trace.patterns[layer][:, heads]) @ trace.values[layer][:, heads]
        z = change.new_zeros(n, len(batch), new.shape[2], self.n_heads, change.shape[-1])
        for index, head in enumerate(heads):
            z[index, :, :, head] = change[:, index]
        written = self._project(layer, z.flatten(-2)) - self._project(layer, z.new_zeros(z[0, 0, 0].numel()))
        attention_out = (trace.attention_out[layer] + written).flatten(0, 1)
        with self._evaluating(), ExitStack() as stack:
            stack.enter_context(self._starting_at(layer, trace.resid_pre[layer].repeat(n, 1, 1)))
            stack.enter_context(self._returning(self._attention[layer], attention_out))
            mlp, mlp_out = self._mlp[layer], trace.mlp_out[layer]
            if mlp is not None and mlp_out is not None:
                stack.enter_context(self._returning(mlp, mlp_out.repeat(n, 1, 1)))
            positions = batch.positions.repeat(n)
            stack.enter_context(self._last_block_at(positions, skip_mlp=mlp_out is not None and layer == self._last))
            logits = self._logits_at(batch.tokens.repeat(n, 1), positions)
        return _read(logits.unflatten(0, (n, len(batch))), batch.targets)

    def _patch_sets_from(
        self,
        layer: int,
        trace: Trace,
        patterns: Sequence[Tensor],
        masks: Bool[Tensor, "set layer head"],
        rows: str,
    ) -> Answers:
        n, batch = len(masks), trace.batch
        if layer == self.n_layers:  # empty sets: nothing is patched
            answers = trace.answers
            return Answers(answers.log_p.expand(n, -1), answers.matched.expand(n, -1))
        dest = torch.arange(batch.tokens.shape[1], device=self.device)
        row_mask = (dest == batch.positions[:, None]) if rows == "last" else torch.ones_like(batch.tokens).bool()

        def replace(at: int, pattern: Tensor, _values: Tensor) -> Tensor | None:
            if not masks[:, at].any():
                return None
            replaced = masks[:, None, at, :, None, None] & row_mask[None, :, None, :, None]
            own = pattern.unflatten(0, (n, len(batch)))
            return torch.where(replaced, patterns[at].to(pattern), own).flatten(0, 1)

        positions = batch.positions.repeat(n)
        with self._evaluating(), ExitStack() as stack:
            stack.enter_context(self._starting_at(layer, trace.resid_pre[layer].repeat(n, 1, 1)))
            stack.enter_context(self._on_pattern(replace))
            if self._shortcuts:
                stack.enter_context(self._last_block_at(positions))
            logits = self._logits_at(batch.tokens.repeat(n, 1), positions)
        return _read(logits.unflatten(0, (n, len(batch))), batch.targets)

    @property
    def _last(self) -> int:
        return self.n_layers - 1

    @contextmanager
    def _noting_outputs(self, module: nn.Module) -> Iterator[None]:
        """Notes how many values the module returns (0: a bare tensor), so that a stand-in returns as many."""

        def hook(_module: nn.Module, _args: tuple, output: Any) -> None:
            self._n_outputs[module] = len(output) if isinstance(output, tuple) else 0

        handle = module.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def _as_output(self, module: nn.Module, tensor: Tensor) -> Any:
        n = self._n_outputs[module]
        return (tensor, *[None] * (n - 1)) if n else tensor

    def _passing_through(self, block: nn.Module) -> Callable[..., Any]:
        """A forward that returns its input: the block stays in its place, so that no layer is renumbered."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._as_output(block, args[0] if args else kwargs["hidden_states"])

        return forward

    def _returning(self, module: nn.Module, output: Tensor) -> AbstractContextManager[None]:
        """The module is not run and returns `output`."""
        result = self._as_output(module, output)
        return _replaced_forward(module, lambda *args, **kwargs: result)

    @contextmanager
    def _starting_at(self, layer: int, resid: Tensor) -> Iterator[None]:
        """Blocks before `layer` pass their input through; block `layer` gets `resid`."""
        with ExitStack() as stack:
            for block in self._blocks[:layer]:
                stack.enter_context(_replaced_forward(block, self._passing_through(block)))
            stack.enter_context(editing_input(self._blocks[layer], lambda _: resid))
            yield

    @contextmanager
    def _last_block_at(self, positions: Tensor, skip_mlp: bool = False) -> Iterator[None]:
        """In the last block, only the given position of each row goes through the output projection and the MLP.

        Their outputs `[row, 1, d_model]` are added to the residual stream at every position: right at the given one,
        meaningless at the others, which nobody reads.
        """
        with ExitStack() as stack:
            stack.enter_context(self._on_z(self._last, lambda z: _at(z, positions)))
            if (mlp := self._mlp[self._last]) is not None and not skip_mlp:
                stack.enter_context(editing_input(mlp, lambda resid: _at(resid, positions)))
            yield

    def _shortcuts_hold(self) -> bool:
        """Checks once, on a few tokens, that the shortcuts give what the plain run with the edited pattern gives."""
        if self._shortcuts is None:
            self._parallel = self._find_parallel_layers()
            tokens = self._sample_tokens(2, 7)
            last = torch.full((2,), tokens.shape[1] - 1, device=self.device)
            trace = self._trace(PromptBatch(tokens, last, tokens[:, 0], ((), ())))
            try:
                self._shortcuts = all(
                    self._shortcut_equals_plain_run(trace, layer) for layer in {0, self.n_layers // 2, self._last}
                )
            except RuntimeError:  # shapes that do not go together: a block that does something of its own
                self._shortcuts = False
        return self._shortcuts

    def _shortcut_equals_plain_run(self, trace: Trace, layer: int) -> bool:
        batch, head = trace.batch, self.n_heads - 1
        uniform = torch.ones_like(trace.patterns[layer]).tril()
        uniform = uniform / uniform.sum(-1, keepdim=True)
        short = self._patch_heads_by_shortcut(trace, layer, [head], uniform)
        plain = self.logits_with_patterns(batch.tokens, batch.positions, {(layer, head): uniform[:, head]})
        tolerance = 1e-4 if self.dtype == torch.float32 else 5e-2
        return torch.allclose(short.log_p[0], _read(plain, batch.targets).log_p, atol=tolerance, rtol=tolerance)

    def _find_parallel_layers(self) -> list[bool]:
        """Per layer, whether the MLP's input is the same when the attention writes nothing."""
        tokens = self._sample_tokens(1, 5)
        resid: dict[int, Tensor] = {}
        mlp_in: list[dict[int, Tensor]] = [{}, {}]
        for silenced in (0, 1):
            with self._evaluating(), ExitStack() as stack:
                for layer in range(self.n_layers):
                    if (mlp := self._mlp[layer]) is None:
                        continue
                    stack.enter_context(editing_input(mlp, keep_in(mlp_in[silenced], layer)))
                    if silenced:  # same block input, no attention
                        stack.enter_context(editing_input(self._blocks[layer], lambda _, kept=resid[layer]: kept))
                        stack.enter_context(editing_output(self._attention[layer], torch.zeros_like))
                    else:
                        stack.enter_context(editing_input(self._blocks[layer], keep_in(resid, layer)))
                self._logits_at(tokens, tokens.new_zeros(1))
        plain, silent = mlp_in
        return [layer in plain and torch.equal(plain[layer], silent[layer]) for layer in range(self.n_layers)]

    def _weights_drop_it(self, layer: int, z: Tensor | None) -> bool:
        """Whether the edit does reach the heads' outputs, and only an output projection of zeros hides it."""
        if z is None or torch.equal(z[layer + 1], z[0]):
            return False
        return torch.equal(self._project(layer, z[layer + 1]), self._project(layer, z[0]))

    def _no_pattern_message(self, layers: Sequence[int]) -> str:
        return (
            f"no attention pattern can be read or edited at layer {_listed(layers)} of this {self.kind}: "
            "its attention does not go through the interface that the library hooks, so patching it would do nothing"
        )

    def _sample_tokens(self, n: int, length: int) -> Tensor:
        generator = torch_generator(0, "sample tokens")
        return torch.randint(self.vocabulary_size, (n, length), generator=generator).to(self.device)

    def _check_tokens(self, tokens: Tensor) -> None:
        if self.context is not None and tokens.shape[1] > self.context:
            raise ArgumentError(f"sequences of {tokens.shape[1]} tokens; this model takes at most {self.context}")

    def _checked_layers(self, layers: Sequence[int]) -> Sequence[int]:
        for layer in layers:
            if not 0 <= layer < self.n_layers:
                raise ArgumentError(f"layer {layer}: this model has layers 0 to {self._last}")
        return layers

    def _per_batch(self, trace: Trace, batch_size: int | None) -> int:
        """How many heads or sets run together, so that at most `batch_size` sequences do."""
        n, length = trace.batch.tokens.shape
        if batch_size is None:
            batch_size = _BATCH_ELEMENTS // (length * 4 * self.d_model)
        elif batch_size < 1:
            raise ArgumentError(f"batch_size={batch_size}: give a positive number of sequences")
        return max(1, batch_size // n)


def hooked(model: Any, tokenizer: Any = None) -> HookedModel:
    """The one interface for a model of any supported kind.

    Args:
        model: a `HookedTransformer`, a `TransformerBridge`, a Hugging Face causal language model, a checkpoint of a
            series, or something this function returned before.
        tokenizer: a transformers tokenizer, where the model carries none.

    Raises:
        UnsupportedModelError: none of these.
    """
    if isinstance(model, HookedModel):
        return model
    if callable(getattr(model, "hooked", None)):
        return model.hooked()
    from emergent_heads.models import huggingface, transformerlens

    for kind in (*transformerlens.KINDS, huggingface.HuggingFaceModel):
        if kind.accepts(model):
            return kind(model, tokenizer)
    raise UnsupportedModelError(
        f"cannot use a {type(model).__module__}.{type(model).__qualname__} as a model: give a HookedTransformer, a "
        "TransformerBridge, a Hugging Face causal language model or a checkpoint of a series"
    )


def check_intervention(model: Any) -> None:
    """Checks that editing attention patterns and the residual stream changes the model's output, at every layer.

    Run by itself before a model's first patching or ablation. Raises:
        InterventionHasNoEffect: an edit is dropped without a word, as some adapters do.
    """
    model = hooked(model)
    model.check_pattern_edits()
    model.check_residual_edits()


# ---- hooks, all of them gone when the block ends ----


@contextmanager
def editing_input(module: nn.Module, edit: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Passes the module's first tensor argument through `edit` (None leaves it)."""

    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if args:
            new = edit(args[0])
            return None if new is None else ((new, *args[1:]), kwargs)
        name = next(name for name in ("hidden_states", "x", "input") if name in kwargs)
        new = edit(kwargs[name])
        return None if new is None else (args, {**kwargs, name: new})

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def editing_output(module: nn.Module, edit: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Passes the module's output (the first one, of several) through `edit` (None leaves it)."""

    def hook(_module: nn.Module, _args: tuple, output: Any) -> Any:
        new = edit(output[0] if isinstance(output, tuple) else output)
        return None if new is None else _like(output, new)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    # Through the instance's dictionary: a bridge hands other attributes on to the module it wraps.
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


def _like(output: Any, first: Tensor) -> Any:
    return (first, *output[1:]) if isinstance(output, tuple) else first


def keep_in(found: dict[int, Tensor], layer: int) -> Callable[[Tensor], None]:
    def keep(value: Tensor) -> None:
        found[layer] = value

    return keep


def _at(values: Float[Tensor, "row pos width"], positions: Int[Tensor, " row"]) -> Float[Tensor, "row 1 width"]:
    """One position of each row; a tensor that holds only one position is that position."""
    if values.shape[1] == 1:
        return values
    return values[torch.arange(len(values), device=values.device), positions.to(values.device)][:, None]


def _read(logits: Float[Tensor, "*rows vocabulary"], targets: Int[Tensor, " prompt"]) -> Answers:
    # Few passes over the logits: with a large vocabulary and a small model they are most of the work.
    index = targets.expand(logits.shape[:-1])
    log_p = logits.gather(-1, index[..., None])[..., 0] - logits.logsumexp(-1)
    if not torch.isfinite(log_p).all():
        raise NotFiniteError("the model's logits are NaN or infinite: its weights are damaged, or its dtype overflows")
    return Answers(log_p.cpu(), (logits.argmax(-1) == index).cpu())


def _in_batches(run: Callable[[int, int], Answers], n: int, size: int) -> Answers:
    """Joins `run(start, stop)` over slices of at most `size`, halving it when memory runs out."""
    done: list[Answers] = []
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
    return Answers(torch.cat([answers.log_p for answers in done]), torch.cat([answers.matched for answers in done]))


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
