"""Causal multi-head softmax attention, with TransformerLens' hook names."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformer_lens.hook_points import HookPoint

from emergent_heads.models.hooks import editing_output
from emergent_heads.models.layers import Rotary, listened_to
from emergent_heads.models.mixers import Mixer

if TYPE_CHECKING:
    from emergent_heads.models.small import SmallModelConfig


class Attention(Mixer):
    """Attention as in GPT-2 or Llama: full multi-head, scale `1 / sqrt(d_head)`.

    Without a hook on scores or pattern it runs through `scaled_dot_product_attention`, else it is computed step by
    step; both give the same numbers. Hooks: `hook_q`, `hook_k`, `hook_v`, `hook_z` `[row, pos, head, d_head]`
    (`hook_rot_q`, `hook_rot_k` with rotary positions), `hook_attn_scores`, `hook_pattern` `[row, head, dest, src]`.

    Attributes:
        bias: added to the attention scores, `[head or 1, dest, src]` for the longest sequence; None for none. Set by
            `SmallModel.attention_bias`.
    """

    has_pattern = True

    def __init__(self, config: "SmallModelConfig", layer: int) -> None:
        super().__init__(config, layer)
        width = self.n_heads * self.d_head
        self.qkv = nn.Linear(self.d_model, 3 * width, bias=config.biases)
        self.out = nn.Linear(width, self.d_model, bias=config.biases)
        self.rotary = Rotary(self.d_head, config.context) if config.positions == "rotary" else None
        self.hook_q = HookPoint()  # [row, pos, head, d_head]
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        self.hook_z = HookPoint()
        if self.rotary is not None:
            self.hook_rot_q = HookPoint()
            self.hook_rot_k = HookPoint()
        self.hook_attn_scores = HookPoint()  # [row, head, dest, src]
        self.hook_pattern = HookPoint()  # [row, head, dest, src]
        self.bias: Tensor | None = None

    def forward(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.n_heads, self.d_head)
        q, k, v = self.hook_q(qkv[:, :, 0]), self.hook_k(qkv[:, :, 1]), self.hook_v(qkv[:, :, 2])
        if self.rotary is not None:
            q, k = self.hook_rot_q(self.rotary(q)), self.hook_rot_k(self.rotary(k))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if listened_to(self.hook_attn_scores, self.hook_pattern):
            z = self._explicit(q, k, v)
        else:
            bias = self._bias(x.shape[1])
            mask = None if bias is None else bias + _causal_mask(x.shape[1], bias)
            z = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(self.hook_z(z.transpose(1, 2)).flatten(2))

    def continued(
        self,
        x: Float[Tensor, "row pos d_model"],
        keys: Float[Tensor, "row all head d_head"],
        values: Float[Tensor, "row all head d_head"],
        first: int = 0,
    ) -> Float[Tensor, "row kept d_model"]:
        """What `forward` gives at later positions, from the keys and values of those before them. No hook is called.

        Args:
            x: input at the later positions.
            keys, values: of all positions; those of the later ones are written. Keys turned, if positions are rotary.
            first: the first of the later positions whose output is wanted.
        """
        length = keys.shape[1]
        before = length - x.shape[1]
        qk, v = self.qkv(x).unflatten(2, (-1, self.d_head)).split([2 * self.n_heads, self.n_heads], dim=2)
        if self.rotary is not None:
            qk = self.rotary(qk, before)  # both at once: half the time
        q, k = qk[:, first:, : self.n_heads], qk[:, :, self.n_heads :]
        mask = _causal_mask(length, x)[before + first :]
        if self.bias is not None:
            mask = mask + self.bias[:, before + first : length, :length]
        keys[:, before:], values[:, before:] = k, v
        q, k, v = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        z = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(z.transpose(1, 2).flatten(2))

    def effective_pattern(self, x: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row head dest src"]:
        """The attention pattern."""
        found: list[Tensor] = []
        with editing_output(self.hook_pattern, found.append):
            self(x)
        return found[0]

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * self.d_head**-0.5
        if (bias := self._bias(q.shape[2])) is not None:
            scores = scores + bias
        scores = self.hook_attn_scores(scores + _causal_mask(q.shape[2], scores))
        return self.hook_pattern(scores.softmax(-1)) @ v

    def _bias(self, length: int) -> Tensor | None:
        return None if self.bias is None else self.bias[:, :length, :length]

    # The names that TransformerLens' tools read, as views of the fused matrix.

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:  # noqa: N802 - TransformerLens' name
        return self._projection(0)

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]:  # noqa: N802
        return self._projection(1)

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:  # noqa: N802
        return self._projection(2)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:  # noqa: N802
        return self.out.weight.T.reshape(self.n_heads, self.d_head, self.d_model)

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"]:  # noqa: N802
        return self._projection_bias(0)

    @property
    def b_K(self) -> Float[Tensor, "head d_head"]:  # noqa: N802
        return self._projection_bias(1)

    @property
    def b_V(self) -> Float[Tensor, "head d_head"]:  # noqa: N802
        return self._projection_bias(2)

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:  # noqa: N802
        return self.out.bias if self.out.bias is not None else self.out.weight.new_zeros(self.d_model)

    def _projection(self, which: int) -> Tensor:
        matrices = self.qkv.weight.view(3, self.n_heads, self.d_head, self.d_model)
        return matrices[which].transpose(1, 2)

    def _projection_bias(self, which: int) -> Tensor:
        if self.qkv.bias is None:
            return self.qkv.weight.new_zeros(self.n_heads, self.d_head)
        return self.qkv.bias.view(3, self.n_heads, self.d_head)[which]


def _causal_mask(length: int, like: Tensor) -> Float[Tensor, "dest src"]:
    """Minus infinity where `src` is after `dest`."""
    return torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device).triu(1)
