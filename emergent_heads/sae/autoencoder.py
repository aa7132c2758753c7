"""A sparse autoencoder of the residual stream, read from a folder of SAELens and saved as one, without SAELens.

The folder holds `cfg.json` and `sae_weights.safetensors`, as `save_inference_model` of SAELens 6 writes them; what
older versions wrote is read by the same rules as SAELens reads it. Everything is computed in float32.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from emergent_heads.errors import ArgumentError, CheckpointError, UnsupportedModelError, nearest, whole_number
from emergent_heads.models.hooked import EMBEDDING
from emergent_heads.storage import atomic_path, write_json

Architecture = Literal["standard", "topk", "abstopk", "jumprelu", "gated"]
Normalisation = Literal["none", "constant_norm_rescale", "layer_norm"]
"""What is done to each row before it is read and undone afterwards."""

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
_SCALER = "activation_scaler.json"  # beside the checkpoints of a training
OWN = "emergent_heads"
"""Key of the metadata under which this library keeps what it has to say of an autoencoder."""

_BIASES: dict[Architecture, tuple[str, ...]] = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "abstopk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
_UNREAD = {
    "batchtopk": "save it by `save_inference_model`, which makes a jumprelu autoencoder of it",
    "matryoshka_batchtopk": "save it by `save_inference_model`, which makes a jumprelu autoencoder of it",
    "matching_pursuit": "its latents are found one after the other; use SAELens itself",
    "matryoshka_matching_pursuit": "its latents are found one after the other; use SAELens itself",
    "temporal": "its latents depend on earlier tokens; use SAELens itself",
    **dict.fromkeys(
        ("transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"),
        "it writes to another place than it reads, so it has no directions of the residual stream it reads",
    ),
}
_RESIDUAL = re.compile(r"blocks\.(\d+)\.hook_resid_(pre|post)")
_EPSILON = 1e-5  # of layer norm, as in SAELens
_FORMAT = "6.54.0"


@dataclass(frozen=True)
class Quality:
    """How well an autoencoder does on activations it was not trained on.

    Attributes:
        explained_variance: 1 - (mean square of what is left) / (variance of the activations), over all dimensions.
        l0: mean number of latents that are not 0.
        n_dead: latents that are 0 in all rows.
        n_latents: of all.
        n_rows: rows it was measured on.
    """

    explained_variance: float
    l0: float
    n_dead: int
    n_latents: int
    n_rows: int

    def __str__(self) -> str:
        return (
            f"explained variance {self.explained_variance:.3f}, L0 {self.l0:.1f}, {self.n_dead} of {self.n_latents} "
            f"latents dead, on {self.n_rows:,} held-out rows"
        )


@dataclass(frozen=True, eq=False, repr=False)
class SparseAutoencoder:
    """Latents read from the residual stream, `x ~ latents @ W_dec + b_dec`.

    Attributes:
        architecture: what makes latents of what the encoder reads.
        W_enc: `[d_in, d_sae]`.
        W_dec: `[d_sae, d_in]`, one direction per latent.
        b_dec: `[d_in]`.
        biases: by the names of SAELens, `[d_sae]` each: `b_enc`; of "jumprelu" also `threshold`; of "gated" `b_gate`,
            `b_mag` and `r_mag`.
        k: of "topk" and "abstopk", how many latents of a row are kept.
        b_dec_is_taken_off: whether `b_dec` is subtracted before the encoder reads.
        by_decoder_norm: whether latents are in units in which the rows of `W_dec` have length 1.
        normalisation: of each row.
        layer: the block whose residual stream (`resid_post`) it reads, -1 for what enters the first block; None where
            the folder does not say, or it reads something else.
        metadata: what the folder says of it: `hook_name`, `model_name`, ...
        quality: on held-out rows, where it was trained here.
    """

    architecture: Architecture
    W_enc: Float[Tensor, "d_in d_sae"]
    W_dec: Float[Tensor, "d_sae d_in"]
    b_dec: Float[Tensor, " d_in"]
    biases: Mapping[str, Float[Tensor, " d_sae"]]
    k: int | None = None
    b_dec_is_taken_off: bool = True
    by_decoder_norm: bool = False
    normalisation: Normalisation = "none"
    layer: int | None = None
    metadata: Mapping[str, Any] | None = None
    quality: Quality | None = None

    @property
    def d_in(self) -> int:
        """Width of the residual stream."""
        return self.W_dec.shape[1]

    @property
    def d_sae(self) -> int:
        """Number of latents."""
        return self.W_dec.shape[0]

    @property
    def name(self) -> str:
        """The hook that it reads, for tables and messages."""
        said = (self.metadata or {}).get("hook_name")
        return str(said or (f"the residual stream after layer {self.layer}" if self.layer is not None else "unknown"))

    def __repr__(self) -> str:
        k = f", k {self.k}" if self.k is not None else ""
        quality = f"; {self.quality}" if self.quality else ""
        return f"SparseAutoencoder({self.architecture}{k}, {self.d_in} -> {self.d_sae}, {self.name}{quality})"

    def to(self, device: "torch.device | str") -> "SparseAutoencoder":
        """The same on another device."""
        biases = {name: bias.to(device) for name, bias in self.biases.items()}
        parts = {name: getattr(self, name).to(device) for name in ("W_enc", "W_dec", "b_dec")}
        return replace(self, biases=biases, **parts)

    # ---- there and back ----

    @torch.no_grad()
    def encode(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_sae"]:
        """The latents of each row."""
        x, _, _ = self._normalised(x)
        read = (x - self.b_dec if self.b_dec_is_taken_off else x) @ self.W_enc
        if self.architecture == "gated":
            magnitude = (read * self.biases["r_mag"].exp() + self.biases["b_mag"]).relu()
            return magnitude * (read + self.biases["b_gate"] > 0)
        read = read + self.biases["b_enc"]
        if self.architecture == "jumprelu":
            return read.relu() * (read > self.biases["threshold"])
        if self.architecture == "standard":
            return read.relu()
        if self.by_decoder_norm:
            read = read * self.W_dec.norm(dim=1)
        size = read.abs() if self.architecture == "abstopk" else read
        kept = size.topk(self._k(), dim=-1, sorted=False).indices
        values = read.gather(-1, kept)
        values = values if self.architecture == "abstopk" else values.relu()
        return torch.zeros_like(read).scatter_(-1, kept, values)

    @torch.no_grad()
    def decode(
        self, latents: Float[Tensor, "*rows d_sae"], of: Float[Tensor, "*rows d_in"] | None = None
    ) -> Float[Tensor, "*rows d_in"]:
        """The residual stream that latents stand for.

        Args:
            latents: of each row.
            of: the rows they were read from, which give back what the normalisation of each row took away.

        Raises:
            ArgumentError: this autoencoder normalises each row, and `of` is missing.
        """
        decoded = self._in_units(latents.to(self.W_dec)) @ self.W_dec + self.b_dec
        if self.normalisation == "none":
            return decoded
        if of is None:
            raise ArgumentError(
                f"this autoencoder normalises each row ({self.normalisation}), so latents alone do not say how large "
                "the row is: give the rows as decode(latents, of=x), or call reconstruct(x)"
            )
        _, scale, shift = self._normalised(of)
        return decoded * scale + shift

    def reconstruct(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_in"]:
        """What is left of each row after encoding and decoding it."""
        return self.decode(self.encode(x), of=x)

    @torch.no_grad()
    def amounts(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_sae"]:
        """How much of its decoder row each latent adds to the reconstruction, in the units of the residual stream.

        The contribution of latent j is `amounts[..., j, None] * W_dec[j]`.
        """
        found = self._in_units(self.encode(x))
        return found if self.normalisation == "none" else found * self._normalised(x)[1]

    # ---- directions in the residual stream ----

    @property
    def decoder_directions(self) -> Float[Tensor, "d_sae d_in"]:
        """Unit vectors along which the latents write; zero for a latent without a decoder row."""
        return torch.nn.functional.normalize(self.W_dec, dim=1)

    @property
    def encoder_directions(self) -> Float[Tensor, "d_sae d_in"]:
        """Unit vectors along which the latents are read. Layer norm takes each row's mean off, so they sum to 0."""
        rows = self.W_enc.T
        rows = rows - rows.mean(dim=1, keepdim=True) if self.normalisation == "layer_norm" else rows
        return torch.nn.functional.normalize(rows, dim=1)

    def measured(self, x: Float[Tensor, "row d_in"]) -> Quality:
        """How well it does on these rows."""
        left, spread, active = 0.0, 0.0, 0.0
        fired = torch.zeros(self.d_sae, dtype=torch.bool, device=self.W_dec.device)
        mean = x.double().mean(0)
        for part in x.split(max(1, 2**24 // self.d_sae)):
            latents = self.encode(part)
            left += float((part.to(self.W_dec) - self.decode(latents, of=part)).double().square().sum())
            spread += float((part.double() - mean).square().sum())
            active += float((latents != 0).sum())
            fired |= (latents != 0).any(0)
        n_dead = int((~fired).sum())
        return Quality(1 - left / spread if spread else float("nan"), active / len(x), n_dead, self.d_sae, len(x))

    # ---- saving ----

    def save(self, path: Path | str) -> Path:
        """Writes a folder that SAELens' `SAE.load_from_disk` and `load` read.

        `cfg.json` comes last, so a killed process leaves nothing that looks like an autoencoder.

        Raises:
            OutputError: the folder cannot be written.
        """
        path = Path(path)
        (path / CONFIG).unlink(missing_ok=True)
        weights = {"W_enc": self.W_enc, "W_dec": self.W_dec, "b_dec": self.b_dec, **self.biases}
        with atomic_path(path / WEIGHTS) as temporary:
            save_file({name: weight.detach().cpu().contiguous() for name, weight in weights.items()}, temporary)
        metadata = {"sae_lens_version": _FORMAT, **(self.metadata or {})}
        if self.layer is not None and "hook_name" not in metadata:
            metadata["hook_name"] = hook_of(self.layer)
        if self.quality is not None:
            metadata[OWN] = {**metadata.get(OWN, {}), "quality": asdict(self.quality)}
        config = {
            "architecture": self.architecture,
            "d_in": self.d_in,
            "d_sae": self.d_sae,
            "dtype": "float32",
            "device": "cpu",
            "apply_b_dec_to_input": self.b_dec_is_taken_off,
            "normalize_activations": self.normalisation,
            "reshape_activations": "none",
            "metadata": metadata,
        }
        if self.k is not None:
            config |= {"k": self.k, "rescale_acts_by_decoder_norm": self.by_decoder_norm}
        write_json(path / CONFIG, config)
        return path

    # ---- parts ----

    def _k(self) -> int:
        assert self.k is not None
        return self.k

    def _in_units(self, latents: Float[Tensor, "*rows d_sae"]) -> Float[Tensor, "*rows d_sae"]:
        return latents / self.W_dec.norm(dim=1) if self.by_decoder_norm else latents

    def _normalised(self, x: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Rows as the encoder reads them, and by what to multiply and what to add to have them back."""
        if x.shape[-1] != self.d_in:
            raise ArgumentError(f"rows of width {x.shape[-1]}; this autoencoder reads rows of width {self.d_in}")
        x = x.to(self.W_enc)
        if self.normalisation == "constant_norm_rescale":
            scale = x.norm(dim=-1, keepdim=True) / self.d_in**0.5
            return x / scale, scale, 0.0
        if self.normalisation == "layer_norm":
            mean = x.mean(dim=-1, keepdim=True)
            spread = (x - mean).std(dim=-1, keepdim=True)
            return (x - mean) / (spread + _EPSILON), spread, mean
        return x, 1.0, 0.0


def hook_of(layer: int) -> str:
    """TransformerLens' name of the residual stream after a layer."""
    return "blocks.0.hook_resid_pre" if layer == EMBEDDING else f"blocks.{layer}.hook_resid_post"


def layer_of(hook: object) -> int | None:
    """The layer after which a hook of TransformerLens reads the residual stream; None for any other hook."""
    if (found := _RESIDUAL.fullmatch(str(hook))) is None:
        return None
    return int(found[1]) - (found[2] == "pre")


def load(
    path: Path | str,
    *,
    layer: int | None = None,
    activation_scale: float | None = None,
    device: "torch.device | str" = "cpu",
) -> SparseAutoencoder:
    """Reads a folder of SAELens, without SAELens: `cfg.json` and `sae_weights.safetensors`.

    Architectures "standard", "topk", "abstopk", "jumprelu" and "gated". Latents and reconstructions are those of
    SAELens' own `SAE.load_from_disk`, with one exception: a scale of the activations that is not part of the weights
    is looked for or asked for (`activation_scale`), where SAELens goes on without it.

    Args:
        path: the folder.
        layer: after which it reads the residual stream (-1 for what enters the first block), where the folder does not
            say so by the name of a hook such as `blocks.3.hook_resid_post`.
        activation_scale: what activations were multiplied by in training. Only needed where the folder says
            "expected_average_only_in", which means that the factor is missing in the weights (SAELens folds it into
            them at the end of a training), and has no `activation_scaler.json`. 1.0 reads the weights as they are.
        device: where to put it.

    Raises:
        CheckpointError: a file is missing or damaged, or weights are missing, of the wrong shape or not finite.
        UnsupportedModelError: an architecture or normalisation that is not read; the message says what to do.
        ArgumentError: a layer that contradicts the folder, or an unknown `activation_scale`.
    """
    path = Path(path)
    config = _config(path)
    architecture = _architecture(path, config)
    normalisation = config["normalize_activations"]
    scale = _scale(path, normalisation, activation_scale)
    if normalisation == "expected_average_only_in":
        normalisation = "none"
    if normalisation not in get_args(Normalisation):
        raise UnsupportedModelError(
            f"{path}: activations are normalised by {normalisation!r}, which is read where it is part of the weights: "
            "open it in SAELens, fold it (`fold_activation_whitening`) and save it again"
        )
    if config.get("reshape_activations", "none") != "none":
        raise UnsupportedModelError(
            f"{path} reads {config['metadata'].get('hook_name')}, the outputs of attention heads; only autoencoders "
            "of the residual stream are read"
        )
    weights = _weights(path, architecture, device)
    k = config.get("k") if architecture in ("topk", "abstopk") else None
    if architecture in ("topk", "abstopk"):
        k = whole_number(f"{path}: k", k, least=1)
        if k > len(weights["W_dec"]):
            raise CheckpointError(f"{path}: k is {k} and there are {len(weights['W_dec'])} latents")
    metadata = config["metadata"]
    said = metadata.get(OWN, {}) if isinstance(metadata.get(OWN), dict) else {}
    return SparseAutoencoder(
        architecture,
        weights.pop("W_enc") * scale,
        weights.pop("W_dec") / scale,
        weights.pop("b_dec") / scale,
        weights,
        k=k,
        b_dec_is_taken_off=bool(config.get("apply_b_dec_to_input", True)),
        by_decoder_norm=k is not None and bool(config.get("rescale_acts_by_decoder_norm", False)),
        normalisation=normalisation,
        layer=_layer(path, metadata.get("hook_name"), layer),
        metadata=metadata,
        quality=Quality(**said["quality"]) if "quality" in said else None,
    )


def _config(path: Path) -> dict[str, Any]:
    """`cfg.json`, with what versions before 6 wrote under other names."""
    try:
        config = json.loads((path / CONFIG).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is no folder of SAELens: it has no {CONFIG}. Give the folder that holds {CONFIG} and {WEIGHTS}"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / CONFIG} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / CONFIG} is no configuration of an autoencoder: it holds no names and values")
    config["metadata"] = config.get("metadata") or {
        "hook_name": config.get("hook_name", config.get("hook_point")),
        "model_name": config.get("model_name"),
    }
    activation = config.get("activation_fn", config.get("activation_fn_str"))
    if activation == "topk":
        config["architecture"] = "topk"
        config.setdefault("k", (config.get("activation_fn_kwargs") or {}).get("k"))
    elif activation not in (None, "relu"):
        raise UnsupportedModelError(f"{path}: latents by {activation!r}; relu, topk, jumprelu and gated are read")
    normalise = config.get("normalize_activations") or "none"
    config["normalize_activations"] = "expected_average_only_in" if normalise is True else normalise
    return config


def _architecture(path: Path, config: Mapping[str, Any]) -> Architecture:
    name = config.get("architecture", "standard")
    if name in _BIASES:
        return name
    known = ", ".join(_BIASES)
    if name in _UNREAD:
        raise UnsupportedModelError(f"{path} holds a {name} autoencoder, and {known} are read: {_UNREAD[name]}")
    raise UnsupportedModelError(f"{path} holds a {name!r} autoencoder, and {known} are read; {nearest(name, _BIASES)}")


def _scale(path: Path, normalisation: str, given: float | None) -> float:
    """By what activations are multiplied before the encoder reads them, without its being in the weights."""
    if normalisation != "expected_average_only_in":
        if given is not None:
            raise ArgumentError(
                f"activation_scale={given}: the activations of {path} are not scaled by a constant outside its "
                "weights; leave it out"
            )
        return 1.0
    if given is not None:
        if not 0 < given < float("inf"):
            raise ArgumentError(f"activation_scale is {given}; it is a factor above 0")
        return float(given)
    try:
        scale = float(json.loads((path / _SCALER).read_text())["scaling_factor"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{path} says that activations were scaled to an expected norm, and its weights do not say by what: give "
            "activation_scale (sqrt(d_in) / mean norm of the activations it was trained on), or 1.0 to read the "
            "weights as they are"
        ) from error
    return scale


def _weights(path: Path, architecture: Architecture, device: "torch.device | str") -> dict[str, Tensor]:
    file = path / WEIGHTS
    try:
        with safe_open(file, framework="pt", device=str(device)) as stored:
            weights = {name: stored.get_tensor(name).float() for name in stored.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no {WEIGHTS}; give the folder that holds it") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); copy it again") from error
    factor = weights.pop("scaling_factor", None)  # of versions before 6
    if factor is not None and not torch.allclose(factor, torch.ones_like(factor)):
        raise UnsupportedModelError(f"{file} scales its latents by a factor of fine-tuning, which is not read")
    if architecture == "jumprelu" and "log_threshold" in weights:
        weights["threshold"] = weights.pop("log_threshold").exp()
    needed = {"W_enc", "W_dec", "b_dec", *_BIASES[architecture]}
    if missing := sorted(needed - set(weights)):
        raise CheckpointError(f"{file} lacks {missing[0]}, which a {architecture} autoencoder has")
    if odd := sorted(set(weights) - needed):
        raise CheckpointError(
            f"{file} holds {odd[0]}, which a {architecture} autoencoder does not have; is {CONFIG} of another one?"
        )
    d_sae, d_in = weights["W_dec"].shape if weights["W_dec"].ndim == 2 else (-1, -1)
    shapes = {"W_enc": (d_in, d_sae), "W_dec": (d_sae, d_in), "b_dec": (d_in,)}
    for name, weight in weights.items():
        if tuple(weight.shape) != (wanted := shapes.get(name, (d_sae,))) or d_in < 1:
            raise CheckpointError(f"{file}: {name} has the shape {list(weight.shape)} and should have {list(wanted)}")
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"{file}: {name} is not finite: the weights are damaged")
    return weights


def _layer(path: Path, hook: object, given: int | None) -> int | None:
    said = layer_of(hook)
    if given is not None and said is not None and given != said:
        raise ArgumentError(f"layer={given}: {path} reads {hook}, which is the residual stream after layer {said}")
    return said if given is None else given


def latent_names(latents: Sequence[int]) -> str:
    """Latents in a table or message."""
    return ", ".join(str(latent) for latent in latents)
