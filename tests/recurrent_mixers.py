"""What every recurrent mixer promises, for the tests of each: checks through a small model of two layers."""

from collections.abc import Callable
from typing import Any

import torch

import emergent_heads as eh

ROWS, LENGTH, VOCABULARY, D_MODEL = 2, 20, 11, 16


def small_model(mixer: str, seed: int = 0, *, mixer_options: dict[str, Any] | None = None, **settings: Any) -> Any:
    config = eh.SmallModelConfig(
        **{"n_layers": 2, "d_model": D_MODEL, **settings},
        mixer=mixer,
        mixer_options=mixer_options or {},
        vocabulary_size=VOCABULARY,
        context=40,
    )
    return eh.SmallModel(config, seed)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def check_causality(model: Any) -> None:
    """Changing token t moves no logits before t, and all from t on."""
    model.double()
    for position in (1, 9, LENGTH - 1):
        changed = tokens()
        changed[:, position] = (changed[:, position] + 1) % VOCABULARY
        moved = (model(tokens()) - model(changed)).abs().amax((0, 2))
        assert moved[:position].max() < 1e-12
        assert moved[position:].min() > 1e-9


def check_listening(model: Any, hooks: dict[str, tuple[int, ...]]) -> Any:
    """A full cache holds these hooks, `[row, pos, *shape]`, and its logits are the fast path's; gives the cache."""
    silent = model(tokens())
    logits, cache = model.run_with_cache(tokens())
    torch.testing.assert_close(logits, silent, atol=1e-5, rtol=0)
    prefix = "blocks.0.mixer."
    found = {name.removeprefix(prefix): value.shape for name, value in cache.items() if name.startswith(prefix)}
    assert found == {hook: (ROWS, LENGTH, *shape) for hook, shape in hooks.items()}
    return cache


def check_editing(model: Any, hook: str) -> None:
    """Halving what passes a hook at one position moves logits from there on, and none before."""
    model.double()

    def halve(activation: torch.Tensor, hook: Any) -> torch.Tensor:
        activation = activation.clone()
        activation[:, 7] *= 0.5
        return activation

    edited = model.run_with_hooks(tokens(), fwd_hooks=[(f"blocks.0.mixer.{hook}", halve)])
    moved = (edited - model(tokens())).abs().amax((0, 2))
    assert moved[:7].max() < 1e-12
    assert moved[7:].max() > 1e-6


def check_gradients_when_listening(model: Any, hook: str) -> None:
    """The step-by-step path has the gradients of the fast one."""
    model(tokens(), "loss").backward()
    fast = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with model.hooks(fwd_hooks=[(f"blocks.{layer}.mixer.{hook}", lambda a, hook: a) for layer in range(2)]):
        model(tokens(), "loss").backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, fast[name], atol=1e-6, rtol=1e-4)


def check_stacked_training(models: list[Any]) -> None:
    """Gradients with respect to stacked parameters are those of each model's mixer, both ways round."""
    mixers = [model.block_list[0].token_mixer for model in models]
    parameters, _ = torch.func.stack_module_state(mixers)  # pyright: ignore[reportArgumentType]
    x = torch.randn(len(mixers), ROWS, LENGTH, D_MODEL, generator=torch.Generator().manual_seed(0))

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(mixers[0], parameters, (x,)).pow(2).mean()

    inside = torch.vmap(torch.func.grad(loss))(parameters, x)
    torch.vmap(loss)(parameters, x).sum().backward()
    for seed, mixer in enumerate(mixers):
        mixer(x[seed]).pow(2).mean().backward()
        for name, parameter in mixer.named_parameters():
            torch.testing.assert_close(inside[name][seed], parameter.grad, atol=1e-6, rtol=1e-4)
            torch.testing.assert_close(parameters[name].grad[seed], parameter.grad, atol=1e-6, rtol=1e-4)


def check_drawing(draw: Any, constant: set[str]) -> None:
    """The same seed draws the same mixer, another seed another one but for these parameters."""
    first, again, other = draw(0), draw(0), draw(1)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter, other.get_parameter(name)) == (name in constant), name


def check_same_as(
    ours: Any,
    theirs: Any,
    x: torch.Tensor,
    counterparts: Callable[[Any, Callable[[Any], Any]], dict[str, torch.Tensor]],
    call: Callable[[Any, torch.Tensor], torch.Tensor] = lambda module, x: module(x),
) -> None:
    """With our parameters in theirs, both give the same output on x and the same gradients.

    `counterparts(theirs, of)` gives `of` (a parameter's values, or gradient) their parameters by our names.
    """
    with torch.no_grad():
        values = counterparts(theirs, lambda parameter: parameter.data)
        assert set(values) == {name for name, _ in ours.named_parameters()}
        for name, parameter in ours.named_parameters():
            values[name].copy_(parameter)
    ours_x, theirs_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, expected = ours(ours_x), call(theirs, theirs_x)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, atol=1e-4, rtol=1e-4)
    gradients = counterparts(theirs, lambda parameter: parameter.grad)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def drawn(module: torch.nn.Module, seed: int = 0) -> Any:
    """All parameters drawn anew, so that none stands at a value that hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return module


def check_pattern_mixes_any_values(model: Any, d_value: int, **tolerance: float) -> None:
    """The implied matrices are causal, and times values put in the mixers' place they give what comes out."""
    tokens = torch.randint(VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(0))
    patterns = eh.effective_pattern(model, tokens)
    values = torch.randn(2, 21, 2, d_value, generator=torch.Generator().manual_seed(1))
    for layer, pattern in patterns.items():
        assert pattern.shape == (2, 2, 21, 21)
        assert (pattern.triu(1) == 0).all()
        read = {}
        hooks = [
            (f"blocks.{layer}.mixer.hook_v", lambda value, hook: values),
            (f"blocks.{layer}.mixer.hook_recurrence_out", lambda value, hook, read=read: read.update(out=value)),
        ]
        model.run_with_hooks(tokens, fwd_hooks=hooks)
        mixed = torch.einsum("rhds,rshv->rdhv", pattern, values)
        torch.testing.assert_close(mixed, read["out"], **tolerance)


def check_stacked_gradients(mixers: list[Any]) -> None:
    """On one input, gradients of stacked parameters are those of each mixer alone."""
    parameters, _ = torch.func.stack_module_state(mixers)
    x = torch.randn(2, 19, D_MODEL, generator=torch.Generator().manual_seed(0))

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(mixers[0], parameters, (x,)).square().mean()

    stacked = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(parameters, x)
    for index, mixer in enumerate(mixers):
        mixer(x).square().mean().backward()
        for name, parameter in mixer.named_parameters():
            torch.testing.assert_close(stacked[name][index], parameter.grad, rtol=1e-4, atol=1e-5)


def check_half_precision(mixer: Any) -> None:
    """Under automatic mixed precision the output is near the full one, and gradients are finite."""
    mixer.initialise(torch.Generator().manual_seed(0))
    x = torch.randn(2, 21, D_MODEL, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = mixer(x)
        half.float().square().sum().backward()
    torch.testing.assert_close(half.float(), mixer(x), rtol=0.1, atol=0.05)
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())
