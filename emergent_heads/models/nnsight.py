"""nnsight models: `NNsight(model)`, `TransformersModel` and `LanguageModel` (nnsight 0.8).

Run here, the module that nnsight wraps is used as it is, by the way of its own kind (`huggingface.py` as a rule): the
same numbers at the same speed, from files, notebooks, `python -c` and stdin alike, where nnsight's own traces need
source that can be read back. nnsight's tree of envoys is neither used nor changed, so traces made before, between and
after work as ever.
"""

import sys
from typing import Any

from emergent_heads.errors import UnsupportedModelError
from emergent_heads.models.hooked import HookedModel, hooked


def comes_from_nnsight(model: Any) -> bool:
    """Whether this is an nnsight model; nnsight is not imported to find out."""
    nnsight = sys.modules.get("nnsight")
    return nnsight is not None and isinstance(model, nnsight.Envoy)


def wrapped(model: Any, tokenizer: Any = None) -> HookedModel:
    """The interface for the module that an nnsight model wraps.

    A model whose weights are not loaded yet loads them, as its first trace would.

    Raises:
        UnsupportedModelError: the wrapped module is of no supported kind, or interventions were stored by
            `model.edit`, which only nnsight's own traces would apply.
    """
    if edited := sorted({envoy.path for envoy in [model, *model.modules()] if envoy._edits}):
        raise UnsupportedModelError(
            f"this nnsight model has stored edits (at {', '.join(edited)}), which apply in its own traces only, so a "
            "ranking would be of the model without them: call clear_edits(), or build the change into the module"
        )
    if not getattr(model, "dispatched", True):
        model.dispatch()
    found = hooked(model._module, tokenizer if tokenizer is not None else getattr(model, "tokenizer", None))
    found.kind = f"nnsight {type(model).__name__} of a {found.kind}"
    return found
