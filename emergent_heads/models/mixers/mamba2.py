"""Mamba-2's state space duality: matrix states with one decay per head, computed in chunks of matrix products."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.hook_points import HookPoint

from emergent_heads.models.layers import listened_to
from emergent_heads.models.mixers import Mixer
from emergent_heads.models.mixers.convolution import CausalConv
from emergent_heads.models.mixers.mamba import draw_step_bias
from emergent_heads.models.mixers.recurrence import linear_recurrence, products_of_decays

if TYPE_CHECKING:
    from emergent_heads.models.small import SmallModelConfig


class Mamba2(Mixer):
    """Mamba-2 (Dao & Gu 2024, arXiv 2405.21060) with one group: all heads share B and C.

    Linear maps of the input give x (a vector for each head), B and C, which go through a short convolution and a SiLU,
    a time step dt for each head, and a gate. For each head `h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T`, `y[t] =
    h[t] C[t] + D x[t]` with numbers A and D; `out` reads the RMS norm, over all heads, of `y silu(gate)`. The time
    step and the convolution have biases whatever the model's linear maps have.

    While nobody listens to the decays, writes or states, it is computed in chunks: within a chunk as attention with
    the pattern `C[t] . B[s] exp(A (dt[s+1] + ... + dt[t])) dt[s]`, between chunks through the states at their ends.

    Hooks: `hook_gate_input` `[row, pos, head * size]` (before its SiLU), `hook_conv` (x, B and C before their SiLU),
    `hook_ssm_x` `[row, pos, head, size]`, `hook_ssm_B`, `hook_ssm_C` `[row, pos, state]`, `hook_ssm_dt` (after its
    softplus), `hook_ssm_decay` `[row, pos, head]`, `hook_ssm_write` (dt x B^T), `hook_ssm_state` (h) `[row, pos, head,
    size, state]`, `hook_recurrence_out` (y) `[row, pos, head, size]`, `hook_z` (before `out`). An edit of
    `hook_ssm_write` reaches all later states, one of `hook_ssm_state` the output at its own position only, as in
    TransformerLens.
    """

    def __init__(
        self,
        config: "SmallModelConfig",
        layer: int,
        *,
        state_size: int = 32,
        expand: int = 2,
        kernel_size: int = 4,
        chunk_size: int = 32,
    ) -> None:
        """Makes it.

        Args:
            config: of the model; its `n_heads` are the heads.
            layer: which layer it is in.
            state_size: columns of each head's state; 64 to 256 in the paper, for models of ten times the width.
            expand: the size of a head is this many times the model's `d_head`.
            kernel_size: positions that the convolution sees.
            chunk_size: positions in a chunk; a matter of speed only.
        """
        super().__init__(config, layer)
        self.state_size = state_size
        self.chunk_size = chunk_size
        self.width = expand * self.n_heads * self.d_head
        self.input = nn.Linear(self.d_model, self.width + 2 * state_size, bias=config.biases)
        self.gate = nn.Linear(self.d_model, self.width, bias=config.biases)
        self.dt = nn.Linear(self.d_model, self.n_heads, bias=config.biases)
        self.conv = CausalConv(self.width + 2 * state_size, kernel_size)
        self.dt_bias = nn.Parameter(torch.zeros(self.n_heads))
        self.A_log = nn.Parameter(torch.zeros(self.n_heads))
        self.D = nn.Parameter(torch.zeros(self.n_heads))
        self.norm_weight = nn.Parameter(torch.ones(self.width))
        self.out = nn.Linear(self.width, self.d_model, bias=config.biases)
        self.hook_gate_input = HookPoint()  # [row, pos, head * size]
        self.hook_conv = HookPoint()  # [row, pos, head * size + 2 * state]
        self.hook_ssm_x = HookPoint()  # [row, pos, head, size]
        self.hook_ssm_B = HookPoint()  # [row, pos, state]
        self.hook_ssm_C = HookPoint()
        self.hook_ssm_dt = HookPoint()  # [row, pos, head]
        self.hook_ssm_decay = HookPoint()
        self.hook_ssm_write = HookPoint()  # [row, pos, head, size, state]
        self.hook_ssm_state = HookPoint()
        self.hook_recurrence_out = HookPoint()  # [row, pos, head, size]
        self.hook_z = HookPoint()  # [row, pos, head * size]

    def initialise(self, generator: torch.Generator) -> None:
        """A uniform in -16 to -1, D = 1, time steps log-uniform in 0.001 to 0.1, as the paper's code."""
        self.conv.initialise(generator)
        self.A_log.copy_((torch.rand(self.n_heads, generator=generator) * 15 + 1).log())
        self.dt_bias.copy_(draw_step_bias(self.n_heads, generator))
        self.D.fill_(1.0)
        self.norm_weight.fill_(1.0)

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        gate = functional.silu(self.hook_gate_input(self.gate(x)))
        x, b, c, dt = self._selected(x)
        y = self.hook_recurrence_out(self._recurrence(x, b, c, dt))
        normed = functional.rms_norm(y.flatten(2) * gate, (self.width,), self.norm_weight, eps=1e-5)
        return self.out(self.hook_z(normed))

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row head dest src"]:
        """How much of `hook_ssm_x` at `src` is in `h C` at `dest`, for each head: exact.

        `C[dest] . B[src] exp(A (dt[src+1] + ... + dt[dest])) dt[src]`; the skip, which adds D to the diagonal, is left
        out.
        """
        _, b, c, dt = self._selected(x)
        decayed = products_of_decays((dt * self._a()).transpose(1, 2))
        return (c @ b.mT)[:, None] * decayed * dt.transpose(1, 2)[:, :, None]

    def _selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dt = self.hook_ssm_dt(functional.softplus(self.dt(x) + self.dt_bias))
        mixed = functional.silu(self.hook_conv(self.conv(self.input(x))))
        x, b, c = mixed.split([self.width, self.state_size, self.state_size], dim=-1)
        x = self.hook_ssm_x(x.unflatten(-1, (self.n_heads, -1)))
        return x, self.hook_ssm_B(b), self.hook_ssm_C(c), dt

    def _recurrence(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor) -> Tensor:
        if not listened_to(self.hook_ssm_decay, self.hook_ssm_write, self.hook_ssm_state):
            return chunked_recurrence(x, dt, self._a(), b, c, self.D, self.chunk_size)
        decay = self.hook_ssm_decay((dt * self._a()).exp())
        write = self.hook_ssm_write((x * dt[..., None])[..., None] * b[:, :, None, None])
        states = self.hook_ssm_state(linear_recurrence(decay[..., None, None], write))
        return (states @ c[:, :, None, :, None]).squeeze(-1) + x * self.D[:, None]

    def _a(self) -> Tensor:
        return -self.A_log.exp()


def chunked_recurrence(
    x: Float[Tensor, "row pos head size"],
    dt: Float[Tensor, "row pos head"],
    a: Float[Tensor, " head"],
    b: Float[Tensor, "row pos state"],
    c: Float[Tensor, "row pos state"],
    d: Float[Tensor, " head"],
    chunk_size: int,
) -> Float[Tensor, "row pos head size"]:
    """`h[t] c[t] + d x[t]` with `h[t] = exp(dt[t] a) h[t-1] + dt[t] x[t] b[t]^T` for each head, chunk by chunk.

    Section 6 of the Mamba-2 paper. Exponents are differences of sums within one chunk and never positive.
    """
    length, heads, size = x.shape[1:]
    chunk_size = min(chunk_size, length)
    if padding := -length % chunk_size:  # positions after the last, which no earlier one sees
        x, dt, b, c = (functional.pad(each, (0, 0) * (each.ndim - 2) + (0, padding)) for each in (x, dt, b, c))
    x, dt, b, c = (each.unflatten(1, (-1, chunk_size)) for each in (x, dt, b, c))
    log_decay = (dt * a).cumsum(2)  # since the chunk began, [row, chunk, pos, head]

    pattern = _pattern_within_chunks(log_decay.transpose(2, 3), dt.transpose(2, 3), b, c, d)
    y = (pattern @ x.transpose(2, 3)).transpose(2, 3)
    if x.shape[1] > 1:
        # What each chunk adds to the state at its end, then the state there, [row, chunk, state, head * size].
        left_at_end = _decay(log_decay[:, :-1, -1:] - log_decay[:, :-1])
        added = b[:, :-1].mT @ (x[:, :-1] * (left_at_end * dt[:, :-1])[..., None]).flatten(3)
        decay = _decay(log_decay[:, :-1, -1]).repeat_interleave(size, -1)
        read = c[:, 1:] @ linear_recurrence(decay[:, :, None], added)
        from_earlier = read.unflatten(-1, (heads, size)) * _decay(log_decay[:, 1:])[..., None]
        first, later = y.split([1, y.shape[1] - 1], 1)
        y = torch.cat([first, later + from_earlier], 1)
    return y.flatten(1, 2)[:, :length]


def _pattern_within_chunks(
    log_decay: Float[Tensor, "row chunk head pos"],
    dt: Float[Tensor, "row chunk head pos"],
    b: Float[Tensor, "row chunk pos state"],
    c: Float[Tensor, "row chunk pos state"],
    d: Float[Tensor, " head"],
) -> Float[Tensor, "row chunk head dest src"]:
    """What a position takes of the positions of its chunk, with d on the diagonal for the skip."""
    # The mask is cheaper on c b^T, which the heads share; what it removes is finite.
    decayed = _decay(log_decay[..., :, None] - log_decay[..., None, :]) * dt[..., None, :]
    skip = torch.eye(dt.shape[-1], device=d.device, dtype=d.dtype) * d[:, None, None]
    return torch.addcmul(skip, (c @ b.mT).tril()[:, :, None], decayed)


def _decay(exponent: Tensor) -> Tensor:
    """`exp(exponent)`, at most 1, and not below exp(-60), where a CPU gets slow and nothing is left to see anyway."""
    return exponent.clamp(-60.0, 0.0).exp()
