"""Several small models of one configuration as one model, whose every weight has a dimension for the run in front.

The batches of all runs go through together: `[run * row, pos, d_model]`. What works row by row (attention,
activations, sums) is the single model's own code; linear maps, norms and embeddings are computed with each run's
weights; any other module that has weights, such as a mixer that is not attention, is run once for each run.
"""

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from emergent_heads.models.layers import MLP, GatedMLP, Norm
from emergent_heads.models.mixers.attention import Attention
from emergent_heads.models.small import Block, SmallModel

_ROW_BY_ROW = (Block, MLP, GatedMLP, Attention)
"""Modules that treat all rows alike and have weights in linear maps and norms only. Subclasses may have others."""


class StackedModel:
    """The models of several runs as one; their weights and gradients become views of the stacked ones."""

    def __init__(self, models: Sequence[SmallModel]) -> None:
        """Takes models that have one configuration."""
        self._models = models
        self._skeleton = copy.deepcopy(models[0])
        self._attention = list(zip(_attention(self._skeleton), _attention(models[0]), strict=True))
        self._gradients: list[Tensor] = []
        self._embed = self._stacked("embed.weight")
        self._pos_embed = self._stacked("pos_embed.weight") if models[0].pos_embed is not None else None
        self._blocks = [self._replaced(f"blocks.{layer}") for layer in range(len(models[0].blocks))]
        self._ln_final = self._replaced("ln_final")
        self._unembed = self._replaced("unembed")
        n_runs, vocabulary, _ = self._embed.shape
        self._offsets = torch.arange(n_runs, device=self._embed.device)[:, None, None] * vocabulary

    def __call__(self, tokens: Int[Tensor, "run row pos"]) -> Float[Tensor, "run row pos vocabulary"]:
        """Logits of each run's model on its own tokens."""
        resid = functional.embedding(tokens + self._offsets, self._embed.flatten(0, 1))
        if self._pos_embed is not None:
            resid = resid + self._pos_embed[:, None, : tokens.shape[2]]
        resid = resid.flatten(0, 1)
        for block in self._blocks:
            resid = block(resid)
        return self._unembed(self._ln_final(resid)).unflatten(0, tokens.shape[:2])

    def zero_grad(self) -> None:
        """Sets all gradients to zero, in place."""
        for gradient in self._gradients:
            gradient.zero_()

    def share_bias(self) -> None:
        """Takes the attention bias that the models have now."""
        for shared, own in self._attention:
            shared.bias = own.bias

    def _stacked(self, name: str) -> Tensor:
        """The weight `[run, ...]` of that name."""
        weights = [model.get_parameter(name) for model in self._models]
        stacked = torch.stack([weight.detach() for weight in weights]).requires_grad_()
        stacked.grad = torch.zeros_like(stacked)
        self._gradients.append(stacked.grad)
        for weight, values, gradient in zip(weights, stacked.detach(), stacked.grad, strict=True):
            weight.data, weight.grad = values, gradient
        return stacked

    def _replaced(self, name: str) -> nn.Module:
        """The skeleton's module of that name, made to work with the weights of all runs."""
        module = self._skeleton.get_submodule(name)
        if type(module) in _ROW_BY_ROW:
            for child, _ in list(module.named_children()):
                setattr(module, child, self._replaced(f"{name}.{child}"))
            return module
        weights = {each: self._stacked(f"{name}.{each}") for each, _ in module.named_parameters()}
        if isinstance(module, nn.Linear):
            return _Linear(weights)
        if isinstance(module, Norm):
            return _Norm(module, weights)
        return _EachRun(module, weights) if weights else module


class _Linear(nn.Module):
    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._weight, self._bias = weights["weight"], weights.get("bias")

    def forward(self, x: Float[Tensor, "run*row pos d_in"]) -> Float[Tensor, "run*row pos d_out"]:
        of_runs = x.reshape(len(self._weight), -1, x.shape[-1])
        if self._bias is None:
            out = torch.bmm(of_runs, self._weight.mT)
        else:
            out = torch.baddbmm(self._bias[:, None], of_runs, self._weight.mT)
        return out.view(*x.shape[:-1], out.shape[-1])


class _Norm(nn.Module):
    def __init__(self, norm: Norm, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._centred, self._eps = norm.centred, norm.eps
        self._weight, self._bias = weights["weight"], weights.get("bias")

    def forward(self, x: Float[Tensor, "run*row pos d_model"]) -> Float[Tensor, "run*row pos d_model"]:
        of_runs = x.view(len(self._weight), -1, x.shape[-1])
        if x.device.type == "cpu":
            # One call for each run is as fast there, and sums the weights' gradients in the single model's order.
            biases = [None] * len(of_runs) if self._bias is None else self._bias.unbind()
            parts = map(self._normalized, of_runs.unbind(), self._weight.unbind(), biases)
            return torch.stack(list(parts)).view(x.shape)
        scaled = self._normalized(of_runs) * self._weight[:, None]
        return (scaled if self._bias is None else scaled + self._bias[:, None]).view(x.shape)

    def _normalized(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if self._centred:
            return functional.layer_norm(x, x.shape[-1:], weight, bias, self._eps)
        return functional.rms_norm(x, x.shape[-1:], weight, self._eps)


class _EachRun(nn.Module):
    """A module whose inside is not known, run once for each run."""

    def __init__(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._module, self._weights = module, weights

    def forward(self, x: Float[Tensor, "run*row pos d_model"]) -> Float[Tensor, "run*row pos d_model"]:
        n_runs = len(next(iter(self._weights.values())))
        parts = [
            torch.func.functional_call(
                self._module, {name: weight[run] for name, weight in self._weights.items()}, (part,)
            )
            for run, part in enumerate(x.unflatten(0, (n_runs, -1)))
        ]
        return torch.cat(parts)


def _attention(model: SmallModel) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]
