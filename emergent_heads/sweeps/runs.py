"""The runs of a sweep: what one is made of, and grids of them."""

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, cast

import numpy as np

from emergent_heads.errors import ArgumentError, EmergentHeadsError, nearest
from emergent_heads.models.attention_bias import AttentionBias
from emergent_heads.models.mixers import mixer_class, mixer_options
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.storage import digest
from emergent_heads.tasks.settings import is_settings
from emergent_heads.tasks.task import SequenceTask
from emergent_heads.training.initial_weights import Carry, check_carry, check_fit
from emergent_heads.training.settings import TrainingSettings

_LONGEST_NAME = 120
EARLIER = "init_from_"
"""Begins the columns of the run that a run starts from."""
_LISTS = ("betas", "checkpoints")  # settings that are lists of numbers themselves


@dataclass(frozen=True)
class RunSpec:
    """One training to be: a model, a task, how it is trained, and the seed.

    Attributes:
        config: the model; vocabulary and context are taken from the task where they are left open.
        task: what it is trained on.
        training: how.
        seed: of weights and sequences. What the task itself draws, such as the matrix of a linear map, has the task's
            own seed.
        init_from: an earlier run whose last weights this one starts from; None where all are drawn. A sweep trains it
            first, once for all runs that start from it, and gives it no row of its own unless it is named as a run.
        carry: "all" weights, or "all but embeddings"; see `emergent_heads.train`.

    Raises:
        ArgumentError: model, task and training do not go together. ModelMismatchError: the weights of `init_from`
            would not fit the model.
    """

    config: SmallModelConfig
    task: SequenceTask
    training: TrainingSettings
    seed: int = 0
    init_from: "RunSpec | None" = None
    carry: Carry = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", self.config.for_task(self.task))
        if self.training.bias is not None:
            self.config.check_attention(self.training.bias.layers, self.training.bias.heads)
            self.task.pattern()  # there must be one
        check_carry(self.carry)
        if self.init_from is not None:
            check_fit(self.init_from.config, self.config, self.carry)
        elif self.carry != "all":
            raise ArgumentError(f"carry={self.carry!r} goes with init_from, the run to carry weights from")

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the run, as plain values."""
        return {
            "config": self.config.settings(),
            "task": self.task.settings(),
            "training": self.training.settings(),
            "seed": self.seed,
            **({"init_from": self.init_from.name, "carry": self.carry} if self.init_from is not None else {}),
        }

    @property
    def chain(self) -> "list[RunSpec]":
        """This run, the one it starts from, the one that starts from, and so on."""
        return [self, *(self.init_from.chain if self.init_from is not None else [])]

    @cached_property
    def name(self) -> str:
        """Name of the run's folder: what tells it apart for a reader, and a digest of all its settings.

        Equal settings give an equal name, in whatever sweep and on whatever machine.
        """
        config, bias = self.config, self.training.bias
        mixer = config.mixer if isinstance(config.mixer, str) else "+".join(config.mixer)
        model = f"{mixer}-{config.n_layers}x{config.d_model}x{config.n_heads}"
        parts = [self.task.label, model, *([f"bias={bias.strength:g}"] if bias else []), f"seed={self.seed}"]
        if self.init_from is not None:
            parts.append(f"from={self.init_from.task.name}")
        readable = "".join(sign if sign.isalnum() or sign in "-=+." else "_" for sign in "-".join(parts))
        key = digest(json.dumps(self.settings, sort_keys=True, default=str))
        return f"{readable[:_LONGEST_NAME]}-{key[:10]}"

    @cached_property
    def columns(self) -> dict[str, Any]:
        """All settings under the names of a table's columns, as numbers and words.

        Sizes that the configuration leaves to be worked out are given; no attention bias is one of strength 0.
        `init_from` is the task of the run that this one starts from, or "none"; `init_from_...` are that run's
        settings but the seeds.
        """
        task = {("task_seed" if key == "seed" else key): value for key, value in self.task.settings().items()}
        config = {**self.config.settings(), "d_head": self.config.head_size, "d_mlp": self.config.mlp_size}
        config["unembed_bias"] = self.config.unembedding_bias
        training = self.training.settings()
        bias = training.pop("attention_bias") or AttentionBias(0.0).settings()
        bias = {f"attention_bias_{key}".removesuffix("_strength"): value for key, value in bias.items()}
        both = {"vocabulary_size", "context"}  # they are the task's
        flat = {**task, **{key: value for key, value in config.items() if key not in both}, **training, **bias}
        options = flat.pop("mixer_options")
        own = {key: _plain(value) for key, value in {**flat, **options, "seed": self.seed}.items()}
        if self.init_from is None:
            return {**own, "init_from": "none", "carry": "none"}
        seeds = ("seed", "task_seed")
        earlier = {EARLIER + key: value for key, value in self.init_from.columns.items() if key not in seeds}
        return {**own, **earlier, "init_from": self.init_from.task.name, "carry": self.carry}

    def __repr__(self) -> str:
        return f"RunSpec({self.name})"

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


def grid(
    task: "type[SequenceTask] | SequenceTask | Sequence[type[SequenceTask] | SequenceTask]",
    config: SmallModelConfig | None = None,
    *,
    task_seed: "int | Sequence[int] | Literal['seed'] | None" = None,
    invalid: Literal["refuse", "leave out"] = "refuse",
    **settings: Any,
) -> list[RunSpec]:
    """Every combination of the settings, as a list of runs; add lists for what is no full grid.

    Settings go by their names to the task, to the `SmallModelConfig` (options of a mixer, such as `hidden_units`, too)
    and to the `TrainingSettings`; `seed` is the run's. A list, range or array is an axis of the grid. Anything else is
    one value, a tuple too: `mixer=["attention", "mamba"]` are two models, `mixer=("attention", "mamba")` is one with
    two layers. (`checkpoints` and `betas` are lists themselves: an axis of them is a list of lists.)

    Heads at fixed width: `d_model=128, n_heads=[4, 8]`. Heads of fixed size: `d_head=16, n_heads=[4, 8]` without
    `d_model`, which is then their product.

    Args:
        task: a task, its class, or a list of these. Each gets those of the settings that it has.
        config: where the model's other settings come from.
        task_seed: seed of what the task draws once, such as the matrix of a linear map: a number or an axis, or
            "seed" for the run's own, so that each seed has another matrix. By default "seed" for a class, and for a
            task the seed it has. (Whether the paper draws a matrix for each seed is not known.)
        invalid: what becomes of a combination that makes no sense, such as a sparsity above the state size.
        settings: of task, model and training.

    Returns:
        The runs, the last setting changing fastest, each once.

    Raises:
        ArgumentError: a setting that nothing takes (with the nearest names), a combination that makes no sense, or
            nothing left.

    Example:
        `eh.grid(eh.tasks.LinearMap, state_size=[8, 12], sparsity=[2, 3], n_layers=1, d_model=128, n_heads=[4, 8],
        attention_bias=[None, 5.0], steps=2000, seed=range(3))`
    """
    if invalid not in ("refuse", "leave out"):
        raise ArgumentError(f'invalid must be "refuse" or "leave out", not {invalid!r}')
    tasks = cast(list[Any], list(task) if isinstance(task, (list, tuple)) else [task])
    axes = {name: _axis(name, value) for name, value in settings.items()}
    mixers = [*axes.get("mixer", []), config.mixer if config is not None else "attention"]
    homes = [_Homes.of(one, mixers) for one in tasks]
    if unknown := [name for name in axes if not any(name in home for home in homes)]:
        known = sorted({name for home in homes for name in home.all})
        raise ArgumentError(f"no task, model or training takes {unknown[0]!r}; {nearest(unknown[0], known)}")
    if "steps" not in axes:
        raise ArgumentError("how long? give steps")
    runs: dict[str, RunSpec] = {}
    reason = "no settings"
    for one, home in zip(tasks, homes, strict=True):
        seeds = _task_seeds(one, task_seed)
        taken = {name: values for name, values in axes.items() if name in home}
        for own_seed, *values in product(seeds, *taken.values()):
            chosen = dict(zip(taken, values, strict=True))
            try:
                run = _combine(one, config, home, chosen, own_seed)
            except EmergentHeadsError as error:
                varied = [f"{name}={value!r}" for name, value in chosen.items() if len(axes[name]) > 1]
                reason = f"{error}" + (f" (at {', '.join(varied)})" if varied else "")
                if invalid == "refuse":
                    raise ArgumentError(reason) from error
                continue
            runs.setdefault(run.name, run)
    if not runs:
        raise ArgumentError(f"no combination is left: {reason}")
    return list(runs.values())


@dataclass(frozen=True)
class _Homes:
    """Which names the parts of a run take."""

    task: frozenset[str]
    config: frozenset[str]
    options: frozenset[str]
    training: frozenset[str]

    @classmethod
    def of(cls, task: "type[SequenceTask] | SequenceTask", mixers: "Iterable[str | Sequence[str]]") -> "_Homes":
        kind = task if isinstance(task, type) else type(task)
        if not issubclass(kind, SequenceTask):
            raise ArgumentError(
                f"task must be one that models are trained on, such as emergent_heads.tasks.LinearMap, not {task!r}"
            )
        names = {name for mixer in mixers for name in _as_tuple(mixer)}
        options = {option for name in names for option in list(inspect.signature(mixer_class(name)).parameters)[2:]}
        of_task = {each.name for each in fields(cast(Any, kind)) if each.init} - {"seed"}
        of_config = {each.name for each in fields(SmallModelConfig)}
        of_training = {each.name for each in fields(TrainingSettings)}
        return cls(*(map(frozenset, (of_task, of_config, options, of_training))))

    @property
    def all(self) -> frozenset[str]:
        return self.task | self.config | self.options | self.training | {"seed", "task_seed"}

    def __contains__(self, name: str) -> bool:
        return name in self.all


def _combine(
    task: "type[SequenceTask] | SequenceTask",
    config: SmallModelConfig | None,
    home: _Homes,
    chosen: Mapping[str, Any],
    task_seed: "int | Literal['seed'] | None",
) -> RunSpec:
    seed = chosen.get("seed", 0)
    of_task = {name: value for name, value in chosen.items() if name in home.task}
    if task_seed is not None:
        of_task["seed"] = seed if task_seed == "seed" else task_seed
    made = task(**of_task) if isinstance(task, type) else replace(cast(Any, task), **of_task)
    of_training = {name: value for name, value in chosen.items() if name in home.training}
    return RunSpec(_config(config, home, chosen), made, TrainingSettings(**of_training), seed)


def _config(config: SmallModelConfig | None, home: _Homes, chosen: Mapping[str, Any]) -> SmallModelConfig:
    values = {name: value for name, value in chosen.items() if name in home.config}
    options = {name: value for name, value in chosen.items() if name in home.options and name not in home.config}
    before = config.settings() if config is not None else {}
    if "d_model" not in values and values.get("d_head") and "n_heads" in values:
        values["d_model"] = values["d_head"] * values["n_heads"]
    missing = [name for name in ("n_layers", "d_model") if name not in {**before, **values}]
    if missing:
        raise ArgumentError(f"what model? give {' and '.join(missing)}, or a config")
    options = {**before.get("mixer_options", {}), **values.get("mixer_options", {}), **options}
    # A grid over mixers gives each of them the options that it has.
    mixers = _as_tuple(values.get("mixer", before.get("mixer", "attention")))
    taken = {name: value for mixer in mixers for name, value in mixer_options(mixer, options).items()}
    known = {name for name in options if name in home.options}
    left = {name: value for name, value in options.items() if name in taken or name not in known}
    return SmallModelConfig(**{**before, **values, "mixer_options": left})


def _task_seeds(task: "type[SequenceTask] | SequenceTask", given: Any) -> list[Any]:
    if "seed" not in {each.name for each in fields(cast(Any, task))}:
        if given is not None:
            raise ArgumentError("task_seed is given, but the task draws nothing that has a seed")
        return [None]
    if given is None:
        return ["seed"] if isinstance(task, type) else [None]
    return _axis("task_seed", given)


def _axis(name: str, value: Any) -> list[Any]:
    """The values of a grid's axis; one value for anything but a list, range or array of one dimension."""
    values = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else value
    if not isinstance(values, (list, range)):
        return [value]
    if not len(values):
        raise ArgumentError(f"{name} is an empty list; give at least one value")
    if name in _LISTS and all(isinstance(each, (int, float)) for each in values):
        return [tuple(values)]
    return list(values)


def _as_tuple(mixer: "str | Sequence[str]") -> tuple[str, ...]:
    return (mixer,) if isinstance(mixer, str) else tuple(mixer)


def _plain(value: Any) -> Any:
    """A number or word for a table's cell."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(each, (int, float, str)) for each in value):
        return "/".join(map(str, value))
    if isinstance(value, list) and all(map(is_settings, value)):
        return "+".join(map(_plain, value))
    key = digest(json.dumps(value, sort_keys=True, default=str))[:10]  # of a matrix only same or not the same counts
    return f"{dict(value)['task']}-{key[:6]}" if is_settings(value) else key


def check_runs(runs: Iterable[RunSpec]) -> list[RunSpec]:
    """The runs as a list: itself, if they are one.

    Raises:
        ArgumentError: there are none, or something else is among them.
    """
    chosen = runs if isinstance(runs, list) else list(runs)
    if wrong := [run for run in chosen if not isinstance(run, RunSpec)]:
        raise ArgumentError(f"a sweep takes runs as emergent_heads.grid makes them, not {wrong[0]!r}")
    if not chosen:
        raise ArgumentError("no runs; give at least one, as emergent_heads.grid makes them")
    return chosen
