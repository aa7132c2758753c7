"""Data of probes: sequences in three parts, and at which of their tokens which labels are read.

Labels that are read at the same tokens share their activations, so they are kept together, as a site.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from emergent_heads.errors import ArgumentError, whole_number
from emergent_heads.models.hooked import HookedModel
from emergent_heads.randomness import numpy_generator
from emergent_heads.storage import digest
from emergent_heads.tasks.algorithmic import mixed
from emergent_heads.tasks.features import Feature, FeatureValues
from emergent_heads.tasks.task import PromptTask, SequenceTask

SPLIT = "probe"
_FEWEST_TRAIN, _FEWEST_TEST = 20, 5
_MOST_DRAWS = 200

Features = str | Feature | Sequence[str | Feature] | None


@dataclass(frozen=True, eq=False)
class Target:
    """What is read at a site: one place of a feature.

    Attributes:
        feature, kind, place: as in the tables.
        labels: `[component, row]`, float32, of the site's rows; only components that vary in the training rows.
        varies: `[component]`, which of the feature's components these are.
        rates: `[component]`, mean label in the training rows, of all components.
    """

    feature: str
    kind: str
    place: int
    labels: Float[Tensor, "varying row"]
    varies: Bool[np.ndarray, " component"]
    rates: Float[np.ndarray, " component"]

    @property
    def continuous(self) -> bool:
        return self.kind == "continuous"

    @property
    def key(self) -> tuple[str, int]:
        return self.feature, self.place


@dataclass(frozen=True, eq=False)
class Site:
    """One token in each of some rows, and what is read there.

    Attributes:
        number: among the sites.
        rows: `[here]`, the rows that have the token; training rows come first, then validation, then test rows.
        positions: `[here]`, index of the token in each.
        ends: how many of them are training rows, and training or validation rows.
        targets: what is read.
    """

    number: int
    rows: Int[np.ndarray, " here"]
    positions: Int[np.ndarray, " here"]
    ends: tuple[int, int]
    targets: tuple[Target, ...]

    @property
    def train(self) -> slice:
        return slice(0, self.ends[0])

    @property
    def validation(self) -> slice:
        return slice(self.ends[0], self.ends[1])

    @property
    def test(self) -> slice:
        return slice(self.ends[1], len(self.rows))


@dataclass(frozen=True, eq=False)
class ProbeData:
    """Sequences and labels for probes; no sequence is in more than one part.

    Attributes:
        tokens: `[row, pos]`, up to the last token that is read; training rows first, then validation, then test rows.
        answer_starts: `[row]`, index of the first token of the answer; beyond the end where all is prompt.
        sizes: rows for training, validation and test.
        n_distinct: how many different sequences each part holds.
        sites: where labels are read.
    """

    tokens: Int[Tensor, "row pos"]
    answer_starts: Int[np.ndarray, " row"]
    sizes: tuple[int, int, int]
    n_distinct: tuple[int, int, int]
    sites: tuple[Site, ...]

    @property
    def key(self) -> str:
        """Content key: the same sequences, positions and labels give the same key."""
        parts: list[object] = [self.tokens, *self.sizes]
        for site in self.sites:
            parts += [site.rows, site.positions]
            for target in site.targets:
                parts += [target.feature, target.kind, target.place, target.labels, target.varies]
        return digest(*parts)


def choose_features(task: Any, features: Features) -> tuple[Feature, ...]:
    """The features asked for: all of the task, or some by name, or features of the caller's own.

    Raises:
        ArgumentError: none, a name twice, or a name that the task does not have.
    """
    if features is None:
        features = tuple(getattr(task, "features", ()))
        if not features:
            raise ArgumentError(
                f"{task.name} has no features of its own: give some, as eh.Feature(name, kind, labels, positions)"
            )
    given = [features] if isinstance(features, (str, Feature)) else list(features)
    chosen = [_named(task, each) if isinstance(each, str) else each for each in given]
    if not chosen:
        raise ArgumentError("features is empty: give names or features, or None for all features of the task")
    names = [feature.name for feature in chosen]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ArgumentError(f"two features are called {twice[0]!r}; their names must differ")
    return tuple(chosen)


def draw_data(
    task: SequenceTask | PromptTask,
    features: Sequence[Feature],
    model: HookedModel,
    *,
    n_train: int,
    n_test: int,
    seed: int,
) -> ProbeData:
    """Draws sequences (of a task with fixed prompts: divides them) and reads the features.

    Raises:
        ArgumentError: fewer rows than a probe needs, too few sequences or prompts, tokens that the model does not
            know, or a feature that cannot be read or has nothing to be learned from.
    """
    whole_number("n_train", n_train, least=_FEWEST_TRAIN)
    sizes = (n_train, whole_number("n_test", n_test, least=_FEWEST_TEST), n_test)
    if isinstance(task, PromptTask):
        rows = _divided_prompts(task, model, sizes, seed)
        values = [_read(feature, rows.all_tokens, task) for feature in features]
        values = [FeatureValues(each.labels[rows.order], each.positions[rows.order]) for each in values]
    else:
        rows = _drawn_sequences(task, sizes, seed)
        values = [_read(feature, rows.all_tokens, task) for feature in features]
    tokens = rows.all_tokens[rows.order]
    if tokens.max() >= model.vocabulary_size:
        raise ArgumentError(
            f"{task.name} has token ids up to {tokens.max()} and the model knows {model.vocabulary_size}; give a "
            "model of this task"
        )
    distinct = _count_distinct(tokens, rows.sizes)
    if distinct[0] < _FEWEST_TRAIN or min(distinct[1:]) < _FEWEST_TEST:
        raise ArgumentError(
            f"{task.name} gives {distinct[0]} different sequences for training, {distinct[1]} for validation and "
            f"{distinct[2]} for the test, which is too few for probes: it takes {_FEWEST_TRAIN}, {_FEWEST_TEST} and "
            f"{_FEWEST_TEST}; ask for more rows, or choose a larger task"
        )
    sites = tuple(_sites(features, values, rows.sizes))
    end = 1 + max(int(site.positions.max()) for site in sites)
    return ProbeData(
        torch.from_numpy(np.ascontiguousarray(tokens[:, :end])),
        rows.answer_starts[rows.order],
        rows.sizes,
        distinct,
        sites,
    )


# ---- rows ----


@dataclass(frozen=True, eq=False)
class _Rows:
    """Sequences before they are put in order: `order` lists training rows, then validation, then test rows."""

    all_tokens: Int[np.ndarray, "row pos"]
    answer_starts: Int[np.ndarray, " row"]
    order: Int[np.ndarray, " chosen"]
    sizes: tuple[int, int, int]


def _drawn_sequences(task: SequenceTask, sizes: tuple[int, int, int], seed: int) -> _Rows:
    """Fresh sequences; a hash of a sequence decides its part, so that no part holds a sequence of another."""
    total = sum(sizes)
    edges = np.cumsum(sizes) / total
    tokens: list[list[np.ndarray]] = [[], [], []]
    starts: list[list[np.ndarray]] = [[], [], []]
    missing = list(sizes)
    for step in range(_MOST_DRAWS):
        share = max(left / size for left, size in zip(missing, sizes, strict=True))
        batch = task.batch(int(1.1 * share * total) + 64, seed=seed, step=step, split=SPLIT)
        drawn, answer = batch.tokens.cpu().numpy(), batch.answer_mask.cpu().numpy()
        first = np.where(answer.any(1), answer.argmax(1), drawn.shape[1])
        part_of = np.searchsorted(edges, _shares(drawn), side="right")
        for part in range(3):
            rows = np.flatnonzero(part_of == part)[: missing[part]]
            tokens[part].append(drawn[rows])
            starts[part].append(first[rows])
            missing[part] -= len(rows)
        if not any(missing):
            every = [np.concatenate([each for part in parts for each in part]) for parts in (tokens, starts)]
            return _Rows(every[0], every[1], np.arange(total), sizes)
    raise ArgumentError(
        f"{task!r} has too few different sequences to divide them into training, validation and test rows; choose a "
        "larger size"
    )


def _divided_prompts(task: PromptTask, model: HookedModel, sizes: tuple[int, int, int], seed: int) -> _Rows:
    """The task's prompts in random order, divided in the ratio of the sizes; equal prompts stay together."""
    batch = task.batch(model.tokenizer, vocabulary_size=model.vocabulary_size, context=model.context)
    tokens = batch.tokens.cpu().numpy()
    _, group = np.unique(tokens, axis=0, return_inverse=True)
    group = group.reshape(-1)
    shuffled = numpy_generator(seed, "prompts").permutation(int(group.max()) + 1)[group]
    order = np.argsort(shuffled, kind="stable")
    total = min(len(tokens), sum(sizes))
    ends = [round(total * edge / sum(sizes)) for edge in np.cumsum(sizes)]
    in_order = shuffled[order]
    for number, end in enumerate(ends):
        while 0 < end < len(order) and in_order[end] == in_order[end - 1]:
            end += 1
        ends[number] = end
    found = (ends[0], ends[1] - ends[0], ends[2] - ends[1])
    return _Rows(tokens, np.full(len(tokens), tokens.shape[1]), order[: ends[2]], found)


def _shares(tokens: Int[np.ndarray, "row pos"]) -> Float[np.ndarray, " row"]:
    """A number from 0 to below 1 for each row, by its tokens alone."""
    found = np.zeros(len(tokens), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in tokens.T.astype(np.uint64):
            found = mixed(found + column + np.uint64(0x9E3779B97F4A7C15))
    return (found >> np.uint64(11)) / 2.0**53


def _count_distinct(tokens: Int[np.ndarray, "row pos"], sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    parts = np.split(_shares(tokens), np.cumsum(sizes)[:2])
    first, second, third = (len(np.unique(part)) for part in parts)
    return first, second, third


# ---- labels ----


def _named(task: Any, name: str) -> Feature:
    if not callable(getattr(task, "feature", None)):
        raise ArgumentError(
            f"{task.name} has no features of its own, so none is called {name!r}: give it as "
            "eh.Feature(name, kind, labels, positions)"
        )
    return task.feature(name)


def _read(feature: Feature, tokens: Int[np.ndarray, "row pos"], task: Any) -> FeatureValues:
    try:
        return feature.read(tokens)
    except ArgumentError as error:
        if repr(feature.name) in str(error):
            raise
        raise ArgumentError(f"feature {feature.name!r}: {error}") from error
    except Exception as error:
        raise ArgumentError(
            f"feature {feature.name!r} cannot be read from the sequences of {task.name} "
            f"({type(error).__name__}: {error}); is it a feature of another task?"
        ) from error


def _sites(
    features: Sequence[Feature], values: Sequence[FeatureValues], sizes: tuple[int, int, int]
) -> Iterator[Site]:
    """The places of all features, put together where they are read at the same tokens."""
    targets: dict[bytes, list[Target]] = {}
    where: dict[bytes, tuple[np.ndarray, np.ndarray, tuple[int, int]]] = {}
    for feature, of_feature in zip(features, values, strict=True):
        used = [
            (positions, target)
            for place, positions in enumerate(of_feature.positions.T)
            if (target := _target(feature, place, positions, of_feature.labels[:, place], sizes)) is not None
        ]
        if not used:
            raise ArgumentError(_why_nothing(feature, of_feature, sizes))
        for positions, target in used:
            key = positions.tobytes()
            rows = np.flatnonzero(positions >= 0)
            where.setdefault(key, (rows, positions[rows], _ends(rows, sizes)))
            targets.setdefault(key, []).append(target)
    for number, (key, here) in enumerate(where.items()):
        yield Site(number, *here, tuple(targets[key]))


def _target(
    feature: Feature,
    place: int,
    positions: Int[np.ndarray, " row"],
    labels: Float[np.ndarray, "row component"],
    sizes: tuple[int, int, int],
) -> Target | None:
    """One place of a feature; None where too few rows have it, or no component varies."""
    rows = np.flatnonzero(positions >= 0)
    if not _enough(rows, sizes):
        return None
    here = labels[rows]
    train = here[: _ends(rows, sizes)[0]]
    varies = train.min(axis=0) < train.max(axis=0)
    if not varies.any():
        return None
    kept = torch.from_numpy(np.ascontiguousarray(here[:, varies].T)).float()
    return Target(feature.name, feature.kind, place, kept, varies, train.mean(axis=0))


def _ends(rows: Int[np.ndarray, " here"], sizes: tuple[int, int, int]) -> tuple[int, int]:
    train, validation = np.searchsorted(rows, np.cumsum(sizes)[:2])
    return int(train), int(validation)


def _enough(rows: Int[np.ndarray, " here"], sizes: tuple[int, int, int]) -> bool:
    train, validation = _ends(rows, sizes)
    return train >= _FEWEST_TRAIN and min(validation - train, len(rows) - validation) >= _FEWEST_TEST


def _why_nothing(feature: Feature, values: FeatureValues, sizes: tuple[int, int, int]) -> str:
    """Why no place of a feature can be probed."""
    n_places = values.positions.shape[1]
    enough = [_enough(np.flatnonzero(positions >= 0), sizes) for positions in values.positions.T]
    if not any(enough):
        most = max((int((positions >= 0).sum()) for positions in values.positions.T), default=0)
        return (
            f"feature {feature.name!r}: too few examples for a probe: of {sum(sizes)} rows at most {most} have one of "
            f"its {n_places} places; it takes {_FEWEST_TRAIN} for training, {_FEWEST_TEST} for validation and "
            f"{_FEWEST_TEST} for the test"
        )
    return f"feature {feature.name!r}: its labels are constant at every place, so there is nothing to be read"
