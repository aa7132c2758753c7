"""Norms, MLPs and rotary positions of small models, with TransformerLens' hook names.

Each computes as PyTorch's own fused function does while nobody listens inside it, and step by step when somebody does.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.hook_points import HookPoint

if TYPE_CHECKING:
    from emergent_heads.models.small import SmallModelConfig


def listened_to(*points: nn.Module) -> bool:
    """Whether anything is hooked to any of these points (or modules), forwards or backwards."""
    return any(
        point._forward_hooks or point._forward_pre_hooks or point._backward_hooks or point._backward_pre_hooks
        for point in points
    )


def at_least_32_bits(x: Tensor) -> Tensor:
    """The tensor in 32 bits if it has 16, for sums and products over many positions."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Norm(nn.Module):
    """LayerNorm or RMSNorm over `d_model`, eps 1e-5. Hooks: `hook_scale` `[row, pos, 1]`, `hook_normalized`."""

    def __init__(self, config: "SmallModelConfig") -> None:
        super().__init__()
        self.centred = config.norm == "layer"
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.d_model)) if self.centred and config.biases else None
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        if not listened_to(self.hook_scale, self.hook_normalized):
            if self.centred:
                return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        scale = self.hook_scale((x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        scaled = self.hook_normalized(x / scale) * self.weight
        return scaled if self.bias is None else scaled + self.bias


class MLP(nn.Module):
    """Two matrices with a GELU between them. Hooks: `hook_pre`, `hook_post` `[row, pos, d_mlp]`."""

    def __init__(self, config: "SmallModelConfig") -> None:
        super().__init__()
        self.input = nn.Linear(config.d_model, config.mlp_size, bias=config.biases)
        self.out = nn.Linear(config.mlp_size, config.d_model, bias=config.biases)
        self.hook_pre = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        return self.out(self.hook_post(functional.gelu(self.hook_pre(self.input(x)))))


class GatedMLP(nn.Module):
    """SwiGLU, `out(silu(gate(x)) * input(x))`, where only `out` may have a bias.

    Hooks: `hook_pre` (the gate's), `hook_pre_linear`, `hook_post` `[row, pos, d_mlp]`.
    """

    def __init__(self, config: "SmallModelConfig") -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.mlp_size, bias=False)
        self.input = nn.Linear(config.d_model, config.mlp_size, bias=False)
        self.out = nn.Linear(config.mlp_size, config.d_model, bias=config.biases)
        self.hook_pre = HookPoint()
        self.hook_pre_linear = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        gate = functional.silu(self.hook_pre(self.gate(x)))
        return self.out(self.hook_post(gate * self.hook_pre_linear(self.input(x))))


class Rotary(nn.Module):
    """Rotary positions over the whole head, base 10,000; its first half is paired with its second, as in GPT-NeoX."""

    cos: Tensor
    signed_sin: Tensor

    def __init__(self, d_head: int, context: int | None) -> None:
        super().__init__()
        frequencies = 10_000.0 ** -(torch.arange(0, d_head, 2).float() / d_head)
        angles = torch.arange(context or 0).float()[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # [pos, 1, d_head], the same for every head
        self.register_buffer("cos", angles.cos(), persistent=False)
        halves = torch.tensor([-1.0, 1.0]).repeat_interleave(d_head // 2)
        self.register_buffer("signed_sin", angles.sin() * halves, persistent=False)

    def forward(self, x: Float[Tensor, "row pos head d_head"], start: int = 0) -> Float[Tensor, "row pos head d_head"]:
        """Turns `x`, whose first position is the sequence's position `start`."""
        positions = slice(start, start + x.shape[1])
        first, second = x.chunk(2, dim=-1)
        return x * self.cos[positions] + torch.cat([second, first], dim=-1) * self.signed_sin[positions]
