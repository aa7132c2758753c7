"""Addition, multiplication and majority of majorities, against whole numbers of Python and counting by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emergent_heads.errors import ArgumentError
from emergent_heads.tasks import Addition, MajorityOfMajorities, Multiplication

OPERATIONS = {Addition: lambda a, b: a + b, Multiplication: lambda a, b: a * b}


def written(number: int, bits: int) -> str:
    return "".join(str(number >> place & 1) for place in range(bits))


def number(text: str) -> int:
    return int(text[::-1], 2)


def by_name(task, tokens):
    """Labels of each feature by the row, the feature's name and the token it is read at, as `{(row, name): {...}}`."""
    found = {}
    for feature in task.features:
        values = feature.read(tokens)
        for row, (labels, positions) in enumerate(zip(values.labels, values.positions, strict=True)):
            assert len(set(positions.tolist())) == len(positions)
            found[row, feature.name] = {
                int(position): label.tolist() for position, label in zip(positions, labels, strict=True)
            }
    return found


# ---- Addition and multiplication ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "prompt", "sequence"),
    [
        (Addition(4), "0110+1100", "0110+1100=10010<EOS>"),
        (Multiplication(4), "0110+1100", "0110+1100=01001000<EOS>"),
        (Addition(1), "1+1", "1+1=01<EOS>"),
        (Multiplication(1), "1+1", "1+1=10<EOS>"),
        (Addition(3), "111+111", "111+111=0111<EOS>"),
        (Multiplication(3), "111+111", "111+111=100011<EOS>"),  # 7 * 7 = 49
    ],
)
def test_worked_examples(task, prompt, sequence):
    tokens = task.solve(prompt)
    assert tokens.shape == (1, task.length)
    assert task.text(tokens[0]) == sequence


def test_features_of_the_worked_example_of_addition():
    task = Addition(4)
    found = by_name(task, task.solve("0110+1100"))
    assert found[0, "first_operand"] == {9: [0], 10: [1], 11: [1], 12: [0]}
    assert found[0, "second_operand"] == {9: [1], 10: [1], 11: [0], 12: [0]}
    assert found[0, "carry"] == {10: [0], 11: [1], 12: [1], 13: [0]}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([Addition, Multiplication]), st.integers(1, 70), st.integers(0, 2**40), st.integers(0, 10**6))
def test_every_answer(kind, bits, seed, step):
    task = kind(bits)
    answer_bits = bits + 1 if kind is Addition else 2 * bits
    assert task.length == 2 * bits + 1 + 1 + answer_bits + 1
    for row in task.batch(4, seed=seed, step=step).tokens:
        prompt, answer = task.text(row).split("=")
        first, second = prompt.split("+")
        assert len(first) == len(second) == bits
        result = OPERATIONS[kind](number(first), number(second))
        assert answer == written(result, answer_bits) + "<EOS>"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**40))
def test_every_feature_of_addition(bits, seed):
    task = Addition(bits)
    tokens = task.batch(3, seed=seed).tokens
    names = [*(f"a{i}" for i in range(bits)), "+", *(f"b{i}" for i in range(bits)), "="]
    names += [*(f"s{i}" for i in range(bits + 1)), "<EOS>"]
    found = by_name(task, tokens)
    for row in range(3):
        a, b = (number(part) for part in task.text(tokens[row]).split("=")[0].split("+"))
        for column in range(bits):
            kept = 2 ** (column + 1)
            carry = (a % kept + b % kept) // kept
            reads_sum_bit = names.index(f"s{column}")
            assert found[row, "carry"].pop(reads_sum_bit) == [carry]
            assert found[row, "first_operand"].pop(reads_sum_bit - 1) == [a >> column & 1]
            assert found[row, "second_operand"].pop(reads_sum_bit - 1) == [b >> column & 1]
    assert not any(found.values())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 34), st.integers(0, 2**40))
def test_every_feature_of_multiplication(bits, seed):
    task = Multiplication(bits)
    tokens = task.batch(2, seed=seed).tokens
    names = [*(f"a{i}" for i in range(bits)), "+", *(f"b{i}" for i in range(bits)), "="]
    names += [*(f"p{i}" for i in range(2 * bits)), "<EOS>"]
    found = by_name(task, tokens)
    for row in range(2):
        a, b = (number(part) for part in task.text(tokens[row]).split("=")[0].split("+"))
        total = a * (b & 1)
        for partial in range(2, bits + 1):
            added = (a << partial - 1) * (b >> partial - 1 & 1)
            for place in range(bits):
                kept = 2 ** (partial + place)
                carry = (total % kept + added % kept) // kept  # out of column partial - 1 + place
                before_its_bit = names.index(f"p{partial + place}") - 1
                assert found[row, f"carry_{partial}"].pop(before_its_bit) == [carry]
            total += added
        assert total == a * b
        for place in range(bits):
            before_its_bit = names.index(f"p{place}") - 1
            assert found[row, "first_operand"].pop(before_its_bit) == [a >> place & 1]
            assert found[row, "second_operand"].pop(before_its_bit) == [b >> place & 1]
    assert not any(found.values())


def test_names_of_the_features_of_multiplication():
    names = [feature.name for feature in Multiplication(5).features]
    assert names == ["carry_2", "carry_3", "carry_4", "carry_5", "first_operand", "second_operand"]


@pytest.mark.parametrize("kind", [Addition, Multiplication])
def test_splits_share_no_pair_in_either_order(kind):
    """All 256 pairs of 4-bit numbers come up, each in training or elsewhere, together with its mirror image."""
    task = kind(4)
    prompts = {}
    for split in ("train", "held-out", "probe"):
        tokens = task.batch(6000, seed=3, split=split).tokens
        prompts[split] = {task.text(row).split("=")[0] for row in tokens}
    elsewhere = prompts["held-out"] | prompts["probe"]
    assert len(prompts["train"]) + len(elsewhere) == 256
    for mine, others in ((prompts["train"], elsewhere), (elsewhere, prompts["train"])):
        assert not mine & others
        assert {"+".join(reversed(prompt.split("+"))) for prompt in mine} == mine
    assert 0.03 < len(elsewhere) / 256 < 0.25  # one in eight


def test_operands_are_uniform():
    """The bits of 100,000 operands, and of all pairs of them, are even; training leaves out an eighth at random."""
    tokens = Addition(8).batch(50_000, seed=0).tokens.numpy()
    bits = np.delete(tokens[:, :17], 8, axis=1) - 0.5
    assert np.abs(bits.mean(0)).max() < 0.02
    assert np.abs(np.corrcoef(bits.T) - np.eye(16)).max() < 0.04


def test_base_rates_of_carries():
    tokens = Addition(16).batch(20_000, seed=1).tokens
    rates = Addition(16).feature("carry").read(tokens).base_rate[:, 0]
    np.testing.assert_allclose(rates, [0.5 - 0.5 ** (column + 2) for column in range(16)], atol=0.018)
    tokens = Multiplication(16).batch(20_000, seed=1).tokens
    rates = Multiplication(16).feature("carry_16").read(tokens).base_rate[:, 0]
    assert rates[0] == pytest.approx(0.13, abs=0.015)
    assert rates.max() == pytest.approx(0.25, abs=0.015)


@pytest.mark.parametrize(
    ("task", "plateau", "tolerance"),
    [
        (Addition(16, layout="paper"), 17 / 19 * math.log(2), 2e-4),
        (Addition(16), 17 / 18 * math.log(2), 2e-4),
        (Multiplication(16, layout="paper"), 0.635, 1e-3),
        (MajorityOfMajorities(64, layout="paper"), 0.473 / 3, 3e-3),  # standard error 0.0013
        (MajorityOfMajorities(64), 0.473 / 2, 4.5e-3),
    ],
)
def test_plateaus_of_the_reference(task, plateau, tolerance):
    assert task.plateau == pytest.approx(plateau, abs=tolerance)
    assert task.reference_lines["position_marginals_loss_nats"] == task.plateau
    assert task.reference_lines["uniform_loss_nats"] == pytest.approx(math.log(5))
    assert task.floor == 0
    assert task.mean_length == task.length


@pytest.mark.parametrize("kind", [Addition, Multiplication])
@pytest.mark.parametrize("bits", [0, -3, 2.5, "8", None])
def test_bits_must_be_a_whole_number(kind, bits):
    with pytest.raises(ArgumentError, match=r"bits is .*; it must be a whole number, at least 1"):
        kind(bits)


# ---- Majority of majorities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "prompt", "answer"),
    [
        (MajorityOfMajorities(8), "11010010", "0"),
        (MajorityOfMajorities(8), "11110011", "1"),
        (MajorityOfMajorities(8), "11110001", "0"),  # two of four groups: a tie
        (MajorityOfMajorities(9, groups=3), "110011000", "1"),
        (MajorityOfMajorities(4, groups=1), "1100", "0"),  # half of a group: a tie
        (MajorityOfMajorities(4, groups=1), "0111", "1"),
        (MajorityOfMajorities(1, groups=1), "1", "1"),
    ],
)
def test_worked_examples_of_majorities(task, prompt, answer):
    assert task.text(task.solve(prompt)[0]) == f"{prompt}={answer}<EOS>"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 17), st.integers(0, 2**40))
def test_every_answer_and_feature_of_majorities(groups, size, seed):
    task = MajorityOfMajorities(groups * size, groups)
    tokens = task.batch(4, seed=seed).tokens
    assert task.length == tokens.shape[1] == groups * size + 3
    found = by_name(task, tokens)
    for row in range(4):
        prompt, answer = task.text(tokens[row]).split("=")
        votes = []
        for group in range(groups):
            part = prompt[group * size : (group + 1) * size]
            votes.append(int(part.count("1") > part.count("0")))
            for bit in range(size):
                position = group * size + bit
                assert found[row, "running_count"].pop(position) == [part[: bit + 1].count("1")]
            assert found[row, "group_vote"].pop(position) == [votes[-1]]
        assert answer == f"{int(votes.count(1) > votes.count(0))}<EOS>"
        assert found[row, "votes"].pop(task.text(tokens[row]).index("=")) == votes
    assert not any(found.values())


def test_shares_of_the_reference():
    """Groups of 16 bits vote 1 in 40.18 %, four of them in 18.13 %: the binomial tails."""
    task = MajorityOfMajorities(64)
    group = sum(math.comb(16, ones) for ones in range(9, 17)) / 2**16
    answer = sum(math.comb(4, ones) * group**ones * (1 - group) ** (4 - ones) for ones in (3, 4))
    assert (group, answer) == (pytest.approx(0.4018, abs=5e-5), pytest.approx(0.1813, abs=5e-5))
    tokens = task.batch(20_000, seed=0).tokens
    np.testing.assert_allclose(task.feature("votes").read(tokens).base_rate, [[group] * 4], atol=0.015)
    assert float(tokens[:, 65].double().mean()) == pytest.approx(answer, abs=0.012)
    assert task.reference_lines["constant_answer_exact_match"] == pytest.approx(1 - answer, abs=0.012)


def test_splits_of_majorities_share_no_problem():
    task = MajorityOfMajorities(8)
    train = {task.text(row) for row in task.batch(4000, seed=0).tokens}
    elsewhere = {task.text(row) for row in task.batch(4000, seed=0, split="probe").tokens}
    assert len(train) + len(elsewhere) == len(train | elsewhere) == 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4), "10 bits do not divide into 4 equal groups; change bits or groups"),
        ((2, 4), "2 bits do not divide into 4 equal groups"),
        ((0, 4), "bits is 0; it must be a whole number, at least 1"),
        ((8, 0), "groups is 0; it must be a whole number, at least 1"),
        ((8, 2, "papers"), "layout must be prompt or paper, not 'papers'"),
    ],
)
def test_majorities_that_make_no_sense(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        MajorityOfMajorities(*arguments)
