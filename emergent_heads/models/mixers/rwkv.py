"""RWKV's time mixing, versions 4 and 7: recurrences that read like attention without queries, and like a fast learner.

Only what mixes positions is here; RWKV's channel mixing is the place of the model's own MLP.
"""

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.hook_points import HookPoint

from emergent_heads.errors import ArgumentError
from emergent_heads.models.layers import at_least_32_bits, listened_to
from emergent_heads.models.mixers import Mixer
from emergent_heads.models.mixers.recurrence import linear_recurrence

if TYPE_CHECKING:
    from emergent_heads.models.small import SmallModelConfig


class RWKV4(Mixer):
    """Time mixing of RWKV-4 (arXiv 2305.13048): a running mean of values with weights that decay, for each channel.

    With k, v and the receptance r computed from a blend of the present and the previous position, channel by channel,

        wkv[t] = (sum_{i<t} exp(k[i] - (t-1-i) w) v[i] + exp(u + k[t]) v[t]) / (the same sum without v)

    and the output is a linear map of `sigmoid(r) * wkv`. The decay `w = exp(log_decay_rate)` and the bonus u of the
    present position are parameters. The matrices have no biases, as in the paper.

    Hooks, all `[row, pos, d_model]`: `hook_r` (before the sigmoid), `hook_k`, `hook_v`; the memory after each
    position, `hook_mean` (the weighted mean of the values so far) and `hook_log_weight` (the logarithm of its total
    weight; an edit of either changes what the next position reads, not the memory after it); `hook_wkv`, and `hook_z`,
    gated.
    """

    def __init__(self, config: "SmallModelConfig", layer: int) -> None:
        super().__init__(config, layer)
        width = config.d_model
        self.depth = _relative_depth(config, layer)
        self.mix_r = nn.Parameter(torch.zeros(width))
        self.mix_k = nn.Parameter(torch.zeros(width))
        self.mix_v = nn.Parameter(torch.zeros(width))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.log_decay_rate = nn.Parameter(torch.zeros(width))
        self.bonus = nn.Parameter(torch.zeros(width))
        self.out = nn.Linear(width, width, bias=False)
        self.hook_r = HookPoint()  # [row, pos, d_model], as all of them
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        self.hook_mean = HookPoint()
        self.hook_log_weight = HookPoint()
        self.hook_wkv = HookPoint()
        self.hook_z = HookPoint()

    def initialise(self, generator: torch.Generator) -> None:
        """Sets decays, bonus and blends as the paper's appendix does: spread over channels, slower in deep layers."""
        channel = torch.arange(self.d_model, dtype=torch.float64)
        through, (first_to_last, last_to_first) = channel / self.d_model, self.depth
        spread = channel / max(self.d_model - 1, 1)
        self.mix_k.copy_(through**last_to_first)
        self.mix_v.copy_(through**last_to_first + 0.3 * first_to_last)
        self.mix_r.copy_(through ** (0.5 * last_to_first))
        self.log_decay_rate.copy_(-5 + 8 * spread ** (0.7 + 1.3 * first_to_last))
        self.bonus.copy_(math.log(0.3) + 0.5 * ((channel + 1) % 3 - 1))

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        r, k, v = self._read(x)
        wkv = self.hook_wkv(self._wkv(k, v).to(v.dtype))
        return self.out(self.hook_z(r.sigmoid() * wkv))

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row channel dest src"]:
        """The weights of the running means, which sum to 1: `hook_wkv = P @ hook_v`, channel by channel.

        Each of the `d_model` channels is a head of width 1.
        """
        _, k, _ = self._read(x)
        position = torch.arange(x.shape[1], device=x.device)
        age = (position[:, None] - 1 - position).to(k.dtype)
        scores = k.transpose(1, 2)[:, :, None] - self.log_decay_rate.exp()[:, None, None] * age.clamp(min=0)
        scores = scores + torch.diag_embed(self.bonus[:, None].expand(-1, x.shape[1]))
        return scores.masked_fill(age < -1, float("-inf")).softmax(-1)

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = _previous(x)
        r = self.hook_r(self.receptance(torch.lerp(before, x, self.mix_r)))
        k = self.hook_k(self.key(torch.lerp(before, x, self.mix_k)))
        return r, k, self.hook_v(self.value(torch.lerp(before, x, self.mix_v)))

    def _wkv(self, k: Tensor, v: Tensor) -> Float[Tensor, "row pos d_model"]:
        # Exponentials of keys and quotients of their sums need 32 bits at least.
        with torch.autocast(k.device.type, enabled=False):
            k, v, rate = at_least_32_bits(k), at_least_32_bits(v), at_least_32_bits(self.log_decay_rate).exp()
            with torch.no_grad():
                # Sums are kept relative to their largest term, so that no key is too large for its exponential. Any
                # such level gives the same quotient: it needs neither a gradient nor the digits lost here.
                drift = torch.arange(k.shape[1], device=k.device, dtype=k.dtype)[:, None] * rate
                level = (k + drift).cummax(1).values - drift
                change = _previous(level) - level
            weight = (k - level).exp()
            kept = (change - rate).exp()
            sums = linear_recurrence(kept[:, :, None], torch.stack([weight * v, weight], 2))
            mean = self.hook_mean(sums[:, :, 0] / sums[:, :, 1])
            log_weight = self.hook_log_weight(level + sums[:, :, 1].log())
            share = torch.sigmoid(self.bonus + k - _previous(log_weight, float("-inf")))
            return torch.lerp(_previous(mean), v, share)


class RWKV7(Mixer):
    """Time mixing of RWKV-7 (arXiv 2503.14456): a matrix for each head that forgets, removes and writes by channel.

    With everything but the state computed from a blend of the present and the previous position, at each position

        S <- S (diag(w) - kappa^T (a * kappa)) + v^T k~;   wkv = S r

    where w is the decay of each key channel, kappa the key of what is removed (k times a parameter, of unit length), a
    how fast, and k~ the key of what is written (k scaled down where a is small). The heads' outputs are normalised,
    get a bonus of the present value, `(r . (rho * k~)) v`, and are gated by g. Decay, a and g pass through matrices of
    low rank. While nobody listens to the states, a chunk of positions is computed at once; both ways give the same
    numbers.

    Differs from the paper in one thing: later layers do not blend in the values of the first layer, as here a mixer
    knows its own layer only.

    Hooks: `hook_r`, `hook_k`, `hook_v`, `hook_log_decay` (between -0.607 and 0), `hook_a`, `hook_kappa`, `hook_g`
    `[row, pos, head, d_head]`; `hook_state` `[row, pos, head, d_value, d_key]`, S after each position (an edit changes
    what is read there, not the states after it); `hook_wkv` (before the norm) and `hook_z` (gated)
    `[row, pos, head, d_head]`.
    """

    def __init__(self, config: "SmallModelConfig", layer: int, *, rank: int = 32, chunk_size: int = 32) -> None:
        """Makes the mixer.

        Args:
            config: of the model.
            layer: which block it is in.
            rank: of the matrices that make decay, removal rate and gate.
            chunk_size: positions computed at once, at most 64; it changes the speed only.

        Raises:
            ArgumentError: a chunk above 64 positions.
        """
        super().__init__(config, layer)
        # The inverse of a chunk's decay is at most exp(0.607 * 64), far from overflow in 32 bits.
        if chunk_size > 64:
            raise ArgumentError(f"chunk_size of an RWKV7 mixer must be at most 64, not {chunk_size}")
        width = self.n_heads * self.d_head
        self.chunk_size = chunk_size
        self.depth = _relative_depth(config, layer)
        self.mix = nn.Parameter(torch.zeros(6, self.d_model))  # for r, k, v, decay, a, g
        self.receptance = nn.Linear(self.d_model, width, bias=False)
        self.key = nn.Linear(self.d_model, width, bias=False)
        self.value = nn.Linear(self.d_model, width, bias=False)
        self.down = nn.Linear(self.d_model, 3 * rank, bias=False)  # for decay, a, g
        self.decay_up = nn.Linear(rank, width)
        self.a_up = nn.Linear(rank, width)
        self.gate_up = nn.Linear(rank, width, bias=False)
        self.removal = nn.Parameter(torch.ones(self.n_heads, self.d_head))  # xi in the paper
        self.replacement = nn.Parameter(torch.ones(self.n_heads, self.d_head))  # alpha
        self.bonus = nn.Parameter(torch.zeros(self.n_heads, self.d_head))  # rho
        self.norm_weight = nn.Parameter(torch.ones(self.n_heads, self.d_head))
        self.norm_bias = nn.Parameter(torch.zeros(self.n_heads, self.d_head))
        self.out = nn.Linear(width, self.d_model, bias=False)
        self.hook_r = HookPoint()  # [row, pos, head, d_head]
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        self.hook_log_decay = HookPoint()
        self.hook_a = HookPoint()
        self.hook_kappa = HookPoint()
        self.hook_g = HookPoint()
        self.hook_state = HookPoint()  # [row, pos, head, d_value, d_key]
        self.hook_wkv = HookPoint()  # [row, pos, head, d_head]
        self.hook_z = HookPoint()

    def initialise(self, generator: torch.Generator) -> None:
        """Sets decays and blends spread over channels, slower in deep layers, as the authors' code does.

        Matrices of low rank are drawn as all others are; the bonus starts at zero.
        """
        first_to_last, last_to_first = self.depth
        through = torch.arange(self.d_model, dtype=torch.float64) / self.d_model
        powers = torch.tensor([0.2, 0.9, 0.4, 0.9, 0.9, 0.2], dtype=torch.float64) * last_to_first
        more = torch.tensor([0.0, 0.4, 0.6, 0.0, 0.0, 0.0], dtype=torch.float64) * first_to_last
        self.mix.copy_(through ** powers[:, None] + more[:, None])
        width = self.decay_up.bias.shape[0]
        spread = torch.arange(width, dtype=torch.float64) / max(width - 1, 1)
        self.decay_up.bias.copy_(-6.5 + 5 * spread ** (0.85 + first_to_last**0.5))
        self.a_up.bias.zero_()
        self.removal.fill_(0.85)
        for parameter, value in ((self.replacement, 1.0), (self.bonus, 0.0), (self.norm_weight, 1.0)):
            parameter.fill_(value)
        self.norm_bias.zero_()

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        r, log_decay, k, v, a, kappa, g = self._read(x)
        written = k * torch.addcmul(1 - self.replacement, a, self.replacement)
        if listened_to(self.hook_state):
            states = self.hook_state(rwkv7_states(log_decay, written, v, a, kappa))
            wkv = (states @ r.to(states.dtype)[..., None])[..., 0]
        else:
            wkv = rwkv7_recurrence(r, log_decay, written, v, a, kappa, self.chunk_size)
        wkv = self.hook_wkv(wkv.to(v.dtype))
        normalised = functional.layer_norm(wkv, (self.d_head,), None, None, 1e-5 * self.d_head)
        present = (r * self.bonus * written).sum(-1, keepdim=True) * v
        z = self.hook_z((torch.addcmul(self.norm_bias, normalised, self.norm_weight) + present) * g)
        return self.out(z.flatten(2))

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row head dest src"]:
        """The matrix P by which the recurrence mixes values: `hook_wkv = P @ hook_v`, head by head.

        It is exact, as the recurrence is linear in the values; P depends on the input through all else. The bonus of
        the present value, which is added after the norm, is not in it.
        """
        r, log_decay, k, v, a, kappa, _ = self._read(x)
        written = k * torch.addcmul(1 - self.replacement, a, self.replacement)
        sources = torch.eye(x.shape[1], dtype=v.dtype, device=v.device)[:, None].expand(*v.shape[:3], -1)
        return rwkv7_recurrence(r, log_decay, written, sources, a, kappa, self.chunk_size).transpose(1, 2)

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """r, log decay, k, v, a, kappa and g, each `[row, pos, head, d_head]`."""
        before, heads = _previous(x), (self.n_heads, self.d_head)
        r = self.hook_r(self.receptance(torch.lerp(before, x, self.mix[0])).unflatten(-1, heads))
        k = self.hook_k(self.key(torch.lerp(before, x, self.mix[1])).unflatten(-1, heads))
        v = self.hook_v(self.value(torch.lerp(before, x, self.mix[2])).unflatten(-1, heads))
        for_decay, for_a, for_g = self._low_rank(x)
        decay = self.decay_up(for_decay.tanh()).sigmoid() * -math.exp(-0.5)
        log_decay = self.hook_log_decay(decay.unflatten(-1, heads))
        a = self.hook_a(self.a_up(for_a).sigmoid().unflatten(-1, heads))
        kappa = self.hook_kappa(_unit(k * self.removal))
        g = self.hook_g(self.gate_up(for_g.sigmoid()).unflatten(-1, heads))
        return r, log_decay, k, v, a, kappa, g

    def _low_rank(self, x: Tensor) -> tuple[Tensor, ...]:
        """What decay, a and g are made from, `[row, pos, rank]` each, from the blends of two positions for them.

        The blend is worked into the small matrices, which spares three blends of the whole input.
        """
        weight = self.down.weight.unflatten(0, (3, -1))
        of_present = self.mix[3:, None] * weight
        weights = torch.stack([of_present, weight - of_present]).flatten(0, 2)
        present, before = functional.linear(x, weights).chunk(2, dim=-1)
        return (present + _previous(before)).chunk(3, dim=-1)


def rwkv7_recurrence(
    r: Float[Tensor, "row pos head d_key"],
    log_decay: Float[Tensor, "row pos head d_key"],
    k: Float[Tensor, "row pos head d_key"],
    v: Float[Tensor, "row pos head d_value"],
    a: Float[Tensor, "row pos head d_key"],
    kappa: Float[Tensor, "row pos head d_key"],
    chunk_size: int = 32,
) -> Float[Tensor, "row pos head d_value"]:
    """What r reads from the states, a chunk of positions at a time, in 32 bits at least.

    With the decay divided out of the keys, a chunk is a delta rule without decay, where what the positions remove
    solves a triangular system (as in Yang et al. 2024, arXiv 2412.06464, section 3.3).
    """
    # Half precision would be too coarse for the products of many decays, and there is no triangular solve in it.
    with torch.autocast(r.device.type, enabled=False):
        inputs = [
            at_least_32_bits(each).transpose(1, 2).split(chunk_size, dim=2) for each in (r, log_decay, k, v, a, kappa)
        ]
        state: Tensor | None = None
        outs: list[Tensor] = []
        for chunk in zip(*inputs, strict=True):
            out, state = _rwkv7_chunk(chunk, state)
            outs.append(out)
        return torch.cat(outs, dim=2).transpose(1, 2)


def rwkv7_states(
    log_decay: Float[Tensor, "row pos head d_key"],
    k: Float[Tensor, "row pos head d_key"],
    v: Float[Tensor, "row pos head d_value"],
    a: Float[Tensor, "row pos head d_key"],
    kappa: Float[Tensor, "row pos head d_key"],
) -> Float[Tensor, "row pos head d_value d_key"]:
    """The state after each position, one position at a time."""
    with torch.autocast(k.device.type, enabled=False):
        decay, k, v, a, kappa = (at_least_32_bits(each) for each in (log_decay.exp(), k, v, a, kappa))
        state = k.new_zeros(k.shape[0], k.shape[2], v.shape[-1], k.shape[-1])
        states: list[Tensor] = []
        for kept, key, value, rate, removed in zip(*(each.unbind(1) for each in (decay, k, v, a, kappa)), strict=True):
            held = state @ removed[..., None]
            state = state * kept[..., None, :] - held * (rate * removed)[..., None, :]
            state = state + value[..., None] * key[..., None, :]
            states.append(state)
        return torch.stack(states, dim=1)


def _rwkv7_chunk(inputs: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and last state, `[row, head, d_key, d_value]`, of one chunk; all others `[row, head, pos, d]`."""
    r, log_decay, k, v, a, kappa = inputs
    v = v.contiguous()
    until_now = log_decay.cumsum(-2).exp()
    # What is removed is read before the decay at its position, the output after it.
    until_before = functional.pad(until_now, (0, 0, 1, -1), value=1.0)
    reads = torch.cat([kappa * until_before, r * until_now], -2)
    keys = torch.stack([kappa * -a, k], -3) / until_now[..., None, :, :]
    keys = keys.flatten(-3, -2)
    # Parts by `chunk`, whose gradients are put together once, where those of slices are each padded and added.
    of_removals, of_outputs = (reads @ keys.transpose(-1, -2) * _sees(r.shape[2], r)).chunk(2, dim=-2)
    among_removals, of_writes = of_removals.chunk(2, dim=-1)
    held, read = of_writes @ v, None
    if state is not None:
        held_before, read = (reads @ state).chunk(2, dim=-2)
        held = held + held_before
    # Solved, not inverted by powers of the matrix: those grow past all precision where keys repeat.
    held = torch.linalg.solve_triangular(-among_removals, held, upper=False, unitriangular=True)
    values = torch.cat([held, v], -2)
    out = of_outputs @ values
    kept = until_now[..., -1:, :].transpose(-1, -2)
    added = keys.transpose(-1, -2) @ values
    if state is None or read is None:
        return out, kept * added
    return out + read, kept * (state + added)


def _sees(size: int, like: Tensor) -> Float[Tensor, "read key"]:
    """1 where a read of a chunk sees a key: removals those of earlier positions, outputs those of their own too."""
    here = torch.ones(size, size, dtype=like.dtype, device=like.device)
    return torch.cat([here.tril(-1), here.tril()]).repeat(1, 2)


def _relative_depth(config: "SmallModelConfig", layer: int) -> tuple[float, float]:
    """How deep a layer lies, from 0 to 1 and from 1 to nearly 0, by which RWKV's initial values vary."""
    return layer / max(config.n_layers - 1, 1), 1 - layer / config.n_layers


def _previous(x: Float[Tensor, "row pos *rest"], first: float = 0.0) -> Float[Tensor, "row pos *rest"]:
    """The position before, `first` before the first."""
    return functional.pad(x, (0, 0, 1, -1), value=first)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length one."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-12).rsqrt()
