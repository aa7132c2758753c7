"""Mamba's selective state space model: a linear recurrence whose decay, input and readout follow the input."""

import math
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.hook_points import HookPoint

from emergent_heads.models.layers import listened_to
from emergent_heads.models.mixers import Mixer
from emergent_heads.models.mixers.convolution import CausalConv
from emergent_heads.models.mixers.recurrence import linear_recurrence, products_of_decays
from emergent_heads.models.mixers.stacking import apply_to_stack

if TYPE_CHECKING:
    from emergent_heads.models.small import SmallModelConfig

_SHORTEST_STEP, _LONGEST_STEP = 1e-3, 1e-1  # time steps when training starts, section 3.6 of the Mamba paper


class Mamba(Mixer):
    """Mamba (Gu & Dao 2023, arXiv 2312.00752), with a state of `state_size` numbers for each of its channels.

    One linear map goes through a short convolution and a SiLU into the scan of each channel, `h[t] = exp(dt[t] A)
    h[t-1] + dt[t] B[t] x[t]`, `y[t] = C[t] . h[t] + D x[t]`; another, through a SiLU, gates y before `out`. The time
    step dt (one for each channel) and B, C (shared by all channels) are linear in x, A and D are parameters. The time
    step, and the convolution, have biases whatever the model's linear maps have.

    While nobody listens to the decays, writes or states, no tensor of all states is made: forwards only the current
    one exists, and the hand-written backward pass computes eight positions' anew at a time.

    Hooks, `[row, pos, channel]` but where said otherwise: `hook_gate_input` (before its SiLU), `hook_conv` (before its
    SiLU), `hook_ssm_x` (what the scan reads), `hook_ssm_dt` (after its softplus), `hook_ssm_B`, `hook_ssm_C` `[row,
    pos, state]`, `hook_ssm_decay`, `hook_ssm_write` (dt B x), `hook_ssm_state` (h) `[row, pos, channel, state]`,
    `hook_recurrence_out` (y), `hook_z` (before `out`). An edit of `hook_ssm_write` reaches all later states, one of
    `hook_ssm_state` the output at its own position only, as in TransformerLens.
    """

    def __init__(
        self,
        config: "SmallModelConfig",
        layer: int,
        *,
        state_size: int = 16,
        expand: int = 2,
        kernel_size: int = 4,
        dt_rank: int | None = None,
    ) -> None:
        """Makes it; the defaults are the paper's.

        Args:
            config: of the model.
            layer: which layer it is in.
            state_size: numbers in each channel's state.
            expand: channels per d_model.
            kernel_size: positions that the convolution sees.
            dt_rank: rank of the map from x to the time steps; None for d_model / 16, rounded up.
        """
        super().__init__(config, layer)
        self.state_size = state_size
        self.channels = expand * self.d_model
        self.dt_rank = dt_rank or -(-self.d_model // 16)
        self.input = nn.Linear(self.d_model, self.channels, bias=config.biases)
        self.gate = nn.Linear(self.d_model, self.channels, bias=config.biases)
        self.conv = CausalConv(self.channels, kernel_size)
        self.select = nn.Linear(self.channels, self.dt_rank + 2 * state_size, bias=False)
        self.dt = nn.Linear(self.dt_rank, self.channels)
        self.A_log = nn.Parameter(torch.zeros(self.channels, state_size))
        self.D = nn.Parameter(torch.zeros(self.channels))
        self.out = nn.Linear(self.channels, self.d_model, bias=config.biases)
        self.hook_gate_input = HookPoint()  # [row, pos, channel]
        self.hook_conv = HookPoint()
        self.hook_ssm_x = HookPoint()
        self.hook_ssm_dt = HookPoint()
        self.hook_ssm_B = HookPoint()  # [row, pos, state]
        self.hook_ssm_C = HookPoint()
        self.hook_ssm_decay = HookPoint()  # [row, pos, channel, state]
        self.hook_ssm_write = HookPoint()
        self.hook_ssm_state = HookPoint()
        self.hook_recurrence_out = HookPoint()  # [row, pos, channel]
        self.hook_z = HookPoint()

    def initialise(self, generator: torch.Generator) -> None:
        """A = -1, -2, ..., D = 1, time steps log-uniform in 0.001 to 0.1, as the paper's section 3.6 and its code."""
        self.conv.initialise(generator)
        self.A_log.copy_(torch.arange(1.0, self.state_size + 1).log().expand_as(self.A_log))
        self.D.fill_(1.0)
        weight = torch.rand(self.dt.weight.shape, generator=generator) * 2 - 1
        self.dt.weight.copy_(weight * self.dt_rank**-0.5)
        self.dt.bias.copy_(draw_step_bias(self.channels, generator))

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        gate = _by_position(self.gate, x)
        x = self._convolved(x)
        dt, b, c = self._selected(x)
        y = self.hook_recurrence_out(self._scan(x, dt, b, c))
        return _by_position(self.out, self.hook_z(y * functional.silu(self.hook_gate_input(gate))))

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row channel dest src"]:
        """How much of `hook_ssm_x` at `src` is in `C . h` at `dest`, for each channel: exact.

        The hidden attention of Ali et al. 2024 (arXiv 2403.01590), `C[dest] . exp(A (dt[src+1] + ... + dt[dest]))
        dt[src] B[src]`. The skip, which adds D to the diagonal, is left out.
        """
        dt, b, c = self._selected(self._convolved(x))
        dt = dt.transpose(1, 2)
        total = dt.new_zeros(*dt.shape, dt.shape[-1])
        for state, a in enumerate((-self.A_log.exp()).unbind(-1)):
            decayed = products_of_decays(dt * a[:, None])
            total += c[:, None, :, None, state] * decayed * b[:, None, None, :, state]
        return total * dt[..., None, :]

    def _convolved(self, x: Tensor) -> Tensor:
        return self.hook_ssm_x(functional.silu(self.hook_conv(self.conv(_by_position(self.input, x)))))

    def _selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dt, b, c = _by_position(self.select, x).split([self.dt_rank, self.state_size, self.state_size], dim=-1)
        dt = functional.softplus(_by_position(self.dt, dt))
        return self.hook_ssm_dt(dt), self.hook_ssm_B(b), self.hook_ssm_C(c)

    def _scan(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a = -self.A_log.exp()
        if not listened_to(self.hook_ssm_decay, self.hook_ssm_write, self.hook_ssm_state):
            return selective_scan(x, dt, a, b, c, self.D)
        decay = self.hook_ssm_decay((dt[..., None] * a).exp())
        write = self.hook_ssm_write((dt * x)[..., None] * b[..., None, :])
        states = self.hook_ssm_state(linear_recurrence(decay, write))
        return (states @ c[..., None]).squeeze(-1) + x * self.D


def _by_position(linear: nn.Linear, x: Float[Tensor, "row pos in"]) -> Float[Tensor, "row pos out"]:
    """`linear(x)`, laid out in memory as `[pos, row, out]`: the scan goes over positions, and need not copy then."""
    return linear(x.transpose(0, 1)).transpose(0, 1)


def draw_step_bias(size: int, generator: torch.Generator) -> Float[Tensor, " size"]:
    """Biases whose softplus is log-uniform in 0.001 to 0.1."""
    low, high = math.log(_SHORTEST_STEP), math.log(_LONGEST_STEP)
    step = (torch.rand(size, generator=generator) * (high - low) + low).exp()
    return step + (-torch.expm1(-step)).log()  # the inverse of softplus


def selective_scan(
    x: Float[Tensor, "row pos channel"],
    dt: Float[Tensor, "row pos channel"],
    a: Float[Tensor, "channel state"],
    b: Float[Tensor, "row pos state"],
    c: Float[Tensor, "row pos state"],
    d: Float[Tensor, " channel"],
) -> Float[Tensor, "row pos channel"]:
    """`c[t] . h[t] + d x[t]` with `h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]`, for each channel; a is negative.

    In single precision at least, with a backward pass of its own, which can be differentiated once and works under
    `torch.func` transforms. Fastest where the tensors' memory is laid out as `[pos, row, channel]`.
    """
    tensors = (x, dt, a.T, b, c, d)
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return _SelectiveScan.apply(*(tensor.to(dtype) for tensor in tensors))[0]


_SEGMENT = 8  # positions whose decays and states the backward pass holds at once: few enough to stay in the cache


class _SelectiveScan(torch.autograd.Function):
    """Gives the outputs `[*stack, row, pos, channel]` and the states before each segment, for the backward pass.

    Of x, dt `[*stack, row, pos, channel]`, a `[*stack, state, channel]`, b, c `[*stack, row, pos, state]` and d
    `[*stack, channel]`. The loops go over positions with tensors `[row, state, channel]`, changed in place.
    """

    @staticmethod
    def forward(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        rows = _Rows(x, dt, a, b, c, d)
        y = torch.empty_like(rows.x)
        state = rows.zero_state()
        decay = torch.empty_like(state)
        starts = state.new_empty(-(-len(y) // _SEGMENT), *state.shape)
        for t, (x_t, dt_t, b_t, c_t, y_t) in enumerate(zip(rows.x, rows.dt, rows.b, rows.c, y, strict=True)):
            if t % _SEGMENT == 0:
                starts[t // _SEGMENT] = state
            torch.mul(dt_t, rows.a, out=decay).exp_()
            state.mul_(decay).addcmul_(b_t.mT, dt_t * x_t)
            torch.bmm(c_t, state, out=y_t).addcmul_(x_t, rows.d)
        return rows.positions_last(y), starts.unflatten(1, rows.shape).movedim(0, -3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: "Tensor | None", _: None) -> tuple["Tensor | None", ...]:  # pyright: ignore
        return (None,) * 6 if dy is None else _SelectiveScanGradient.apply(*ctx.saved_tensors, dy)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return apply_to_stack(_SelectiveScan, info.batch_size, in_dims, arguments)


class _SelectiveScanGradient(torch.autograd.Function):
    """Gradients of x, dt, a, b, c and d, from the last segment to the first."""

    @staticmethod
    def forward(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor, dy: Tensor
    ) -> tuple[Tensor, ...]:
        rows = _Rows(x, dt, a, b, c, d)
        dy = rows.positions_first(dy)
        dx, ddt, db, dc = (torch.empty_like(each) for each in (rows.x, rows.dt, rows.b, rows.c))
        dstate, product, da = (rows.zero_state() for _ in range(3))
        dd = torch.zeros_like(dy[0])
        decays = dstate.new_empty(_SEGMENT, *dstate.shape).unbind()
        states = dstate.new_empty(_SEGMENT + 1, *dstate.shape).unbind()
        writes = dy.new_empty(_SEGMENT, *dy.shape[1:]).unbind()
        by_position = [*zip(*map(torch.unbind, (rows.x, rows.dt, rows.b, rows.c, dy, dx, ddt, db, dc)), strict=True)]
        segments = starts.movedim(-3, 0).flatten(1, -3).unbind()
        for segment, start in reversed([*enumerate(segments)]):
            within = by_position[segment * _SEGMENT : (segment + 1) * _SEGMENT]
            states[0].copy_(start)
            for i, (x_t, dt_t, b_t, *_) in enumerate(within):
                torch.mul(dt_t, x_t, out=writes[i])
                torch.mul(dt_t, rows.a, out=decays[i]).exp_()
                torch.mul(states[i], decays[i], out=states[i + 1]).addcmul_(b_t.mT, writes[i])
            for i, (x_t, dt_t, b_t, c_t, dy_t, dx_t, ddt_t, db_t, dc_t) in reversed([*enumerate(within)]):
                dstate.addcmul_(c_t.mT, dy_t)
                # In this order of the factors the product is three times as fast as in the other.
                torch.bmm(dy_t, states[i + 1].mT, out=dc_t)
                torch.bmm(writes[i], dstate.mT, out=db_t)
                dwrite = torch.bmm(b_t, dstate)
                # From here on the gradient of the state before t; times that state, of the exponent dt[t] a.
                torch.mul(dstate.mul_(decays[i]), states[i], out=product)
                da.addcmul_(product, dt_t)
                torch.sum(product.mul_(rows.a), -2, keepdim=True, out=ddt_t).addcmul_(dwrite, x_t)
                torch.mul(dwrite, dt_t, out=dx_t).addcmul_(dy_t, rows.d)
                dd.addcmul_(dy_t, x_t)
        dx, ddt, db, dc = map(rows.positions_last, (dx, ddt, db, dc))
        return dx, ddt, rows.summed(da), db, dc, rows.summed(dd).squeeze(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        raise RuntimeError(
            "the fast selective scan cannot be differentiated twice; hook hook_ssm_state, and it is computed step by "
            "step, which can"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return apply_to_stack(_SelectiveScanGradient, info.batch_size, in_dims, arguments)


class _Rows:
    """The scan's tensors with positions first and the rows of all models in one dimension, `[pos, row, 1, feature]`.

    a is `[1 or row, state, channel]` and d `[1 or row, 1, channel]`.
    """

    def __init__(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
        self.shape = x.shape[:-2]
        self.x, self.dt, self.b, self.c = map(self.positions_first, (x, dt, b, c))
        self.a, self.d = self._of_each_row(a), self._of_each_row(d[..., None, :])

    @staticmethod
    def positions_first(x: Float[Tensor, "*stack row pos feature"]) -> Float[Tensor, "pos rows 1 feature"]:
        return x.movedim(-2, 0).flatten(1, -2).contiguous()[:, :, None]

    def positions_last(self, x: Float[Tensor, "pos rows 1 feature"]) -> Float[Tensor, "*stack row pos feature"]:
        return x.view(len(x), *self.shape, -1).movedim(0, -2)

    def zero_state(self) -> Float[Tensor, "rows state channel"]:
        return self.x.new_zeros(self.x.shape[1], *self.a.shape[1:])

    def summed(self, x: Float[Tensor, "rows size channel"]) -> Float[Tensor, "*stack size channel"]:
        """The sum over the rows of each model."""
        return x.unflatten(0, self.shape).sum(-3)

    def _of_each_row(self, parameter: Float[Tensor, "*stack size channel"]) -> Float[Tensor, "#rows size channel"]:
        if parameter.ndim == 2:
            return parameter.contiguous()[None]
        return parameter[..., None, :, :].expand(*self.shape, *parameter.shape[-2:]).flatten(0, -3)
