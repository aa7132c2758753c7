"""Token mixing by learned matrices over positions: the causal MLP-Mixer, and one matrix for each head.

Both know positions by number and not by what stands there. That suits tasks in which every position reads the same
places in every sequence, such as the linear map.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens.hook_points import HookPoint

from emergent_heads.models.layers import listened_to
from emergent_heads.models.mixers import Mixer

if TYPE_CHECKING:
    from emergent_heads.models.small import SmallModelConfig

# Positions computed together: what lies above the diagonal in a block is computed in vain, small blocks cost calls.
_BLOCK = 64


class MLPMixer(Mixer):
    """The token-mixing MLP of MLP-Mixer (arXiv 2105.01601), made causal.

    Every position has `hidden_units` units. The units of position s read positions up to s, the output at t reads the
    units of positions up to t, so both matrices are block lower-triangular. A GELU stands between them. All channels
    share the matrices; each channel is mixed by itself. Shorter sequences take the upper left corner.

    Hooks: `hook_pre`, `hook_post` `[row, pos, unit, d_model]`, the units before and after the GELU.

    Attributes:
        hidden_units: units of each position. On the linear map (S = 16, one layer, learning rate 1e-3, one seed) eight
            solved all 16 output bits in 900 steps, and one solved 10 in 1,200 and no more by 1,500.
        read_weight: `[context * hidden_units, context]`, from positions to units. What stands above the diagonal is
            never used.
        write_weight: `[context, context * hidden_units]`, from units to positions.
    """

    read_mask: Tensor
    write_mask: Tensor

    def __init__(self, config: "SmallModelConfig", layer: int, hidden_units: int = 8) -> None:
        super().__init__(config, layer)
        context = config.context or 1
        self.hidden_units = hidden_units
        self._gpt2_std = 0.02 * (2 * config.n_layers) ** -0.5 if config.initialisation == "gpt2" else None
        self.read_weight = nn.Parameter(torch.zeros(context * hidden_units, context))
        self.write_weight = nn.Parameter(torch.zeros(context, context * hidden_units))
        self.read_bias = nn.Parameter(torch.zeros(context * hidden_units)) if config.biases else None
        self.write_bias = nn.Parameter(torch.zeros(context)) if config.biases else None
        visible = torch.ones(context, context).tril()
        self.register_buffer("read_mask", visible.repeat_interleave(hidden_units, 0), persistent=False)
        self.register_buffer("write_mask", visible.repeat_interleave(hidden_units, 1), persistent=False)
        self.hook_pre = HookPoint()  # [row, pos, unit, d_model]
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        rows, length, width = x.shape
        columns = x.transpose(0, 1).reshape(length, rows * width)  # one matrix product for all rows and channels
        pres = [self._read(columns, start) for start in range(0, length, _BLOCK)]
        if listened_to(self.hook_pre, self.hook_post):
            pre = self.hook_pre(torch.cat(pres).view(length, self.hidden_units, rows, width).permute(2, 0, 1, 3))
            post = self.hook_post(functional.gelu(pre)).permute(1, 2, 0, 3).reshape(-1, rows * width)
            posts = post.split(_BLOCK * self.hidden_units)
        else:
            posts = [functional.gelu(pre) for pre in pres]
        mixed = self._write(posts, length)
        if self.write_bias is not None:
            mixed = mixed + self.write_bias[:length, None]
        return mixed.view(length, rows, width).transpose(0, 1)

    def initialise(self, generator: torch.Generator) -> None:
        """As the model's `initialisation` draws linear maps, where the fan-in is what a row of a matrix really reads.

        Drawn with the full length as fan-in, early positions are faint, and the linear map takes a third longer.
        """
        maps = (
            (self.read_weight, self.read_bias, self.read_mask),
            (self.write_weight, self.write_bias, self.write_mask),
        )
        for weight, bias, mask in maps:
            if self._gpt2_std is not None:
                std = self._gpt2_std if weight is self.write_weight else 0.02
                weight.copy_(torch.randn(weight.shape, generator=generator) * std * mask)
                continue
            bound = mask.sum(1) ** -0.5
            weight.copy_((torch.rand(weight.shape, generator=generator) * 2 - 1) * bound[:, None] * mask)
            if bias is not None:
                bias.copy_((torch.rand(bias.shape, generator=generator) * 2 - 1) * bound)

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row 1 dest src"]:
        """How outputs change with inputs at this input: the derivative of output t of a channel by its input s.

        A channel's output depends on the same channel's inputs only. Given is the exact mean of the derivatives over
        channels; they differ between channels only in the slope of the GELU at the units.
        """
        length = x.shape[1]
        units = length * self.hidden_units
        columns = x.transpose(0, 1).flatten(1)
        pre = torch.cat([self._read(columns, start) for start in range(0, length, _BLOCK)]).detach()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(functional.gelu(pre.requires_grad_()).sum(), pre)
        slope = slope.view(units, *x.shape[::2]).mean(-1).T  # [row, pos * unit]
        read = (self.read_weight * self.read_mask)[:units, :length]
        write = (self.write_weight * self.write_mask)[:length, :units]
        return ((write * slope[:, None]) @ read)[:, None]

    def _read(self, columns: Float[Tensor, "pos column"], start: int) -> Float[Tensor, "unit column"]:
        """The units of the block of positions that begins at `start`."""
        stop = min(start + _BLOCK, columns.shape[0])
        of = slice(start * self.hidden_units, stop * self.hidden_units)
        weight = self.read_weight[of, :stop] * self.read_mask[of, :stop]
        if self.read_bias is None:
            return weight @ columns[:stop]
        return torch.addmm(self.read_bias[of, None], weight, columns[:stop])

    def _write(self, posts: "list[Tensor] | tuple[Tensor, ...]", length: int) -> Float[Tensor, "pos column"]:
        """The sum of what the blocks of units write to their own and later positions."""
        total: Tensor | None = None
        for block, post in enumerate(posts):
            start = block * _BLOCK
            units = slice(start * self.hidden_units, start * self.hidden_units + post.shape[0])
            weight = self.write_weight[start:length, units] * self.write_mask[start:length, units]
            written = functional.pad(weight @ post, (0, 0, start, 0)) if start else weight @ post
            total = written if total is None else total + written
        return total  # pyright: ignore[reportReturnType] - there is at least one block


class LinearMixer(Mixer):
    """One learned lower-triangular matrix over positions for each head: attention whose pattern is a parameter.

    The matrix has entries of any size and sign, and rows that need not sum to 1. Shorter sequences take its upper left
    corner. It can be patched as a pattern. One layer of it solved no bit of the linear map (S = 16) in 1,500 steps.

    Hooks: `hook_v`, `hook_z` `[row, pos, head, d_head]`, `hook_pattern` `[row, head, dest, src]`.

    Attributes:
        pattern: `[head, dest, src]`; what stands above the diagonal is never used.
    """

    has_pattern = True
    mask: Tensor

    def __init__(self, config: "SmallModelConfig", layer: int) -> None:
        super().__init__(config, layer)
        context, width = config.context or 1, self.n_heads * self.d_head
        self._gpt2 = config.initialisation == "gpt2"
        self.value = nn.Linear(self.d_model, width, bias=config.biases)
        self.out = nn.Linear(width, self.d_model, bias=config.biases)
        self.pattern = nn.Parameter(torch.zeros(self.n_heads, context, context))
        self.register_buffer("mask", torch.ones(context, context).tril(), persistent=False)
        self.hook_v = HookPoint()  # [row, pos, head, d_head]
        self.hook_pattern = HookPoint()  # [row, head, dest, src]
        self.hook_z = HookPoint()

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        rows, length, _ = x.shape
        v = self.hook_v(self.value(x).view(rows, length, self.n_heads, self.d_head))
        pattern = self._pattern(length)
        if listened_to(self.hook_pattern):
            # A copy for each row, as a hook may write into it.
            pattern = self.hook_pattern(pattern.expand(rows, -1, -1, -1).clone())
            z = (pattern @ v.transpose(1, 2)).transpose(1, 2)
        else:
            columns = v.permute(2, 1, 0, 3).reshape(self.n_heads, length, rows * self.d_head)
            z = (pattern @ columns).view(self.n_heads, length, rows, self.d_head).permute(2, 1, 0, 3)
        return self.out(self.hook_z(z).flatten(2))

    def initialise(self, generator: torch.Generator) -> None:
        """Draws the pattern as the model's `initialisation` draws a linear map of the full length."""
        if self._gpt2:
            self.pattern.copy_(torch.randn(self.pattern.shape, generator=generator) * 0.02)
        else:
            bound = self.pattern.shape[-1] ** -0.5
            self.pattern.copy_((torch.rand(self.pattern.shape, generator=generator) * 2 - 1) * bound)
        self.pattern.mul_(self.mask)

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row head dest src"]:
        """The matrix itself, the same for all rows."""
        return self._pattern(x.shape[1]).expand(x.shape[0], -1, -1, -1)

    def _pattern(self, length: int) -> Float[Tensor, "head dest src"]:
        return self.pattern[:, :length, :length] * self.mask[:length, :length]
