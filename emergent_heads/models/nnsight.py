"""nnsight models: `NNsight(model)`, `TransformersModel` and `LanguageModel` (nnsight 0.8), run here or remotely.

Run here, the module that nnsight wraps is used as it is, by the way of its own kind (`huggingface.py` as a rule): the
same numbers at the same speed, from files, notebooks, `python -c` and stdin alike, where nnsight's own traces need
source that can be read back. nnsight's tree of envoys is neither used nor changed, so traces made before, between and
after work as ever.

Run remotely (`hooked(model, remote=True)`), everything goes through nnsight: one session per question, in which
`nnsight_remote.py` runs beside the weights. Nothing is loaded here.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from emergent_heads.errors import ArgumentError, InterventionHasNoEffect, NotFiniteError, UnsupportedModelError
from emergent_heads.models import nnsight_remote
from emergent_heads.models.engine import Head, Trace
from emergent_heads.models.hooked import EMBEDDING, Answers, HookedModel, OnPattern, hooked, listed
from emergent_heads.randomness import torch_generator
from emergent_heads.tasks.task import PromptBatch

Patterns = Sequence[Float[Tensor, "prompt head dest src"]]
"""Per layer."""

# Children of the attention, in the order in which they are looked for.
_VALUES = ("v_proj", "value", "query_key_value", "qkv_proj", "c_attn", "Wqkv", "W_pack", "qkv")
_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")

# Numbers in the widest activation and in the logits of what runs together at the server.
_BATCH_ELEMENTS = 2**24
_LOGIT_ELEMENTS = 2**27


def comes_from_nnsight(model: Any) -> bool:
    """Whether this is an nnsight model; nnsight is not imported to find out."""
    nnsight = sys.modules.get("nnsight")
    return nnsight is not None and isinstance(model, nnsight.Envoy)


def wrapped(model: Any, tokenizer: Any = None) -> HookedModel:
    """The interface for the module that an nnsight model wraps, run here.

    A model whose weights are not loaded yet loads them, as its first trace would.

    Raises:
        UnsupportedModelError: the wrapped module is of no supported kind, or interventions were stored by
            `model.edit`, which only nnsight's own traces would apply.
    """
    _check_no_edits(model)
    if not getattr(model, "dispatched", True):
        model.dispatch()
    found = hooked(model._module, tokenizer if tokenizer is not None else getattr(model, "tokenizer", None))
    found.kind = f"nnsight {type(model).__name__} of a {found.kind}"
    return found


class RemoteModel(HookedModel):
    """An nnsight model that a server runs: rankings, recovery curves, patterns, logits and the residual stream.

    A ranking crosses the network once for each of its two models, as two checkpoints are served as two models: one
    request fetches post's answers and patterns; one carries these patterns to pre and brings back the answers of every
    head patched alone, pre's own answers, and the patterns that the table's scores are of. That request also checks
    that editing each layer moves the output, and that the heads' outputs there are what patterns and values give.

    Patterns are there with eager attention only, which every request asks for; the model's setting is its own again
    afterwards.

    Args:
        model: a `TransformersModel` or `LanguageModel`; weights are neither loaded nor used here.
        tokenizer: instead of the model's own.
        remote: what nnsight takes: True for the configured server, a server's address, or "local" for nnsight's dry
            run of the remote way.

    Raises:
        ArgumentError: this nnsight model cannot be run remotely.
        UnsupportedModelError: no attention with modules of known names, or stored edits.
    """

    is_remote = True

    def __init__(self, model: Any, tokenizer: Any = None, *, remote: bool | str = True) -> None:
        super().__init__()
        name = getattr(model, "repo_id", None)
        if not hasattr(model, "to_model_key") or not (name or remote == "local"):
            raise ArgumentError(
                f"a server cannot know this nnsight {type(model).__name__}: make an nnsight.TransformersModel from "
                "the name of a repository to run it remotely"
            )
        _check_no_edits(model)
        module = model._module
        config = module.config.get_text_config()
        revision = f" at {model.revision}" if model.revision else ""
        self.kind = f"remote {name or type(module).__name__}{revision}"
        self._module, self._envoy, self._remote = module, model, remote
        self.n_layers = config.num_hidden_layers
        self.n_heads = getattr(config, "num_attention_heads", 0)
        self.d_model = config.hidden_size
        self.vocabulary_size = int(module.get_input_embeddings().weight.shape[0])
        self.context = getattr(config, "max_position_embeddings", None)
        self.tokenizer = tokenizer if tokenizer is not None else model.tokenizer
        self._places = _places(module, self.n_layers)
        self._dtype: torch.dtype = module.dtype
        self._patches = RemotePatches(self)

    # ---- reading ----

    @property
    def device(self) -> torch.device:
        """Where tensors are on this side."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """What the server computed in when it was last asked; before that, what the checkpoint names."""
        return self._dtype

    def logits(
        self, tokens: Int[Tensor, "prompt pos"], positions: Int[Tensor, " prompt"]
    ) -> Float[Tensor, "prompt vocabulary"]:
        """Next-token logits at one position of each prompt, float32."""
        self._check_tokens(tokens)
        return self.ask(nnsight_remote.logits_at, {"tokens": tokens.cpu(), "positions": positions.cpu()})

    def answers(self, batch: PromptBatch) -> Answers:
        """Log-probability of each prompt's target and whether it is the top token."""
        self._check_tokens(batch.tokens)
        return self.answers_in(self.ask(nnsight_remote.answers, _tensors(batch)))

    def answers_and_patterns(self, batch: PromptBatch) -> tuple[Answers, list[Float[Tensor, "prompt head dest src"]]]:
        """`answers` and every layer's patterns, by one request."""
        self._check_tokens(batch.tokens)
        found = self.ask(nnsight_remote.answers_and_patterns, _tensors(batch), range(self.n_layers))
        return self.answers_in(found), self.patterns_in(found, batch.tokens.shape[1])

    def patterns(
        self, tokens: Int[Tensor, "prompt pos"], layers: Sequence[int] | None = None
    ) -> dict[int, Float[Tensor, "prompt head dest src"]]:
        """Post-softmax attention patterns of these layers (default: all)."""
        self._check_tokens(tokens)
        wanted = sorted(self._checked_layers(range(self.n_layers) if layers is None else layers))
        first = tokens.new_zeros(len(tokens))
        batch = PromptBatch(tokens, first, first, ((),) * len(tokens))
        found = self.ask(nnsight_remote.answers_and_patterns, _tensors(batch), wanted)
        return dict(zip(wanted, self.patterns_in(found, tokens.shape[1]), strict=True))

    def residual(
        self,
        tokens: Int[Tensor, "prompt pos"],
        layers: Sequence[int],
        positions: Int[Tensor, "prompt kept"] | None = None,
    ) -> Float[Tensor, "layer prompt kept d_model"]:
        """Residual stream after each of these blocks, float32; -1 is what enters the first."""
        self._check_tokens(tokens)
        self._checked_layers([layer for layer in layers if layer != EMBEDDING])
        kept = None if positions is None else positions.cpu()
        return self.ask(nnsight_remote.residual_stream, {"tokens": tokens.cpu(), "positions": kept}, list(layers))

    # ---- editing ----

    @property
    def engine(self) -> Any:
        """Answers with patterns replaced, one request a call."""
        return self._patches

    def foresee_patches(self, patterns: Patterns, rows: str, batch_size: int | None) -> None:
        """Has every head patched alone by the request of the next trace, so that patching them needs none."""
        self._patches.foresee(patterns, rows, batch_size)

    def check_pattern_edits(self) -> None:
        """Checks once, by one request, that a changed pattern changes the output, layer by layer."""
        if not self._patches.conclusive:
            tokens = self.sample_tokens(1, 7)
            end = torch.tensor([tokens.shape[1] - 1])
            self._patches.trace(PromptBatch(tokens, end, tokens[:, 0], ((),)))

    def logits_with_patterns(
        self,
        tokens: Int[Tensor, "prompt pos"],
        positions: Int[Tensor, " prompt"],
        patterns: Mapping[tuple[int, int], Float[Tensor, "prompt dest src"]],
    ) -> Float[Tensor, "prompt vocabulary"]:
        raise self._not_remotely("logits with patterns replaced (answers with them are: `.engine`)")

    def pattern_gradients(self, batch: PromptBatch) -> list[Float[Tensor, "prompt head dest src"]]:
        raise self._not_remotely('gradients, and so `method="screen"`')

    @property
    def residual_engine(self) -> Any:
        raise self._not_remotely("edits of the residual stream")

    def check_residual_edits(self) -> None:
        raise self._not_remotely("edits of the residual stream")

    def run(self, tokens: Int[Tensor, "row pos"]) -> Float[Tensor, "row kept vocabulary"]:
        raise self._not_remotely("runs under hooks")

    def on_pattern(self, callback: OnPattern) -> AbstractContextManager[None]:
        raise self._not_remotely("hooks")

    def on_z(self, layer: int, callback: Callable[[Tensor], Tensor | None]) -> AbstractContextManager[None]:
        raise self._not_remotely("hooks")

    def project(self, layer: int, z: Float[Tensor, "*rows z"]) -> Float[Tensor, "*rows d_model"]:
        raise self._not_remotely("the output projection's weights")

    def _not_remotely(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{what} cannot be had of a {self.kind}: run remotely, a model offers rankings, recovery curves, "
            "answers, logits, patterns and reading of the residual stream; for the rest, run it here (`remote=False`)"
        )

    # ---- requests ----

    def ask(self, serve: Callable[..., Any], *args: Any) -> Any:
        """What a function of `nnsight_remote.py` returns at the server: one request."""
        import nnsight

        nnsight.register(nnsight_remote)  # its functions travel as source: the package is not installed there
        model, places, found = self._envoy, self._places, None
        with _asking_for_eager_attention(self._module), model.session(remote=self._remote):
            found = nnsight.save(serve(model, places, *args))
        return found

    def answers_in(self, found: Mapping[str, Any], which: str = "") -> Answers:
        """The answers in what came back.

        Raises:
            NotFiniteError: they are NaN or infinite.
        """
        answers = Answers(found[f"{which}log_p"], found[f"{which}matched"])
        if not torch.isfinite(answers.log_p).all():
            raise NotFiniteError(f"the logits of this {self.kind} are NaN or infinite")
        return answers

    def patterns_in(self, found: Mapping[str, Any], length: int) -> list[Float[Tensor, "prompt head dest src"]]:
        """The patterns in what came back.

        Raises:
            InterventionHasNoEffect: there are none.
        """
        self._dtype = getattr(torch, found["dtype"])
        if missing := [layer for layer, pattern in enumerate(found["patterns"]) if pattern is None]:
            raise InterventionHasNoEffect(
                f"the attention of layer {listed(missing)} of this {self.kind} returns no patterns, though eager "
                "attention was asked for: the server runs it in another way, so it cannot be patched"
            )
        return [nnsight_remote.unpacked(pattern, length) for pattern in found["patterns"]]


@dataclass(frozen=True, eq=False)
class RemoteTrace(Trace):
    """What is fetched of a remote pass: answers and patterns, nothing that a run could start from.

    Attributes:
        found: the answers.
        foreseen: answers `[layer * head, prompt]` with each head patched alone, if they came with it.
        foreseen_patterns, foreseen_rows: what they were patched with.
    """

    found: Answers
    foreseen: Answers | None = None
    foreseen_patterns: Patterns = ()
    foreseen_rows: str = ""

    @property
    def answers(self) -> Answers:
        return self.found

    def select(self, rows: list[int], batch: PromptBatch) -> "RemoteTrace":
        """The trace of these rows only, which are `batch`."""
        foreseen = self.foreseen
        return replace(
            self,
            batch=batch,
            patterns=[pattern[rows] for pattern in self.patterns],
            found=Answers(self.found.log_p[rows], self.found.matched[rows]),
            foreseen=None if foreseen is None else Answers(foreseen.log_p[:, rows], foreseen.matched[:, rows]),
            foreseen_patterns=[pattern[rows] for pattern in self.foreseen_patterns],
        )

    def has_foreseen(self, patterns: Patterns, rows: str) -> bool:
        """Whether the answers with each head patched by these patterns are here."""
        if self.foreseen is None or rows != self.foreseen_rows:
            return False
        return all(torch.equal(*pair) for pair in zip(patterns, self.foreseen_patterns, strict=True))


class RemotePatches:
    """What `engine.PatchEngine` does, for a model that is run remotely: each call is one request, or none.

    Attributes:
        uses_shortcuts: False; every head is a whole pass, at the server.
        conclusive: whether an edit of every layer was seen to move the output.
    """

    uses_shortcuts = False

    def __init__(self, model: RemoteModel) -> None:
        self._model = model
        self.conclusive = False
        self._foreseen: tuple[Patterns, str, int | None] | None = None
        self._kept: RemoteTrace | None = None

    def foresee(self, patterns: Patterns, rows: str, batch_size: int | None) -> None:
        """What the request of the next trace has each head patched with, so that `patch_heads` needs none."""
        self._foreseen, self._kept = (patterns, rows, batch_size), None

    def trace(self, batch: PromptBatch) -> RemoteTrace:
        """Answers and patterns of the model as it is: by one request, or from the last one."""
        batch = batch.to("cpu")
        if self._kept is not None and (rows := _rows_of(batch, self._kept.batch)) is not None:
            return self._kept.select(rows, batch)
        heads = self._model.n_layers * self._model.n_heads
        patterns, rows, batch_size = self._foreseen or ((), "all", None)
        masks = torch.eye(heads, dtype=torch.bool) if self._foreseen else torch.zeros(0, heads, dtype=torch.bool)
        self._foreseen = None
        found = self._request(batch, patterns, masks, rows, batch_size)
        own = nnsight_remote.unpacked
        kept = [own(pattern, batch.tokens.shape[1]) for pattern in found["patterns"]]
        foreseen = self._model.answers_in(found, "patched_") if len(masks) else None
        nothing = torch.zeros(len(batch), 0)
        answers = self._model.answers_in(found)
        self._kept = RemoteTrace(batch, nothing, [], [], [], kept, [], answers, foreseen, patterns, rows)
        return self._kept

    def patch_heads(
        self,
        trace: RemoteTrace,
        patterns: Patterns,
        heads: Sequence[Head],
        *,
        rows: str = "all",
        batch_size: int | None = None,
    ) -> Answers:
        """The answers with one head's pattern replaced, for each of these heads: `[head, prompt]`."""
        places = [layer * self._model.n_heads + head for layer, head in heads]
        if trace.foreseen is not None and trace.has_foreseen(patterns, rows):
            return Answers(trace.foreseen.log_p[places], trace.foreseen.matched[places])
        every = torch.eye(self._model.n_layers * self._model.n_heads, dtype=torch.bool)
        return self._answers(trace, patterns, every[places], rows, batch_size)

    def patch_sets(
        self,
        trace: RemoteTrace,
        patterns: Patterns,
        masks: Bool[Tensor, "set layer head"],
        *,
        rows: str = "all",
        batch_size: int | None = None,
    ) -> Answers:
        """The answers with all heads of a set patched together, for each set: `[set, prompt]`."""
        return self._answers(trace, patterns, masks.flatten(1), rows, batch_size)

    def _answers(
        self,
        trace: RemoteTrace,
        patterns: Patterns,
        masks: Bool[Tensor, "set head"],
        rows: str,
        batch_size: int | None,
    ) -> Answers:
        return self._model.answers_in(self._request(trace.batch, patterns, masks, rows, batch_size), "patched_")

    def _request(
        self,
        batch: PromptBatch,
        patterns: Patterns,
        masks: Bool[Tensor, "set head"],
        rows: str,
        batch_size: int | None,
    ) -> dict[str, Any]:
        model, length = self._model, batch.tokens.shape[1]
        model._check_tokens(batch.tokens)
        job = {
            "patterns": [nnsight_remote.packed(pattern) for pattern in patterns],
            "masks": masks.unflatten(-1, (model.n_layers, model.n_heads)),
            "last_row_only": rows == "last",
            "trial": None if self.conclusive else _unlike_any(length),
            "rows": _rows_together(model, length) if batch_size is None else batch_size,
        }
        found = model.ask(nnsight_remote.patched, _tensors(batch), model.n_heads, job)
        model.answers_in(found)
        model.patterns_in(found, length)
        self._check(found)
        return found

    def _check(self, found: Mapping[str, Any]) -> None:
        """Refuses what is no patching."""
        kind, tolerance = self._model.kind, {torch.float64: 1e-6, torch.float32: 1e-4}.get(self._model.dtype, 5e-2)
        if off := [layer for layer, error in enumerate(found["deviation"]) if not error <= tolerance]:
            raise UnsupportedModelError(
                f"the heads' outputs of layer {listed(off)} of this {kind} are not what its patterns and values give, "
                "as far as its modules can be read, so its patterns cannot be replaced remotely"
            )
        if "moved" not in found:
            return
        effects = list(zip(found["moved"], found["idle"], strict=True))
        if dead := [layer for layer, (moved, idle) in enumerate(effects) if not moved and not idle]:
            raise InterventionHasNoEffect(
                f"editing the attention patterns of layer {listed(dead)} does not change the output of this {kind}: "
                "the server drops the edit, so patching it would do nothing"
            )
        self.conclusive = all(moved for moved, _ in effects)


def _check_no_edits(model: Any) -> None:
    if edited := sorted({envoy.path for envoy in [model, *model.modules()] if envoy._edits}):
        raise UnsupportedModelError(
            f"this nnsight model has stored edits (at {', '.join(edited)}), which apply in its own traces only, so a "
            "ranking would be of the model without them: call clear_edits(), or build the change into the module"
        )


def _places(model: Any, n_layers: int) -> dict[str, Any]:
    """Paths of the modules that are read and edited, per layer but for the unembedding."""
    name_of = {module: name for name, module in model.named_modules()}
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == n_layers)
    blocks = list(next(lists, []))
    parts = [found for block in blocks if (found := next(filter(None, map(_parts, block.modules())), None))]
    if not blocks or len(parts) < len(blocks):
        raise UnsupportedModelError(
            f"attention is found in {len(parts)} of {n_layers} layers of this {type(model).__name__}: it is looked "
            f"for by a child named one of {', '.join(_VALUES)} beside one of {', '.join(_PROJECTIONS)}; such a model "
            "cannot be run remotely"
        )
    attention, values, projections = ([name_of[part] for part in of] for of in zip(*parts, strict=True))
    return {
        "blocks": [name_of[block] for block in blocks],
        "attention": attention,
        "values": values,
        "projections": projections,
        "unembedding": name_of[model.get_output_embeddings()],
    }


def _parts(module: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module] | None:
    """An attention, the child that makes its values and its output projection, if this is one."""
    children = dict(module.named_children())
    values = next((children[name] for name in _VALUES if name in children), None)
    projection = next((children[name] for name in _PROJECTIONS if name in children), None)
    return None if values is None or projection is None else (module, values, projection)


@contextmanager
def _asking_for_eager_attention(module: Any) -> Iterator[None]:
    """nnsight tells the server to run attention the way the model here is set to."""
    own = module.config._attn_implementation or "eager"
    if own == "eager":
        yield
        return
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(own)


def _tensors(batch: PromptBatch) -> dict[str, Tensor]:
    return {name: getattr(batch, name).cpu() for name in ("tokens", "positions", "targets")}


def _rows_of(batch: PromptBatch, known: PromptBatch) -> list[int] | None:
    """Where the prompts of `batch` are in `known`; None where one of them is not."""
    place = {row: at for at, row in enumerate(_keys(known))}
    rows = [place.get(row, -1) for row in _keys(batch)]
    return None if -1 in rows else rows


def _keys(batch: PromptBatch) -> list[tuple[int, ...]]:
    columns = (batch.tokens, batch.positions[:, None], batch.targets[:, None])
    return [tuple(row) for row in torch.cat(columns, dim=1).tolist()]


def _rows_together(model: RemoteModel, length: int) -> int:
    """How many sequences the server runs at once, where the caller does not say."""
    return max(1, min(_BATCH_ELEMENTS // (length * 4 * model.d_model), _LOGIT_ELEMENTS // model.vocabulary_size))


def _unlike_any(length: int) -> Float[Tensor, "dest src"]:
    """A causal pattern unlike any model's own."""
    pattern = torch.rand(length, length, generator=torch_generator(0, "random pattern")).tril()
    return pattern / pattern.sum(-1, keepdim=True)
