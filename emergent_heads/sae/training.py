"""Training a sparse autoencoder on the residual stream of a model, by SAELens' trainer."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.evaluation import model_name
from emergent_heads.errors import ArgumentError, NotFiniteError, whole_number
from emergent_heads.models.hooked import EMBEDDING, HookedModel, hooked
from emergent_heads.randomness import derive_seed, numpy_generator, torch_generator
from emergent_heads.sae.autoencoder import OWN, SparseAutoencoder, hook_of
from emergent_heads.storage import digest
from emergent_heads.tasks.task import PromptTask, SequenceTask

Positions = Literal["all"] | Sequence[int] | Callable[[Int[np.ndarray, "row pos"]], Bool[np.ndarray, "row pos"]]
Data = SequenceTask | PromptTask | Int[Tensor, "row pos"] | Int[np.ndarray, "row pos"]

SPLIT, HELD_OUT = "autoencoder", "autoencoder held-out"
_ROWS_AT_ONCE = 256  # of a forward pass
_BATCHES_MIXED = 16  # held at a time, so that a batch does not come from a few sequences
_HELD_OUT_SHARE = 0.1  # of fixed rows
_MOST_EMPTY_DRAWS = 100
_DECAY_SHARE = 0.2  # of the steps, at the end
_DEAD_SHARE = 0.1  # of the steps: a latent that has not fired for so long is revived


def train(
    model: Any,
    data: Data,
    *,
    layer: int,
    d_sae: int | None = None,
    k: int = 16,
    n_activations: int = 200_000,
    batch_size: int = 512,
    learning_rate: float = 1e-3,
    positions: Positions = "all",
    n_held_out: int = 10_000,
    seed: int = 0,
    progress: bool = True,
) -> SparseAutoencoder:
    """Trains a top-k autoencoder on the residual stream after one layer.

    The residual stream is scaled to a mean length of sqrt(d_model) for the training, so that the same settings do for
    checkpoints of different sizes, and the scale is folded into the weights afterwards. Latents that have not fired
    for a tenth of the training are revived by SAELens' auxiliary loss.

    Args:
        model: a checkpoint of a series, or any model that `eh.hooked` takes.
        data: a task, of whose sequences fresh ones are drawn, or whose prompts are read over and over; or token ids
            `[row, pos]`. Of fixed rows a tenth is held out.
        layer: after which the residual stream is read (`resid_post`); -1 for what enters the first block.
        d_sae: number of latents; by default 8 times the model's width.
        k: latents that stand for one activation.
        n_activations: to train on, counted as often as they are seen.
        batch_size: activations in a batch.
        learning_rate: of Adam; in the last fifth of the steps it goes down to a tenth.
        positions: which tokens are read: "all" that are no padding (of a task those that the model reads up to the
            last one that counts), a list of positions, or a function that is given tokens `[row, pos]` and returns
            which of them, `[row, pos]`.
        n_held_out: activations that the quality is measured on.
        seed: of the initial weights and of the rows. Nothing global is drawn from or seeded.
        progress: whether to show a bar.

    Returns:
        The autoencoder, with its `quality` on rows it was not trained on. It is kept by `.save(path)`.

    Raises:
        ArgumentError: SAELens is missing, or an argument makes no sense.
        NotFiniteError: the residual stream is not finite.
    """
    the_model = hooked(model)
    source = _Source.of(data, the_model, seed, positions)
    settings = _settings(
        the_model,
        source,
        layer=layer,
        d_sae=d_sae,
        k=k,
        n_activations=n_activations,
        batch_size=batch_size,
        learning_rate=learning_rate,
        positions=positions,
        n_held_out=n_held_out,
        seed=seed,
    )
    stream = _Stream(the_model, layer, source, settings["batch_size"], seed)
    trained = _trained(stream, settings, model_name(model), hook_of(layer), progress)
    found = replace(trained, layer=layer, metadata={**(trained.metadata or {}), OWN: settings})
    return replace(found, quality=found.measured(stream.held_out(settings["n_held_out"])))


def settings_of(model: HookedModel, data: Data, **options: Any) -> dict[str, Any]:
    """What `train` with these arguments says under `OWN` in the metadata of what it makes.

    Raises:
        ArgumentError: an argument makes no sense.
    """
    given = {
        name: each.default for name, each in signature(train).parameters.items() if each.kind == each.KEYWORD_ONLY
    }
    del given["progress"]
    given |= options
    return _settings(model, _Source.of(data, model, given["seed"], given["positions"]), **given)


def _settings(
    model: HookedModel,
    source: "_Source",
    *,
    layer: int,
    d_sae: int | None,
    k: int,
    n_activations: int,
    batch_size: int,
    learning_rate: float,
    positions: Positions,
    n_held_out: int,
    seed: int,
) -> dict[str, Any]:
    if not EMBEDDING <= layer < model.n_layers:
        raise ArgumentError(
            f"layer {layer}: this model has layers 0 to {model.n_layers - 1}, and -1 for the embedding"
        )
    d_sae = 8 * model.d_model if d_sae is None else whole_number("d_sae", d_sae, least=1)
    if not learning_rate > 0:
        raise ArgumentError(f"learning_rate is {learning_rate}; it is above 0")
    if (k := whole_number("k", k, least=1)) > d_sae:
        raise ArgumentError(f"k is {k} and there are {d_sae} latents; k is how many of them may be active")
    return {
        "layer": int(layer),
        "d_sae": d_sae,
        "k": k,
        "n_activations": whole_number("n_activations", n_activations, least=1),
        "batch_size": whole_number("batch_size", batch_size, least=1),
        "learning_rate": float(learning_rate),
        "n_held_out": whole_number("n_held_out", n_held_out, least=2),
        "seed": seed,
        "data": source.name,
        "positions": _said(positions, source),
    }


# ---- SAELens ----


def _sae_lens() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own use of names that transformer-lens has deprecated
            import sae_lens
    except ImportError as error:
        raise ArgumentError(
            f"training an autoencoder needs SAELens ({error}): pip install 'emergent-heads[sae]', in an environment "
            "with transformer-lens 3. Autoencoders that were saved are read without it, by eh.sae.load(path)"
        ) from error
    return sae_lens


def _trained(stream: "_Stream", settings: dict[str, Any], model: str, hook: str, progress: bool) -> SparseAutoencoder:
    """Runs SAELens' trainer step by step, as its own `fit` does, but with our bar and our estimate of the scale."""
    sae_lens = _sae_lens()
    from sae_lens.config import SAETrainerConfig
    from sae_lens.saes.sae import SAEMetadata

    n_steps = max(1, settings["n_activations"] // settings["batch_size"])
    device = stream.device
    scale = stream.d_model**0.5 / float(stream.peek().norm(dim=1).mean())
    with _own_randomness(derive_seed(settings["seed"], "autoencoder weights")):
        sae = sae_lens.TopKTrainingSAE(
            sae_lens.TopKTrainingSAEConfig(
                d_in=stream.d_model,
                d_sae=settings["d_sae"],
                k=settings["k"],
                normalize_activations="expected_average_only_in",
                metadata=SAEMetadata(model_name=model, hook_name=hook),
            )
        )
    sae.to(str(device))
    config = SAETrainerConfig(
        total_training_samples=n_steps * settings["batch_size"],
        train_batch_size_samples=settings["batch_size"],
        lr=settings["learning_rate"],
        lr_end=settings["learning_rate"] / 10,
        lr_decay_steps=int(_DECAY_SHARE * n_steps),
        dead_feature_window=max(1, int(_DEAD_SHARE * n_steps)),
        feature_sampling_window=n_steps + 1,
        device=str(device),
    )
    trainer = sae_lens.SAETrainer(config, sae, data_provider=stream)
    trainer.activation_scaler.scaling_factor = scale
    with torch.enable_grad():
        for _ in tqdm(range(n_steps), desc="autoencoder", unit="step", leave=False, **notebook.bar(progress)):
            trainer.step(next(stream))
            trainer.n_training_steps += 1
    sae.fold_activation_norm_scaling_factor(scale)
    weights = {name: weight.detach().clone() for name, weight in sae.state_dict().items()}
    sae.process_state_dict_for_saving_inference(weights)
    inference = sae.cfg.get_inference_sae_cfg_dict()
    return SparseAutoencoder(
        "topk",
        weights.pop("W_enc"),
        weights.pop("W_dec"),
        weights.pop("b_dec"),
        weights,
        k=settings["k"],
        b_dec_is_taken_off=bool(inference["apply_b_dec_to_input"]),
        by_decoder_norm=bool(inference["rescale_acts_by_decoder_norm"]),
        metadata=inference["metadata"],
    )


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """For initialisations that take no generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# ---- activations ----


@dataclass(frozen=True, eq=False)
class _Source:
    """Rows of tokens to read, and which of their tokens.

    Attributes:
        name: what they are.
        draw: called with a number of rows, a number that tells draws apart, and whether held-out rows are wanted;
            gives tokens and the mask of those that are read.
    """

    name: str
    draw: Callable[[int, int, bool], tuple[Int[Tensor, "row pos"], Bool[Tensor, "row pos"]]]

    @classmethod
    def of(cls, data: Data, model: HookedModel, seed: int, positions: Positions) -> "_Source":
        if isinstance(data, SequenceTask):
            return cls(repr(data), lambda n, number, held_out: _drawn(data, n, number, held_out, seed, positions))
        if isinstance(data, PromptTask):
            batch = data.batch(model.tokenizer, vocabulary_size=model.vocabulary_size, context=model.context)
            tokens, ends = batch.tokens.cpu(), batch.positions.cpu()
            name = data.name
        else:
            tokens = torch.as_tensor(data)
            if tokens.ndim != 2 or not len(tokens) or tokens.is_floating_point():
                raise ArgumentError(
                    f"data is a tensor of the shape {list(tokens.shape)} and {tokens.dtype}; give token ids "
                    "[row, pos], or a task"
                )
            tokens, ends = tokens.long(), torch.full((len(tokens),), tokens.shape[1] - 1)
            name = f"tokens {digest(tokens)}"
        real = torch.arange(tokens.shape[1]) <= ends[:, None]
        return cls(name, _Fixed(tokens, _chosen(tokens, real, positions), seed).draw)


def _drawn(
    task: SequenceTask, n: int, number: int, held_out: bool, seed: int, positions: Positions
) -> tuple[Tensor, Tensor]:
    """Fresh sequences; what a model reads of each up to the token that predicts the last one that counts."""
    batch = task.batch(n, seed=seed, step=number, split=HELD_OUT if held_out else SPLIT)
    counts = (batch.loss_mask | batch.answer_mask).cpu()[:, 1:]
    real = counts.flip(1).cummax(1).values.flip(1)
    tokens = batch.tokens.cpu()[:, :-1]
    return tokens, _chosen(tokens, real, positions)


@dataclass(frozen=True, eq=False)
class _Fixed:
    """Rows that are read over and over, in a new order each time; a tenth of them is held out."""

    tokens: Int[Tensor, "row pos"]
    mask: Bool[Tensor, "row pos"]
    seed: int

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows to train on, and held-out ones; equal rows stay together."""
        _, group = np.unique(self.tokens.numpy(), axis=0, return_inverse=True)
        n_groups = int(group.max()) + 1
        n_out = max(1, round(_HELD_OUT_SHARE * n_groups))
        if n_groups < 2:
            raise ArgumentError("data has one row only (or copies of it), so none can be held out; give more rows")
        out = np.isin(group.reshape(-1), numpy_generator(self.seed, "held-out rows").permutation(n_groups)[:n_out])
        return np.flatnonzero(~out), np.flatnonzero(out)

    def draw(self, n: int, number: int, held_out: bool) -> tuple[Tensor, Tensor]:
        rows = self.parts[int(held_out)]
        passes = range(number * n // len(rows), (number * n + n - 1) // len(rows) + 1)
        orders = [numpy_generator(self.seed, "order of rows", each).permutation(len(rows)) for each in passes]
        start = number * n - passes[0] * len(rows)
        chosen = torch.from_numpy(rows[np.concatenate(orders)[start : start + n]])
        return self.tokens[chosen], self.mask[chosen]


def _chosen(tokens: Tensor, real: Tensor, positions: Positions) -> Tensor:
    """Which of the real tokens are read."""
    if isinstance(positions, str):
        if positions != "all":
            raise ArgumentError(f"positions is {positions!r}; use 'all', a list of positions, or a function of tokens")
        return real
    if callable(positions):
        mask = torch.as_tensor(np.asarray(positions(tokens.numpy())))
        if mask.shape != tokens.shape or mask.dtype != torch.bool:
            raise ArgumentError(
                f"positions gave {list(mask.shape)} of {mask.dtype} for tokens {list(tokens.shape)}; it must say True "
                "or False of each token"
            )
        return real & mask
    wanted = sorted({int(position) for position in positions})
    if not wanted or wanted[0] < 0 or wanted[-1] >= tokens.shape[1]:
        raise ArgumentError(f"positions is {list(positions)!r}; the rows have positions 0 to {tokens.shape[1] - 1}")
    mask = torch.zeros_like(real)
    mask[:, wanted] = True
    return real & mask


def _said(positions: Positions, source: _Source) -> object:
    """Positions as they are kept; a function is known by what it chooses."""
    if callable(positions):
        return f"a function ({digest(source.draw(_ROWS_AT_ONCE, 0, False)[1])})"
    return positions if isinstance(positions, str) else [int(position) for position in positions]


class _Stream(Iterator[Float[Tensor, "row d_model"]]):
    """Batches of activations, mixed over many sequences."""

    def __init__(self, model: HookedModel, layer: int, source: _Source, batch_size: int, seed: int) -> None:
        self._model, self._layer, self._source, self._batch_size = model, layer, source, batch_size
        self._generator = torch_generator(seed, "order of activations")
        self._numbers = {False: 0, True: 0}
        self._held = torch.empty(0, model.d_model)
        self._place = 0
        self.d_model, self.device = model.d_model, model.device

    def __next__(self) -> Float[Tensor, "row d_model"]:
        if self._place + self._batch_size > len(self._held):
            self._fill()
        self._place += self._batch_size
        return self._held[self._place - self._batch_size : self._place]

    def peek(self) -> Float[Tensor, "row d_model"]:
        """The activations that are held, to be had again by the batches."""
        if not len(self._held):
            self._fill()
        return self._held

    def held_out(self, n: int) -> Float[Tensor, "row d_model"]:
        """Activations of rows that are not trained on; of a few fixed rows there may be fewer."""
        return self._read(n, held_out=True)[:n]

    def _fill(self) -> None:
        wanted = _BATCHES_MIXED * self._batch_size
        held = torch.cat([self._held[self._place :], self._read(wanted, held_out=False)])
        self._held = held[torch.randperm(len(held), generator=self._generator)]
        self._place = 0

    def _read(self, n: int, *, held_out: bool) -> Float[Tensor, "row d_model"]:
        parts: list[Tensor] = []
        found = empty = 0
        while found < n:
            tokens, mask = self._source.draw(_ROWS_AT_ONCE, self._numbers[held_out], held_out)
            self._numbers[held_out] += 1
            if mask.any():
                resid = self._model.residual(tokens, [self._layer])[0]
                parts.append(resid[mask.to(resid.device)].float().cpu())
                found += len(parts[-1])
            elif (empty := empty + 1) > _MOST_EMPTY_DRAWS:
                raise ArgumentError("positions names no real token in the rows that were drawn")
        x = torch.cat(parts)
        if not torch.isfinite(x).all():
            raise NotFiniteError(
                f"the residual stream of this {self._model.kind} after layer {self._layer} is NaN or infinite: its "
                "weights are damaged, or its dtype overflows"
            )
        return x
