"""The recurrent block of Griffin and RecurrentGemma: a gated linear recurrence for each channel."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.hook_points import HookPoint

from emergent_heads.errors import ArgumentError
from emergent_heads.models.mixers import Mixer
from emergent_heads.models.mixers.convolution import CausalConv
from emergent_heads.models.mixers.recurrence import linear_recurrence, products_of_decays

if TYPE_CHECKING:
    from emergent_heads.models.small import SmallModelConfig

_SHARPNESS = 8.0  # c in the paper, a constant


class LinearRNN(Mixer):
    """The real-gated linear recurrent unit (RG-LRU) in its recurrent block (De et al. 2024, arXiv 2402.19427).

    One linear map goes through a short convolution into the recurrence `h[t] = a[t] h[t-1] + sqrt(1 - a[t]^2) i[t]
    x[t]`, another through a GELU; their product is mapped back. The decay is `a = exp(-8 r softplus(p))` with a
    parameter p for each channel. The recurrence gate r and the input gate i are sigmoids of x, by matrices that are
    block-diagonal over the heads. As in RecurrentGemma, the first position's input is not scaled by `sqrt(1 - a^2)`.

    Hooks, `[row, pos, width]` each: `hook_gate_input` (before its GELU), `hook_conv` (the recurrence's input x),
    `hook_input_gate`, `hook_recurrence_gate`, `hook_ssm_decay` (a in the recurrence; the input's scale does not follow
    an edit), `hook_ssm_write` (what is added to the state), `hook_ssm_state` (h; an edit reaches the output at its own
    position only, one of `hook_ssm_write` all later ones), `hook_z` (before `out`).
    """

    def __init__(
        self, config: "SmallModelConfig", layer: int, *, width: int | None = None, kernel_size: int = 4
    ) -> None:
        """Makes it.

        Args:
            config: of the model.
            layer: which layer it is in.
            width: channels of the recurrence; None for d_model.
            kernel_size: positions that the convolution sees.

        Raises:
            ArgumentError: the width does not divide into the heads.
        """
        super().__init__(config, layer)
        self.width = width or self.d_model
        if self.width % self.n_heads:
            raise ArgumentError(
                f"the gates' {self.width} channels do not divide into {self.n_heads} heads; change n_heads or width"
            )
        block = self.width // self.n_heads
        self.input = nn.Linear(self.d_model, self.width, bias=config.biases)
        self.gate = nn.Linear(self.d_model, self.width, bias=config.biases)
        self.conv = CausalConv(self.width, kernel_size)
        self.input_gate_weight = nn.Parameter(
            torch.zeros(self.n_heads, block, block)
        )  # [head, channel in, channel out]
        self.input_gate_bias = nn.Parameter(torch.zeros(self.n_heads, block))
        self.recurrence_gate_weight = nn.Parameter(torch.zeros(self.n_heads, block, block))
        self.recurrence_gate_bias = nn.Parameter(torch.zeros(self.n_heads, block))
        self.decay_parameter = nn.Parameter(torch.zeros(self.width))
        self.out = nn.Linear(self.width, self.d_model, bias=config.biases)
        self.hook_gate_input = HookPoint()  # [row, pos, width], as all of them
        self.hook_conv = HookPoint()
        self.hook_input_gate = HookPoint()
        self.hook_recurrence_gate = HookPoint()
        self.hook_ssm_decay = HookPoint()
        self.hook_ssm_write = HookPoint()
        self.hook_ssm_state = HookPoint()
        self.hook_z = HookPoint()

    def initialise(self, generator: torch.Generator) -> None:
        """As RecurrentGemma: gates with standard deviation `1 / sqrt(fan_in)` and no bias; slow decays.

        The decay is `d^(8 r)` with d between 0.9 and 0.999, uniform on the ring of these radii.
        """
        self.conv.initialise(generator)
        for weight in (self.input_gate_weight, self.recurrence_gate_weight):
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
        self.input_gate_bias.zero_()
        self.recurrence_gate_bias.zero_()
        squared = torch.rand(self.width, generator=generator) * (0.999**2 - 0.9**2) + 0.9**2
        self.decay_parameter.copy_((squared**-0.5 - 1).log())

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        gate = functional.gelu(self.hook_gate_input(self.gate(x)), approximate="tanh")
        x = self.hook_conv(self.conv(self.input(x)))
        log_decay, scale = self._gates(x)
        states = linear_recurrence(self.hook_ssm_decay(log_decay.exp()), self.hook_ssm_write(scale * x))
        return self.out(self.hook_z(self.hook_ssm_state(states) * gate))

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row width dest src"]:
        """How much of `hook_conv` at `src` is in the state at `dest`, for each channel: exact."""
        log_decay, scale = self._gates(self.conv(self.input(x)))
        return products_of_decays(log_decay.transpose(1, 2)) * scale.transpose(1, 2)[:, :, None]

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the decay, and what the input is multiplied by, `[row, pos, width]` each."""
        input_gate = self.hook_input_gate(self._gate(x, self.input_gate_weight, self.input_gate_bias))
        recurrence_gate = self._gate(x, self.recurrence_gate_weight, self.recurrence_gate_bias)
        log_rate = -_SHARPNESS * functional.softplus(self.decay_parameter)
        log_decay = self.hook_recurrence_gate(recurrence_gate) * log_rate
        # The square root's slope is bounded, for a gate that keeps everything (a = 1).
        scale = (-torch.expm1(2 * log_decay)).clamp(min=1e-7).sqrt()
        first = torch.arange(x.shape[1], device=x.device)[:, None] == 0
        return log_decay, scale.masked_fill(first, 1.0) * input_gate

    def _gate(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        by_head = x.unflatten(-1, (self.n_heads, -1))
        return (torch.einsum("rphi,hio->rpho", by_head, weight) + bias).sigmoid().flatten(2)
