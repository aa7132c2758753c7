"""When did a capability emerge in training, which heads made it emerge, and what was learned before the loss moved?

Names are imported when first used, so `import emergent_heads` needs neither torch nor transformer_lens.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "emergent_heads.analysis.ablation": ("ablate_features", "ablation_series"),
    "emergent_heads.analysis.attention_view": ("attention_view",),
    "emergent_heads.analysis.early_warning": ("early_warning",),
    "emergent_heads.analysis.emergence": ("emergence_from_table", "emergence_table", "find_emergence"),
    "emergent_heads.analysis.evaluation": ("evaluate",),
    "emergent_heads.analysis.heads": ("rank_heads",),
    "emergent_heads.analysis.probes": ("Probes", "ProbeSeries", "fit_probes", "open_probes", "probe_series"),
    "emergent_heads.analysis.quiet": ("classify_features",),
    "emergent_heads.analysis.recovery": ("recovery_curve",),
    "emergent_heads.analysis.trajectories": ("head_trajectories",),
    "emergent_heads.analysis.transplant": ("transplant_features",),
    "emergent_heads.analysis.transition": ("LossRange", "find_transition"),
    "emergent_heads.checkpoints.known_issues": ("known_issues",),
    "emergent_heads.checkpoints.series": ("Checkpoint", "CheckpointSeries"),
    "emergent_heads.checkpoints.suites": ("register_suite", "suite", "suites"),
    "emergent_heads.models.attention_bias": ("AttentionBias",),
    "emergent_heads.models.hooked": ("check_intervention", "hooked"),
    "emergent_heads.models.mixers": ("Mixer", "register_mixer"),
    "emergent_heads.models.small": ("SmallModel", "SmallModelConfig", "effective_pattern"),
    "emergent_heads.sweeps": ("RunSpec", "SweepResult", "budget_grid", "compute_frontier", "grid", "run_sweep"),
    "emergent_heads.tasks.features": ("Feature",),
    "emergent_heads.training.loop": ("train",),
    "emergent_heads.training.seeds": ("train_seeds",),
    "emergent_heads.training.run": ("Run", "open_run"),
    "emergent_heads.training.settings": ("TrainingSettings",),
}
_MODULES = ("errors", "executors", "sae", "tasks")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_MODULES, *_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from emergent_heads import errors, executors, sae, tasks
    from emergent_heads.analysis.ablation import ablate_features, ablation_series
    from emergent_heads.analysis.attention_view import attention_view
    from emergent_heads.analysis.early_warning import early_warning
    from emergent_heads.analysis.emergence import emergence_from_table, emergence_table, find_emergence
    from emergent_heads.analysis.evaluation import evaluate
    from emergent_heads.analysis.heads import rank_heads
    from emergent_heads.analysis.probes import Probes, ProbeSeries, fit_probes, open_probes, probe_series
    from emergent_heads.analysis.quiet import classify_features
    from emergent_heads.analysis.recovery import recovery_curve
    from emergent_heads.analysis.trajectories import head_trajectories
    from emergent_heads.analysis.transition import LossRange, find_transition
    from emergent_heads.analysis.transplant import transplant_features
    from emergent_heads.checkpoints.known_issues import known_issues
    from emergent_heads.checkpoints.series import Checkpoint, CheckpointSeries
    from emergent_heads.checkpoints.suites import register_suite, suite, suites
    from emergent_heads.models.attention_bias import AttentionBias
    from emergent_heads.models.hooked import check_intervention, hooked
    from emergent_heads.models.mixers import Mixer, register_mixer
    from emergent_heads.models.small import SmallModel, SmallModelConfig, effective_pattern
    from emergent_heads.sweeps import RunSpec, SweepResult, budget_grid, compute_frontier, grid, run_sweep
    from emergent_heads.tasks.features import Feature
    from emergent_heads.training.loop import train
    from emergent_heads.training.run import Run, open_run
    from emergent_heads.training.seeds import train_seeds
    from emergent_heads.training.settings import TrainingSettings


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"emergent_heads.{name}")
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'emergent_heads' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
