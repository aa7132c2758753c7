"""How much of the gap between pre and post a few heads recover, against random heads of the same layers.

Recovered gap = (p_patched - p_pre) / (p_post - p_pre), p being the mean of p(target) over the prompts. Random sets are
drawn with as many heads in each layer as the set they are compared with, from all heads of these layers, as in a
permutation test; `p_value` is the share of sets (the set itself counted) that do at least as well. A set that holds
all heads of its layers has no control: no other set is like it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from tqdm.auto import tqdm

from emergent_heads import notebook
from emergent_heads.analysis.heads import HeadRanking
from emergent_heads.analysis.patching import Pair, check_choice, open_pair
from emergent_heads.analysis.sending import SentModel, check_task_travels, piece_size
from emergent_heads.errors import ArgumentError
from emergent_heads.jobs import Executor, Job, run_jobs, values
from emergent_heads.models.engine import Head
from emergent_heads.plots import heads as head_plots
from emergent_heads.randomness import numpy_generator
from emergent_heads.results import Result
from emergent_heads.statistics import bootstrap_means, bootstrap_ratio, share_interval
from emergent_heads.tasks.task import PromptTask
from emergent_heads.workers import kept_by_worker, opened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HeadSet = frozenset[Head]
_MOST_IN_JOB = 64  # head sets that one job runs


@dataclass(frozen=True, repr=False, eq=False)
class RecoveryCurve(Result):
    """What the top K heads recover together, for each K.

    Attributes:
        table: one row per `k` and `heads` ("ranked", "greedy", "random"): `p` with its interval, `share_matched` with
            its exact interval, `recovered_gap` with its interval, `n_sets`, and for ranked and greedy rows `p_value`
            against the random sets. Intervals of one set are over prompts; those of "random" span the middle 95 % of
            the sets.
        greedy: the heads in greedy order, empty where it was not asked for.
    """

    greedy: tuple[Head, ...] = ()

    def headline(self) -> str:
        about = self.about
        return (
            f"RecoveryCurve: {about['pre']} -> {about['post']}, {about['n_prompts']} prompts of {about['task_name']}; "
            f"p {about['p_pre']:.3f} -> {about['p_post']:.3f}{self.caution}"
        )

    def shown(self) -> pd.DataFrame:
        columns = ["k", "heads", "p", "share_matched", "recovered_gap", "recovered_low", "recovered_high", "p_value"]
        return self.table.loc[:, columns]

    def plot(self) -> "Figure":
        """Recovered gap against K, with the band of the random sets."""
        return head_plots.recovery(self.table)


def recovery_curve(
    pre: Any,
    post: Any,
    task: PromptTask,
    heads: HeadRanking | Sequence[Head],
    *,
    ks: Sequence[int] = (1, 2, 4, 8, 16),
    controls: int = 100,
    order: str = "delta_p",
    rows: str | None = None,
    prompts: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    executor: Executor | None = None,
    workers: int | None = 0,
    progress: bool = True,
) -> RecoveryCurve:
    """Patches the top K heads together, for each K, against random head sets of the same layers.

    Args:
        pre, post, task: as in `rank_heads`.
        heads: a ranking, or heads `(layer, head)` best first.
        ks: numbers of heads; those above the number of heads given are left out, and all heads of the model are
            always added.
        controls: random sets for each K (drawn with repetition; each distinct set is run once).
        order: "greedy" also adds the head that helps most given those already patched, up to the largest K below all
            heads. It is chosen on the prompts it is measured on, so it is an upper estimate.
        rows, prompts: as in `rank_heads`; by default what the ranking used.
        batch_size: largest number of sequences run together.
        seed: of the random sets and the bootstrap.
        executor: anything whose `submit(function, *arguments)` gives futures: the head sets are divided among its
            workers. Each opens the two models once; p then agrees to float32's rounding, as batches are others.
            Checkpoints are loaded by the workers themselves, other models are pickled.
        workers: processes of this machine in its place; 0 runs all sets in this process, None takes one for each core.
        progress: whether to show a bar.

    Raises:
        ArgumentError: no usable K, a head the model does not have, both an executor and workers, or something that
            cannot be sent to another process.
    """
    check_choice("order", order, ("delta_p", "greedy"))
    if controls < 0:
        raise ArgumentError(f"controls={controls}: give 0 or more random sets")
    used: Mapping[str, Any] = heads.about if isinstance(heads, HeadRanking) else {"rows": "all", "prompts": "all"}
    rows, prompts = rows or str(used["rows"]), prompts or str(used["prompts"])
    pair = open_pair(pre, post, task, prompts=prompts, rows=rows)
    every = [(layer, head) for layer in range(pair.model.n_layers) for head in range(pair.model.n_heads)]
    ranked = heads.top(len(every)) if isinstance(heads, HeadRanking) else [(int(at), int(head)) for at, head in heads]
    ks = _usable(ks, ranked, every)
    chosen: list[tuple[int, str, HeadSet]] = [(k, "ranked", frozenset(ranked[:k])) for k in ks]
    with _runner(pair, (pre, post), task, rows, prompts, batch_size, executor, workers, progress) as runner:
        greedy = _greedy(runner, every, max(ks, default=0)) if order == "greedy" else ()
        chosen += [(k, "greedy", frozenset(greedy[:k])) for k in ks if greedy]
        chosen += [(len(every), "ranked", frozenset(every))]
        draws = {(k, name): _random_sets(heads_of, pair.model.n_heads, controls, seed) for k, name, heads_of in chosen}
        runner.run([heads_of for _, _, heads_of in chosen] + [drawn for sets in draws.values() for drawn in sets])
    table = pd.DataFrame(_rows(pair, runner, chosen, draws, seed))
    said = {"order": order, "controls": controls, "seed": seed, "heads": ranked[: max(ks, default=0)]}
    return RecoveryCurve(table, greedy, about={**pair.about, **said})


_OfSets = tuple[Float[np.ndarray, "set prompt"], Float[np.ndarray, "set prompt"]]
"""p(target) of sets of heads, and whether the target is the top token."""


class _Sets:
    """Answers of pre with sets of heads patched, each distinct set run once."""

    def __init__(self, pair: Pair, rows: str, batch_size: int | None, progress: bool) -> None:
        self._pair, self._rows, self._batch_size, self._progress = pair, rows, batch_size, progress
        self.p: dict[HeadSet, Float[np.ndarray, " prompt"]] = {}
        self.matched: dict[HeadSet, Float[np.ndarray, " prompt"]] = {}

    def run(self, sets: Sequence[HeadSet]) -> None:
        new = [heads for heads in dict.fromkeys(sets) if heads not in self.p]
        if not new:
            return
        p, matched = self.measured(new)
        self.p.update(zip(new, p, strict=True))
        self.matched.update(zip(new, matched, strict=True))

    def measured(self, sets: Sequence[HeadSet]) -> _OfSets:
        model = self._pair.model
        masks = torch.zeros(len(sets), model.n_layers, model.n_heads, dtype=torch.bool)
        for index, heads in enumerate(sets):
            for layer, head in heads:
                masks[index, layer, head] = True
        p = np.empty((len(sets), len(self._pair.batch)))
        matched = np.empty_like(p)
        with tqdm(total=p.size, desc="head sets x prompts", leave=False, **notebook.bar(self._progress)) as bar:
            for prompts, trace, patterns in self._pair.traces():
                answers = model.engine.patch_sets(trace, patterns, masks, rows=self._rows, batch_size=self._batch_size)
                p[:, prompts] = np.exp(answers.log_p.double().numpy())
                matched[:, prompts] = answers.matched.numpy()
                bar.update(answers.log_p.numel())
        return p, matched


@dataclass(frozen=True, eq=False)
class _SentPair:
    """What a worker opens the pair from, once for all its jobs."""

    pre: SentModel
    post: SentModel
    task: PromptTask
    rows: str
    prompts: str
    batch_size: int | None
    key: str = field(default_factory=lambda: uuid4().hex)

    def open(self) -> _Sets:
        pre, post = SentModel.arrived_together(self.pre, self.post)
        pair = open_pair(pre, post, self.task, prompts=self.prompts, rows=self.rows)
        return _Sets(pair, self.rows, self.batch_size, progress=False)

    def measured(self, sets: Sequence[HeadSet]) -> _OfSets:
        """The job of some sets."""
        return kept_by_worker(self.key, self.open).measured(sets)


class _SetsByWorkers(_Sets):
    """The same by workers."""

    def __init__(self, sent: _SentPair, executor: Executor, workers: int | None, progress: bool) -> None:
        self._sent, self._executor, self._workers, self._progress = sent, executor, workers, progress
        self.p, self.matched = {}, {}

    def measured(self, sets: Sequence[HeadSet]) -> _OfSets:
        size = piece_size(len(sets), self._workers, _MOST_IN_JOB)
        pieces = [sets[start : start + size] for start in range(0, len(sets), size)]
        jobs = [
            Job(f"head sets from {size * number}", self._sent.measured, (piece,), size=len(piece))
            for number, piece in enumerate(pieces)
        ]
        modules = [*self._sent.pre.modules, *self._sent.post.modules]
        shown: dict[str, Any] = {"title": "head sets", "unit": "set", "progress": self._progress}
        ended = run_jobs(jobs, self._executor, modules=modules, **shown)
        of_jobs = dict(values(ended))
        p, matched = zip(*(of_jobs[job] for job in jobs), strict=True)
        return np.concatenate(p), np.concatenate(matched)


@contextmanager
def _runner(
    pair: Pair,
    models: tuple[Any, Any],
    task: PromptTask,
    rows: str,
    prompts: str,
    batch_size: int | None,
    executor: Executor | None,
    workers: int | None,
    progress: bool,
) -> Iterator[_Sets]:
    """What runs head sets: here, or by workers."""
    if executor is None and workers == 0:
        yield _Sets(pair, rows, batch_size, progress)
        return
    check_task_travels(executor, task)
    pre, post = (SentModel.of(model, what, executor) for model, what in zip(models, ("pre", "post"), strict=True))
    with opened(executor, workers) as chosen:
        assert chosen is not None
        sent = _SentPair(pre, post, task, rows, prompts, batch_size)
        yield _SetsByWorkers(sent, chosen, 0 if executor else workers, progress)


def _usable(ks: Sequence[int], ranked: Sequence[Head], every: Sequence[Head]) -> list[int]:
    if unknown := [head for head in ranked if head not in set(every)]:
        last_layer, last_head = every[-1]
        raise ArgumentError(
            f"heads {unknown[:3]} are not in this model: layers go from 0 to {last_layer}, heads from 0 to {last_head}"
        )
    if len(set(ranked)) < len(ranked):
        raise ArgumentError("the same head is named twice")
    if any(k < 1 for k in ks):
        raise ArgumentError(f"ks={tuple(ks)}: give numbers of heads from 1 up")
    return sorted({int(k) for k in ks if k <= len(ranked) and k < len(every)})


def _greedy(runner: _Sets, every: Sequence[Head], n: int) -> tuple[Head, ...]:
    order: list[Head] = []
    for _ in range(n):
        candidates = [head for head in every if head not in order]
        sets = [frozenset([*order, head]) for head in candidates]
        runner.run(sets)
        order.append(max(zip(candidates, sets, strict=True), key=lambda pair: runner.p[pair[1]].mean())[0])
    return tuple(order)


def _random_sets(heads: HeadSet, n_heads: int, n: int, seed: int) -> list[HeadSet]:
    """Random sets with as many heads in each layer as `heads` has; none where only `heads` itself is such a set."""
    layers = sorted({layer for layer, _ in heads})
    counts = [sum(at == layer for at, _ in heads) for layer in layers]
    if all(count == n_heads for count in counts):
        return []
    generator = numpy_generator(seed, "random heads", len(heads), *counts)
    return [
        frozenset(
            (layer, int(head))
            for layer, count in zip(layers, counts, strict=True)
            for head in generator.choice(n_heads, size=count, replace=False)
        )
        for _ in range(n)
    ]


def _rows(pair: Pair, runner: _Sets, chosen: list, draws: dict, seed: int) -> list[dict[str, Any]]:
    rows = []
    for k, name, heads in chosen:
        controls = draws.get((k, name), [])
        means = np.array([runner.p[drawn].mean() for drawn in controls])
        rows.append(_set_row(pair, runner, k, name, heads, means, seed))
        if len(controls) and name == "ranked":
            rows.append(_random_row(pair, runner, k, controls))
    return rows


def _set_row(
    pair: Pair, runner: _Sets, k: int, name: str, heads: HeadSet, controls: Float[np.ndarray, " set"], seed: int
) -> dict[str, Any]:
    p, matched = runner.p[heads], runner.matched[heads]
    mean, low, high = (float(value) for value in bootstrap_means(p, seed=seed))
    share = share_interval(int(matched.sum()), len(matched))
    recovered = bootstrap_ratio(p - pair.p_pre, pair.p_post - pair.p_pre, seed=seed)
    beaten = (1 + (controls >= p.mean()).sum()) / (1 + len(controls)) if len(controls) else np.nan
    return {
        "k": k, "heads": name, "n_sets": 1,
        "p": mean, "p_low": low, "p_high": high,
        "share_matched": share.value, "share_low": share.low, "share_high": share.high,
        "recovered_gap": recovered.value, "recovered_low": recovered.low, "recovered_high": recovered.high,
        "p_value": beaten,
    }  # fmt: skip


def _random_row(pair: Pair, runner: _Sets, k: int, controls: Sequence[HeadSet]) -> dict[str, Any]:
    p = np.array([runner.p[drawn].mean() for drawn in controls])
    matched = np.array([runner.matched[drawn].mean() for drawn in controls])
    gap = (pair.p_post - pair.p_pre).mean()
    recovered = (p - pair.p_pre.mean()) / gap if gap else np.full_like(p, np.nan)
    row: dict[str, Any] = {"k": k, "heads": "random", "n_sets": len(controls), "p_value": np.nan}
    for column, prefix, of_sets in (
        ("p", "p", p),
        ("share_matched", "share", matched),
        ("recovered_gap", "recovered", recovered),
    ):
        row[column] = of_sets.mean()
        row[f"{prefix}_low"], row[f"{prefix}_high"] = np.quantile(of_sets, [0.025, 0.975])
    return row
