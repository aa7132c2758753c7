"""Published families of runs, by name, and those that the user adds.

Repositories, names of revisions and tokens per step are those of the model cards:

- Pythia and PolyPythias: EleutherAI/pythia; van der Wal et al. 2025, arXiv:2503.09543. 2,097,152 tokens a step.
- GPT-2 runs of Stanford CRFM: stanford-crfm/mistral.
- OLMo, OLMo 2, OLMo 3: allenai; the tokens are in the names of the revisions, in whole 10^9. Stage 2 of OLMo 2 starts
  from the end of stage 1 and counts its own steps and tokens; its seeds are the "ingredients" that were averaged into
  the final model, of which the last of 13B and 32B had three times the tokens.
- SmolLM2 and SmolLM3: HuggingFaceTB; "nb_tokens = nb_step * GBS" with the global batch size (GBS) of each card. The
  stages of SmolLM3 count on from each other and are one series here.
- Amber and K2: LLM360; the number counts checkpoints, not optimiser steps.
- BLOOM: bigscience, intermediate checkpoints; their tokenizer is that of the finished model.
- The small models trained for TransformerLens: NeelNanda; files in TransformerLens' own format. The number is the one
  `get_checkpoint_labels` of TransformerLens gives, tokens where the last exceeds 10^9. They were trained with a
  beginning-of-sequence token, so give tasks `prepend_bos=True`.

Pythia and the GPT-2 runs have fixed schedules, kept here so that a series of theirs tells its steps offline. The steps
of all others are read from the repository, when first asked for. Nothing is fetched when a suite is named.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from emergent_heads.checkpoints.files import FileSource, hub_source
from emergent_heads.checkpoints.hub import CachePolicy, HubSource
from emergent_heads.checkpoints.naming import check_pattern, tells_the_name, tells_tokens
from emergent_heads.errors import ArgumentError, UnknownSuiteError, UnsupportedModelError, nearest, whole_number

if TYPE_CHECKING:
    import pandas as pd

    from emergent_heads.checkpoints.series import CheckpointSeries, ModelKind

PYTHIA_V0_STEPS = tuple(range(1000, 143_001, 1000))
PYTHIA_STEPS = (0, *(2**power for power in range(10)), *PYTHIA_V0_STEPS)
STANFORD_STEPS = (*range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20_000, 100), *range(20_000, 400_001, 1000))

Counted = Literal["steps", "checkpoints", "tokens"]
"""What the number of a checkpoint counts."""

_PYTHIA_TOKENS_PER_STEP = 2_097_152
_PYTHIA_SIZES = ("14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
_SIZES_WITH_SEEDS = ("14m", "31m", "70m", "160m", "410m")
_SIZES_WITH_VARIANTS = _PYTHIA_SIZES[2:]
_STANFORD_RUNS = {
    "small": ("alias-{}-x21", "battlestar-{}-x49", "caprica-{}-x81", "darkmatter-{}-x343", "expanse-{}-x777"),
    "medium": ("arwen-{}-x21", "beren-{}-x49", "celebrimbor-{}-x81", "durin-{}-x343", "eowyn-{}-x777"),
}
_OLMO = {"1b": "OLMo-1B-hf", "1b-0724": "OLMo-1B-0724-hf", "7b-0424": "OLMo-7B-0424-hf", "7b-0724": "OLMo-7B-0724-hf"}
_OLMO_2_STAGE_1 = {
    "1b": "OLMo-2-0425-1B",
    "1b-early": "OLMo-2-0425-1B-early-training",
    "7b": "OLMo-2-1124-7B",
    "13b": "OLMo-2-1124-13B",
    "32b": "OLMo-2-0325-32B",
}
_OLMO_2_STAGE_2 = {  # repository, and how many ingredients there are
    "1b": ("OLMo-2-0425-1B", 3),
    "7b": ("OLMo-2-1124-7B", 3),
    "13b": ("OLMo-2-1124-13B", 4),
    "32b": ("OLMo-2-0325-32B", 3),
}
_OLMO_3 = {"7b": "Olmo-3-1025-7B", "32b": "Olmo-3-1125-32B"}
_SMOLLM2_TOKENS_PER_STEP = {"135M": 1_048_576, "360M": 1_572_864, "1.7B": 2_097_152}
_SMOLLM3_TOKENS_PER_STEP = 2_359_296
_BLOOM_SIZES = ("560m", "1b1", "1b7", "3b", "7b1")
_TRANSFORMER_LENS = {
    "attn-only-1l": "Attn_Only_1L512W_C4_Code",
    "attn-only-2l": "Attn_Only_2L512W_C4_Code",
    "attn-only-3l": "Attn_Only_3L512W_C4_Code",
    "attn-only-4l": "Attn_Only_4L512W_C4_Code",
    "gelu-1l": "GELU_1L512W_C4_Code",
    "gelu-2l": "GELU_2L512W_C4_Code",
    "gelu-3l": "GELU_3L512W_C4_Code",
    "gelu-4l": "GELU_4L512W_C4_Code",
    "solu-1l": "SoLU_1L512W_C4_Code",
    "solu-2l": "SoLU_2L512W_C4_Code",
    "solu-3l": "SoLU_3L512W_C4_Code",
    "solu-4l": "SoLU_4L512W_C4_Code",
    "solu-6l": "SoLU_6L768W_C4_Code",
    "solu-8l": "SoLU_8L1024W_C4_Code",
    "solu-10l": "SoLU_10L1280W_C4_Code",
    "solu-12l": "SoLU_12L1536W_C4_Code",
    "solu-1l-pile": "SoLU_1L_v9_old",
    "solu-2l-pile": "SoLU_2L_v10_old",
    "solu-4l-pile": "SoLU_4L_v11_old",
    "solu-6l-pile": "SoLU_6L_v13_old",
    "solu-8l-pile": "SoLU_8L_v21_old",
    "solu-10l-pile": "SoLU_10L_v22_old",
    "solu-12l-pile": "SoLU_12L_v23_old",
}
_PRE_PRETRAINED = ("pythia-160m-shuffle-dyck-500steps", "pythia-160m-c4-only-10k", "pythia-160m-sd-500-c4-10k")
_REFUSED = dict.fromkeys(
    ("pre-pretraining", *_PRE_PRETRAINED),
    f"the pre-pretrained Pythias of Hu et al. 2025 are public (of michahu8: {', '.join(_PRE_PRETRAINED)}), but their "
    "README does not say how their checkpoints are named; look at the branches and files of the repository, then use "
    "CheckpointSeries.from_hub or register_suite with the pattern you find",
) | dict.fromkeys(
    ("olmo-7b", "olmo-7b-hf"),
    "the checkpoints of allenai/OLMo-7B need Python code of their repository, and allenai/OLMo-7B-hf is not known to "
    "have any; use olmo-7b-0424 or olmo-7b-0724",
)
"""Public checkpoints that people ask for -> why they are no suite."""


@dataclass(frozen=True)
class Suite:
    """Runs that differ in their seed only.

    Attributes:
        name: what `suite()` is called with.
        size: size of the model as published.
        repositories: seed -> hub repository.
        pattern: name of a step's revision, or path of its file where it ends in ".pth": `{step}` for the number,
            `{billions}` for the tokens seen in 10^9, `{seed}` for the seed, `*` for what does not matter.
        steps: the published schedule; None where the repository is asked.
        tokens_per_step: tokens of one step; None where the name of a checkpoint tells its tokens, or nothing does.
        counted: what the number of a checkpoint counts.
        tokenizer: repository of the tokenizer, if the checkpoints have none.
    """

    name: str
    size: str | None
    repositories: Mapping[int, str]
    pattern: str = "step{step}"
    steps: tuple[int, ...] | None = None
    tokens_per_step: int | None = None
    counted: Counted = "steps"
    tokenizer: str | None = None

    def source(
        self, seed: int, cache: CachePolicy = "keep", disk_budget_gb: float | None = None
    ) -> HubSource | FileSource:
        """The checkpoints of one run."""
        return hub_source(
            self.repositories[seed],
            self.pattern.replace("{seed}", str(seed)),
            cache=cache,
            disk_budget_gb=disk_budget_gb,
            known_steps=self.steps,
            tokens_per_step=self.tokens_per_step,
            tokenizer_repository=self.tokenizer,
        )


def _pythia() -> Iterable[Suite]:
    def one(name: str, size: str, steps: tuple[int, ...] = PYTHIA_STEPS, seeds: tuple[int, ...] = ()) -> Suite:
        repositories = {0: f"EleutherAI/{name}"} | {seed: f"EleutherAI/{name}-seed{seed}" for seed in seeds}
        return Suite(name, size, repositories, steps=steps, tokens_per_step=_PYTHIA_TOKENS_PER_STEP)

    for size in _PYTHIA_SIZES:
        yield one(f"pythia-{size}", size, seeds=tuple(range(1, 10)) if size in _SIZES_WITH_SEEDS else ())
    for size in _SIZES_WITH_VARIANTS:
        yield one(f"pythia-{size}-deduped", size)
        yield one(f"pythia-{size}-v0", size, PYTHIA_V0_STEPS)
        yield one(f"pythia-{size}-deduped-v0", size, PYTHIA_V0_STEPS)
    for what in ("data", "weight"):
        name = f"pythia-160m-{what}-seed"
        repositories = {seed: f"EleutherAI/{name}{seed}" for seed in (1, 2, 3)}
        yield Suite(name, "160m", repositories, steps=PYTHIA_STEPS, tokens_per_step=_PYTHIA_TOKENS_PER_STEP)


def _stanford() -> Iterable[Suite]:
    for size, runs in _STANFORD_RUNS.items():
        repositories = {seed: f"stanford-crfm/{run.format(f'gpt2-{size}')}" for seed, run in enumerate(runs)}
        yield Suite(f"stanford-gpt2-{size}", size, repositories, "checkpoint-{step}", STANFORD_STEPS)


def _olmo() -> Iterable[Suite]:
    tokens = "tokens{billions}B"
    for size, name in _OLMO.items():
        yield Suite(f"olmo-{size}", size.partition("-")[0], {0: f"allenai/{name}"}, f"step{{step}}-{tokens}")
    for size, name in _OLMO_2_STAGE_1.items():
        yield Suite(f"olmo-2-{size}", size.partition("-")[0], {0: f"allenai/{name}"}, f"stage1-step{{step}}-{tokens}")
    for size, (name, ingredients) in _OLMO_2_STAGE_2.items():
        repositories = dict.fromkeys(range(1, ingredients + 1), f"allenai/{name}")
        pattern = f"stage2-ingredient{{seed}}-step{{step}}-{tokens}"
        yield Suite(f"olmo-2-{size}-stage2", size, repositories, pattern)
    for size, name in _OLMO_3.items():
        yield Suite(f"olmo-3-{size}", size, {0: f"allenai/{name}"}, "stage1-step{step}")


def _smollm() -> Iterable[Suite]:
    for size, tokens in _SMOLLM2_TOKENS_PER_STEP.items():
        repositories = {0: f"HuggingFaceTB/SmolLM2-{size}-intermediate-checkpoints"}
        yield Suite(f"smollm2-{size.lower()}", size.lower(), repositories, "step-{step}", tokens_per_step=tokens)
    yield Suite(
        "smollm3-3b",
        "3b",
        {0: "HuggingFaceTB/SmolLM3-3B-checkpoints"},
        "stage*-step-{step}",
        tokens_per_step=_SMOLLM3_TOKENS_PER_STEP,
    )


def _llm360() -> Iterable[Suite]:
    yield Suite("amber-7b", "7b", {0: "LLM360/Amber"}, "ckpt_{step}", counted="checkpoints")
    yield Suite("k2-65b", "65b", {0: "LLM360/K2"}, "ckpt_{step}", counted="checkpoints")


def _bloom() -> Iterable[Suite]:
    for name in (*(f"bloom-{size}" for size in _BLOOM_SIZES), "bloom"):
        size = name.removeprefix("bloom").removeprefix("-") or "176b"
        repositories = {0: f"bigscience/{name}-intermediate"}
        yield Suite(f"bloom-{size}", size, repositories, "global_step{step}", tokenizer=f"bigscience/{name}")


def _transformer_lens() -> Iterable[Suite]:
    for alias, name in _TRANSFORMER_LENS.items():
        size = alias.removesuffix("-pile").rpartition("-")[2]
        yield Suite(alias, size, {0: f"NeelNanda/{name}"}, "checkpoints/*_{step}.pth", counted="tokens")


def _published() -> dict[str, Suite]:
    families = (_pythia(), _stanford(), _olmo(), _smollm(), _llm360(), _bloom(), _transformer_lens())
    return {suite.name: suite for family in families for suite in family}


SUITES = _published()


def suite(
    name: str,
    seed: int | None = None,
    *,
    kind: "ModelKind | None" = None,
    cache: CachePolicy = "keep",
    disk_budget_gb: float | None = None,
    device: str = "cpu",
    allow_known_bad: bool = True,
) -> "CheckpointSeries":
    """The checkpoints of a published run, or of one that `register_suite` added.

    Args:
        name: a suite as `suites()` lists it ("pythia-160m"), or the repository of one run, with or without its owner
            ("EleutherAI/pythia-160m-seed3").
        seed: which run of the suite; by default the first, for Pythia the repository without a suffix. A repository's
            name has its seed in it.
        kind, cache, disk_budget_gb, device, allow_known_bad: as in `CheckpointSeries.from_hub`.

    Raises:
        UnknownSuiteError: no such suite, size or seed, or one whose checkpoints nobody has described.
        UnsupportedModelError: a suite whose models are no causal language models (MultiBERTs).
    """
    from emergent_heads.checkpoints.kinds import default_kind
    from emergent_heads.checkpoints.series import CheckpointSeries

    found, seed = _find(name, seed)
    source = found.source(seed, cache, disk_budget_gb)
    return CheckpointSeries(
        source,
        kind=kind or default_kind(source),
        device=device,
        seed=seed,
        size=found.size,
        allow_known_bad=allow_known_bad,
    )


def suites() -> "pd.DataFrame":
    """All suites, published ones first; asks nothing of the hub.

    Columns: name; repository of the first seed; seeds; steps (how many checkpoints), first and last, missing where the
    repository tells them when asked; counted, what the number of a checkpoint counts: steps, tokens or checkpoints;
    tokens_seen, what `CheckpointSeries.tokens_seen` goes by: "per step", "name", "number" or "unknown";
    tokens_per_step.
    """
    import pandas as pd

    rows = [
        {
            "name": found.name,
            "repository": next(iter(found.repositories.values())),
            "seeds": _range(tuple(found.repositories)),
            "steps": len(found.steps) if found.steps else None,
            "first": found.steps[0] if found.steps else None,
            "last": found.steps[-1] if found.steps else None,
            "counted": found.counted,
            "tokens_seen": _tokens_from(found),
            "tokens_per_step": found.tokens_per_step,
        }
        for found in SUITES.values()
    ]
    whole = dict.fromkeys(("steps", "first", "last", "tokens_per_step"), "Int64")
    return pd.DataFrame(rows).astype(whole)


def register_suite(
    name: str,
    repositories: str | Mapping[int, str],
    pattern: str = "step{step}",
    *,
    steps: Iterable[int] | None = None,
    tokens_per_step: int | None = None,
    size: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Adds a suite of your own to `suite()` and `suites()`, for as long as the process lives.

    Args:
        name: what `suite()` is to be called with.
        repositories: hub repository ("owner/name") of each seed, or of the one run there is.
        pattern: how a checkpoint's revision is named: `{step}` for the step, `{billions}` for the tokens seen in
            10^9, `{seed}` for the seed, `*` for what does not matter. Where it ends in ".pth" it is the path of a
            file in TransformerLens' own format.
        steps: the steps there are, if you want to know them offline; by default they are read from the repository.
        tokens_per_step: tokens of one optimiser step, for `CheckpointSeries.tokens_seen`.
        size: size of the model, as you call it.
        tokenizer: repository of the tokenizer, if the checkpoints have none.

    Raises:
        ArgumentError: the name is taken, or an argument makes no sense.
    """
    if not name:
        raise ArgumentError("name is empty; say what suite() is to be called with")
    if name in SUITES or name in _runs() or name in _REFUSED:
        raise ArgumentError(f"name={name!r} is taken; choose another")
    runs = {0: repositories} if isinstance(repositories, str) else dict(repositories)
    if not runs or not all(isinstance(seed, int) for seed in runs):
        raise ArgumentError("repositories must give one repository for each whole number that is a seed")
    check_pattern(pattern)
    schedule = None if steps is None else _schedule(steps)
    if schedule is not None and not tells_the_name(pattern):
        raise ArgumentError(f"pattern={pattern!r} is open beyond the step, so steps must be read from the repository")
    if tokens_per_step is not None:
        whole_number("tokens_per_step", tokens_per_step, least=1)
    added = Suite(name, size, runs, pattern, schedule, tokens_per_step, tokenizer=tokenizer)
    for seed in runs:
        added.source(seed)  # which says what is wrong with repository or pattern
    SUITES[name] = added


def _schedule(steps: Iterable[int]) -> tuple[int, ...]:
    given = [whole_number("steps", step, least=0) for step in steps]
    if not given or sorted(set(given)) != given:
        raise ArgumentError("steps must name each step once, ascending")
    return tuple(given)


def _find(name: str, seed: int | None) -> tuple[Suite, int]:
    if found := SUITES.get(name):
        seeds = tuple(found.repositories)
        if seed is not None and seed not in seeds:
            raise UnknownSuiteError(f"{name} has no seed {seed}; its seeds are {_range(seeds)}")
        return found, seeds[0] if seed is None else seed
    runs = _runs()
    if name not in runs:
        _refuse(name)
        names = dict.fromkeys([*SUITES, *(run for run in runs if "/" not in run)])
        longer = [other for other in names if name and name in other]  # to difflib, "gpt2" is far from longer names
        raise UnknownSuiteError(f"no suite {name!r}; {nearest(name, longer or names)}")
    found, own = runs[name]
    if seed not in (None, 0, own):
        raise UnknownSuiteError(f"{name} is seed {own}, not {seed}; give {found.name!r} to choose a seed")
    return found, own


def _runs() -> dict[str, tuple[Suite, int]]:
    """Repository, with and without its owner -> its run; the first suite where several share a repository."""
    runs: dict[str, tuple[Suite, int]] = {}
    for found in SUITES.values():
        for seed, repository in found.repositories.items():
            runs.setdefault(repository, (found, seed))
            runs.setdefault(repository.partition("/")[2], (found, seed))
    return runs


def _refuse(name: str) -> None:
    """Says of public checkpoints that are no suite here why they are none."""
    short = name.rpartition("/")[2].lower()
    if short.startswith("multibert"):
        raise UnsupportedModelError(
            f"{name}: MultiBERTs are masked language models, which see what follows a position, so nothing here that "
            "asks for the next token applies; their checkpoints are in repositories of their own "
            "(google/multiberts-seed_0-step_20k)"
        )
    if short in _REFUSED:
        raise UnknownSuiteError(f"no suite {name!r}: {_REFUSED[short]}")


def _tokens_from(found: Suite) -> str:
    if tells_tokens(found.pattern):
        return "name"
    if found.counted == "tokens":
        return "number"
    return "unknown" if found.tokens_per_step is None else "per step"


def _range(seeds: tuple[int, ...]) -> str:
    if len(seeds) > 1 and seeds == tuple(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(str(seed) for seed in seeds)
