"""A training that starts from the weights of an earlier run, in place of drawn ones.

"all but embeddings" is what pre-pretraining needs, where the earlier run's tokens mean something else: token embedding
and unembedding are drawn anew and the rest is carried, as in Lee et al. 2026 (arXiv 2603.10055).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from emergent_heads.checkpoints.run import RunSource, read_manifest
from emergent_heads.checkpoints.series import Checkpoint
from emergent_heads.checkpoints.weights import stored_in
from emergent_heads.errors import ArgumentError, CheckpointError, ModelMismatchError, NoCheckpointsError
from emergent_heads.models.mixers import mixer_options
from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.storage import digest
from emergent_heads.training.folder import INITIAL
from emergent_heads.training.run import Run

Carry = Literal["all", "all but embeddings"]
Start = Run | Checkpoint | Path | str
"""What names the weights to start from: a run or its folder, for its last checkpoint, or one of its checkpoints."""
EMBEDDINGS = ("embed.weight", "unembed.weight", "unembed.bias")


@dataclass(frozen=True, eq=False)
class InitialWeights:
    """The weights that a run takes over from an earlier one. An attention bias is no weight, and stays behind.

    Attributes:
        run: name of the earlier run.
        step: of its checkpoint.
        carry: "all" weights, or "all but embeddings": token embedding and unembedding (matrix and bias) are drawn from
            the new run's seed.
        digest: of the carried weights.
        weights: those that are carried, by their names in the model's state; none where they are not needed any more.
    """

    run: str
    step: int
    carry: Carry
    digest: str
    weights: Mapping[str, Tensor]

    @classmethod
    def of(cls, start: Start, carry: Carry, config: SmallModelConfig, folder: Path) -> "InitialWeights":
        """The weights that `start` names, checked against the model that is to take them.

        Args:
            start: what names them.
            carry: what is taken.
            config: of the new model, with vocabulary and context.
            folder: of the new run. Where the earlier run is gone, a run that was begun here goes on with what it kept.

        Raises:
            ArgumentError: `start` names no run of the library, or one that is unfinished or diverged without saying
                which step. ModelMismatchError: the weights do not fit the model. NoCheckpointsError, CheckpointError,
                RunFolderError: they cannot be read.
        """
        check_carry(carry)
        path, step = _place(start)
        try:
            if step is None:
                step = _last_step(path)
            source = RunSource(path)
            earlier = SmallModelConfig(**source.manifest["config"])
            check_fit(earlier, config, carry)
            weights = _carried(_load(source, step).state_dict(), carry)
        except (NoCheckpointsError, CheckpointError):
            if (kept := _kept(folder, path.resolve().name, step, carry)) is None:
                raise
            return kept
        if earlier.context != config.context:
            _check_shapes(weights, config, earlier)
        return cls(source.name, step, carry, _digest(weights), weights)

    def settings(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"run": self.run, "step": self.step, "carry": self.carry, "digest": self.digest}

    @torch.no_grad()
    def put_on(self, model: SmallModel) -> None:
        """Replaces the weights of `model` by those that are carried."""
        state = model.state_dict()
        for name, weight in self.weights.items():
            state[name].copy_(weight)


def check_carry(carry: str) -> None:
    """Raises ArgumentError where `carry` is none of the ways there are."""
    if carry not in get_args(Carry):
        raise ArgumentError(f"carry must be {' or '.join(map(repr, get_args(Carry)))}, not {carry!r}")


def check_fit(earlier: SmallModelConfig, config: SmallModelConfig, carry: Carry) -> None:
    """Checks that weights of one model mean the same in another, as far as the configurations tell.

    Learned positions belong to their places in the sequence, so they are carried too, and need equal contexts.

    Raises:
        ModelMismatchError: they do not; the message names what differs.
    """
    there, here = _function(earlier, carry), _function(config, carry)
    if different := [f"{name} {there[name]} there, {here[name]} here" for name in there if there[name] != here[name]]:
        hint = ""
        if carry == "all" and _function(earlier, "all but embeddings") == _function(config, "all but embeddings"):
            hint = '; carry="all but embeddings" draws token embedding and unembedding anew'
        raise ModelMismatchError(
            f"the earlier run's weights do not fit this model: {'; '.join(different)}"
            + (hint or "; give the model the earlier run's settings")
        )
    if config.positions == "learned" and earlier.context != config.context:
        raise ModelMismatchError(
            f"the earlier run learned positions for a context of {earlier.context} and this model has "
            f"{config.context}; give both models the same context (the longer one, as context=...), or rotary "
            "positions"
        )


def _function(config: SmallModelConfig, carry: Carry) -> dict[str, Any]:
    """All that decides the function of given weights, and their shapes, but the context."""
    found = {name: getattr(config, name) for name in ("n_layers", "d_model", "n_heads", "norm", "positions", "mlp")}
    mixer = config.mixers[0] if len(set(config.mixers)) == 1 else config.mixers
    found |= {"d_head": config.head_size, "mixer": mixer, "biases": config.biases}
    found |= {"d_mlp": config.mlp_size if config.mlp != "none" else None}
    found |= {"mixer_options": {name: mixer_options(name, config.mixer_options) for name in config.mixers}}
    if carry == "all":
        found |= {"vocabulary_size": config.vocabulary_size, "unembed_bias": config.unembedding_bias}
    return found


def _place(start: Start) -> tuple[Path, int | None]:
    """Folder and step; no step for the last of a run that is done."""
    if isinstance(start, Run):
        return start.path, None
    if isinstance(start, Checkpoint):
        if not isinstance(start.series.source, RunSource):
            raise ArgumentError(
                f"{start} is no checkpoint of a run that the library trained; init_from takes such a run, its folder, "
                "or run.series[step]"
            )
        return start.series.source.path, start.step
    if isinstance(start, (str, Path)):
        return Path(start), None
    raise ArgumentError(f"init_from takes a run, its folder, or run.series[step], not {start!r}")


def _last_step(path: Path) -> int:
    run = Run.open(path)
    if run.status in ("finished", "solved"):
        return run.series.last.step
    what = "has diverged" if run.status == "diverged" else "is not finished"
    raise ArgumentError(
        f"the run {run.name} {what}, so it has no last checkpoint to start from; train it to its end, or name a "
        "checkpoint: init_from=run.series[step]"
    )


def _load(source: RunSource, step: int) -> SmallModel:
    try:
        return source.load(step)[0]
    except CheckpointError as error:
        raise CheckpointError(f"{source.name}, step {step}: {error} ({source.where(step)})") from error


def _carried(state: Mapping[str, Tensor], carry: Carry) -> dict[str, Tensor]:
    return {name: weight for name, weight in state.items() if carry == "all" or name not in EMBEDDINGS}


def _check_shapes(weights: Mapping[str, Tensor], config: SmallModelConfig, earlier: SmallModelConfig) -> None:
    """Of mixers that have weights for each position."""
    state = SmallModel(config).state_dict()
    for name, weight in weights.items():
        if weight.shape != state[name].shape:
            raise ModelMismatchError(
                f"{name} is {list(weight.shape)} in the earlier run, with a context of {earlier.context}, and "
                f"{list(state[name].shape)} in this model, with {config.context}; give both models the same context"
            )


def _digest(weights: Mapping[str, Tensor]) -> str:
    return digest(*(part for name in sorted(weights) for part in (name, weights[name])))


def _kept(folder: Path, run: str, step: int | None, carry: Carry) -> InitialWeights | None:
    """What a run in `folder` was begun with, if that is the checkpoint asked for; None where none was."""
    try:
        manifest = read_manifest(folder)
    except NoCheckpointsError:
        return None
    known = manifest.get("init_from")
    if known is None or (known["run"], known["carry"]) != (run, carry) or step not in (None, known["step"]):
        return None
    if manifest["status"] != "unfinished":  # only what it was is of interest then
        return InitialWeights(**known, weights={})
    if not (folder / INITIAL).is_file():
        return None
    with stored_in(folder / INITIAL) as stored:
        weights = {name: read() for name, read in stored.items()}
    return InitialWeights(**{**known, "digest": _digest(weights)}, weights=weights)
