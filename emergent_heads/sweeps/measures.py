"""What is measured of a trained run."""

import json
from copy import deepcopy
from functools import lru_cache
from typing import Any

import pandas as pd

from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.sweeps.runs import RunSpec
from emergent_heads.training.run import Run

PLATEAU_LEFT = 0.06
"""Share of the way from plateau to floor at which a run has left the plateau.

For cellular automata (four symbols) it is where the paper puts it: a loss below 1.3 of 1.386 nats. For a linear map of
16 cells it is the first output bit.
"""
EVENTS = ("step_left_plateau", "step_solved")
AT_THE_END = ("share_learned", "excess_loss_nats")


def measures_of(run: RunSpec, trained: Run) -> dict[str, Any]:
    """The columns of the table that a training decides."""
    metrics, task = trained.metrics, run.task
    last = metrics.iloc[-1]
    seen = int(last["step"]) * run.training.batch_size(task)
    return {
        "status": _status(trained),
        "step_left_plateau": _first_step(metrics, task.plateau - PLATEAU_LEFT * (task.plateau - task.floor)),
        "step_solved": trained.solved_step,
        "last_step": int(last["step"]),
        "share_learned": float(last["share_learned"]),
        "loss_nats": float(last["loss_nats"]),
        "excess_loss_nats": float(last["loss_nats"] - task.floor),
        "exact_match": float(last["exact_match"]),
        "n_parameters": training_cost(run.config, task.length)[0],
        "sequences": seen,
        "tokens": float(seen * task.length),
        **flops_of(run, int(last["step"])),
        "seconds": float(last["seconds"]),
    }


def flops_of(run: RunSpec, steps: int | None = None) -> dict[str, float]:
    """FLOPs of that many steps of a run (all of them if left out), forward and backward, counted in both ways.

    `flops`: exactly, see `training_cost`: what the machine does, padding included. `flops_paper`: by the formula of
    arXiv 2505.03997, see `paper_flops_per_token`, on the tokens up to the first end mark; NaN where a layer is not
    attention, which it does not know.
    """
    task, config = run.task, run.config
    sequences = run.training.batch_size(task) * (run.training.steps if steps is None else steps)
    tokens = sequences * task.mean_length
    known = set(config.mixers) == {"attention"}
    per_token = paper_flops_per_token(config.n_layers, config.d_model, task.mean_length) if known else float("nan")
    return {
        "flops": float(training_cost(config, task.length)[1] * sequences),
        "flops_paper": float(per_token * tokens),
    }


def paper_flops_per_token(n_layers: int, d_model: int, mean_length: float) -> float:
    """FLOPs of training on one token, forward and backward: 6 (12 n_layers d_model^2 + n_layers mean_length d_model).

    The count of arXiv 2505.03997, which leaves out embedding and unembedding, counts the pairs of positions that a
    causal pattern has, and no padding.
    """
    return 6.0 * (12 * n_layers * d_model**2 + n_layers * mean_length * d_model)


def _status(trained: Run) -> str:
    if trained.status == "diverged":
        return "diverged"
    return "not solved" if trained.solved_step is None else "solved"


def _first_step(metrics: pd.DataFrame, loss: float) -> int | None:
    """First evaluated step with a held-out loss of at most `loss`."""
    below = metrics.loc[metrics["loss_nats"] <= loss, "step"]
    return int(below.iloc[0]) if len(below) else None


def training_cost(config: SmallModelConfig, length: int) -> tuple[int, int]:
    """Parameters of a model, and FLOPs of training on one sequence of `length` tokens, forward and backward.

    Counted by PyTorch on a model without data: 2 for each multiply-and-add of matrix products and convolutions;
    attention counts all pairs of positions, as usual. Elementwise work, which scans mostly are, counts nothing.
    """
    return _training_cost(json.dumps(config.settings()), length)


@lru_cache(maxsize=256)
def _training_cost(config: str, length: int) -> tuple[int, int]:
    model = SmallModel(SmallModelConfig(**json.loads(config)))
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    try:
        flops = _training_flops(deepcopy(model).to("meta"), length)
    except (NotImplementedError, RuntimeError, TypeError):  # a mixer that needs its values
        flops = _training_flops(model, length)
    return n_parameters, flops


def _training_flops(model: SmallModel, length: int) -> int:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # The fused kernel of a CPU is not counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length - 1, dtype=torch.long, device=model.device)).sum().backward()
    return counter.get_total_flops()
