"""The settings that all experiments share, at the two scales, so that runs with equal settings are trained once.

The paper's optimiser is not known. Those of scale "paper" are its sizes with the optimiser of third-party
reproductions; those of "small" were chosen so that a run of the linear map takes seconds on one core.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from emergent_heads.experiments.registry import Scale
from emergent_heads.sweeps import RunSpec, grid
from emergent_heads.tasks import AlgorithmicTask, CellularAutomaton, LinearMap

_Value = TypeVar("_Value")

_SMALL: Mapping[str, Any] = {
    "d_model": 64,
    "n_heads": 8,
    "learning_rate": 3e-3,
    "warmup_steps": 50,
    "tokens_per_batch": 1024,
    "evaluate_every": 20,
    "n_held_out": 256,
    "stop_when_solved": True,
    "checkpoints": (),
}
_PAPER: Mapping[str, Any] = {
    "d_model": 128,
    "n_heads": 8,
    "steps": 10_000,
    "learning_rate": 1e-3,
    "warmup_steps": 200,
    "tokens_per_batch": 8192,
    "evaluate_every": 50,
    "checkpoints": (),
}
# A linear map is solved at 95 % of the way to the floor: with one output bit unlearned no run of up to 16 gets there.
# Automata come down slowly once the pattern is found, while the tables are learned by heart: half of the way counts.
LINEAR_MAP: Mapping[Scale, Mapping[str, Any]] = {
    "small": {**_SMALL, "state_size": 8, "sparsity": 3, "n_layers": 1, "steps": 2000, "solved_at": 0.95},
    "paper": {**_PAPER, "state_size": 16, "sparsity": 3, "n_layers": 1, "solved_at": 0.95},
}
AUTOMATA: Mapping[Scale, Mapping[str, Any]] = {
    "small": {**_SMALL, "state_size": 4, "states": 4, "rules": 4, "n_layers": 2, "steps": 800, "solved_at": 0.5},
    "paper": {**_PAPER, "state_size": 16, "states": 16, "rules": 256, "n_layers": 4, "solved_at": 0.5},
}

# The block, optimiser and batch of the quiet-features paper, at one learning rate that solves these sizes in seconds.
_ALGORITHM: Mapping[str, Any] = {
    "norm": "rms",
    "positions": "rotary",
    "mlp": "swiglu",
    "biases": False,
    "d_model": 64,
    "n_heads": 4,
    "weight_decay": 0.1,
    "n_held_out": 512,
}
ALGORITHMS: Mapping[Scale, Mapping[str, Any]] = {
    "small": {**_ALGORITHM, "n_layers": 2, "learning_rate": 3e-3, "warmup_steps": 50},
    "paper": {**_ALGORITHM, "n_layers": 4, "learning_rate": 1e-3, "warmup_steps": 1000},
}
ROWS = 64
"""Sequences in a batch of an algorithmic task, as in the paper."""


@dataclass(frozen=True)
class Recipes:
    """Makes the runs of an experiment.

    Attributes:
        scale: "small" or "paper".
        max_steps: no run is longer, to try an experiment out; None for the recipe's own steps.
    """

    scale: Scale
    max_steps: int | None = None

    def linear_map(self, **changes: Any) -> list[RunSpec]:
        """Runs of linear maps, each seed with a matrix of its own unless `task_seed` is given (see `grid`)."""
        return self._runs(LinearMap, LINEAR_MAP[self.scale], changes)

    def automata(self, **changes: Any) -> list[RunSpec]:
        """Runs of cellular automata, each seed with tables of its own unless `task_seed` is given (see `grid`)."""
        return self._runs(CellularAutomaton, AUTOMATA[self.scale], changes)

    def algorithm(self, task: AlgorithmicTask, *, steps: int, **changes: Any) -> list[RunSpec]:
        """Runs of an algorithmic task at a fixed number of steps, with checkpoints ever further apart."""
        steps = self.steps(steps)
        recipe = {**ALGORITHMS[self.scale], "tokens_per_batch": ROWS * task.length, **changes, "steps": steps}
        kept = checkpoint_steps(steps)
        return grid(task, **{"checkpoints": [kept], "evaluate_every": max(1, steps // 60), **recipe})

    def sized(self, *, small: _Value, paper: _Value) -> _Value:
        """The value of this scale."""
        return small if self.scale == "small" else paper

    def steps(self, wanted: int) -> int:
        """Steps of a run that is to have `wanted`."""
        return wanted if self.max_steps is None else min(wanted, self.max_steps)

    def _runs(self, task: type, recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> list[RunSpec]:
        settings = {"task_seed": "seed", **recipe, **changes}
        settings["steps"] = self.steps(settings["steps"])
        return grid(task, **settings)


def checkpoint_steps(last: int, *, first: int = 10, ratio: float = 1.2) -> tuple[int, ...]:
    """Step 0, then steps that grow by about the same ratio, up to the last."""
    n = 1 + round(math.log(max(last, first) / first) / math.log(ratio))
    return tuple(sorted({0, last, *(min(last, round(first * ratio**power)) for power in range(n))}))
