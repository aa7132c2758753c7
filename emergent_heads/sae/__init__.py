"""Sparse autoencoders of the residual stream: which latents carry a probed feature, since when, and are they used?

Reading a saved SAELens folder (`load`) and everything done with it needs no extra; `train` needs the extra `sae`.
Names are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "emergent_heads.sae.ablation": ("LatentAblation", "ablate_latents"),
    "emergent_heads.sae.autoencoder": ("Quality", "SparseAutoencoder", "load"),
    "emergent_heads.sae.comparison": ("LatentComparison", "compare_features"),
    "emergent_heads.sae.series": ("LatentSeries", "latent_series"),
    "emergent_heads.sae.training": ("train",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LatentAblation",
    "LatentComparison",
    "LatentSeries",
    "Quality",
    "SparseAutoencoder",
    "ablate_latents",
    "compare_features",
    "latent_series",
    "load",
    "train",
]

if TYPE_CHECKING:
    from emergent_heads.sae.ablation import LatentAblation, ablate_latents
    from emergent_heads.sae.autoencoder import Quality, SparseAutoencoder, load
    from emergent_heads.sae.comparison import LatentComparison, compare_features
    from emergent_heads.sae.series import LatentSeries, latent_series
    from emergent_heads.sae.training import train


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'emergent_heads.sae' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
