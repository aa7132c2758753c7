"""Search for the first checkpoint that passes, over places in a series; knows nothing of models or scores.

Places are numbered 0 to n - 1. `ask(place)` says whether the checkpoint passes (True), fails (False) or cannot be used
(None); a place is asked once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

Strategy = Literal["bisect", "scan", "verify"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

_NEIGHBOURS = 2
_SPREAD = 8


@dataclass(frozen=True)
class Crossing:
    """Last failing place `pre` and first passing place `post`, with no usable place between them.

    `pre` is None where no usable place comes before `post`; both are None where nothing passes.
    """

    pre: int | None
    post: int | None


@dataclass(frozen=True)
class Found:
    """What a search found, and every answer it got.

    Attributes:
        crossing: the crossing found.
        answers: place -> passes, or None for a place that cannot be used.
        missed_by_bisect: whether plain bisection gives a later crossing or none; None where the strategy cannot tell.
    """

    crossing: Crossing
    answers: dict[int, bool | None]
    missed_by_bisect: bool | None


@dataclass(frozen=True)
class _Asked:
    """Answers so far; asks for each place once."""

    passes: Callable[[int], bool | None]
    answers: dict[int, bool | None] = field(default_factory=dict)

    def __call__(self, place: int) -> bool | None:
        if place not in self.answers:
            self.answers[place] = self.passes(place)
        return self.answers[place]

    def places(self, answer: bool) -> list[int]:
        """Places that gave this answer, ascending."""
        return sorted(place for place, given in self.answers.items() if given is answer)


def search(strategy: Strategy, n: int, passes: Callable[[int], bool | None]) -> Found:
    """Looks for the first passing place among `n` in the way `strategy` names.

    `bisect` is the search of the sparse-attention-emergence paper: last place first (a failure there means never),
    then bisection, which takes the first place for failing and the answers for monotone; the first place is asked only
    where the search ends on it. It asks for at most ceil(log2 n) + 2 usable places, if none is unusable.
    `scan` asks for all. `verify` bisects, asks for the neighbours of the crossing and for a spread of places over the
    whole series, and bisects again below any earlier pass, until it sees none.
    """
    ask = _Asked(passes)
    if strategy == "bisect":
        return Found(_bisect(n, ask), ask.answers, missed_by_bisect=None)
    crossing = _scan(n, ask) if strategy == "scan" else _verify(n, ask)
    plain = _bisect(n, ask)  # every place on its way has been asked already
    missed = crossing.post is not None and crossing.post != plain.post
    return Found(crossing, ask.answers, missed)


def persistent_place(answers: Mapping[int, bool | None]) -> int | None:
    """First asked place from which every later asked place passes; None where the last one fails."""
    found = None
    for place in sorted(answers, reverse=True):
        if answers[place] is False:
            break
        found = place if answers[place] else found
    return found


def _bisect(n: int, ask: _Asked) -> Crossing:
    last = next((place for place in reversed(range(n)) if ask(place) is not None), None)
    if last is None or not ask(last):
        return Crossing(None, None)
    low, high = _narrow(0, last, ask)
    if low > 0 or ask(0) is False:
        return Crossing(low, high)
    return Crossing(None, 0 if ask(0) else high)


def _scan(n: int, ask: _Asked) -> Crossing:
    for place in range(n):
        ask(place)
    return _first_crossing(ask)


def _verify(n: int, ask: _Asked) -> Crossing:
    crossing = _bisect(n, ask)
    for place in np.linspace(0, n - 1, min(n, _SPREAD)).round().astype(int).tolist():
        ask(place)
    while True:
        _ask_neighbours(crossing, n, ask)
        earliest = next(iter(ask.places(True)), None)
        if earliest == crossing.post:
            break
        assert earliest is not None
        _narrow(max([0, *(place for place in ask.places(False) if place < earliest)]), earliest, ask)
        crossing = _first_crossing(ask)
    _narrow_last_loss(ask)
    return crossing


def _first_crossing(ask: _Asked) -> Crossing:
    passing = ask.places(True)
    if not passing:
        return Crossing(None, None)
    return Crossing(max((place for place in ask.places(False) if place < passing[0]), default=None), passing[0])


def _ask_neighbours(crossing: Crossing, n: int, ask: _Asked) -> None:
    if crossing.post is None:
        return
    below = crossing.post if crossing.pre is None else crossing.pre
    for place in range(max(0, below - _NEIGHBOURS), min(n, crossing.post + _NEIGHBOURS + 1)):
        ask(place)


def _narrow_last_loss(ask: _Asked) -> None:
    """Makes the crossing that persists one between neighbours, as the first crossing is."""
    persistent = persistent_place(ask.answers)
    failing = ask.places(False)
    if persistent is not None and failing:
        _narrow(failing[-1], persistent, ask)


def _narrow(low: int, high: int, ask: _Asked) -> tuple[int, int]:
    """Halves between `low`, taken to fail, and `high`, which passes, until no usable place is left between them."""
    while (middle := _usable_between(low, high, ask)) is not None:
        low, high = (low, middle) if ask(middle) else (middle, high)
    return low, high


def _usable_between(low: int, high: int, ask: _Asked) -> int | None:
    """The middle place, or the usable one nearest to it, strictly between `low` and `high`."""
    middle = (low + high) // 2
    for distance in range(high - low):
        for place in (middle - distance, middle + distance):
            if low < place < high and ask(place) is not None:
                return place
    return None
