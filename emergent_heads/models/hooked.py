"""What the analyses need of a model.

Any hooked model offers the same few things: logits at given positions, the attention patterns of its heads, logits
with some heads' patterns replaced, the residual stream, and logits with an edit of it. `hooked(model)` gives this
interface for the kinds of model in use; the kinds differ only in where their modules are and how a pattern is reached
(`huggingface.py`, `transformerlens.py`, `hooked_small.py`; `nnsight.py` unwraps).

Patched runs of many heads go through `engine.py`, which `model.engine` makes and keeps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from emergent_heads import notebook
from emergent_heads.errors import (
    ArgumentError,
    InterventionHasNoEffect,
    NotFiniteError,
    UnsupportedModelError,
)
from emergent_heads.models.hooks import at_positions, editing_input, editing_output, keep_in, without_running
from emergent_heads.randomness import torch_generator
from emergent_heads.tasks.task import PromptBatch

if TYPE_CHECKING:
    from emergent_heads.models.engine import PatchEngine
    from emergent_heads.models.residual_engine import ResidualEngine

OnPattern = Callable[[int, Tensor, Tensor], Tensor | None]
"""Called at each layer with (layer, pattern `[row, head, dest, src]`, values `[row, head, src, d_head]`); a tensor it
returns takes the pattern's place."""

KeysAndValues = tuple[Float[Tensor, "row pos head d_head"], Float[Tensor, "row pos head d_head"]]
"""Of one layer's attention; keys turned, where positions are rotary."""

EMBEDDING = -1
"""The layer before the first block, where the residual stream holds the embeddings."""


class Answers(NamedTuple):
    """How well the target is predicted at each prompt's answer position, on the CPU."""

    log_p: Float[Tensor, "... prompt"]
    matched: Bool[Tensor, "... prompt"]


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
    blocks: Sequence[Any]
    attention: Sequence[Any]
    mlp: Sequence[Any]  # None where a block has no module of its own for it
    unembedding: nn.Module

    way_out = ""
    """End of a message that refuses edits of patterns: what to use instead."""

    is_remote = False
    """Whether it is run elsewhere, by requests: then whole batches are asked for at once, and no hooks can be set."""

    def __init__(self) -> None:
        self._residual_checked = False
        self._engine: "PatchEngine | None" = None
        self._residual_engine: "ResidualEngine | None" = None

    # ---- what a kind must supply ----

    @abstractmethod
    def run(self, tokens: Int[Tensor, "row pos"]) -> Float[Tensor, "row kept vocabulary"]:
        """Logits of a plain forward pass (of the positions that the unembedding lets through)."""

    @abstractmethod
    def on_pattern(self, callback: OnPattern) -> AbstractContextManager[None]:
        """Calls `callback` at every layer's attention."""

    @abstractmethod
    def on_z(self, layer: int, callback: Callable[[Tensor], Tensor | None]) -> AbstractContextManager[None]:
        """Calls `callback` with the heads' outputs `[row, pos, head * d_head]` as they enter the output projection."""

    @abstractmethod
    def project(self, layer: int, z: Float[Tensor, "*rows z"]) -> Float[Tensor, "*rows d_model"]:
        """The attention's output projection, bias included."""

    # ---- what a kind can supply, so that later positions can be run alone ----

    @property
    def continues(self) -> bool:
        """Whether blocks can be run on later positions alone, from kept keys and values of those before."""
        return False

    def keeping_keys_and_values(self, found: dict[int, KeysAndValues]) -> AbstractContextManager[None]:
        """Puts the keys and values of all positions into `found`, by layer, of a pass made inside."""
        raise NotImplementedError

    def continued(
        self, layer: int, resid: Float[Tensor, "row pos d_model"], keys_and_values: KeysAndValues, first: int = 0
    ) -> Float[Tensor, "row kept d_model"]:
        """Residual stream after this block at later positions, from the one before it at these positions.

        Args:
            layer: of the block.
            resid: at the last positions of the sequences.
            keys_and_values: of all positions; those of the later ones are written.
            first: the first of the later positions that is wanted.
        """
        raise NotImplementedError

    def unembedded(self, resid: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocabulary"]:
        """Logits, from the residual stream after the last block."""
        raise NotImplementedError

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

    def _repr_html_(self) -> str:
        where = {"context": self.context, "device": self.device, "dtype": str(self.dtype).removeprefix("torch.")}
        tokenizer = None if self.tokenizer is None else type(self.tokenizer).__name__
        return notebook.page(notebook.card(self.kind, {**self.shape, **where, "tokenizer": tokenizer}))

    def logits(
        self, tokens: Int[Tensor, "prompt pos"], positions: Int[Tensor, " prompt"]
    ) -> Float[Tensor, "prompt vocabulary"]:
        """Next-token logits at one position of each prompt, float32. Only that position is unembedded."""
        with self.evaluating():
            return self.logits_at(tokens.to(self.device), positions.to(self.device))

    def answers(self, batch: PromptBatch) -> Answers:
        """Log-probability of each prompt's target and whether it is the top token."""
        batch = batch.to(self.device)
        return read_answers(self.logits(batch.tokens, batch.positions), batch.targets)

    def answers_and_patterns(self, batch: PromptBatch) -> tuple[Answers, list[Float[Tensor, "prompt head dest src"]]]:
        """`answers` and every layer's patterns, by one forward pass."""
        batch = batch.to(self.device)
        logits, patterns = self._logits_and_patterns(batch.tokens, batch.positions, range(self.n_layers))
        return read_answers(logits, batch.targets), [patterns[layer] for layer in range(self.n_layers)]

    def patterns(
        self, tokens: Int[Tensor, "prompt pos"], layers: Sequence[int] | None = None
    ) -> dict[int, Float[Tensor, "prompt head dest src"]]:
        """Post-softmax attention patterns of these layers (default: all)."""
        tokens = tokens.to(self.device)
        wanted = range(self.n_layers) if layers is None else self._checked_layers(layers)
        with without_running(self.unembedding):
            return self._logits_and_patterns(tokens, tokens.new_zeros(len(tokens)), wanted)[1]

    def residual(
        self,
        tokens: Int[Tensor, "prompt pos"],
        layers: Sequence[int],
        positions: Int[Tensor, "prompt kept"] | None = None,
    ) -> Float[Tensor, "layer prompt kept d_model"]:
        """Residual stream after each of these blocks (`resid_post`), at given positions of each prompt or at all.

        Layer -1 (`EMBEDDING`) is what enters the first block: token and position embeddings.
        """
        tokens = tokens.to(self.device)
        self._check_tokens(tokens)
        found: dict[int, Tensor] = {}
        with self.evaluating(), without_running(self.unembedding), ExitStack() as stack:
            for layer in self._checked_layers([layer for layer in layers if layer != EMBEDDING]):
                stack.enter_context(editing_output(self.blocks[layer], keep_in(found, layer)))
            if EMBEDDING in layers:
                stack.enter_context(editing_input(self.blocks[0], keep_in(found, EMBEDDING)))
            self.run(tokens)
        resid = torch.stack([found[layer] for layer in layers])
        if positions is None:
            return resid
        prompts = torch.arange(len(tokens), device=self.device)[:, None]
        return resid[:, prompts, positions.to(self.device)]

    # ---- editing ----

    @property
    def engine(self) -> "PatchEngine":
        """Runs with many heads patched, one by one or in sets.

        Raises:
            InterventionHasNoEffect: editing this model's patterns does not change its output.
        """
        if self._engine is None or not self._engine.conclusive:
            from emergent_heads.models.engine import PatchEngine

            self._engine = PatchEngine(self)
        return self._engine

    @property
    def residual_engine(self) -> "ResidualEngine":
        """Runs with edits of the residual stream, many at once.

        Raises:
            InterventionHasNoEffect: editing the residual stream does not change this model's output.
        """
        if self._residual_engine is None:
            from emergent_heads.models.residual_engine import ResidualEngine

            self._residual_engine = ResidualEngine(self)
        return self._residual_engine

    def foresee_patches(  # noqa: B027 - only a remote model has anything to do
        self, patterns: Sequence[Float[Tensor, "prompt head dest src"]], rows: str, batch_size: int | None
    ) -> None:
        """Says that after the next trace every head will be patched alone: a remote model does it on the way."""

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

        with self.evaluating(), self.on_pattern(replace):
            return self.logits_at(tokens.to(self.device), positions.to(self.device))

    def pattern_gradients(self, batch: PromptBatch) -> list[Float[Tensor, "prompt head dest src"]]:
        """Gradient of each prompt's p(target) with respect to every head's pattern, by layer: one backward pass."""
        self.check_pattern_edits()
        batch = batch.to(self.device)
        offsets: list[Tensor] = []

        def add_offset(_layer: int, pattern: Tensor, _values: Tensor) -> Tensor:
            offsets.append(torch.zeros_like(pattern, requires_grad=True))
            return pattern + offsets[-1]

        with self.evaluating(), torch.enable_grad(), self.on_pattern(add_offset):
            logits = self.logits_at(batch.tokens, batch.positions)
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
            InterventionHasNoEffect: it does not, at some layer, or there is no pattern to be seen.
        """
        _ = self.engine

    def check_residual_edits(self) -> None:
        """Checks once that an edit of the residual stream changes the output, layer by layer.

        Raises:
            InterventionHasNoEffect: it does not, at some layer.
        """
        if self._residual_checked:
            return
        tokens = self.sample_tokens(1, 6)
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

    # ---- for the engine and the kinds ----

    @contextmanager
    def evaluating(self) -> Iterator[None]:
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

    def logits_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits at one position per row, by a forward pass that unembeds nothing else."""
        self._check_tokens(tokens)
        with editing_input(self.unembedding, lambda resid: at_positions(resid, positions)):
            return self.run(tokens)[:, -1].float()

    def _logits_and_patterns(
        self, tokens: Tensor, positions: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        found: dict[int, Tensor] = {}

        def keep(layer: int, pattern: Tensor, _values: Tensor) -> None:
            if layer in layers:
                found[layer] = pattern

        with self.evaluating(), self.on_pattern(keep):
            logits = self.logits_at(tokens, positions)
        self.check_all_seen(found, layers)
        return logits, {layer: found[layer] for layer in sorted(found)}

    def _logits_with_residual(self, tokens: Tensor, positions: Tensor, edits: Mapping[int, Callable]) -> Tensor:
        with self.evaluating(), ExitStack() as stack:
            for layer in self._checked_layers(list(edits)):
                stack.enter_context(editing_output(self.blocks[layer], edits[layer]))
            return self.logits_at(tokens, positions)

    def check_all_seen(self, found: Container[int], layers: Sequence[int]) -> None:
        """Raises InterventionHasNoEffect where the pattern of a layer was not seen."""
        if missing := [layer for layer in layers if layer not in found]:
            raise InterventionHasNoEffect(
                f"no attention pattern can be read or edited at layer {listed(missing)} of this {self.kind}: its "
                "attention does not go through the interface that the library hooks, so patching it would do nothing"
                f"{self.way_out}"
            )

    def sample_tokens(self, n: int, length: int) -> Int[Tensor, "row pos"]:
        """A few random tokens, always the same, for checks of what a model does with them; none beyond its context."""
        length = min(length, self.context or length)
        generator = torch_generator(0, "sample tokens")
        return torch.randint(self.vocabulary_size, (n, length), generator=generator).to(self.device)

    def _check_tokens(self, tokens: Tensor) -> None:
        if self.context is not None and tokens.shape[1] > self.context:
            raise ArgumentError(f"sequences of {tokens.shape[1]} tokens; this model takes at most {self.context}")

    def _checked_layers(self, layers: Sequence[int]) -> Sequence[int]:
        for layer in layers:
            if not 0 <= layer < self.n_layers:
                raise ArgumentError(f"layer {layer}: this model has layers 0 to {self.n_layers - 1}")
        return layers


def hooked(model: Any, tokenizer: Any = None, *, remote: bool | str = False) -> HookedModel:
    """The one interface for a model of any supported kind.

    Args:
        model: a `HookedTransformer`, a `TransformerBridge`, a Hugging Face causal language model, a `SmallModel`, an
            nnsight model around one of them, a checkpoint of a series, or something this function returned before.
        tokenizer: a transformers tokenizer, where the model carries none.
        remote: for an nnsight model only, what nnsight takes: True has its server run everything, by one request for
            each of the two models of a ranking, and loads no weights here; see `models.nnsight.RemoteModel` for what
            a model offers then.

    Raises:
        ArgumentError: `remote` for something else than an nnsight model that a server knows.
        UnsupportedModelError: none of these.
    """
    from emergent_heads.models import nnsight

    if nnsight.comes_from_nnsight(model):  # before attributes are asked for: it passes them on to its module
        return nnsight.RemoteModel(model, tokenizer, remote=remote) if remote else nnsight.wrapped(model, tokenizer)
    if remote:
        raise ArgumentError(
            f"remote={remote!r}: only an nnsight model can be run remotely, not a {type(model).__name__}"
        )
    if isinstance(model, HookedModel):
        return model
    if callable(getattr(model, "hooked", None)):
        return model.hooked()
    from emergent_heads.models import hooked_small, huggingface, transformerlens

    for kind in (*transformerlens.KINDS, huggingface.HuggingFaceModel, hooked_small.HookedSmallModel):
        if kind.accepts(model):
            return kind(model, tokenizer)
    raise UnsupportedModelError(
        f"cannot use a {type(model).__module__}.{type(model).__qualname__} as a model: give a HookedTransformer, a "
        "TransformerBridge, a Hugging Face causal language model, a SmallModel, an nnsight model of one of them or a "
        "checkpoint of a series"
    )


def check_intervention(model: Any) -> None:
    """Checks that editing attention patterns and the residual stream changes the model's output, at every layer.

    Run by itself before a model's first patching or ablation. Raises:
        InterventionHasNoEffect: an edit is dropped without a word, as some adapters do.
    """
    model = hooked(model)
    model.check_pattern_edits()
    model.check_residual_edits()


def read_answers(logits: Float[Tensor, "prompt vocabulary"], targets: Int[Tensor, " prompt"]) -> Answers:
    """Reads logits at the answers' positions.

    Raises:
        NotFiniteError: the logits are NaN or infinite.
    """
    # Few passes over the logits: with a large vocabulary and a small model they are most of the work.
    target_logits = logits.gather(-1, targets[:, None])[:, 0]
    log_p = target_logits - logits.logsumexp(-1)
    if not torch.isfinite(log_p).all():
        raise NotFiniteError("the model's logits are NaN or infinite: its weights are damaged, or its dtype overflows")
    matched = target_logits == logits.amax(-1)
    matched[matched.clone()] = logits[matched].argmax(-1) == targets[matched]  # of equal logits, the first counts
    return Answers(log_p.cpu(), matched.cpu())


def listed(numbers: Sequence[int]) -> str:
    """Numbers in a message."""
    return ", ".join(str(number) for number in numbers)
