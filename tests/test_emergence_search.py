"""The search for the first passing place, against brute force over all short curves."""

import itertools
import math

import pytest

from emergent_heads.analysis.search import STRATEGIES, Crossing, persistent_place, search


def run(strategy, curve):
    """Found crossing and the places in the order they were asked for."""
    asked = []

    def passes(place):
        asked.append(place)
        return curve[place]

    found = search(strategy, len(curve), passes)
    assert len(asked) == len(set(asked)), "a place was asked for twice"
    assert found.answers == {place: curve[place] for place in asked}
    return found, asked


def curves(values, longest):
    return [list(curve) for n in range(1, longest + 1) for curve in itertools.product(values, repeat=n)]


def papers_bisection(curve):
    """The search of the paper, written down as its description reads."""
    if not curve[-1]:
        return None, None
    lo, hi = 0, len(curve) - 1
    while hi - lo > 1:
        mid = (lo + hi) // 2
        lo, hi = (lo, mid) if curve[mid] else (mid, hi)
    return (None, 0) if curve[lo] else (lo, hi)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_curve_that_rises_once_is_found_exactly_by_every_strategy(strategy):
    for n in range(1, 41):
        for first in range(n + 1):
            found, asked = run(strategy, [place >= first for place in range(n)])
            pre, post = (first - 1 if 0 < first < n else None), (first if first < n else None)
            assert found.crossing == Crossing(pre, post), (n, first)
            assert not found.missed_by_bisect
            if strategy == "bisect":
                assert len(asked) <= math.ceil(math.log2(n)) + 2, (n, first)


@pytest.mark.parametrize("n", [143, 154, 609])
def test_bisection_keeps_its_bound_on_the_published_series(n):
    for first in range(n + 1):
        found, asked = run("bisect", [place >= first for place in range(n)])
        assert found.crossing.post == (first if first < n else None)
        assert len(asked) <= math.ceil(math.log2(n)) + 2


def test_bisection_visits_the_steps_of_the_paper():
    steps = [0, *(2**power for power in range(10)), *range(1000, 144_000, 1000)]
    _, asked = run("bisect", [step >= 31_000 for step in steps])
    assert [steps[place] // 1000 for place in asked] == [143, 66, 28, 47, 37, 32, 30, 31]


def test_bisection_equals_the_papers_on_every_curve():
    for curve in curves([False, True], 10):
        found, _ = run("bisect", curve)
        assert (found.crossing.pre, found.crossing.post) == papers_bisection(curve), curve
        assert found.missed_by_bisect is None


def test_scan_finds_the_first_passing_place_of_every_curve():
    for curve in curves([False, True], 10):
        found, asked = run("scan", curve)
        first = curve.index(True) if True in curve else None
        assert found.crossing == Crossing(first - 1 if first else None, first), curve
        assert asked == list(range(len(curve)))
        assert found.missed_by_bisect == (first != papers_bisection(curve)[1])


def test_verify_finds_a_true_crossing_before_which_nothing_it_saw_passes():
    for curve in curves([False, True], 11):
        found, asked = run("verify", curve)
        pre, post = found.crossing.pre, found.crossing.post
        passing = [place for place in asked if curve[place]]
        assert post == min(passing, default=None), curve
        assert pre == (post - 1 if post else None), curve
        assert pre is None or pre in asked
        assert found.missed_by_bisect == (post != papers_bisection(curve)[1])
        assert post is None or post <= (papers_bisection(curve)[1] or len(curve))
        if len(curve) <= 8:  # the spread alone covers so short a series
            assert found.crossing == run("scan", curve)[0].crossing


def test_verify_looks_at_both_neighbours_and_over_the_whole_series():
    curve = [place >= 60 for place in range(154)]
    _, asked = run("verify", curve)
    assert {57, 58, 59, 60, 61, 62} <= set(asked)
    assert {0, 153} <= set(asked)
    gaps = [b - a for a, b in itertools.pairwise(sorted(asked))]
    assert max(gaps) <= 22
    assert len(asked) < 25


def test_verify_finds_a_plateau_that_bisection_misses():
    curve = [20 <= place < 60 for place in range(154)]
    found, _ = run("verify", curve)
    assert found.crossing == Crossing(19, 20)
    assert found.missed_by_bisect
    assert run("bisect", curve)[0].crossing == Crossing(None, None)


def test_the_persistent_place_is_narrowed_by_verify():
    curve = [place in range(20, 60) or place >= 101 for place in range(154)]
    found, asked = run("verify", curve)
    assert found.crossing == Crossing(19, 20)
    assert persistent_place(found.answers) == 101
    assert 100 in asked


def test_persistent_place_is_the_start_of_the_last_unbroken_stretch():
    for curve in curves([False, True, None], 7):
        usable = [place for place, answer in enumerate(curve) if answer is not None]
        lasting = [place for place in usable if all(curve[later] for later in usable if later >= place)]
        assert persistent_place(dict(enumerate(curve))) == min(lasting, default=None), curve


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unusable_places_are_passed_over(strategy):
    for curve in curves([False, True, None], 8):
        found, _ = run(strategy, curve)
        pre, post = found.crossing.pre, found.crossing.post
        usable = [place for place, answer in enumerate(curve) if answer is not None]
        if post is None:
            assert pre is None
            assert not usable or not curve[usable[-1]]
            if strategy != "bisect":
                assert not any(curve)
            continue
        assert curve[post] is True
        before = [place for place in usable if place < post]
        assert pre == (before[-1] if before else None), curve
        assert pre is None or curve[pre] is False
        if strategy != "bisect":
            assert post == curve.index(True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_usable_places_nothing_is_found(strategy):
    found, asked = run(strategy, [None] * 5)
    assert found.crossing == Crossing(None, None)
    assert sorted(asked) == list(range(5))
