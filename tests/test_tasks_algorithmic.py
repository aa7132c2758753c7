"""What all algorithmic tasks share: sequences and masks, splits, reference lines, greedy decoding, bad input."""

import hashlib
import math
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emergent_heads.errors import ArgumentError
from emergent_heads.models.small import SmallModel, SmallModelConfig
from emergent_heads.tasks import (
    ActivitySelection,
    Addition,
    AlgorithmicTask,
    MajorityOfMajorities,
    MaximumSubarray,
    Multiplication,
    SequenceBatch,
)
from emergent_heads.tasks.algorithmic import hashes
from emergent_heads.training.evaluation import evaluate

SMALL = [Addition(5), Multiplication(4), MajorityOfMajorities(12), MaximumSubarray(6), ActivitySelection(4)]
LARGE = [Addition(16), Multiplication(16), MajorityOfMajorities(64), MaximumSubarray(64), ActivitySelection(16)]


def parts(task: AlgorithmicTask, row) -> tuple[str, str]:
    """Prompt and answer."""
    prompt, answer = task.text(row).removesuffix("<EOS>").split("=")
    return prompt, answer


# ---- Sequences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", SMALL + LARGE, ids=repr)
def test_prompt_equals_answer_end(task):
    """Both layouts have the same tokens; "paper" counts `=` as well, and nothing else."""
    batch, paper = task.batch(50, seed=1), replace(task, layout="paper").batch(50, seed=1)
    assert torch.equal(batch.tokens, paper.tokens)
    assert batch.tokens.shape == batch.loss_mask.shape == batch.answer_mask.shape == (50, task.length)
    assert batch.tokens.dtype == torch.int64
    assert torch.equal(batch.loss_mask, batch.answer_mask)
    assert torch.equal(paper.loss_mask, paper.answer_mask)
    assert (task.equals, task.end) == (len(task.symbols), len(task.symbols) + 1)
    assert task.vocabulary_size == task.end + 1
    for row, tokens in enumerate(batch.tokens.tolist()):
        equals = tokens.index(task.equals)
        end = tokens.index(task.end)
        assert tokens.count(task.equals) == 1
        assert max(tokens[:equals] + tokens[equals + 1 : end]) < len(task.symbols)
        assert set(tokens[end:]) == {task.end}
        assert batch.answer_mask[row].nonzero().flatten().tolist() == list(range(equals + 1, end + 1))
        assert paper.answer_mask[row].nonzero().flatten().tolist() == list(range(equals, end + 1))
        assert task.separators(batch.tokens)[row] == equals


@pytest.mark.parametrize("task", SMALL + LARGE, ids=repr)
def test_a_prompt_of_ones_own_is_solved_as_in_a_batch(task):
    tokens = task.batch(20, seed=2, split="probe").tokens
    assert torch.equal(task.solve(*(parts(task, row)[0] for row in tokens)), tokens)


@pytest.mark.parametrize("task", SMALL, ids=repr)
def test_batches_come_back_from_their_names_alone(task):
    first = task.batch(30, seed=4, step=7)
    task.batch(3, seed=9)
    again = pickle.loads(pickle.dumps(task)).batch(30, seed=4, step=7)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.loss_mask, again.loss_mask)
    others = [{"seed": 5, "step": 7}, {"seed": 4, "step": 8}, {"seed": 4, "step": 7, "split": "held-out"}]
    for arguments in others:
        assert not torch.equal(first.tokens, task.batch(30, **arguments).tokens)
    held_out, probe = (task.batch(30, seed=4, split=split).tokens for split in ("held-out", "probe"))
    assert not torch.equal(held_out, probe)


def test_tasks_are_their_settings():
    for task in SMALL + LARGE:
        task.reference_lines  # noqa: B018 - what was computed must not get in the way
        found = task.settings()
        assert found.pop("task") == type(task).__name__ == task.name
        assert type(task)(**found) == task == pickle.loads(pickle.dumps(task))
        assert hash(task) == hash(type(task)(**found))
    assert Addition(np.int64(8)).settings() == {"task": "Addition", "bits": 8, "layout": "prompt"}
    assert type(Addition(np.int64(8)).bits) is int
    assert Addition(8) != Multiplication(8)
    assert Addition(8) != Addition(8, layout="paper")


def test_more_problems_than_are_drawn_at_once():
    task = MajorityOfMajorities(16)
    tokens = task.batch(40_000, seed=0, split="probe").tokens
    assert tokens.shape == (40_000, 19)
    assert len(torch.unique(tokens, dim=0)) > 6500  # nearly all of the eighth of 65,536 that is not for training


# ---- Splits ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SMALL), st.integers(0, 2**40), st.integers(0, 2**40), st.text(max_size=5))
def test_no_split_shares_a_problem_with_training(task, seed, other_seed, split):
    train = {parts(task, row) for row in task.batch(200, seed=seed).tokens}
    other = {parts(task, row) for row in task.batch(200, seed=other_seed, split=f"not {split}").tokens}
    assert not train & other


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3), min_size=1, max_size=4))
def test_hashes_against_whole_numbers_of_python(rows):
    def mixed(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    salt = int.from_bytes(hashlib.sha256(b"0\x1fsplit").digest()[:8], "little") >> 1
    weights = [mixed(place * 0x9E3779B97F4A7C15 % 2**64) | 1 for place in (1, 2, 3)]
    expected = [
        mixed((salt + sum(part * weight for part, weight in zip(row, weights, strict=True))) % 2**64) for row in rows
    ]
    assert hashes(np.array(rows)).tolist() == expected


def test_mixing_is_that_of_splitmix64():
    """First numbers of splitmix64 with the seed 1234567, as published with the generator's test vectors."""
    from emergent_heads.tasks.algorithmic import mixed

    states = (np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    assert mixed(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_hashes_part_neighbouring_problems_evenly():
    bits = np.array(np.meshgrid(*[[0, 1]] * 12)).reshape(12, -1).T
    found = hashes(bits)
    assert len(np.unique(found)) == 4096
    shares = np.bincount((found % 8).astype(int), minlength=8) / 4096  # standard error 0.005
    np.testing.assert_allclose(shares, 1 / 8, atol=0.025)
    held_out = found % 8 == 0
    for place in range(12):  # one bit more or less tells nothing of the split
        other = held_out[np.arange(4096) ^ (1 << place)]
        assert (held_out & other).mean() == pytest.approx(1 / 64, abs=0.008)  # standard error 0.002


@pytest.mark.parametrize("task", [Addition(1), Multiplication(1), MajorityOfMajorities(1, groups=1)], ids=repr)
def test_a_task_of_too_few_problems_says_so(task):
    """All of its three or two problems are for training."""
    assert len(task.batch(4, seed=0)) == 4
    with pytest.raises(ArgumentError, match="has too few problems to part them into training and held-out ones"):
        task.batch(4, seed=0, split="held-out")


# ---- Reference lines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["prompt", "paper"])
@pytest.mark.parametrize("task", SMALL, ids=repr)
def test_reference_lines_by_counting(task, layout):
    """The same quantities, counted on other sequences; training leaves an eighth of few problems out."""
    task = replace(task, layout=layout)
    batches = [task.batch(n, seed=6, split=split) for n, split in ((7000, "train"), (1000, "probe"))]
    counted = [
        [token for token, counts in zip(row, mask, strict=True) if counts]
        for batch in batches
        for row, mask in zip(batch.tokens.tolist(), batch.answer_mask.tolist(), strict=True)
    ]
    places = [
        Counter(row[place] for row in counted if len(row) > place) for place in range(max(len(row) for row in counted))
    ]
    nats = -sum(n * math.log(n / counts.total()) for counts in places for n in counts.values())
    lines = task.reference_lines
    assert task.plateau == pytest.approx(nats / sum(map(len, counted)), rel=0.02)
    assert lines["position_marginals_loss_nats"] == task.plateau
    assert lines["uniform_loss_nats"] == pytest.approx(math.log(task.vocabulary_size))
    assert lines["floor_loss_nats"] == task.floor == 0
    assert lines["perfect_exact_match"] == 1
    most = max(Counter(map(tuple, counted)).values()) / 8000
    assert lines["constant_answer_exact_match"] == pytest.approx(most, abs=0.025)
    ends = [row.index(task.end) + 1 for batch in batches for row in batch.tokens.tolist()]
    assert task.mean_length == pytest.approx(np.mean(ends), rel=0.02)


@pytest.mark.parametrize("task", SMALL + LARGE, ids=repr)
def test_every_task_has_features_that_vary(task):
    tokens = task.batch(500, seed=0, split="probe").tokens
    assert len({feature.name for feature in task.features}) == len(task.features) >= 2
    for feature in task.features:
        assert task.feature(feature.name).kind == feature.kind
        labels = feature.read(tokens).labels
        assert np.nanstd(labels) > 0.1
        cropped = feature.read(tokens[:, :-1])
        np.testing.assert_array_equal(cropped.labels, labels)


# ---- Greedy decoding ------------------------------------------------------------------------------------------------


@torch.no_grad()
def decoded(model: SmallModel, task: AlgorithmicTask, prompt: list[int]) -> list[int]:
    """What the model writes after the prompt, its first choice each time, up to `<EOS>` or the end of the room."""
    tokens = list(prompt)
    while tokens[-1] != task.end and len(tokens) < task.length:
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def briefly_trained(task: AlgorithmicTask) -> SmallModel:
    model = SmallModel(SmallModelConfig(n_layers=1, d_model=32, n_heads=2).for_task(task), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(120):
        batch = task.batch(64, seed=0, step=step)
        logits = model(batch.tokens[:, :-1])
        counts = batch.loss_mask[:, 1:]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits[counts], batch.tokens[:, 1:][counts]).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("layout", ["prompt", "paper"])
@pytest.mark.parametrize("task", [Addition(3), MaximumSubarray(3), ActivitySelection(2)], ids=repr)
def test_teacher_forced_exact_match_is_that_of_greedy_decoding(task, layout):
    """A model that is right in some sequences and wrong in others, also about the length of the answer."""
    task = replace(task, layout=layout)
    model = briefly_trained(task)
    batch = task.batch(60, seed=1)
    matches = []
    for row in range(60):
        one = SequenceBatch(batch.tokens[[row]], batch.loss_mask[[row]], batch.answer_mask[[row]])
        first = int(one.answer_mask[0].nonzero()[0])
        answer = one.tokens[0][one.answer_mask[0]].tolist()
        matches.append(decoded(model, task, one.tokens[0, :first].tolist()) == answer)
        assert evaluate(model, one, rows=1).exact_match == matches[-1]
    assert evaluate(model, batch, rows=16).exact_match == pytest.approx(np.mean(matches))
    assert 3 <= sum(matches) <= 57


# ---- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_batches_have_at_least_one_sequence(n):
    with pytest.raises(ArgumentError, match=r"n is .*; it must be a whole number, at least 1"):
        Addition(4).batch(n, seed=0)


@pytest.mark.parametrize("kind", [Addition, Multiplication, MajorityOfMajorities, MaximumSubarray, ActivitySelection])
def test_unknown_layout(kind):
    with pytest.raises(ArgumentError, match="layout must be prompt or paper, not 'poem'"):
        kind(8, layout="poem")


@pytest.mark.parametrize(
    ("task", "prompt", "message"),
    [
        (Addition(4), "0110+110", r"states no problem of Addition\(bits=4, .* one looks like '[01]{4}\+[01]{4}'"),
        (Addition(4), "0110+11001", "states no problem of Addition"),
        (Addition(4), "011011001", "states no problem of Addition"),
        (Addition(4), "0+10+1100", "states no problem of Addition"),
        (Addition(4), "0110+1100" * 9, "states no problem of Addition"),
        (Addition(4), "", "the prompt '' states no problem of Addition"),
        (Addition(4), "0110+1100=", "has '='; Addition writes '01.'"),
        (Addition(4), "0110+1102", "has '2'; Addition writes '01.'"),
        (Addition(4), ["0110+1100"], "has '0110.1100'; Addition writes '01.'"),
        (Addition(4), ["01"], "has '01'; Addition writes '01.'"),
        (Multiplication(2), "01+011", r"states no problem of Multiplication\(bits=2"),
        (MajorityOfMajorities(8), "1101001", "states no problem of MajorityOfMajorities"),
        (MajorityOfMajorities(8), "1101001+", "states no problem of MajorityOfMajorities"),
        (MaximumSubarray(5), "LGNI", "states no problem of MaximumSubarray"),
        (MaximumSubarray(5), "LGNILA", "states no problem of MaximumSubarray"),
        (MaximumSubarray(5), "LGNIT", "has 'T'; MaximumSubarray writes"),
        (MaximumSubarray(5), "lgnil", "has 'l'; MaximumSubarray writes"),
    ],
)
def test_prompts_that_state_no_problem(task, prompt, message):
    with pytest.raises(ArgumentError, match=message):
        task.solve(prompt)


def test_no_prompt():
    with pytest.raises(ArgumentError, match=r"Addition.solve needs at least one prompt"):
        Addition(4).solve()


def test_sequences_that_hold_no_problem():
    task = Addition(4)
    tokens = task.batch(3, seed=0).tokens
    shifted, without = tokens.clone(), tokens.clone()
    shifted[1] = torch.roll(tokens[1], 1)
    without[2, 9] = 0
    with pytest.raises(ArgumentError, match=r"sequence 1 states no problem of Addition\(bits=4"):
        task.problems(shifted)
    for read in (task.separators, task.problems, task.feature("carry").read):
        with pytest.raises(ArgumentError, match=r"sequence 2 has no `=` \(token 3\)"):
            read(without)
    with pytest.raises(ArgumentError, match=r"sequences of 12 tokens are not those of Addition.* which have 16"):
        task.problems(tokens[:, :12])


def test_text_of_tokens_of_another_vocabulary():
    assert Addition(4).text([0, 1, 2, 3, 4, 4]) == "01+=<EOS>"
    assert Addition(4).text(torch.tensor([1, 1])) == "11"
    for token in (5, -1):
        with pytest.raises(ArgumentError, match=f"token {token} is none of Addition, which has 5"):
            Addition(4).text([0, token, 1])


def test_unknown_feature():
    with pytest.raises(ArgumentError, match="Addition has no feature 'carries'; nearest: carry"):
        Addition(4).feature("carries")
