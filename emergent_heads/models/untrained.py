"""Models of the same shape with fresh weights: what a readout finds before anything was learned."""

import warnings
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from emergent_heads.errors import UnsupportedModelError
from emergent_heads.models.hooked import HookedModel, hooked
from emergent_heads.models.hooked_small import HookedSmallModel
from emergent_heads.models.huggingface import HuggingFaceModel
from emergent_heads.models.small import SmallModel
from emergent_heads.models.transformerlens import BridgeModel, HookedTransformerModel
from emergent_heads.randomness import derive_seed


def untrained(model: HookedModel, seed: int = 0) -> HookedModel:
    """A model of the same kind and shape, on the same device, with weights drawn as before a training.

    The draw is one of its own: no training that starts from `seed` starts from these weights. A `TransformerBridge`
    gives the Hugging Face model that it would be a bridge of, which has the same residual stream.

    Raises:
        UnsupportedModelError: a kind of model that cannot be made anew.
    """
    own_seed = derive_seed(seed, "untrained")
    with torch.random.fork_rng(devices=[]):  # most libraries draw weights from the global generator
        torch.manual_seed(own_seed)
        made = _fresh(model, own_seed)
    return hooked(made.to(model.device, model.dtype).eval().requires_grad_(False), model.tokenizer)


def _fresh(model: HookedModel, seed: int) -> nn.Module:
    own: Any = model._module
    if isinstance(model, HookedSmallModel):
        return SmallModel(own.config, seed)
    if isinstance(model, BridgeModel):
        own = own.original_model  # its parts are replaced; its class and configuration are not
    if isinstance(model, (BridgeModel, HuggingFaceModel)):
        return type(own)(deepcopy(own.config))
    if isinstance(model, HookedTransformerModel):
        config = deepcopy(own.cfg)
        config.seed = None
        with warnings.catch_warnings():  # the class is deprecated, which the caller knows: the model is theirs
            warnings.simplefilter("ignore", DeprecationWarning)
            made = type(own)(config, tokenizer=None, move_to_device=False)
        made.init_weights()
        return made
    raise UnsupportedModelError(f"no model like this {model.kind} can be made with fresh weights")
