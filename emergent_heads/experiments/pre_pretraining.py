"""Does training on synthetic sequences first make capabilities of a language model emerge earlier?"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy import stats

from emergent_heads import tasks
from emergent_heads.analysis.emergence import find_emergence
from emergent_heads.analysis.heads import rank_heads
from emergent_heads.analysis.trajectories import head_trajectories
from emergent_heads.checkpoints.series import Checkpoint
from emergent_heads.errors import InterventionHasNoEffect
from emergent_heads.experiments.comparisons import LEAST_SEEDS, NAN, of_interval
from emergent_heads.experiments.pre_pretraining_figure import overview
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.study import Arm, Check, Judgement, Study, Verdict, select
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.randomness import numpy_generator
from emergent_heads.statistics import (
    Interval,
    bootstrap_mean,
    holm_p,
    log_rank_p,
    restricted_mean,
    restricted_mean_difference,
)
from emergent_heads.storage import write_json
from emergent_heads.sweeps import RunSpec
from emergent_heads.tasks.task import PromptTask, SequenceTask
from emergent_heads.training.run import Run
from emergent_heads.training.settings import TrainingSettings

NONE = "none"
SYNTHETIC = ("Dyck", "shuffle Dyck", "NCA", "cellular automaton")
CLAIMED = SYNTHETIC[:3]
"""What the paper names: Dyck languages and neural cellular automata."""
CONTROLS = ("shuffled tokens", "more text")
CAPABILITIES = ("string repetition", "in-context repetition")
HEADS = ("previous-token head", "induction head")
OUTCOMES = (*CAPABILITIES, *HEADS)
CLOCKS = {"after": "steps after pre-pretraining", "total": "steps in all"}
THRESHOLDS = {"string repetition": 0.3, "in-context repetition": 0.5}
"""Share of prompts matched that counts as emerged."""
HEAD_LEVELS = {"previous_token": 0.5, "induction": 0.3}
"""Pattern score from which a head counts as one of that kind."""
LEAST_SAVING = 0.1
"""A share of the steps without pre-pretraining: to save less, with the whole interval, counts as no saving."""
LEVEL = 0.05
_MEASURES = "pre_pretraining.json"
_PROMPTS = 128
_SEEN = 50  # tokens of the text that are drawn for prompts stand in it at least so often
_NO_HEADS = np.zeros(0)


@dataclass(frozen=True)
class Sizes:
    """What one scale trains.

    Attributes:
        config: the model.
        vocabulary_size: of the text's byte-pair encoding.
        context: tokens in a sequence, of text and of all else.
        before: steps of pre-pretraining.
        after: steps of training on text that follow; without pre-pretraining there are `before` more of them.
        training: settings of both.
        seeds: runs of each arm.
    """

    config: SmallModelConfig
    vocabulary_size: int
    context: int
    before: int
    after: int
    training: Mapping[str, Any]
    seeds: int

    def text(self) -> SequenceTask:
        """Text of which three rows in four are one passage said over and over."""
        corpus = tasks.TextCorpus("stdlib", vocabulary_size=self.vocabulary_size, context=self.context)
        return tasks.repeated_text(corpus, passage=(self.context // 8, self.context // 2))

    def synthetic(self, arm: str) -> SequenceTask:
        """What an arm is pre-pretrained on, in sequences of the text's length."""
        made = {
            "Dyck": partial(tasks.Dyck, brackets=16, max_depth=8, length=self.context),
            "shuffle Dyck": partial(tasks.ShuffleDyck, brackets=16, max_depth=8, length=self.context),
            "NCA": partial(tasks.NeuralCellularAutomata, grid=6, colours=4, token_bytes=1, length=self.context),
            "cellular automaton": partial(
                tasks.CellularAutomaton, state_size=8, states=self.context // 8, symbols=4, rules=256
            ),
            "shuffled tokens": lambda: tasks.ShuffledTokens(self.text()),
            "more text": self.text,
        }
        return made[arm]()


_TRAINING: Mapping[str, Any] = {"weight_decay": 0.01, "warmup_steps": 100}
SIZES = {
    # The recipe for a repetition that emerges in seconds: see the notes of the experiment.
    "small": Sizes(
        SmallModelConfig.gpt_neox(n_layers=2, d_model=64, n_heads=4, d_mlp=64),
        vocabulary_size=128,
        context=64,
        before=500,
        after=1500,
        training={**_TRAINING, "learning_rate": 8e-3, "betas": (0.9, 0.98), "tokens_per_batch": 2048},
        seeds=8,
    ),
    "paper": Sizes(
        SmallModelConfig.gpt_neox(n_layers=6, d_model=256, n_heads=8),
        vocabulary_size=8192,
        context=512,
        before=1000,
        after=20_000,
        training={**_TRAINING, "learning_rate": 1e-3, "tokens_per_batch": 65_536, "dtype": "bfloat16"},
        seeds=8,
    ),
}


def _arms(recipes: Recipes) -> list[Arm]:
    sizes = SIZES[recipes.scale]
    names = (NONE, *SYNTHETIC, *CONTROLS)
    return [Arm("pre-pretraining", "", name, _runs(sizes, recipes, name)) for name in names]


def _runs(sizes: Sizes, recipes: Recipes, arm: str) -> list[RunSpec]:
    before, after = recipes.steps(sizes.before), recipes.steps(sizes.after)
    text = sizes.text()
    if arm == NONE:
        return [RunSpec(sizes.config, text, _training(sizes, before + after), seed) for seed in range(sizes.seeds)]
    synthetic, seeds = sizes.synthetic(arm), range(sizes.seeds)
    # Seeds of their own, or "more text" would be the same batches again.
    parents = [RunSpec(sizes.config, synthetic, _training(sizes, before, (0, before)), 100 + seed) for seed in seeds]
    settings = _training(sizes, after)
    return [
        RunSpec(sizes.config, text, settings, seed, init_from=parent, carry="all but embeddings")
        for seed, parent in zip(seeds, parents, strict=True)
    ]


def _training(sizes: Sizes, steps: int, checkpoints: Sequence[int] | None = None) -> TrainingSettings:
    every = max(1, (sizes.before + sizes.after) // 40)
    kept = range(0, steps + 1, every) if checkpoints is None else checkpoints
    return TrainingSettings(
        steps=steps, checkpoints=tuple(kept), evaluate_every=2 * every, n_held_out=64, **sizes.training
    )


# ---- what is measured of a run ----


def _measure(folder: Path) -> None:
    """Finds when each outcome came, and which heads brought repetition, once: kept in the run's folder."""
    if not (folder / _MEASURES).is_file():
        write_json(folder / _MEASURES, _measured(Run.open(folder)))


def _measured(run: Run) -> dict[str, Any]:
    series = run.series
    repetition = tasks.in_context_repetition(_PROMPTS, length=16, n_repeated=15, vocabulary=_ids_of(run.task))
    prompts: dict[str, PromptTask] = {
        "string repetition": tasks.string_repetition(_PROMPTS),
        "in-context repetition": repetition,
    }
    found = {
        name: find_emergence(series, task, "scan", threshold=THRESHOLDS[name], progress=False)
        for name, task in prompts.items()
    }
    steps: dict[str, int | None] = {name: point.first_crossing for name, point in found.items()}
    config = run.config
    every = [(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]
    scores = head_trajectories(series, repetition, every, progress=False).table
    for name, score in zip(HEADS, HEAD_LEVELS, strict=True):
        there = scores.loc[scores[score] >= HEAD_LEVELS[score], "step"]
        steps[name] = None if there.empty else int(there.min())
    point = found["in-context repetition"]
    pre, post = point.pre, point.post
    after = _delta_p(series[pre], series[post], repetition) if pre is not None and post is not None else _NO_HEADS
    before, parent = _NO_HEADS, run.manifest.get("init_from")
    seconds = run.manifest["seconds"]
    if parent is not None:
        first = Run.open(run.path.parent / parent["run"])
        seconds += first.manifest["seconds"]
        # Back to front: the first model has no readout yet that patterns could help.
        before = -_delta_p(first.series.last, first.series.first, _own_answers(first.task))
    return {
        "steps": steps,
        "last_step": series.steps[-1],
        "steps_before": 0 if parent is None else parent["step"],
        "seconds": seconds,
        "delta_p_before": before.tolist(),
        "delta_p_after": after.tolist(),
    }


def _own_answers(task: SequenceTask) -> PromptTask:
    """Beginnings of a task's own sequences, each up to an answer in its second half."""
    batch = task.batch(_PROMPTS, seed=0, split="held-out")
    tokens, answers = batch.tokens.numpy(), batch.answer_mask.numpy().copy()
    answers[:, : task.length // 2] = False
    rows = np.flatnonzero(answers.any(axis=1))
    places = numpy_generator(0, "places of answers").random(answers.shape)
    ends = np.where(answers, places, -1).argmax(axis=1)
    return tasks.from_tokens(tokens[rows], tokens[rows, ends[rows]], ends[rows], name="own answers")


def _ids_of(task: SequenceTask) -> list[int]:
    """Token ids that stand often in the task's sequences."""
    rows = task.batch(256, seed=0, split="tokens of prompts").tokens.numpy()
    ids, counts = np.unique(rows, return_counts=True)
    return [int(token) for token in ids[counts >= _SEEN]]


def _delta_p(pre: Checkpoint, post: Checkpoint, task: PromptTask) -> Float[np.ndarray, " head"]:
    """The heads' delta_p, in order of layer and head."""
    try:
        return rank_heads(pre, post, task, progress=False).delta_p.mean(axis=-1).ravel()
    except InterventionHasNoEffect:
        return _NO_HEADS


# ---- what is made of it ----


@dataclass(frozen=True)
class _Measured:
    """What was measured of the runs of one arm, in the order of their seeds."""

    runs: Sequence[Mapping[str, Any]]

    def times(self, outcome: str, clock: str) -> tuple[Float[np.ndarray, " run"], Bool[np.ndarray, " run"]]:
        """Steps to an outcome, and which of them are censored."""
        steps = [run["steps"][outcome] for run in self.runs]
        offset = [run["steps_before"] if clock == "total" else 0 for run in self.runs]
        known = [run["last_step"] if step is None else step for run, step in zip(self.runs, steps, strict=True)]
        return np.array(known, float) + np.array(offset, float), np.array([step is None for step in steps])

    def horizon(self, clock: str) -> float:
        """The last step that every run has."""
        return min(run["last_step"] + (run["steps_before"] if clock == "total" else 0) for run in self.runs)


@dataclass(frozen=True)
class _Comparison:
    """One arm against none, on one outcome and by one clock."""

    difference: Interval
    p_value: float
    reference: float

    @property
    def sooner(self) -> bool | None:
        """Whether it came earlier; None where that is not settled."""
        if self.difference.high < 0 and self.p_value < LEVEL:
            return True
        return False if self.difference.low > -LEAST_SAVING * self.reference else None


def _compared(arm: _Measured, none: _Measured, outcome: str, clock: str) -> _Comparison:
    horizon = _horizon(arm, none, clock)
    ours, theirs = arm.times(outcome, clock), none.times(outcome, clock)
    return _Comparison(
        restricted_mean_difference(ours, theirs, horizon, seed=0),
        log_rank_p(ours, theirs),
        restricted_mean(*theirs, horizon, seed=0).value,
    )


def _horizon(arm: _Measured, none: _Measured, clock: str) -> float:
    """The last step that the runs of both have: those without pre-pretraining are trained on text for longer."""
    return min(one.horizon(clock) for one in (arm, none))


def _judge(runs: pd.DataFrame, folder: Path) -> Judgement:
    measured = {name: _measured_arm(runs, folder, name) for name in (NONE, *SYNTHETIC, *CONTROLS)}
    none = measured.pop(NONE)
    compared = {
        (name, outcome, clock): _compared(arm, none, outcome, clock)
        for name, arm in measured.items()
        for outcome in OUTCOMES
        for clock in CLOCKS
    }
    checks = [
        _check(name, outcome, clock, one, len(measured[name].runs))
        for (name, outcome, clock), one in compared.items()
        if outcome in CAPABILITIES
    ]
    checks += [_carried(name, arm) for name, arm in measured.items()]
    table = pd.DataFrame(
        [_row(NONE, none, none, outcome, {}) for outcome in OUTCOMES]
        + [
            _row(name, arm, none, outcome, {clock: compared[name, outcome, clock] for clock in CLOCKS})
            for name, arm in measured.items()
            for outcome in OUTCOMES
        ]
    )
    curves = pd.concat([_times_table(name, arm) for name, arm in {NONE: none, **measured}.items()], ignore_index=True)
    return Judgement(checks, verdict=_verdict(compared), table=table, curves=curves)


def _measured_arm(runs: pd.DataFrame, folder: Path, name: str) -> _Measured:
    rows = select(runs, x=name).sort_values("seed")
    return _Measured([json.loads((folder / run / _MEASURES).read_text()) for run in rows["run"]])


def _verdict(compared: Mapping[tuple[str, str, str], _Comparison]) -> Verdict:
    """Whether Dyck or NCA brings some capability earlier after pre-pretraining, corrected for the number of tries."""
    tried = [compared[name, outcome, "after"] for name in CLAIMED for outcome in CAPABILITIES]
    corrected = holm_p(np.nan_to_num([one.p_value for one in tried], nan=1.0))
    if any(one.sooner and p < LEVEL for one, p in zip(tried, corrected, strict=True)):
        return "holds"
    return "does not hold" if all(one.sooner is False for one in tried) else "not settled"


def _check(name: str, outcome: str, clock: str, one: _Comparison, n_seeds: int) -> Check:
    part = f"{name}, {outcome}, {CLOCKS[clock]}"
    value, low, high = one.difference
    says = f"{part}: {value:+.0f} ({low:+.0f} to {high:+.0f}) of {one.reference:.0f} without, {_p(one.p_value)}"
    return Check(part, one.sooner if n_seeds >= LEAST_SEEDS else None, value, low, high, n_seeds, says)


def _p(value: float) -> str:
    if np.isnan(value):
        return "nothing happened in either"
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _carried(name: str, arm: _Measured) -> Check:
    """Whether the heads that mattered in pre-pretraining matter again, more than those of other seeds do."""
    part = f"{name}, heads carry over"
    pairs = [
        (np.array(run["delta_p_before"]), np.array(run["delta_p_after"]))
        for run in arm.runs
        if run["delta_p_before"] and run["delta_p_after"]
    ]
    n = len(pairs)
    if n < LEAST_SEEDS:
        return Check(part, None, NAN, NAN, NAN, n, f"{part}: only {n} seeds in which repetition emerged")
    agree = np.array([[_rank_correlation(before, after) for _, after in pairs] for before, _ in pairs])
    own = np.diag(agree)
    others = (agree.sum(0) + agree.sum(1) - 2 * own) / (2 * (n - 1))
    interval = bootstrap_mean(own - others, seed=0)
    says = (
        f"rank correlation of delta_p before and after {own.mean():+.2f} within a seed, {others.mean():+.2f} between "
        f"seeds, difference {interval.value:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"
    )
    return of_interval(part, interval, n, says, above=0.0)


def _rank_correlation(before: np.ndarray, after: np.ndarray) -> float:
    if np.ptp(before) == 0 or np.ptp(after) == 0:
        return 0.0  # no order
    return float(stats.spearmanr(before, after)[0])  # pyright: ignore[reportArgumentType]


def _row(
    name: str, arm: _Measured, none: _Measured, outcome: str, compared: Mapping[str, _Comparison]
) -> dict[str, Any]:
    times, never = arm.times(outcome, "after")
    mean = restricted_mean(times, never, _horizon(arm, none, "after"), seed=0)
    row: dict[str, Any] = {
        "pre-pretraining": name,
        "outcome": outcome,
        "emerged": f"{(~never).sum()} of {len(never)}",
        "steps after": _interval(mean),
        "first": int(times[~never].min()) if (~never).any() else None,
        "last": int(times[~never].max()) if (~never).any() else None,
    }
    for clock in CLOCKS:
        one = compared.get(clock)
        row[f"against none, {clock}"] = _interval(one.difference, "+") if one else None
        row[f"p, {clock}"] = one.p_value if one else None
        row[f"sooner, {clock}"] = {True: "yes", False: "no", None: "not settled"}[one.sooner] if one else None
    return row


def _interval(interval: Interval, sign: str = "") -> str:
    return f"{interval.value:{sign}.0f} ({interval.low:{sign}.0f} to {interval.high:{sign}.0f})"


def _times_table(name: str, arm: _Measured) -> pd.DataFrame:
    """One row per run and outcome, for the figure and for readers."""
    parts = []
    for outcome in OUTCOMES:
        columns: dict[str, Any] = {"arm": name, "outcome": outcome, "never": arm.times(outcome, "after")[1]}
        for clock in CLOCKS:
            columns |= {f"steps_{clock}": arm.times(outcome, clock)[0], f"last_step_{clock}": arm.horizon(clock)}
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


PRE_PRETRAINING = Study(_arms, _judge, overview, "pre-pretraining", _measure)
