"""Small models with every hook in place, for training on tasks whose right attention pattern is known.

A `SmallModel` is a plain pre-norm language model: token embedding, optional positions, blocks of a token mixer and an
MLP, a final norm and an unembedding. Its hook points carry TransformerLens' names, so `run_with_cache`,
`run_with_hooks` and `ActivationCache` work as on any TransformerLens model, with version 3.x and 4.x.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.hook_points import HookPoint

from emergent_heads.errors import ArgumentError, nearest
from emergent_heads.models.hooks import editing_output, keep_in
from emergent_heads.models.layers import MLP, GatedMLP, Norm
from emergent_heads.models.mixers import Mixer, check_mixer_options, mixer_class, mixer_options
from emergent_heads.models.mixers.attention import Attention
from emergent_heads.randomness import torch_generator
from emergent_heads.tasks.task import SequenceTask

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer
    from transformers import GPTNeoXForCausalLM, LlamaForCausalLM

_Class = TypeVar("_Class", bound=type)


def refusing_unknown_keys(cls: _Class) -> _Class:
    """Class decorator for configs: a keyword that is no field is refused with the nearest names."""
    init = cls.__init__

    @wraps(init)
    def checked(self: object, *args: Any, **kwargs: Any) -> None:
        known = [each.name for each in fields(cls) if each.init]
        for key in kwargs:
            if key not in known:
                raise ArgumentError(f"{cls.__name__} has no setting {key!r}; {nearest(key, known)}")
        init(self, *args, **kwargs)

    cls.__init__ = checked
    return cls


@refusing_unknown_keys
@dataclass(frozen=True)
class SmallModelConfig:
    """Shape of a small model.

    Attributes:
        n_layers: blocks.
        d_model: width of the residual stream.
        n_heads: heads of each mixer that has heads.
        d_head: width of a head; None for `d_model / n_heads`.
        d_mlp: hidden units of each MLP; None for `4 * d_model`, with SwiGLU `8/3 * d_model` rounded up to even.
        mixer: one mixer for all layers, or one per layer: "attention", "linear", "mlp_mixer", "mamba", "mamba2",
            "gated_delta_net", "rwkv4", "rwkv7", "xlstm", "linear_rnn", or one added by `register_mixer`.
        mixer_options: options of the mixers, such as `{"hidden_units": 8}` for "mlp_mixer"; each mixer gets those it
            takes.
        norm: "layer" or "rms".
        positions: "learned" (added to the embedding), "rotary" (attention only) or "none".
        mlp: "gelu", "swiglu" or "none".
        biases: whether linear maps and layer norms have biases.
        initialisation: of linear maps. "pytorch" draws weights and biases uniformly within `1 / sqrt(fan_in)`; "gpt2"
            draws weights with standard deviation 0.02, those that write to the residual stream divided by
            `sqrt(2 * n_layers)`, and zero biases.
        embedding_std: standard deviation of token and position embeddings; None for 1.0 with "pytorch" and 0.02 with
            "gpt2". On the linear map it decides how long the plateau is.
        vocabulary_size, context: of the task; `for_task` fills them in.
        unembed_bias: whether the unembedding has a bias; None for what `biases` says.

    Raises:
        ArgumentError: a setting that is unknown or makes no sense.
    """

    n_layers: int
    d_model: int
    n_heads: int = 4
    d_head: int | None = None
    d_mlp: int | None = None
    mixer: str | tuple[str, ...] = "attention"
    mixer_options: Mapping[str, Any] = field(default_factory=dict)
    norm: Literal["layer", "rms"] = "layer"
    positions: Literal["learned", "rotary", "none"] = "learned"
    mlp: Literal["gelu", "swiglu", "none"] = "gelu"
    biases: bool = True
    initialisation: Literal["pytorch", "gpt2"] = "pytorch"
    embedding_std: float | None = None
    vocabulary_size: int | None = None
    context: int | None = None
    unembed_bias: bool | None = None

    def __post_init__(self) -> None:
        for name in ("n_layers", "d_model", "n_heads", "d_head", "d_mlp", "vocabulary_size", "context"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ArgumentError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ArgumentError(f"{name} must be {' or '.join(allowed)}, not {getattr(self, name)!r}")
        if self.d_head is None and self.d_model % self.n_heads:
            raise ArgumentError(
                f"d_model {self.d_model} does not divide into {self.n_heads} heads; change one of them, or give d_head"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ArgumentError(f"rotary positions need an even d_head, not {self.head_size}")
        if not isinstance(self.mixer, str):
            object.__setattr__(self, "mixer", tuple(self.mixer))  # a list, as it comes from a manifest
            if len(self.mixer) != self.n_layers:
                raise ArgumentError(f"{len(self.mixer)} mixers for {self.n_layers} layers; give one, or one per layer")
        object.__setattr__(self, "mixer_options", dict(self.mixer_options))
        check_mixer_options(self.mixers, self.mixer_options)

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.d_head or self.d_model // self.n_heads

    @property
    def mlp_size(self) -> int:
        """Hidden units of each MLP."""
        if self.d_mlp is not None:
            return self.d_mlp
        return 2 * -(-(8 * self.d_model // 3) // 2) if self.mlp == "swiglu" else 4 * self.d_model

    @property
    def unembedding_bias(self) -> bool:
        """Whether the unembedding has a bias."""
        return self.biases if self.unembed_bias is None else self.unembed_bias

    @property
    def mixers(self) -> tuple[str, ...]:
        """Name of each layer's mixer."""
        return (self.mixer,) * self.n_layers if isinstance(self.mixer, str) else self.mixer

    @classmethod
    def transformer_pp(cls, n_layers: int, d_model: int, n_heads: int = 4, **settings: Any) -> "SmallModelConfig":
        """The Llama-style block of the quiet-features paper (arXiv 2505.03997).

        RMSNorm, rotary positions, SwiGLU, no biases, PyTorch's default initialisation with embeddings N(0, 1).
        """
        llama: dict[str, Any] = {"norm": "rms", "positions": "rotary", "mlp": "swiglu", "biases": False}
        return cls(n_layers, d_model, n_heads, **{**llama, **settings})

    @classmethod
    def gpt_neox(cls, n_layers: int, d_model: int, n_heads: int = 4, **settings: Any) -> "SmallModelConfig":
        """A GPT-NeoX, as transformers knows it, so that `run.export_huggingface` can take its runs elsewhere.

        Layer norm and biases, rotary positions over the whole head, GELU, no bias on the unembedding, attention and
        MLP one after the other (`use_parallel_residual=False`). Weights are drawn as PyTorch does with embeddings
        N(0, 1): with 2 layers of width 64 on repeated text, repetition came 50 steps earlier so than with embeddings
        of standard deviation 0.02; larger models may want `initialisation="gpt2"`.
        """
        neox: dict[str, Any] = {"positions": "rotary", "unembed_bias": False}
        return cls(n_layers, d_model, n_heads, **{**neox, **settings})

    @classmethod
    def paper(cls, task: SequenceTask, **settings: Any) -> "SmallModelConfig":
        """The configuration of the sparse-attention paper (arXiv 2606.25010) for a task, as far as it is known.

        Width 128, 8 heads, MLP 512; 1 layer for the linear map, 4 for cellular automata. The paper's text was not at
        hand: learned positions, pre-norm, GELU and the initialisation are choices of third-party reproductions.
        """
        layers = {"LinearMap": 1, "CellularAutomaton": 4}
        if task.name not in layers:
            raise ArgumentError(f"the paper has no model for {task.name}; it has some for {' and '.join(layers)}")
        return cls(**{"n_layers": layers[task.name], "d_model": 128, "n_heads": 8, **settings}).for_task(task)

    def for_task(self, task: SequenceTask) -> "SmallModelConfig":
        """This configuration with the task's vocabulary and length where they are left open.

        Raises:
            ArgumentError: the task has more token ids, or longer sequences, than this configuration takes.
        """
        if self.vocabulary_size is not None and self.vocabulary_size < task.vocabulary_size:
            raise ArgumentError(
                f"{task.name} has {task.vocabulary_size} token ids and the model {self.vocabulary_size}; "
                "leave vocabulary_size out"
            )
        if self.context is not None and self.context < task.length - 1:
            raise ArgumentError(
                f"{task.name} has sequences of {task.length} tokens and the model takes at most {self.context}; "
                "leave context out"
            )
        return replace(
            self,
            vocabulary_size=self.vocabulary_size or task.vocabulary_size,
            context=self.context or task.length,
        )

    def check_attention(self, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None) -> None:
        """Checks that these layers (default: all) are attention, with these heads, so that they can take a bias.

        Raises:
            ArgumentError: one is not, or there is no such layer or head.
        """
        for layer in range(self.n_layers) if layers is None else layers:
            if not 0 <= layer < self.n_layers:
                raise ArgumentError(
                    f"an attention bias on layer {layer}: this model has layers 0 to {self.n_layers - 1}"
                )
            if not issubclass(mixer_class(self.mixers[layer]), Attention):
                raise ArgumentError(
                    f"an attention bias needs attention, and the mixer of layer {layer} is {self.mixers[layer]}; "
                    "choose other layers or train without a bias"
                )
        for head in heads or ():
            if not 0 <= head < self.n_heads:
                raise ArgumentError(f"an attention bias on head {head}: this model has heads 0 to {self.n_heads - 1}")

    def settings(self) -> dict[str, Any]:
        """The fields as plain values, for a manifest; `SmallModelConfig(**settings)` makes it again."""
        settings = {**asdict(self), "mixer": self.mixer if isinstance(self.mixer, str) else list(self.mixer)}
        if self.unembed_bias is None:  # runs are known by these settings, and older ones have none of that name
            del settings["unembed_bias"]
        return settings


_CHOICES = {
    "norm": ("layer", "rms"),
    "positions": ("learned", "rotary", "none"),
    "mlp": ("gelu", "swiglu", "none"),
    "initialisation": ("pytorch", "gpt2"),
}


class Block(nn.Module):
    """Pre-norm block: a token mixer, then an MLP, each added to the residual stream.

    The mixer is `attn`, as in TransformerLens, when it is attention, and `mixer` otherwise; what it adds passes
    `hook_attn_out` or `hook_mixer_out`.
    """

    def __init__(self, config: SmallModelConfig, layer: int) -> None:
        super().__init__()
        name = config.mixers[layer]
        mixer = mixer_class(name)(config, layer, **mixer_options(name, config.mixer_options))
        self._is_attention = isinstance(mixer, Attention)
        self.hook_resid_pre = HookPoint()
        self.ln1 = Norm(config)
        self.add_module("attn" if self._is_attention else "mixer", mixer)
        self.add_module("hook_attn_out" if self._is_attention else "hook_mixer_out", HookPoint())
        self.mlp: nn.Module | None = None
        if config.mlp != "none":
            self.hook_resid_mid = HookPoint()
            self.ln2 = Norm(config)
            self.mlp = GatedMLP(config) if config.mlp == "swiglu" else MLP(config)
            self.hook_mlp_out = HookPoint()
        self.hook_resid_post = HookPoint()

    @property
    def token_mixer(self) -> Mixer:
        """The block's mixer, whatever it is."""
        return self.get_submodule("attn" if self._is_attention else "mixer")  # pyright: ignore[reportReturnType]

    def forward(self, resid: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        resid = self.hook_resid_pre(resid)
        if self._is_attention:
            resid = resid + self.hook_attn_out(self.attn(self.ln1(resid)))  # pyright: ignore[reportCallIssue]
        else:
            resid = resid + self.hook_mixer_out(self.mixer(self.ln1(resid)))  # pyright: ignore[reportCallIssue]
        if self.mlp is not None:
            resid = self.hook_resid_mid(resid)
            resid = resid + self.hook_mlp_out(self.mlp(self.ln2(resid)))
        return self.hook_resid_post(resid)


class SmallModel(HookedRootModule):
    """A small language model that TransformerLens' tools read, and that trains as fast as a plain one.

    Attributes:
        config: its shape.
        cfg: the same in TransformerLens' words, for its tools.
        tokenizer: of a model that was trained on text and read from its run; None of others.
    """

    def __init__(self, config: SmallModelConfig, seed: int = 0) -> None:
        """Draws the weights: the same seed gives the same weights, whatever else is drawn.

        Raises:
            ArgumentError: the vocabulary or the context is left open.
        """
        super().__init__()
        if config.vocabulary_size is None or config.context is None:
            raise ArgumentError(
                "a model needs a vocabulary_size and a context: set both, or use config.for_task(task), which takes "
                "them from the task"
            )
        self.config = config
        with torch.random.fork_rng(devices=[]):  # PyTorch's layers draw when they are made, from the global generator
            self.embed = nn.Embedding(config.vocabulary_size, config.d_model)
            self.hook_embed = HookPoint()
            self.pos_embed: nn.Embedding | None = None
            if config.positions == "learned":
                self.pos_embed = nn.Embedding(config.context, config.d_model)
                self.hook_pos_embed = HookPoint()
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
            self.ln_final = Norm(config)
            self.unembed = nn.Linear(config.d_model, config.vocabulary_size, bias=config.unembedding_bias)
        self.tokenizer: Any = None
        self._cfg = _transformer_lens_config(config)
        self.setup()
        self.initialise(seed)

    def forward(
        self,
        tokens: Int[Tensor, "row pos"],
        return_type: Literal["logits", "loss", "both"] | None = "logits",
        *,
        stop_at_layer: int | None = None,
    ) -> Any:
        """Runs the model.

        Args:
            tokens: token ids.
            return_type: "logits" `[row, pos, vocabulary]`, "loss" (mean next-token cross-entropy in nats), "both" as a
                pair, or None for nothing.
            stop_at_layer: run only the blocks before this one and return the residual stream `[row, pos, d_model]`.

        Raises:
            ArgumentError: a sequence longer than the context, or a token id outside the vocabulary.
        """
        self._check(tokens)
        resid = self.hook_embed(self.embed(tokens))
        if self.pos_embed is not None:
            resid = resid + self.hook_pos_embed(self.pos_embed.weight[: tokens.shape[1]].expand_as(resid))
        if stop_at_layer is not None and stop_at_layer < 0:
            stop_at_layer += self.config.n_layers
        for block in self.block_list[:stop_at_layer]:
            resid = block(resid)
        if stop_at_layer is not None:
            return resid
        if return_type is None:
            return None
        logits = self.unembed(self.ln_final(resid))
        if return_type == "logits":
            return logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss if return_type == "loss" else (logits, loss)

    def run_with_cache(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *model_args: Any, return_cache_object: bool = True, remove_batch_dim: bool = False, **kwargs: Any
    ) -> tuple[Any, Any]:
        """As TransformerLens' `run_with_cache`: the output and an `ActivationCache` (a dict if so asked)."""
        out, cache = super().run_with_cache(*model_args, remove_batch_dim=remove_batch_dim, **kwargs)
        return out, ActivationCache(cache, self, has_batch_dim=not remove_batch_dim) if return_cache_object else cache

    @contextmanager
    def attention_bias(
        self,
        pattern: Tensor,
        strength: float,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> Iterator[None]:
        """Adds `strength * pattern` to the attention scores while the context lasts.

        Args:
            pattern: `[dest, src]`, such as `task.pattern()`, at least as long as the sequences run.
            strength: c in the sparse-attention paper's App. B.3.
            layers, heads: where; None for all.

        Raises:
            ArgumentError: a layer that is not attention, or there is no such layer or head.
        """
        before = [(attention, attention.bias) for attention in self._attention(layers)]
        self.set_attention_bias(pattern, strength, layers=layers, heads=heads)
        try:
            yield
        finally:
            for attention, bias in before:
                attention.bias = bias

    def set_attention_bias(
        self,
        pattern: Tensor | None,
        strength: float = 0.0,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> None:
        """As `attention_bias`, until it is set again; None takes the bias of these layers away."""
        attentions = self._attention(layers, heads)
        bias = None if pattern is None else self._bias(pattern, strength, heads)
        for attention in attentions:
            attention.bias = bias

    def to_hooked_transformer(self) -> "HookedTransformer":
        """The same function as a `HookedTransformer`, with a copy of the weights (transformer-lens 3.x).

        Raises:
            UnsupportedModelError: transformer-lens 4.x, which has none, or a mixer other than attention.
        """
        from emergent_heads.models.conversion import to_hooked_transformer

        return to_hooked_transformer(self)

    def to_huggingface(self) -> "GPTNeoXForCausalLM | LlamaForCausalLM":
        """The same function as a model of transformers, with a copy of the weights.

        A model as `SmallModelConfig.gpt_neox` makes it is a GPT-NeoX, one as `transformer_pp` makes it a Llama.

        Raises:
            UnsupportedModelError: it is neither, or has an attention bias.
        """
        from emergent_heads.models.to_huggingface import to_huggingface

        return to_huggingface(self)

    def initialise(self, seed: int) -> None:
        """Draws all weights anew, as `config.initialisation` says; each module has a stream of its own."""
        config = self.config
        embedding_std = config.embedding_std
        if embedding_std is None:
            embedding_std = 1.0 if config.initialisation == "pytorch" else 0.02
        with torch.no_grad():
            for name, module in self.named_modules():
                generator = torch_generator(seed, "weights", name)
                if isinstance(module, nn.Embedding):
                    _normal(module.weight, embedding_std, generator)
                elif isinstance(module, (nn.Linear, nn.Conv1d)):
                    writes = name.endswith(".out")
                    _draw_linear(module, config, writes=writes, generator=generator)
            for layer, block in enumerate(self.block_list):
                block.token_mixer.initialise(torch_generator(seed, "weights", "mixer", layer))

    @property
    def block_list(self) -> list[Block]:
        """The blocks, in order."""
        return list(self.blocks)  # pyright: ignore[reportReturnType]

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def cfg(self) -> TransformerBridgeConfig:
        self._cfg.device = str(self.device)
        self._cfg.dtype = self.embed.weight.dtype
        return self._cfg

    @property
    def W_E(self) -> Float[Tensor, "vocabulary d_model"]:  # noqa: N802 - TransformerLens' names
        return self.embed.weight

    @property
    def W_U(self) -> Float[Tensor, "d_model vocabulary"]:  # noqa: N802
        return self.unembed.weight.T

    @property
    def b_U(self) -> Float[Tensor, " vocabulary"]:  # noqa: N802
        return self.unembed.bias if self.unembed.bias is not None else self.W_U.new_zeros(self.W_U.shape[1])

    def tokens_to_residual_directions(self, tokens: "int | Int[Tensor, '*shape']") -> Float[Tensor, "*shape d_model"]:
        """The unembedding's direction of each token, which TransformerLens' logit attribution asks for."""
        return self.W_U.T[tokens]

    def __repr__(self) -> str:
        config = self.config
        n_parameters = sum(parameter.numel() for parameter in self.parameters())
        mixers = config.mixer if isinstance(config.mixer, str) else "/".join(config.mixer)
        return (
            f"SmallModel({mixers}: n_layers={config.n_layers}, d_model={config.d_model}, n_heads={config.n_heads}, "
            f"vocabulary_size={config.vocabulary_size}, context={config.context}, {n_parameters:,} parameters)"
        )

    def _bias(self, pattern: Tensor, strength: float, heads: Sequence[int] | None) -> Float[Tensor, "head dest src"]:
        needed = (self.config.context or 0) - 1
        if pattern.ndim != 2 or min(pattern.shape) < needed:
            raise ArgumentError(
                f"the pattern has shape {list(pattern.shape)} and the model reads {needed} positions; give it "
                "[dest, src] for all of them"
            )
        bias = strength * pattern.to(self.embed.weight)[None]
        if heads is None:
            return bias
        chosen = torch.zeros(self.config.n_heads, 1, 1, device=bias.device, dtype=bias.dtype)
        chosen[list(heads)] = 1.0
        return chosen * bias

    def _attention(self, layers: Sequence[int] | None, heads: Sequence[int] | None = None) -> list[Attention]:
        """The mixers of these layers (default: all), which must be attention with these heads."""
        self.config.check_attention(layers, heads)
        blocks = self.block_list
        chosen = range(len(blocks)) if layers is None else layers
        return [blocks[layer].token_mixer for layer in chosen]  # pyright: ignore[reportReturnType]

    def _check(self, tokens: Tensor) -> None:
        context, size = self.config.context, self.config.vocabulary_size
        if tokens.ndim != 2 or tokens.dtype.is_floating_point:
            raise ArgumentError(f"tokens must be ids [row, pos], not {tokens.dtype} of shape {list(tokens.shape)}")
        if tokens.shape[1] > context:  # pyright: ignore[reportOperatorIssue]
            raise ArgumentError(f"sequences of {tokens.shape[1]} tokens; this model takes at most {context}")
        # On a GPU the look at the values would wait for it at every step; there the embedding itself complains.
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = tokens.aminmax()
            if low < 0 or high >= size:  # pyright: ignore[reportOperatorIssue]
                wrong = int(low) if low < 0 else int(high)
                raise ArgumentError(f"token id {wrong}: this model has ids 0 to {size - 1}")  # pyright: ignore


def effective_pattern(
    model: SmallModel, tokens: Int[Tensor, "row pos"], layers: Sequence[int] | None = None
) -> dict[int, Float[Tensor, "row head dest src"]]:
    """How much each position takes of each position in these layers' mixers (default: all), so it can be plotted.

    For attention it is the pattern. For other mixers it is the token-mixing matrix they imply on the input at hand,
    where there is one: the fixed matrix of a linear mixer, the products of decays and gates of a linear recurrence.

    Raises:
        ArgumentError: a mixer implies no such matrix, or the model is no `SmallModel`.
    """
    if not isinstance(model, SmallModel):
        raise ArgumentError(f"effective_pattern reads a SmallModel, not a {type(model).__name__}")
    chosen = range(model.config.n_layers) if layers is None else layers
    inputs: dict[int, Tensor] = {}

    with torch.no_grad(), ExitStack() as stack:
        for layer in chosen:
            if not 0 <= layer < model.config.n_layers:
                raise ArgumentError(f"layer {layer}: this model has layers 0 to {model.config.n_layers - 1}")
            stack.enter_context(editing_output(model.block_list[layer].ln1, keep_in(inputs, layer)))
        model(tokens.to(model.device), None)
        return {layer: model.block_list[layer].token_mixer.effective_pattern(inputs[layer]) for layer in chosen}


def _normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    weight.copy_(torch.randn(weight.shape, generator=generator) * std)


def _draw_linear(
    module: "nn.Linear | nn.Conv1d", config: SmallModelConfig, *, writes: bool, generator: torch.Generator
) -> None:
    weight, bias = module.weight, module.bias
    if config.initialisation == "gpt2":
        _normal(weight, 0.02 * ((2 * config.n_layers) ** -0.5 if writes else 1.0), generator)
        if bias is not None:
            bias.zero_()
        return
    bound = weight[0].numel() ** -0.5  # PyTorch's default for both: kaiming_uniform with a = sqrt(5)
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.copy_((torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)


def _transformer_lens_config(config: SmallModelConfig) -> TransformerBridgeConfig:
    return TransformerBridgeConfig(
        d_model=config.d_model,
        d_head=config.head_size,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        d_mlp=config.mlp_size,
        n_ctx=config.context or 0,
        d_vocab=config.vocabulary_size or 0,
        act_fn="silu" if config.mlp == "swiglu" else "gelu",
        gated_mlp=config.mlp == "swiglu",
        attn_only=config.mlp == "none",
        normalization_type="LN" if config.norm == "layer" else "RMS",
        positional_embedding_type="rotary" if config.positions == "rotary" else "standard",
        model_name="SmallModel",
    )
