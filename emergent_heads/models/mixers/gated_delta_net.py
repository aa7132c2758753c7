"""Gated DeltaNet: a linear recurrence that overwrites what it remembers under a key, and forgets at a learned rate."""

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.hook_points import HookPoint

from emergent_heads.models.layers import at_least_32_bits, listened_to
from emergent_heads.models.mixers import Mixer
from emergent_heads.models.mixers.convolution import CausalConv

if TYPE_CHECKING:
    from emergent_heads.models.small import SmallModelConfig


class GatedDeltaNet(Mixer):
    """The gated delta rule (Yang, Kautz & Hatamizadeh 2024, arXiv 2412.06464), as in Qwen3-Next.

    Each head keeps a matrix S that maps keys to values. At each position S is decayed, what it holds under the key is
    moved towards the value, and the query reads it:

        S <- exp(log_decay) * S;   S <- S + beta * k (v - S^T k)^T;   o = S^T q / sqrt(d_key)

    with q and k of unit length, each of q, k, v after a short causal convolution and a SiLU. The heads' outputs are
    normalised and gated. While nobody listens to the states, a chunk of positions is computed at once, as in the
    paper's section 3.3; the two ways give the same numbers.

    Hooks: `hook_q`, `hook_k` `[row, pos, head, d_key]` and `hook_v` `[row, pos, head, d_value]` after convolution and
    SiLU, before q and k are normalised; `hook_beta` and `hook_log_decay` (not positive) `[row, pos, head]`;
    `hook_state` `[row, pos, head, d_key, d_value]`, S after each position (an edit changes what is read there, not the
    states after it); `hook_recurrence_out`, `hook_gate_input` (before its SiLU) and `hook_z` (normalised and gated)
    `[row, pos, head, d_value]`.
    """

    def __init__(
        self,
        config: "SmallModelConfig",
        layer: int,
        *,
        d_key: int | None = None,
        d_value: int | None = None,
        kernel_size: int = 4,
        chunk_size: int = 32,
    ) -> None:
        """Makes the mixer.

        Args:
            config: of the model.
            layer: which block it is in.
            d_key: width of a head's queries and keys; None for the config's head size.
            d_value: width of a head's values; None for the config's head size.
            kernel_size: positions that the short convolutions see, their own included.
            chunk_size: positions computed at once; it changes the speed only.
        """
        super().__init__(config, layer)
        self.d_key = self.d_head if d_key is None else d_key
        self.d_value = self.d_head if d_value is None else d_value
        self.chunk_size = chunk_size
        keys, values = self.n_heads * self.d_key, self.n_heads * self.d_value
        self.widths = (2 * keys + values, values, self.n_heads, self.n_heads)
        self.input = nn.Linear(self.d_model, sum(self.widths), bias=config.biases)  # q, k, v; gate; beta; decay
        self.convolution = CausalConv(2 * keys + values, kernel_size, bias=False)
        self.log_rate = nn.Parameter(torch.zeros(self.n_heads))
        self.rate_bias = nn.Parameter(torch.zeros(self.n_heads))
        self.norm_weight = nn.Parameter(torch.ones(self.d_value))
        self.out = nn.Linear(values, self.d_model, bias=config.biases)
        self.hook_q = HookPoint()  # [row, pos, head, d_key]
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()  # [row, pos, head, d_value]
        self.hook_beta = HookPoint()  # [row, pos, head]
        self.hook_log_decay = HookPoint()
        self.hook_state = HookPoint()  # [row, pos, head, d_key, d_value]
        self.hook_recurrence_out = HookPoint()  # [row, pos, head, d_value]
        self.hook_gate_input = HookPoint()
        self.hook_z = HookPoint()

    def initialise(self, generator: torch.Generator) -> None:
        """Draws the decay's rates as in Mamba-2 and the paper's code: a forgetting time per head, long for most.

        `exp(log_rate)` is uniform in (0.01, 16) and `softplus(rate_bias)` log-uniform in (0.001, 0.1).
        """
        rate = 0.01 + (16 - 0.01) * torch.rand(self.n_heads, generator=generator)
        low, high = math.log(0.001), math.log(0.1)
        step = (low + (high - low) * torch.rand(self.n_heads, generator=generator)).exp()
        with torch.no_grad():
            self.log_rate.copy_(rate.log())
            self.rate_bias.copy_(step.expm1().log())  # the inverse of softplus
            self.norm_weight.fill_(1.0)
            self.convolution.initialise(generator)

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        q, k, v, beta, log_decay, gate = self._read(x)
        if listened_to(self.hook_state):
            states = self.hook_state(gated_delta_states(k, v, beta, log_decay))
            out = torch.einsum("rphk,rphkv->rphv", _scaled(q).to(states.dtype), states)
        else:
            out = gated_delta_rule(q, k, v, beta, log_decay, self.chunk_size)
        out = self.hook_recurrence_out(out.to(v.dtype))
        normalised = functional.rms_norm(out, (self.d_value,), self.norm_weight, 1e-6)
        return self.out(self.hook_z(normalised * functional.silu(gate)).flatten(2))

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row head dest src"]:
        """The matrix P by which the recurrence mixes values: `hook_recurrence_out = P @ hook_v`, head by head.

        It is exact, as the rule is linear in the values; P depends on the input through q, k, beta and the decay.
        """
        q, k, v, beta, log_decay, _ = self._read(x)
        length = x.shape[1]
        sources = torch.eye(length, dtype=v.dtype, device=v.device)[:, None].expand(*v.shape[:3], length)
        return gated_delta_rule(q, k, sources, beta, log_decay, self.chunk_size).transpose(1, 2)

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v `[row, pos, head, d]`, beta and log decay `[row, pos, head]`, the gate `[row, pos, head, d]`."""
        mixed, gate, beta, rate = self.input(x).split(self.widths, dim=-1)
        keys, values = self.n_heads * self.d_key, self.n_heads * self.d_value
        q, k, v = functional.silu(self.convolution(mixed)).split((keys, keys, values), dim=-1)
        q = self.hook_q(q.unflatten(-1, (self.n_heads, self.d_key)))
        k = self.hook_k(k.unflatten(-1, (self.n_heads, self.d_key)))
        v = self.hook_v(v.unflatten(-1, (self.n_heads, self.d_value)))
        log_decay = self.hook_log_decay(-self.log_rate.exp() * functional.softplus(rate + self.rate_bias))
        gate = self.hook_gate_input(gate.unflatten(-1, (self.n_heads, self.d_value)))
        return q, k, v, self.hook_beta(beta.sigmoid()), log_decay, gate


def gated_delta_rule(
    q: Float[Tensor, "row pos head d_key"],
    k: Float[Tensor, "row pos head d_key"],
    v: Float[Tensor, "row pos head d_value"],
    beta: Float[Tensor, "row pos head"],
    log_decay: Float[Tensor, "row pos head"],
    chunk_size: int = 32,
) -> Float[Tensor, "row pos head d_value"]:
    """The gated delta rule, a chunk of positions at a time, in 32 bits at least.

    Within a chunk, what the positions write solves a triangular system (the paper's section 3.3); from chunk to chunk
    the state is carried on.
    """
    # Half precision would be too coarse for the products of many decays, and there is no triangular solve in it.
    with torch.autocast(q.device.type, enabled=False):
        state: Tensor | None = None
        outs: list[Tensor] = []
        chunks = tuple(at_least_32_bits(each).split(chunk_size, dim=1) for each in (q, k, v, beta, log_decay))
        for chunk in zip(*chunks, strict=True):
            # Transposed by the chunk, and the rest done by the chunk too: what is at work then fits the cache.
            out, state = _delta_chunk(tuple(each.transpose(1, 2).contiguous() for each in chunk), state)
            outs.append(out.transpose(1, 2))
        return torch.cat(outs, dim=1)


def gated_delta_states(
    k: Float[Tensor, "row pos head d_key"],
    v: Float[Tensor, "row pos head d_value"],
    beta: Float[Tensor, "row pos head"],
    log_decay: Float[Tensor, "row pos head"],
) -> Float[Tensor, "row pos head d_key d_value"]:
    """The state after each position, one position at a time."""
    with torch.autocast(k.device.type, enabled=False):
        k, v, beta, decay = (at_least_32_bits(each) for each in (_unit(k), v, beta, log_decay.exp()))
        state = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1])
        states: list[Tensor] = []
        for key, value, strength, kept in zip(*(each.unbind(1) for each in (k, v, beta, decay)), strict=True):
            state = kept[..., None, None] * state
            held = torch.einsum("rhk,rhkv->rhv", key, state)
            state = state + key[..., None] * (strength[..., None] * (value - held))[..., None, :]
            states.append(state)
        return torch.stack(states, dim=1)


def _delta_chunk(chunk: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and last state of one chunk: q, k, v `[row, head, pos, d]`, beta and log decay `[row, head, pos]`."""
    q, k, v, beta, log_decay = chunk
    q, k = _scaled(q), _unit(k)
    total = log_decay.cumsum(-1)
    # Masked before the exponential, which would overflow for later positions and leave no gradient.
    later = torch.full((q.shape[2], q.shape[2]), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :] + later).exp()  # [dest, src]
    since_start, until_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    unheld = v if state is None else v - since_start * (k @ state)
    # Position t writes k_t w_t^T with w_t = beta_t (v_t - what S held under k_t), which earlier writes of the chunk
    # are part of. Solved, not inverted by powers of the matrix: those grow past all precision where keys repeat.
    overlap = beta[..., None] * (k @ k.transpose(-1, -2)) * between
    written = torch.linalg.solve_triangular(overlap, beta[..., None] * unheld, upper=False, unitriangular=True)
    out = (q @ k.transpose(-1, -2) * between) @ written
    added = (until_end * k).transpose(-1, -2) @ written
    if state is None:
        return out, added
    return out + since_start * (q @ state), total[..., -1].exp()[..., None, None] * state + added


def _unit(x: Tensor) -> Tensor:
    """Vectors of length one; epsilon as in flash-linear-attention and transformers."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _scaled(q: Tensor) -> Tensor:
    """Vectors of length `1 / sqrt(d_key)`."""
    return q * (q.shape[-1] * (q.square().sum(-1, keepdim=True) + 1e-6)).rsqrt()
