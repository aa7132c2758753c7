"""Token mixers: what lets one position of a small model read earlier ones.

A mixer is a module `[row, pos, d_model] -> [row, pos, d_model]` in which no output depends on a later position. The
built-in ones have files here; a user adds one by `register_mixer`, without touching the package.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from emergent_heads.errors import ArgumentError, nearest

if TYPE_CHECKING:
    from emergent_heads.models.small import SmallModelConfig

# Imported when first used, like everything of which a session needs a part only.
_HOMES = {
    "attention": "emergent_heads.models.mixers.attention:Attention",
    "linear": "emergent_heads.models.mixers.mlp_mixer:LinearMixer",
    "mlp_mixer": "emergent_heads.models.mixers.mlp_mixer:MLPMixer",
    "mamba": "emergent_heads.models.mixers.mamba:Mamba",
    "mamba2": "emergent_heads.models.mixers.mamba2:Mamba2",
    "gated_delta_net": "emergent_heads.models.mixers.gated_delta_net:GatedDeltaNet",
    "rwkv4": "emergent_heads.models.mixers.rwkv:RWKV4",
    "rwkv7": "emergent_heads.models.mixers.rwkv:RWKV7",
    "xlstm": "emergent_heads.models.mixers.xlstm:XLSTM",
    "linear_rnn": "emergent_heads.models.mixers.linear_rnn:LinearRNN",
}
_REGISTERED: "dict[str, type[Mixer]]" = {}


class Mixer(nn.Module, ABC):
    """Base class of token mixers.

    A subclass takes `(config, layer, **options)`; its keyword arguments are the options that
    `SmallModelConfig.mixer_options` may set. Every `nn.Linear`, `nn.Conv1d` and `nn.Embedding` in it is drawn by the
    model's initialisation; parameters of its own are drawn by `initialise`. It wraps what it mixes in `HookPoint`s
    (`hook_q`, `hook_pattern`, `hook_state`, ...), which the model names and listens through.

    Attributes:
        has_pattern: whether it has a `hook_pattern` `[row, head, dest, src]` and a `hook_v` `[row, src, head, d_head]`
            such that replacing the pattern changes what is mixed, and nothing else. Such a mixer also has `out`, the
            module that takes the heads' outputs `[row, pos, head * d_head]`, and a `hook_z` before it.
    """

    has_pattern: ClassVar[bool] = False

    def __init__(self, config: "SmallModelConfig", layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.d_model = config.d_model
        self.n_heads = config.n_heads
        self.d_head = config.head_size

    @abstractmethod
    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        """Mixes positions; output t depends on positions up to t only."""

    def initialise(self, generator: torch.Generator) -> None:
        """Draws the parameters that are not in an `nn.Linear`, `nn.Conv1d` or `nn.Embedding`, on the CPU.

        Called once, after those have been drawn, so it may also replace their values.
        """

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row head dest src"]:
        """How much each output position takes of each input position, where that can be said.

        Raises:
            ArgumentError: this mixer implies no such matrix.
        """
        raise ArgumentError(
            f"a {type(self).__name__} mixer implies no token-mixing matrix: what it takes from a position is no "
            "fixed multiple of what stands there"
        )


_MixerClass = TypeVar("_MixerClass", bound=type[Mixer])


def register_mixer(name: str) -> Callable[[_MixerClass], _MixerClass]:
    """Class decorator: makes a mixer available as `SmallModelConfig(mixer=name)`.

    Raises:
        ArgumentError: there is another mixer of that name, or the class is no `Mixer`.
    """

    def register(mixer: _MixerClass) -> _MixerClass:
        if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
            raise ArgumentError(f"the mixer {name!r} must be a class derived from emergent_heads.Mixer, not {mixer!r}")
        there = _REGISTERED.get(name)
        # A class defined again in the same place, as when a notebook's cell is run twice, replaces itself.
        if name in _HOMES or (there is not None and there.__qualname__ != mixer.__qualname__):
            raise ArgumentError(f"there is a mixer {name!r} already; choose another name")
        _REGISTERED[name] = mixer
        return mixer

    return register


def mixer_class(name: str) -> type[Mixer]:
    """The mixer of that name.

    Raises:
        ArgumentError: there is none; the message gives the nearest names.
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _HOMES:
        raise ArgumentError(
            f"no mixer {name!r}; {nearest(name, [*_HOMES, *_REGISTERED])}. Add your own with register_mixer"
        )
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute)


def mixer_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that the mixer takes."""
    return {key: value for key, value in options.items() if key in _options(name)}


def check_mixer_options(names: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Checks options before a model is made of them.

    Raises:
        ArgumentError: an unknown mixer, an option that none of the mixers takes, or a size below 1.
    """
    names = tuple(dict.fromkeys(names))
    known = {option: parameter for name in names for option, parameter in _options(name).items()}
    for option, value in options.items():
        if option not in known:
            raise ArgumentError(
                f"no mixer option {option!r} for {', '.join(names)}; "
                + (nearest(option, sorted(known)) if known else "it takes none")
            )
        annotation = known[option].annotation
        is_size = annotation in (int, int | None) and not (value is None and annotation is not int)
        if is_size and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ArgumentError(f"mixer option {option} must be a whole number of at least 1, not {value!r}")


def _options(name: str) -> dict[str, inspect.Parameter]:
    """The keyword arguments of a mixer beside config and layer."""
    return dict(list(inspect.signature(mixer_class(name)).parameters.items())[2:])
