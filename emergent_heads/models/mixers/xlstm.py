"""mLSTM, the matrix-memory cell of xLSTM: a linear recurrence with an exponential input gate and a normaliser."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.hook_points import HookPoint

from emergent_heads.errors import ArgumentError
from emergent_heads.models.layers import at_least_32_bits, listened_to
from emergent_heads.models.mixers import Mixer

if TYPE_CHECKING:
    from emergent_heads.models.small import SmallModelConfig

_EPSILON = 1e-6  # of the normaliser and of the heads' norm, as in the reference implementation


class XLSTM(Mixer):
    """The mLSTM layer of xLSTM (Beck et al. 2024, arXiv 2405.04517), in the block of xLSTM-7B (arXiv 2503.13427).

    Each head keeps a matrix C that maps keys to values, and a normaliser n:

        C <- sigmoid(f) * C + exp(i) * k v^T;   n <- sigmoid(f) * n + exp(i) * k
        h = C^T q / max(|n . q|, 1),   q divided by sqrt(d_key)

    where i and f are read from the input. The heads' outputs are normalised (LayerNorm per head) and gated by a
    sigmoid. C and n are kept divided by exp(m), with m the largest log weight so far, so that nothing overflows. While
    nobody listens to the states, a chunk of positions is computed at once; the two ways give the same numbers.

    Hooks: `hook_q`, `hook_k` `[row, pos, head, d_key]`; `hook_v`, `hook_recurrence_out` (h), `hook_output_gate`
    (before its sigmoid) and `hook_z` (normalised and gated) `[row, pos, head, d_value]`; `hook_input_gate` (i, before
    the exponential) and `hook_forget_gate` (f, before the sigmoid) `[row, pos, head]`; `hook_state` (C)
    `[row, pos, head, d_key, d_value]` and `hook_normaliser` (n) `[row, pos, head, d_key]`, both divided by exp(m). An
    edit of a state changes what is read there, not the states after it. What scales h alone, as n does, changes the
    output little, since the heads' norm follows.
    """

    def __init__(
        self,
        config: "SmallModelConfig",
        layer: int,
        *,
        d_key: int | None = None,
        d_value: int | None = None,
        gate_cap: float | None = 15.0,
        chunk_size: int = 64,
    ) -> None:
        """Makes the mixer.

        Args:
            config: of the model.
            layer: which block it is in.
            d_key: width of a head's queries and keys; None for the config's head size (xLSTM-7B takes half of it).
            d_value: width of a head's values; None for the config's head size.
            gate_cap: i and f are kept within plus and minus this by a tanh; None for no cap.
            chunk_size: positions computed at once; it changes the speed only.

        Raises:
            ArgumentError: a cap that is not positive.
        """
        super().__init__(config, layer)
        self.d_key = self.d_head if d_key is None else d_key
        self.d_value = self.d_head if d_value is None else d_value
        self.gate_cap = gate_cap
        self.chunk_size = chunk_size
        if gate_cap is not None and gate_cap <= 0:
            raise ArgumentError(f"gate_cap of an XLSTM mixer must be positive, or None for no cap, not {gate_cap}")
        keys, values = self.n_heads * self.d_key, self.n_heads * self.d_value
        self.widths = (keys, keys, values, values)
        self.input = nn.Linear(self.d_model, sum(self.widths), bias=config.biases)  # q, k, v, output gate
        self.gates = nn.Linear(self.d_model, 2 * self.n_heads)  # input, forget: always with biases
        self.norm_weight = nn.Parameter(torch.ones(self.n_heads, self.d_value))
        self.norm_bias = nn.Parameter(torch.zeros(self.n_heads, self.d_value)) if config.biases else None
        self.out = nn.Linear(values, self.d_model, bias=config.biases)
        self.hook_q = HookPoint()  # [row, pos, head, d_key]
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()  # [row, pos, head, d_value]
        self.hook_input_gate = HookPoint()  # [row, pos, head]
        self.hook_forget_gate = HookPoint()
        self.hook_state = HookPoint()  # [row, pos, head, d_key, d_value]
        self.hook_normaliser = HookPoint()  # [row, pos, head, d_key]
        self.hook_recurrence_out = HookPoint()  # [row, pos, head, d_value]
        self.hook_output_gate = HookPoint()
        self.hook_z = HookPoint()

    def initialise(self, generator: torch.Generator) -> None:
        """Starts the gates as the paper's code does: the same for every input, nearly all kept.

        Gate weights are zero; forget biases run evenly from 3 to 6 over the heads, input biases are N(0, 0.1).
        """
        input_biases = 0.1 * torch.randn(self.n_heads, generator=generator)
        with torch.no_grad():
            self.gates.weight.zero_()
            self.gates.bias.copy_(torch.cat([input_biases, torch.linspace(3.0, 6.0, self.n_heads)]))
            self.norm_weight.fill_(1.0)
            if self.norm_bias is not None:
                self.norm_bias.zero_()

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        q, k, v, input_gate, forget_gate, output_gate = self._read(x)
        if listened_to(self.hook_state, self.hook_normaliser):
            states, normalisers, log_scale = mlstm_states(k, v, input_gate, forget_gate)
            h = _read_states(q, self.hook_state(states), self.hook_normaliser(normalisers), log_scale)
        else:
            h = mlstm(q, k, v, input_gate, forget_gate, self.chunk_size)
        h = self.hook_recurrence_out(h.to(v.dtype))
        normalised = functional.layer_norm(h, (self.d_value,), eps=_EPSILON) * self.norm_weight
        if self.norm_bias is not None:
            normalised = normalised + self.norm_bias
        return self.out(self.hook_z(normalised * output_gate.sigmoid()).flatten(2))

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row head dest src"]:
        """The matrix P by which the cell mixes values, its normaliser included: `hook_recurrence_out = P @ hook_v`.

        It is exact, as the cell is linear in the values; P depends on the input through q, k and the two gates. Its
        entries may be negative, and a row need not sum to one.
        """
        q, k, v, input_gate, forget_gate, _ = self._read(x)
        length = x.shape[1]
        sources = torch.eye(length, dtype=v.dtype, device=v.device)[:, None].expand(*v.shape[:3], length)
        return mlstm(q, k, sources, input_gate, forget_gate, self.chunk_size).transpose(1, 2)

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, input and forget gate, output gate; `[row, pos, head, d]`, the two gates `[row, pos, head]`."""
        q, k, v, output_gate = (
            each.unflatten(-1, (self.n_heads, -1)) for each in self.input(x).split(self.widths, dim=-1)
        )
        gates = self.gates(x)
        if self.gate_cap is not None:
            gates = self.gate_cap * (gates / self.gate_cap).tanh()
        input_gate, forget_gate = gates.chunk(2, dim=-1)
        return (
            self.hook_q(q),
            self.hook_k(k),
            self.hook_v(v),
            self.hook_input_gate(input_gate),
            self.hook_forget_gate(forget_gate),
            self.hook_output_gate(output_gate),
        )


def mlstm(
    q: Float[Tensor, "row pos head d_key"],
    k: Float[Tensor, "row pos head d_key"],
    v: Float[Tensor, "row pos head d_value"],
    input_gate: Float[Tensor, "row pos head"],
    forget_gate: Float[Tensor, "row pos head"],
    chunk_size: int = 64,
) -> Float[Tensor, "row pos head d_value"]:
    """The mLSTM cell, a chunk of positions at a time, in 32 bits at least; gates before exponential and sigmoid."""
    with torch.autocast(q.device.type, enabled=False):  # half precision would be too coarse for sums of log gates
        tensors = (q, k, v, input_gate, functional.logsigmoid(forget_gate))
        chunks = tuple(at_least_32_bits(each).split(chunk_size, dim=1) for each in tensors)
        state: Tensor | None = None
        log_scale = chunks[-1][0].new_zeros(q.shape[0], q.shape[2])
        outs: list[Tensor] = []
        for chunk in zip(*chunks, strict=True):
            # Transposed by the chunk, and the rest done by the chunk too: what is at work then fits the cache.
            transposed = tuple(each.transpose(1, 2).contiguous() for each in chunk)
            out, state, log_scale = _mlstm_chunk(transposed, state, log_scale)
            outs.append(out.transpose(1, 2))
        return torch.cat(outs, dim=1)


def mlstm_states(
    k: Float[Tensor, "row pos head d_key"],
    v: Float[Tensor, "row pos head d_value"],
    input_gate: Float[Tensor, "row pos head"],
    forget_gate: Float[Tensor, "row pos head"],
) -> tuple[
    Float[Tensor, "row pos head d_key d_value"], Float[Tensor, "row pos head d_key"], Float[Tensor, "row pos head"]
]:
    """State, normaliser and log scale m after each position, one position at a time; both are divided by exp(m)."""
    with torch.autocast(k.device.type, enabled=False):
        k, v, log_input, log_forget = (
            at_least_32_bits(each) for each in (k, v, input_gate, functional.logsigmoid(forget_gate))
        )
        v = functional.pad(v, (0, 1), value=1.0)
        state = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1])
        log_scale = log_input.new_zeros(log_input[:, 0].shape)
        states: list[Tensor] = []
        log_scales: list[Tensor] = []
        for key, value, enter, keep in zip(*(each.unbind(1) for each in (k, v, log_input, log_forget)), strict=True):
            scale = torch.maximum(keep + log_scale, enter).detach()
            kept, entered = (keep + log_scale - scale).exp(), (enter - scale).exp()
            state = kept[..., None, None] * state + (entered[..., None] * key)[..., None] * value[..., None, :]
            log_scale = scale
            states.append(state)
            log_scales.append(log_scale)
        trajectory = torch.stack(states, dim=1)
        return trajectory[..., :-1], trajectory[..., -1], torch.stack(log_scales, dim=1)


def _mlstm_chunk(chunk: tuple[Tensor, ...], state: Tensor | None, log_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, last state and its log scale of one chunk: q, k, v `[row, head, pos, d]`, log gates `[row, head, pos]`.

    The last column of the state is the normaliser. Everything is divided by exp(m), here m = total + scale. As m is no
    part of the function no gradient need go through the maximum.
    """
    q, k, v, log_input, log_forget = chunk
    q = q * q.shape[-1] ** -0.5
    v = functional.pad(v, (0, 1), value=1.0)  # the normaliser is one more value, of which every position has 1
    total = log_forget.cumsum(-1)
    entering = log_input - total  # log weight of each position, counted from the chunk's start
    scale = torch.maximum(entering.detach().cummax(-1).values, log_scale.detach()[..., None])
    later = torch.full((q.shape[2], q.shape[2]), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    weights = (entering[..., None, :] - scale[..., :, None] + later).exp()  # [dest, src]
    mixed = (q @ k.transpose(-1, -2) * weights) @ v
    added = ((entering - scale[..., -1:]).exp()[..., None] * k).transpose(-1, -2) @ v
    if state is not None:
        kept = (log_scale[..., None] - scale).exp()
        mixed = mixed + kept[..., None] * (q @ state)
        added = added + kept[..., -1, None, None] * state
    floor = (-(total + scale)).exp()[..., None]
    out = mixed[..., :-1] / (torch.maximum(mixed[..., -1:].abs(), floor) + _EPSILON)
    return out, added, total[..., -1] + scale[..., -1]


def _read_states(q: Tensor, states: Tensor, normalisers: Tensor, log_scale: Tensor) -> Tensor:
    q = q.to(states.dtype) * q.shape[-1] ** -0.5
    read = torch.einsum("rphk,rphkv->rphv", q, states)
    norm = torch.einsum("rphk,rphk->rph", q, normalisers).abs()
    return read / (torch.maximum(norm, (-log_scale).exp()) + _EPSILON)[..., None]
