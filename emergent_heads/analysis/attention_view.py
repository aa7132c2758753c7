"""A prompt with the attention patterns of a model's heads, to look at in a notebook, drawn by CircuitsVis."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from emergent_heads.errors import ArgumentError
from emergent_heads.models.engine import Head
from emergent_heads.models.hooked import HookedModel, hooked
from emergent_heads.tasks.task import PromptBatch, PromptTask
from emergent_heads.tasks.tokenisation import id_texts, token_texts, usable

if TYPE_CHECKING:
    from circuitsvis.utils.render import RenderedHTML

Prompt = Union[str, "PromptTask", "PromptBatch", "Int[Tensor, ' pos']", "Int[np.ndarray, ' pos']", Sequence[int]]

_MOST_NUMBERS = 2_000_000  # about 12 MB of page


def attention_view(
    model: Any,
    prompt: Prompt,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[Head] | None = None,
    row: int = 0,
) -> "RenderedHTML":
    """Attention patterns of one prompt as an HTML object: small maps of all chosen heads, one of them in large.

    Needs CircuitsVis: `pip install "emergent-heads[notebook]"`. What a notebook shows loads CircuitsVis' JavaScript
    from a CDN (unpkg.com). Without a connection, CircuitsVis puts all of it into the output (1.3 MB); to tell, it
    asks google.com whenever a notebook shows the object. `str(view)` is the page's source for the CDN.

    ```python
    eh.attention_view(series[point.post], task, heads=heads.top(8))  # heads of a ranking, on the task's first prompt
    eh.attention_view(model, "Mary and John went to the shop. John gave a drink to", layers=[9, 10])
    ```

    Args:
        model: a checkpoint of a series, or any model that `eh.hooked` takes.
        prompt: text, to which no special tokens are added; token ids `[pos]`; a prompt task, or a batch of prompts
            such as `.batch` of a ranking.
        layers: shows all heads of these layers; by default of all layers, where no heads are given.
        heads: shows these `(layer, head)`, in this order.
        row: which prompt of a task or a batch.

    Returns:
        CircuitsVis' object, with an HTML repr. Patterns are post-softmax, rounded to four places.

    Raises:
        ArgumentError: CircuitsVis is not installed, both layers and heads are given, the model has no such layer or
            head, the prompt is no row of tokens, or there is more to be shown than a notebook can take.
        TokenizerError: text, and the model has no tokenizer.
        InterventionHasNoEffect: this model's patterns cannot be read.
    """
    try:
        from circuitsvis.attention import attention_heads
    except ImportError as error:
        raise ArgumentError(
            'attention_view needs CircuitsVis, which is not installed: pip install "emergent-heads[notebook]" (or '
            "circuitsvis), or draw with matplotlib: .plot_patterns() of a ranking"
        ) from error
    model = hooked(model)
    chosen = _chosen(model, layers, heads)
    tokens, texts = _prompt(model, prompt, row)
    if (n := len(chosen) * len(tokens) ** 2) > _MOST_NUMBERS:
        raise ArgumentError(
            f"{len(chosen)} heads on {len(tokens)} tokens are {n:,} numbers, more than a notebook can show: give "
            "heads=... or layers=..., or a shorter prompt"
        )
    patterns = model.patterns(tokens[None], sorted({layer for layer, _ in chosen}))
    shown: Float[Tensor, "head dest src"] = torch.stack([patterns[layer][0, head] for layer, head in chosen])
    view = attention_heads(
        attention=shown.double().cpu().numpy().round(4),
        tokens=texts,
        attention_head_names=[f"L{layer}H{head}" for layer, head in chosen],
        min_value=0.0,
        max_value=1.0,
        mask_upper_tri=True,
    )
    return _with_safe_texts(view, texts)


def _chosen(model: HookedModel, layers: Sequence[int] | None, heads: Sequence[Head] | None) -> list[Head]:
    if layers is not None and heads is not None:
        raise ArgumentError("layers and heads are both given: give one of them")
    if heads is None:
        of_layers = range(model.n_layers) if layers is None else [int(layer) for layer in layers]
        heads = [(layer, head) for layer in of_layers for head in range(model.n_heads)]
    chosen = [(int(layer), int(head)) for layer, head in heads]
    if unknown := [at for at in chosen if not (0 <= at[0] < model.n_layers and 0 <= at[1] < model.n_heads)]:
        raise ArgumentError(
            f"heads {unknown[:3]} are not in this model: layers go from 0 to {model.n_layers - 1}, heads from 0 to "
            f"{model.n_heads - 1}"
        )
    if not chosen:
        raise ArgumentError("no heads to show: give at least one layer or head")
    return chosen


def _prompt(model: HookedModel, prompt: Prompt, row: int) -> tuple[Int[Tensor, " pos"], list[str]]:
    """Token ids of the prompt, without padding, and each token as text."""
    if isinstance(prompt, PromptTask):
        prompt = prompt.batch(model.tokenizer, vocabulary_size=model.vocabulary_size, context=model.context)
    if isinstance(prompt, PromptBatch):
        if not 0 <= row < len(prompt):
            raise ArgumentError(f"row={row}: there are {len(prompt)} prompts, 0 to {len(prompt) - 1}")
        end = int(prompt.positions[row]) + 1
        return prompt.tokens[row, :end], list(prompt.texts[row][:end])
    if isinstance(prompt, str):
        ids = usable(model.tokenizer, "a prompt as text")(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        ids = np.asarray(prompt.cpu() if isinstance(prompt, Tensor) else prompt)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ArgumentError(
                f"the prompt is {ids.dtype} of shape {list(ids.shape)}: give text, or one row of token ids [pos]"
            )
        ids = ids.tolist()
    if not ids:
        raise ArgumentError("the prompt is empty: give at least one token")
    if outside := [token for token in ids if not 0 <= token < model.vocabulary_size]:
        raise ArgumentError(f"token id {outside[0]}: the model knows 0 to {model.vocabulary_size - 1}")
    (texts,) = id_texts([ids]) if model.tokenizer is None else token_texts(model.tokenizer, [ids])
    return torch.tensor(ids), list(texts)


def _with_safe_texts(view: "RenderedHTML", texts: list[str]) -> "RenderedHTML":
    """The view with "<" of tokens written so that no token ends the script it stands in, which "</script>" does."""
    plain, safe = json.dumps(texts), json.dumps(texts).replace("<", "\\u003c")
    return type(view)(view.local_src.replace(plain, safe), view.cdn_src.replace(plain, safe))
