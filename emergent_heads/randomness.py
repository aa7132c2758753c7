"""One integer seed in, named independent streams out.

A stream depends on the seed and its labels only, so prompts, initial weights and controls do not shift when another
part of a program starts to draw more numbers. The key is SHA-256, stable over processes and Python versions
(`hash()` is not).
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, *labels: object) -> int:
    """63-bit seed for the stream that `labels` name under `seed`."""
    key = "\x1f".join(str(part) for part in (seed, *labels)).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1


def numpy_generator(seed: int, *labels: object) -> np.random.Generator:
    """NumPy generator of the named stream."""
    return np.random.default_rng(derive_seed(seed, *labels))


def torch_generator(seed: int, *labels: object, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """torch generator of the named stream, on `device`."""
    import torch

    return torch.Generator(device=device).manual_seed(derive_seed(seed, *labels))
