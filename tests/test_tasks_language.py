"""The capabilities: what the prompts say, read back by rule, and how they become token ids."""

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from emergent_heads import tasks
from emergent_heads.errors import ArgumentError, PromptError, TokenizerError
from emergent_heads.tasks.words import NAMES, PLACES, TEMPLATES, THINGS, WORDS

PYTHIA = Path(__file__).parents[1].parent / "shared" / "data" / "gpt-neox-tokenizer.json"
EVERYTHING = " ".join([*WORDS, *NAMES, *PLACES, *THINGS, *TEMPLATES, *"0123456789", "1.\n2.\n3.\n4.\n"])
MAKE = {
    "string": tasks.string_repetition,
    "in context": tasks.in_context_repetition,
    "pattern": tasks.pattern_completion,
    "indirect object": tasks.indirect_object,
}
seeds = st.integers(0, 2**32)
numbers = st.integers(1, 40)


@cache
def pythia() -> PreTrainedTokenizerFast:
    if not PYTHIA.exists():
        pytest.skip("needs shared/data/gpt-neox-tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=str(PYTHIA))


@cache
def byte_level(vocabulary: int = 3000) -> PreTrainedTokenizerFast:
    """Spaces belong to the word after them, as in GPT-2 and Pythia."""
    return _trained(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), vocabulary)


@cache
def splits_digits() -> PreTrainedTokenizerFast:
    """ " 3" is a space and "3", as in SmolLM2 and Qwen."""
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return _trained(split, decoders.ByteLevel(), 3000)


@cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """A mark for the space, put before the text as well, and digits alone, as in Llama 2."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Digits(individual_digits=True)])
    return _trained(split, decoders.Metaspace(), 3000)


@cache
def words_only(text: str = EVERYTHING) -> PreTrainedTokenizerFast:
    """Whole words without their spaces; what it does not know becomes [UNK]."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([text], trainers.WordLevelTrainer(special_tokens=["[UNK]"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def _trained(split, decoder, vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoder
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([EVERYTHING] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = [pythia, byte_level, splits_digits, sentencepiece, words_only]


def batch_of(task, tokenizer=None, vocabulary_size=60_000, context=None):
    return task.batch(tokenizer, vocabulary_size=vocabulary_size, context=context)


def read(task, tokenizer=None) -> list[tuple[str, str]]:
    return list(task.prompts(tokenizer).itertuples(index=False, name=None))


def all_different(rows) -> bool:
    return len(set(rows)) == len(rows)


# ---- What the prompts say -------------------------------------------------------------------------------------------


@given(n=numbers, digits=st.integers(3, 12), seed=seeds)
@settings(max_examples=50, deadline=None)
def test_string_repetition_says_a_string_twice(n, digits, seed):
    rows = read(tasks.string_repetition(n, digits=digits, seed=seed))
    assert len(rows) == n
    assert all_different(rows)
    for prompt, target in rows:
        whole = prompt + target
        assert re.fullmatch(r"\d( \d)+", whole)
        assert whole == f"{whole[: 2 * digits - 1]} {whole[: 2 * digits - 1]}"


def test_string_repetition_can_give_every_string_there_is():
    rows = read(tasks.string_repetition(100, digits=2))
    assert {prompt[:3] for prompt, _ in rows} == {f"{a} {b}" for a in range(10) for b in range(10)}


@given(n=numbers, length=st.integers(3, 30), seed=seeds, data=st.data())
@settings(max_examples=50, deadline=None)
def test_in_context_repetition_goes_on_as_before(n, length, seed, data):
    repeated = data.draw(st.integers(1, length - 1))
    task = tasks.in_context_repetition(n, length=length, n_repeated=repeated, seed=seed)
    rows = read(task, byte_level())
    assert len(rows) == n
    assert all_different(rows)
    for prompt, target in rows:
        check_repetition(prompt.split(), target.strip(), length, repeated)
        assert target.startswith(" ")


@given(n=numbers, length=st.integers(3, 20), seed=seeds, ids=st.sets(st.integers(0, 900), min_size=20), data=st.data())
@settings(max_examples=50, deadline=None)
def test_in_context_repetition_on_token_ids(n, length, seed, ids, data):
    repeated = data.draw(st.integers(1, length - 1))
    task = tasks.in_context_repetition(n, length, repeated, seed, vocabulary=sorted(ids))
    batch = batch_of(task, vocabulary_size=901, context=length + repeated)
    rows = [tuple(row) for row in batch.tokens.tolist()]
    assert len(rows) == n
    assert all_different(rows)
    assert batch.positions.tolist() == [length + repeated - 1] * n
    for row, target in zip(rows, batch.targets.tolist(), strict=True):
        assert ids.issuperset(row)
        check_repetition(list(row), target, length, repeated)


def check_repetition(said: list, target: object, length: int, repeated: int) -> None:
    first, again = said[:length], said[length:]
    assert all_different(first)
    assert len(again) == repeated
    earlier = [start for start in range(length - repeated) if first[start : start + repeated] == again]
    assert [first[start + repeated] for start in earlier] == [target]


def test_in_context_repetition_puts_a_at_every_place_but_the_first():
    places = Counter()
    for prompt, _ in read(tasks.in_context_repetition(400, length=6), byte_level()):
        words = prompt.split()
        places[words.index(words[-1])] += 1
    assert set(places) == {1, 2, 3, 4}
    assert min(places.values()) > 60  # 100 expected of each


def test_vocabulary_as_a_number_means_all_ids_below_it():
    batch = batch_of(tasks.in_context_repetition(300, length=5, vocabulary=6), vocabulary_size=6)
    assert set(batch.tokens.flatten().tolist()) == set(range(6))
    as_ids = tasks.in_context_repetition(300, length=5, vocabulary=torch.arange(6))
    assert as_ids == tasks.in_context_repetition(300, length=5, vocabulary=range(6))
    assert batch_of(as_ids, vocabulary_size=6).key == batch.key


@given(n=numbers, seed=seeds)
@settings(max_examples=50, deadline=None)
def test_pattern_completion_goes_on_with_the_pattern(n, seed):
    rows = read(tasks.pattern_completion(n, seed=seed), byte_level())
    assert len(rows) == n
    assert all_different(rows)
    kinds = Counter("list" if prompt.startswith("1.") else "in turn" for prompt, _ in rows)
    assert 0 <= kinds["list"] - kinds["in turn"] <= 1
    for prompt, target in rows:
        if prompt.startswith("1."):
            assert re.fullmatch(r"(\d\. [a-z]+\n)+", prompt)
            found = [int(number) for number in re.findall(r"^\d", prompt, flags=re.MULTILINE)]
            assert [*found, int(target)] == list(range(1, len(found) + 2))
            assert all_different(re.findall(r"[a-z]+", prompt))
        else:
            words = (prompt + target).split(" ")
            assert words[0] != words[1]
            assert words[2:] == words[:-2]


def test_pattern_completion_has_several_lengths():
    rows = read(tasks.pattern_completion(16), byte_level())
    assert len({len(prompt.split()) for prompt, _ in rows[::2]}) >= 4
    assert len({len(prompt.split()) for prompt, _ in rows[1::2]}) >= 4


@given(n=numbers, seed=seeds)
@settings(max_examples=50, deadline=None)
def test_indirect_object_is_the_name_said_once(n, seed):
    rows = read(tasks.indirect_object(n, seed=seed), byte_level())
    assert len(rows) == n
    assert all_different(rows)
    orders = Counter()
    for prompt, target in rows:
        said = [word for word in re.findall(r"\w+", prompt) if word in NAMES]
        assert sorted(Counter(said).values()) == [1, 2]
        assert f" {min(said, key=said.count)}" == target
        orders[said[0] == target.strip()] += 1
    assert 0 <= orders[True] - orders[False] <= 1  # True is ABBA


def test_indirect_object_uses_templates_and_orders_evenly():
    frames = Counter()
    for prompt, target in read(tasks.indirect_object(16 * 5), byte_level()):
        said = [word for word in re.findall(r"\w+", prompt) if word in NAMES]
        bare = [word for word in re.findall(r"\w+", prompt) if word not in (*NAMES, *PLACES, *THINGS)]
        frames[" ".join(bare), said[0] == target.strip()] += 1
    assert len(frames) == 16
    assert set(frames.values()) == {5}


@pytest.mark.parametrize("kind", MAKE)
@given(n=numbers, seed=seeds, other=seeds)
@settings(max_examples=20, deadline=None)
def test_prompts_depend_on_the_seed_and_more_begin_with_the_fewer(kind, n, seed, other):
    assume(seed != other)
    make = MAKE[kind]
    rows = read(make(n, seed=seed), byte_level())
    assert read(make(n, seed=seed), byte_level()) == rows
    assert read(make(n + 7, seed=seed), byte_level())[:n] == rows
    assert read(make(40, seed=other), byte_level()) != read(make(40, seed=seed), byte_level())


def test_a_task_is_described_by_the_call_that_makes_it():
    task = tasks.string_repetition(n_prompts=4, seed=3)
    assert repr(task) == "string_repetition(n_prompts=4, digits=8, seed=3, prepend_bos=False)"
    assert task == tasks.string_repetition(n_prompts=4, seed=3) != tasks.string_repetition(n_prompts=4, seed=4)
    for make in MAKE.values():
        assert eval(repr(make(n_prompts=5, seed=2)), vars(tasks)) == make(n_prompts=5, seed=2)
    long = tasks.in_context_repetition(vocabulary=range(50_000))
    assert len(repr(long)) < 200
    assert repr(long) != repr(tasks.in_context_repetition(vocabulary=range(1, 50_001)))
    table = pd.DataFrame({"prompt": ["a b a"], "target": [" b"]})
    assert repr(tasks.from_table(table)) != repr(tasks.from_table(table.assign(target=" a")))
    assert "n_prompts=1" in repr(tasks.from_table(table, name="mine"))


# ---- From text to token ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
@pytest.mark.parametrize("kind", MAKE)
def test_the_batch_is_what_the_tokenizer_gives_for_running_text(kind, make_tokenizer):
    tokenizer, task = make_tokenizer(), MAKE[kind](24, seed=5)
    batch = batch_of(task, tokenizer)
    assert batch.tokens.dtype == batch.positions.dtype == batch.targets.dtype == torch.long
    for row, (prompt, target) in enumerate(read(task, tokenizer)):
        running = tokenizer(prompt + target, add_special_tokens=False, return_offsets_mapping=True)
        n_tokens = int(batch.positions[row]) + 1
        assert [*batch.tokens[row, :n_tokens].tolist(), int(batch.targets[row])] == running["input_ids"]
        begin, end = running["offset_mapping"][-1]
        assert (prompt + target)[begin:end].strip() == target.strip()
        assert len(batch.texts[row]) == n_tokens


def test_pythia_reads_the_papers_prompt_as_fifteen_tokens():
    table = pd.DataFrame({"prompt": ["0 7 3 1 2 0 2 3 0 7 3 1 2 0 2"], "target": [" 3"]})
    batch = batch_of(tasks.from_table(table), pythia(), vocabulary_size=50_304, context=2048)
    assert batch.tokens.shape == (1, 15)
    assert batch.targets.tolist() == [pythia().convert_tokens_to_ids("Ġ3")]
    assert batch.texts[0][:3] == ("0", " 7", " 3")


def test_pythia_takes_words_and_names_as_one_token_each():
    batch = batch_of(tasks.in_context_repetition(64), pythia())
    assert batch.tokens.shape == (64, 17)
    for row in batch.tokens.tolist():
        assert len(set(row[:16])) == 16
        assert row[16] in row[:16]


@pytest.mark.parametrize("make", [tasks.in_context_repetition, tasks.pattern_completion, tasks.indirect_object])
def test_only_words_that_are_one_token_are_asked_for(make):
    tokenizer = byte_level(1000)
    one_token = {word for word in (*WORDS, *NAMES) if len(tokenizer.tokenize(f" {word}")) == 1}
    assert 20 < len(one_token) < len({*WORDS, *NAMES}) - 100
    answers = {target.strip() for _, target in read(make(200), tokenizer)}
    assert {answer for answer in answers if not answer.isdigit()} <= one_token


def test_white_space_before_the_answer_is_read_as_part_of_the_prompt():
    tokenizer, task = splits_digits(), tasks.string_repetition(8)
    space, batch = tokenizer.convert_tokens_to_ids("Ġ"), batch_of(task, tokenizer)
    assert batch.tokens[torch.arange(8), batch.positions].tolist() == [space] * 8
    assert tokenizer.convert_ids_to_tokens(batch.targets.tolist()) == [target.strip() for _, target in read(task)]
    llama = batch_of(task, sentencepiece())
    assert {row[-1] for row in llama.texts} == {" "}


def test_prompts_of_different_length_are_padded_on_the_right():
    batch = batch_of(tasks.pattern_completion(12), byte_level())
    assert batch.positions.unique().numel() > 3
    for row, position, texts in zip(batch.tokens, batch.positions, batch.texts, strict=True):
        assert "".join(texts) == byte_level().decode(row[: position + 1])
        assert not row[position + 1 :].any()


def test_texts_show_spaces_and_parts_of_characters():
    table = pd.DataFrame({"prompt": ["night day \u2603 night"], "target": [" day"]})
    texts = batch_of(tasks.from_table(table), byte_level()).texts[0]
    assert texts[-1] == " night"
    assert not any("\ufffd" in text for text in texts)
    assert batch_of(tasks.in_context_repetition(1), sentencepiece()).texts[0][-1].startswith(" ")
    numbers = batch_of(tasks.in_context_repetition(2, length=4, vocabulary=9))
    assert numbers.texts == tuple(tuple(map(str, row)) for row in numbers.tokens.tolist())


def test_special_tokens_come_only_where_asked_for():
    inner = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    inner = tokenizer.backend_tokenizer
    inner.post_processor = processors.TemplateProcessing(
        "<s> $A <s>", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenizer("day")["input_ids"][0] == tokenizer.bos_token_id  # as Llama's does, unless told not to
    plain, begun = (
        batch_of(tasks.indirect_object(6, prepend_bos=asked), tokenizer, len(tokenizer)) for asked in (False, True)
    )
    assert begun.tokens[:, 0].tolist() == [tokenizer.bos_token_id] * 6
    assert torch.equal(begun.tokens[:, 1:], plain.tokens)
    assert torch.equal(begun.positions, plain.positions + 1)
    assert begun.texts[0][0] == "<s>"
    ids = tasks.in_context_repetition(6, vocabulary=50, prepend_bos=True)
    assert batch_of(ids, tokenizer).tokens[:, 0].tolist() == [tokenizer.bos_token_id] * 6


# ---- The caller's own prompts ---------------------------------------------------------------------------------------

OWN = [("0 1 2 0 1", " 2"), ("night day night", " day"), ("1. air\n2. NA\n", "3"), ("NA", " night")]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_files_are_read_as_the_text_they_hold(tmp_path, suffix):
    table = pd.DataFrame(OWN, columns=["prompt", "target"]).assign(note=1)
    path = tmp_path / f"mine{suffix}"
    {
        ".csv": lambda: table.to_csv(path, index=False),
        ".tsv": lambda: table.to_csv(path, index=False, sep="\t"),
        ".json": lambda: path.write_text(table.to_json(orient="records")),
        ".jsonl": lambda: path.write_text(table.to_json(orient="records", lines=True)),
        ".parquet": lambda: table.to_parquet(path),
    }[suffix]()
    task = tasks.from_table(path)
    assert read(task) == OWN
    assert task.name == "mine"
    assert task == tasks.from_table(table, name="mine")
    assert batch_of(task, byte_level()).key == batch_of(tasks.from_table(table), byte_level()).key


def test_a_table_of_digits_only_keeps_its_spaces(tmp_path):
    path = tmp_path / "digits.jsonl"
    rows = read(tasks.string_repetition(5))
    path.write_text("".join(json.dumps({"prompt": prompt, "target": target}) + "\n" for prompt, target in rows))
    assert read(tasks.from_table(str(path))) == rows


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_ready_made_ids_come_through_unchanged(kind):
    tokens, targets = kind([[5, 6, 5], [7, 8, -1]]), kind([6, 7])
    batch = batch_of(tasks.from_tokens(tokens, targets, lengths=kind([3, 2])), vocabulary_size=9, context=3)
    assert batch.tokens.tolist() == [[5, 6, 5], [7, 8, 0]]
    assert batch.positions.tolist() == [2, 1]
    assert batch.targets.tolist() == [6, 7]
    assert batch.texts == (("5", "6", "5"), ("7", "8"))


# ---- Bad input ------------------------------------------------------------------------------------------------------


def table_of(*rows: tuple[object, object]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["prompt", "target"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [OWN[0], ("night day night", " day night")],
            r"row 1: the target ' day night' .* 2 tokens \(' day', ' night'\)",
        ),
        ([OWN[0], OWN[1], ("night", "")], r"row 2: the target '' .* is empty"),
        ([OWN[0], ("", " night")], "row 1: the prompt is empty"),
        ([("night ", "day")], r"row 0: the tokenizer merges .*'night ' with the target 'day'; put .* space"),
    ],
)
def test_unusable_answers_name_their_row(rows, message):
    with pytest.raises(PromptError, match=message):
        batch_of(tasks.from_table(table_of(*rows)), byte_level())


def test_answers_the_tokenizer_does_not_know_name_their_row():
    task = tasks.from_table(table_of(OWN[1], ("night", " zebra")))
    with pytest.raises(PromptError, match=r"row 1: the target ' zebra' .* unknown to the tokenizer"):
        batch_of(task, words_only())


@pytest.mark.parametrize(
    "task", [tasks.from_tokens([[1, 2], [3, 512]], [1, 2]), tasks.from_tokens([[1], [2]], [3, 512])]
)
def test_ids_outside_the_vocabulary_name_their_row(task):
    with pytest.raises(PromptError, match="tokens, row 1: the token id is 512 but the model knows 512"):
        batch_of(task, vocabulary_size=512)
    assert len(batch_of(task, vocabulary_size=513)) == 2


def test_a_tokenizer_larger_than_the_model_is_an_error():
    with pytest.raises(PromptError, match=r"row 0: the token id is \d+ but the model knows 200"):
        batch_of(tasks.indirect_object(4), byte_level(), vocabulary_size=200)
    with pytest.raises(PromptError, match="row 0: the token id is -1"):
        batch_of(tasks.from_tokens([[-1]], [0]), vocabulary_size=9)


def test_prompts_longer_than_the_context_name_their_row():
    task = tasks.from_table(table_of((" night", " day"), (" night day night", " day")), name="mine")
    with pytest.raises(PromptError, match="mine, row 1: the prompt has 3 tokens but the model takes 2"):
        batch_of(task, byte_level(), context=2)
    assert len(batch_of(task, byte_level(), context=3)) == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (table_of(), "no rows"),
        (pd.DataFrame({"prompt": ["a"], "answer": ["b"]}), r"missing columns: target \(there are: prompt, answer\)"),
        (pd.DataFrame({"question": ["a"]}), "missing columns: prompt, target"),
        (table_of(("a", " b"), ("c", 4)), r"row 1: the target is 4 \(int\), not text"),
        (table_of(("a", " b"), (None, " b")), r"row 1: the prompt is (None|nan)"),
        (table_of(("a", float("nan"))), "row 0: the target is nan"),
    ],
)
def test_unusable_tables_say_what_is_wrong(table, message):
    with pytest.raises(PromptError, match=message):
        tasks.from_table(table)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.txt", "", r"from its suffix '.txt': use .csv, .tsv"),
        ("a.csv", "", "cannot read prompts from .*a.csv"),
        ("a.csv", "prompt,target\n", "a.csv: the table has no rows"),
        ("a.jsonl", '{"prompt": "a", "target": "b"}\n{"prompt": \n', "a.jsonl: line 2 is not JSON"),
        ("a.json", '{"prompt": "a"}', "must hold one object"),
        ("a.jsonl", '{"prompt": "a", "target": "b"}\n\n{"prompt": "c", "target": 4}\n', "row 1: the target is 4"),
        ("a.parquet", "no parquet", "cannot read prompts from .*a.parquet"),
        (None, "", "there is no file .*a.csv"),
    ],
)
def test_unusable_files_are_named(tmp_path, file, content, message):
    if file is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(PromptError, match=message):
        tasks.from_table(tmp_path / (file or "a.csv"))


@pytest.mark.parametrize("make", MAKE.values())
def test_a_missing_tokenizer_is_an_error(make):
    with pytest.raises(TokenizerError, match="needs a tokenizer and there is none"):
        batch_of(make(), None)
    with pytest.raises(TokenizerError, match="needs a tokenizer of transformers, and Tokenizer is none"):
        batch_of(make(), byte_level().backend_tokenizer)


def test_a_tokenizer_without_a_first_token_cannot_prepend_it():
    for task in (tasks.string_repetition(prepend_bos=True), tasks.indirect_object(prepend_bos=True)):
        with pytest.raises(TokenizerError, match="no beginning-of-text token; use prepend_bos=False"):
            batch_of(task, byte_level())
    with pytest.raises(TokenizerError, match="there is none"):
        batch_of(tasks.in_context_repetition(vocabulary=50, prepend_bos=True), None)


@pytest.mark.parametrize("make", [tasks.in_context_repetition, tasks.pattern_completion, tasks.indirect_object])
def test_too_few_words_of_one_token(make):
    with pytest.raises(PromptError, match=r"needs \d+ words that are one token, and only \d+ of the \d+"):
        batch_of(make(), words_only("the air and nothing else"))


def test_more_prompts_than_the_tokenizers_words_allow():
    tokenizer = words_only("the air and the sea 1 2 3 4 .")
    assert len(read(tasks.pattern_completion(16), tokenizer)) == 16
    with pytest.raises(ArgumentError, match="has only 16 distinct prompts"):
        tasks.pattern_completion(17).prompts(tokenizer)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        *((make, {"n_prompts": n}, "n_prompts is") for make in MAKE.values() for n in (0, -1, 2.5)),
        (tasks.string_repetition, {"digits": 1}, "digits is 1; .* at least 2"),
        (tasks.string_repetition, {"digits": 2, "n_prompts": 101}, "has only 100 distinct prompts"),
        (tasks.in_context_repetition, {"length": 2}, "length is 2; .* at least 3"),
        (tasks.in_context_repetition, {"n_repeated": 0}, "n_repeated is 0"),
        (tasks.in_context_repetition, {"n_repeated": 16}, "n_repeated is 16; of 16 words at most 15"),
        (tasks.in_context_repetition, {"vocabulary": 15}, "15 token ids and length is 16"),
        (tasks.in_context_repetition, {"vocabulary": [0, 1, 1], "length": 3}, "give each id once"),
        (tasks.in_context_repetition, {"vocabulary": [-1, 0, 1], "length": 3}, "give each id once"),
        (tasks.in_context_repetition, {"vocabulary": ["a", "b"]}, "vocabulary must hold whole numbers"),
        (tasks.in_context_repetition, {"vocabulary": 3, "length": 3, "n_prompts": 7}, "only 6 distinct prompts"),
    ],
)
def test_arguments_that_make_no_sense(make, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], []), PromptError, "no prompts"),
        (([[]], [1]), PromptError, "no prompts"),
        (([1, 2], [1, 2]), ArgumentError, r"tokens must have the shape \[prompt, pos\], not \[2\]"),
        (([[1, 2], [3]], [1, 2]), ArgumentError, "rows of tokens differ in length"),
        (([[0.5]], [1]), ArgumentError, "tokens must hold whole numbers"),
        (([[1, 2]], [1, 2]), ArgumentError, "tokens has 1 prompts and targets 2"),
        (([[1, 2]], 1), ArgumentError, r"targets must have the shape \[prompt\]"),
        (([[1, 2], [3, 4]], [1, 2], [2, 0]), ArgumentError, r"lengths\[1\] is 0; it must lie between 1 and 2"),
        (([[1, 2], [3, 4]], [1, 2], [2]), ArgumentError, "tokens has 2 prompts and lengths 1"),
    ],
)
def test_ready_made_ids_that_make_no_sense(arguments, error, message):
    with pytest.raises(error, match=message):
        tasks.from_tokens(*arguments)


def test_tasks_can_be_made_without_loading_torch_or_transformers():
    code = (
        "import sys; from emergent_heads import tasks; tasks.string_repetition().prompts(); "
        "print([name for name in ('torch', 'transformers', 'transformer_lens') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
