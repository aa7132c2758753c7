"""Hooks on any module, all of them gone when the block ends."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


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

    with module.register_forward_pre_hook(hook, with_kwargs=True):
        yield


@contextmanager
def editing_output(module: nn.Module, edit: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Passes the module's output (the first one, of several) through `edit` (None leaves it)."""

    def hook(_module: nn.Module, _args: tuple, output: Any) -> Any:
        new = edit(output[0] if isinstance(output, tuple) else output)
        return None if new is None else _like(output, new)

    with module.register_forward_hook(hook):
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """The module runs `forward` in place of its own."""
    # Through the instance's dictionary: a bridge hands other attributes on to the module it wraps.
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


@contextmanager
def without_running(module: nn.Module) -> Iterator[None]:
    """The module returns its first input as it is."""
    with replaced_forward(module, lambda first, *args, **kwargs: first):
        yield


def keep_in(found: dict[int, Tensor], layer: int) -> Callable[[Tensor], None]:
    """A hook that puts what it sees under `layer` and changes nothing."""

    def keep(value: Tensor) -> None:
        found[layer] = value

    return keep


def keep_copy_in(found: dict[int, Tensor], layer: int) -> Callable[[Tensor], None]:
    """As `keep_in`, for what the model may write over afterwards (Falcon adds to its MLP's output in place)."""

    def keep(value: Tensor) -> None:
        found[layer] = value.clone()

    return keep


def at_positions(
    values: Float[Tensor, "row pos width"], positions: Int[Tensor, " row"]
) -> Float[Tensor, "row 1 width"]:
    """One position of each row; a tensor that holds only one position is that position."""
    if values.shape[1] == 1:
        return values
    return values[torch.arange(len(values), device=values.device), positions.to(values.device)][:, None]


class StandIns:
    """Forwards in place of those of a model's modules, which return as many values as these do."""

    def __init__(self) -> None:
        self._n_outputs: dict[nn.Module, int] = {}

    @contextmanager
    def noting_outputs(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Notes how many values each module returns (0: a bare tensor); to be done once, before any other method."""

        def hook(module: nn.Module, _args: tuple, output: Any) -> None:
            self._n_outputs[module] = len(output) if isinstance(output, tuple) else 0

        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(module.register_forward_hook(hook))
            yield

    @contextmanager
    def passing_through(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """The blocks return their input: they stay in their places, so that no layer is renumbered."""

        def forward_of(block: nn.Module) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._as_output(block, args[0] if args else kwargs["hidden_states"])

        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(replaced_forward(block, forward_of(block)))
            yield

    def returning(self, module: nn.Module, output: Tensor) -> AbstractContextManager[None]:
        """The module is not run and returns `output`."""
        result = self._as_output(module, output)
        return replaced_forward(module, lambda *args, **kwargs: result)

    def _as_output(self, module: nn.Module, tensor: Tensor) -> Any:
        n = self._n_outputs[module]
        return (tensor, *[None] * (n - 1)) if n else tensor


def _like(output: Any, first: Tensor) -> Any:
    return (first, *output[1:]) if isinstance(output, tuple) else first
