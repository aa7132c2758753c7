"""Published families of runs, by name: Pythia, PolyPythias and the GPT-2 runs of Stanford CRFM.

Schedules and repository names are those of the model cards (EleutherAI/pythia; van der Wal et al. 2025, PolyPythias,
arXiv:2503.09543; stanford-crfm/mistral). Nothing is fetched when a suite is named.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emergent_heads.checkpoints.hub import CachePolicy, HubSource
from emergent_heads.errors import UnknownSuiteError, nearest

if TYPE_CHECKING:
    import pandas as pd

    from emergent_heads.checkpoints.series import CheckpointSeries, ModelKind

PYTHIA_V0_STEPS = tuple(range(1000, 143_001, 1000))
PYTHIA_STEPS = (0, *(2**power for power in range(10)), *PYTHIA_V0_STEPS)
STANFORD_STEPS = (*range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20_000, 100), *range(20_000, 400_001, 1000))

_PYTHIA_SIZES = ("14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
_SIZES_WITH_SEEDS = ("14m", "31m", "70m", "160m", "410m")
_SIZES_WITH_VARIANTS = _PYTHIA_SIZES[2:]
_STANFORD_RUNS = {
    "small": ("alias-{}-x21", "battlestar-{}-x49", "caprica-{}-x81", "darkmatter-{}-x343", "expanse-{}-x777"),
    "medium": ("arwen-{}-x21", "beren-{}-x49", "celebrimbor-{}-x81", "durin-{}-x343", "eowyn-{}-x777"),
}


@dataclass(frozen=True)
class Suite:
    """Runs that differ in their seed only.

    Attributes:
        name: what `suite()` is called with.
        size: size of the model as published.
        repositories: seed -> hub repository.
        steps: the published schedule.
        pattern: name of the revision of a step.
    """

    name: str
    size: str
    repositories: Mapping[int, str]
    steps: tuple[int, ...]
    pattern: str = "step{step}"


def _pythia(name: str, size: str, steps: tuple[int, ...] = PYTHIA_STEPS, seeds: tuple[int, ...] = ()) -> Suite:
    repositories = {seed: f"EleutherAI/{name}-seed{seed}" for seed in seeds}
    return Suite(name, size, {0: f"EleutherAI/{name}"} | repositories, steps)


def _all_suites() -> dict[str, Suite]:
    found = [
        _pythia(f"pythia-{size}", size, seeds=tuple(range(1, 10)) if size in _SIZES_WITH_SEEDS else ())
        for size in _PYTHIA_SIZES
    ]
    for size in _SIZES_WITH_VARIANTS:
        found.append(_pythia(f"pythia-{size}-deduped", size))
        found.append(_pythia(f"pythia-{size}-v0", size, PYTHIA_V0_STEPS))
        found.append(_pythia(f"pythia-{size}-deduped-v0", size, PYTHIA_V0_STEPS))
    for what in ("data", "weight"):
        name = f"pythia-160m-{what}-seed"
        found.append(Suite(name, "160m", {seed: f"EleutherAI/{name}{seed}" for seed in (1, 2, 3)}, PYTHIA_STEPS))
    for size, runs in _STANFORD_RUNS.items():
        repositories = {seed: f"stanford-crfm/{run.format(f'gpt2-{size}')}" for seed, run in enumerate(runs)}
        found.append(Suite(f"stanford-gpt2-{size}", size, repositories, STANFORD_STEPS, "checkpoint-{step}"))
    return {suite.name: suite for suite in found}


SUITES = _all_suites()


def suite(
    name: str,
    seed: int = 0,
    *,
    kind: "ModelKind" = "bridge",
    cache: CachePolicy = "keep",
    disk_budget_gb: float | None = None,
    device: str = "cpu",
) -> "CheckpointSeries":
    """The checkpoints of a published run.

    Args:
        name: a suite as `suites()` lists it ("pythia-160m"), or the repository of one run, with or without its owner
            ("EleutherAI/pythia-160m-seed3").
        seed: which run of the suite; 0 is the repository without a suffix. A repository's name has its seed in it.
        kind, cache, disk_budget_gb, device: as in `CheckpointSeries.from_hub`.

    Raises:
        UnknownSuiteError: no such suite, size or seed.
    """
    from emergent_heads.checkpoints.series import CheckpointSeries

    found, seed = _find(name, seed)
    source = HubSource(found.repositories[seed], cache, disk_budget_gb, found.pattern, found.steps)
    return CheckpointSeries(source, kind=kind, device=device, seed=seed, size=found.size)


def suites() -> "pd.DataFrame":
    """All suites: name, repository of the first seed, seeds, number of checkpoints, first and last step."""
    import pandas as pd

    rows = [
        {
            "name": found.name,
            "repository": next(iter(found.repositories.values())),
            "seeds": _range(tuple(found.repositories)),
            "steps": len(found.steps),
            "first": found.steps[0],
            "last": found.steps[-1],
        }
        for found in SUITES.values()
    ]
    return pd.DataFrame(rows)


def _find(name: str, seed: int) -> tuple[Suite, int]:
    if found := SUITES.get(name):
        if seed not in found.repositories:
            raise UnknownSuiteError(f"{name} has no seed {seed}; its seeds are {_range(tuple(found.repositories))}")
        return found, seed
    runs = {repository: (found, run) for found in SUITES.values() for run, repository in found.repositories.items()}
    short = {repository.partition("/")[2]: run for repository, run in runs.items()}
    if name not in runs and name not in short:
        names = dict.fromkeys([*SUITES, *short])
        longer = [other for other in names if name and name in other]  # to difflib, "gpt2" is far from longer names
        raise UnknownSuiteError(f"no suite {name!r}; {nearest(name, longer or names)}")
    found, own = (runs | short)[name]
    if seed not in (0, own):
        raise UnknownSuiteError(f"{name} is seed {own}, not {seed}; give {found.name!r} to choose a seed")
    return found, own


def _range(seeds: tuple[int, ...]) -> str:
    return str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]}-{seeds[-1]}"
