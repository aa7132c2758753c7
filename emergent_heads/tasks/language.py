"""Capabilities of language models, as prompts with one right next token.

A task is made without a tokenizer and describes its prompts; `batch` turns them into token ids with the tokenizer of
the model at hand. The four generated capabilities are those of "Emergent Capabilities Arise Randomly from Learning
Sparse Attention Patterns" (arXiv 2606.25010). Only string repetition is printed there; the prompts of the other three
are this library's own. Rows are counted from 0 everywhere, as in the column `prompt` of the result tables.
"""

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Int

from emergent_heads.errors import ArgumentError, PromptError
from emergent_heads.randomness import numpy_generator
from emergent_heads.storage import digest
from emergent_heads.tasks.task import PromptBatch, PromptTask
from emergent_heads.tasks.tokenisation import (
    bos_id,
    id_texts,
    one_token_words,
    padded_batch,
    token_texts,
    tokenise,
    usable,
)
from emergent_heads.tasks.words import NAMES, PLACES, TEMPLATES, THINGS, WORDS

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

LIST_LENGTHS = (3, 4, 5, 6)
ALTERNATION_LENGTHS = (5, 6, 7, 8)


def string_repetition(
    n_prompts: int = 32, digits: int = 8, seed: int = 0, prepend_bos: bool = False
) -> "StringRepetition":
    """Random digits said twice, without the last one: "0 7 3 1 2 0 2 3 0 7 3 1 2 0 2" -> " 3".

    Args:
        n_prompts: number of distinct prompts; fewer prompts are the first of more prompts, here as in all generators.
        digits: digits said (2 * digits - 1 stand in the prompt).
        seed: of the digits.
        prepend_bos: put the tokenizer's beginning-of-text token before every prompt.

    Raises:
        ArgumentError: fewer than 1 prompt or 2 digits, or more prompts than there are strings of so many digits.
    """
    return StringRepetition(n_prompts, digits, seed, prepend_bos=prepend_bos)


def in_context_repetition(
    n_prompts: int = 32,
    length: int = 16,
    n_repeated: int = 1,
    seed: int = 0,
    vocabulary: int | Sequence[int] | None = None,
    prepend_bos: bool = False,
) -> "WordRepetition | TokenRepetition":
    """Random distinct words, the last of them said again: "... A B ... A" -> " B", B being what followed before.

    The prompt is `length` distinct words and then a stretch of `n_repeated` of them, in the same order; the answer is
    the word that came after this stretch the first time. With `n_repeated=1` only A is repeated, at a random place.
    With `n_repeated=length - 1` the words are said twice, without the last one. The fewer are repeated, the harder:
    SmolLM2-135M matches 16 % of 64 prompts with 1 word of 16 repeated, 48 % with 2, 73 % with 8 and 95 % with 15. Each
    word is one token of the model's tokenizer with its leading space, so the text begins with a space.

    Args:
        n_prompts: number of distinct prompts.
        length: distinct words (or token ids) in a prompt, at least 3.
        n_repeated: how many are said again, 1 to length - 1.
        seed: of words and places.
        vocabulary: for models without a tokenizer, random token ids instead of words: the ids to draw from, or a
            number for the ids 0 to vocabulary - 1. None draws words.
        prepend_bos: put the tokenizer's beginning-of-text token before every prompt.

    Raises:
        ArgumentError: a number outside its range, a repeated or negative id, or more prompts than exist.
    """
    if vocabulary is None:
        return WordRepetition(n_prompts, length, n_repeated, seed, prepend_bos=prepend_bos)
    if isinstance(vocabulary, (int, np.integer)):
        ids = int(vocabulary)
    else:
        ids = tuple(_whole_numbers(vocabulary, "vocabulary", "[token]").tolist())
    return TokenRepetition(n_prompts, length, n_repeated, seed, ids, prepend_bos=prepend_bos)


def pattern_completion(n_prompts: int = 32, seed: int = 0, prepend_bos: bool = False) -> "PatternCompletion":
    r"""Patterns to go on with: numbered lists and two words in turn, alternately.

    Even rows are lists of 3 to 6 random words, "1. apple\n2. river\n3. song\n" -> "4"; odd rows are 5 to 8 words,
    "day night day night day" -> " night", where both words are one token with their leading space.

    Args:
        n_prompts: number of distinct prompts.
        seed: of the words.
        prepend_bos: put the tokenizer's beginning-of-text token before every prompt.

    Raises:
        ArgumentError: fewer than 1 prompt, or (in `batch` and `prompts`) more prompts than exist.
    """
    return PatternCompletion(n_prompts, seed, prepend_bos=prepend_bos)


def indirect_object(n_prompts: int = 32, seed: int = 0, prepend_bos: bool = False) -> "IndirectObject":
    """Who is given the thing: "When Mary and John went to the store, John gave a drink to" -> " Mary".

    Even rows name the indirect object first (ABBA, as above), odd rows the subject (BABA); each pair of rows goes on
    to the next of eight templates. Names are one token with their leading space. After Wang et al., "Interpretability
    in the Wild" (arXiv 2211.00593); the sentences are this library's own.

    Args:
        n_prompts: number of distinct prompts.
        seed: of names, places and things.
        prepend_bos: put the tokenizer's beginning-of-text token before every prompt.

    Raises:
        ArgumentError: fewer than 1 prompt, or (in `batch` and `prompts`) more prompts than exist.
    """
    return IndirectObject(n_prompts, seed, prepend_bos=prepend_bos)


def from_table(
    table: pd.DataFrame | Path | str, prepend_bos: bool = False, *, name: str | None = None
) -> "PromptTable":
    r"""The caller's own prompts: a table with the columns `prompt` and `target`; further columns are ignored.

    Write the target as the text goes on, most often with a leading space: "The capital of France is" -> " Paris".

    Args:
        table: DataFrame, or a .csv, .tsv, .json (list of records), .jsonl or .parquet file. The cells of text files
            are taken as they stand, also where they look like numbers or read "NA".
        prepend_bos: put the tokenizer's beginning-of-text token before every prompt.
        name: of the capability, for tables and plots; by default the file's name without suffix, or "table".

    Raises:
        PromptError: no such file, a file that cannot be read, missing columns, no rows, or a cell that is not text.
    """
    if isinstance(table, pd.DataFrame):
        return PromptTable(_text_cells(table, name or "table"), name or "table", prepend_bos=prepend_bos)
    path = Path(table)
    return PromptTable(_text_cells(_read_as_text(path), str(path)), name or path.stem, prepend_bos=prepend_bos)


def from_tokens(
    tokens: "Int[Tensor, 'prompt pos'] | Int[np.ndarray, 'prompt pos'] | Sequence[Sequence[int]]",
    targets: "Int[Tensor, ' prompt'] | Int[np.ndarray, ' prompt'] | Sequence[int]",
    lengths: "Int[Tensor, ' prompt'] | Int[np.ndarray, ' prompt'] | Sequence[int] | None" = None,
    *,
    name: str = "tokens",
) -> "TokenPrompts":
    """Ready-made token ids, for models without a tokenizer.

    Args:
        tokens: `[prompt, pos]`, padded on the right where `lengths` says so.
        targets: `[prompt]`, the right next token of each prompt.
        lengths: `[prompt]`, tokens of each prompt without its padding; by default there is no padding.
        name: of the capability, for tables and plots.

    Raises:
        ArgumentError: shapes that do not fit, values that are no whole numbers, or a length outside 1 to pos.
        PromptError: no prompts.
    """
    rows, answers = _whole_numbers(tokens, "tokens", "[prompt, pos]"), _whole_numbers(targets, "targets", "[prompt]")
    if rows.size == 0:
        raise PromptError(f"{name}: there are no prompts (tokens has the shape {list(rows.shape)})")
    ends = np.full(len(rows), rows.shape[1])
    if lengths is not None:
        ends = _whole_numbers(lengths, "lengths", "[prompt]")
    for what, values in (("targets", answers), ("lengths", ends)):
        if len(values) != len(rows):
            raise ArgumentError(f"tokens has {len(rows)} prompts and {what} {len(values)}; give one for each prompt")
    if len(wrong := np.flatnonzero((ends < 1) | (ends > rows.shape[1]))):
        row = wrong[0]
        raise ArgumentError(f"lengths[{row}] is {ends[row]}; it must lie between 1 and {rows.shape[1]}")
    prompts = tuple(tuple(row[:end].tolist()) for row, end in zip(rows, ends, strict=True))
    return TokenPrompts(prompts, tuple(answers.tolist()), name)


@dataclass(frozen=True, repr=False)
class TextTask(PromptTask):
    """A capability whose prompts are text; they are tokenised without special tokens unless `prepend_bos`."""

    prepend_bos: bool = field(default=False, kw_only=True)

    @abstractmethod
    def prompts(self, tokenizer: Any = None) -> pd.DataFrame:
        """The prompts as text, columns `prompt` and `target`.

        Args:
            tokenizer: a transformers tokenizer; needed where the task chooses words that are one token.

        Raises:
            TokenizerError: the text depends on the tokenizer and there is none.
            PromptError: the tokenizer has too few words that are one token.
        """

    def batch(self, tokenizer: Any, *, vocabulary_size: int, context: int | None) -> PromptBatch:
        """Token ids of the prompts; see `PromptTask.batch`."""
        tokenizer = usable(tokenizer, self.name)
        table = self.prompts(tokenizer)
        start = [bos_id(tokenizer, self.name)] if self.prepend_bos else []
        rows, targets = tokenise(self.name, tokenizer, table["prompt"].tolist(), table["target"].tolist())
        rows = [start + row for row in rows]
        texts = token_texts(tokenizer, rows)
        return padded_batch(self.name, rows, targets, texts, vocabulary_size=vocabulary_size, context=context)

    def __repr__(self) -> str:
        return _call(self)


@dataclass(frozen=True, repr=False)
class StringRepetition(TextTask):
    """See `string_repetition`."""

    n_prompts: int
    digits: int
    seed: int

    name = "string_repetition"

    def __post_init__(self) -> None:
        _check_at_least("digits", self.digits, 2)
        _check_number_of_prompts(self.name, self.n_prompts, 10**self.digits)

    def prompts(self, tokenizer: Any = None) -> pd.DataFrame:
        random = numpy_generator(self.seed, self.name, self.digits)

        def draw(row: int) -> tuple[str, str]:
            said = [str(digit) for digit in random.integers(10, size=self.digits)]
            return " ".join(said + said[:-1]), f" {said[-1]}"

        return _as_table(_distinct(self.n_prompts, draw))


@dataclass(frozen=True, repr=False)
class WordRepetition(TextTask):
    """See `in_context_repetition`."""

    n_prompts: int
    length: int
    n_repeated: int
    seed: int

    name = "in_context_repetition"

    def __post_init__(self) -> None:
        _check_repetition(self.n_prompts, self.length, self.n_repeated)

    def prompts(self, tokenizer: Any = None) -> pd.DataFrame:
        words = one_token_words(self.name, usable(tokenizer, self.name), WORDS, self.length)
        _check_number_of_prompts(
            self.name, self.n_prompts, _number_of_repetitions(len(words), self.length, self.n_repeated)
        )
        random = numpy_generator(self.seed, self.name, "words", self.length, self.n_repeated)

        def draw(row: int) -> tuple[str, str]:
            said, target = _repetition(random, words, self.length, self.n_repeated)
            return "".join(f" {word}" for word in said), f" {target}"

        return _as_table(_distinct(self.n_prompts, draw))


@dataclass(frozen=True, repr=False)
class PatternCompletion(TextTask):
    """See `pattern_completion`."""

    n_prompts: int
    seed: int

    name = "pattern_completion"

    def __post_init__(self) -> None:
        _check_at_least("n_prompts", self.n_prompts, 1)

    def prompts(self, tokenizer: Any = None) -> pd.DataFrame:
        words = one_token_words(self.name, usable(tokenizer, self.name), WORDS, 2)
        most = 2 * len(ALTERNATION_LENGTHS) * math.perm(len(words), 2)  # there are far more lists
        _check_number_of_prompts(self.name, self.n_prompts, most)
        random = numpy_generator(self.seed, self.name)

        def draw(row: int) -> tuple[str, str]:
            turn = row // 2
            if row % 2 == 0:
                return _numbered_list(_draw(random, WORDS, LIST_LENGTHS[turn % len(LIST_LENGTHS)]))
            return _alternation(_draw(random, words, 2), ALTERNATION_LENGTHS[turn % len(ALTERNATION_LENGTHS)])

        return _as_table(_distinct(self.n_prompts, draw))


@dataclass(frozen=True, repr=False)
class IndirectObject(TextTask):
    """See `indirect_object`."""

    n_prompts: int
    seed: int

    name = "indirect_object"

    def __post_init__(self) -> None:
        _check_at_least("n_prompts", self.n_prompts, 1)

    def prompts(self, tokenizer: Any = None) -> pd.DataFrame:
        names = one_token_words(self.name, usable(tokenizer, self.name), NAMES, 2)
        most = 2 * len(TEMPLATES) * math.perm(len(names), 2) * len(PLACES) * len(THINGS)
        _check_number_of_prompts(self.name, self.n_prompts, most)
        random = numpy_generator(self.seed, self.name)

        def draw(row: int) -> tuple[str, str]:
            indirect_object, subject = _draw(random, names, 2)
            first, second = (indirect_object, subject) if row % 2 == 0 else (subject, indirect_object)
            (place,), (thing,) = _draw(random, PLACES, 1), _draw(random, THINGS, 1)
            template = TEMPLATES[row // 2 % len(TEMPLATES)]
            text = template.format(first=first, second=second, subject=subject, place=place, thing=thing)
            return text, f" {indirect_object}"

        return _as_table(_distinct(self.n_prompts, draw))


@dataclass(frozen=True, repr=False)
class PromptTable(TextTask):
    """See `from_table`."""

    rows: tuple[tuple[str, str], ...]
    name: str

    @property
    def n_prompts(self) -> int:
        return len(self.rows)

    def prompts(self, tokenizer: Any = None) -> pd.DataFrame:
        return _as_table(self.rows)

    def __repr__(self) -> str:
        return (
            f"from_table(name={self.name!r}, n_prompts={self.n_prompts}, key={digest(self.rows)[:8]!r}, "
            f"prepend_bos={self.prepend_bos})"
        )


@dataclass(frozen=True, repr=False)
class TokenRepetition(PromptTask):
    """See `in_context_repetition`, with `vocabulary`."""

    n_prompts: int
    length: int
    n_repeated: int
    seed: int
    vocabulary: int | tuple[int, ...]
    prepend_bos: bool = field(default=False, kw_only=True)

    name = "in_context_repetition"

    def __post_init__(self) -> None:
        _check_repetition(self.n_prompts, self.length, self.n_repeated)
        ids = self.ids
        if len(set(ids)) < len(ids) or min(ids, default=0) < 0:
            raise ArgumentError("vocabulary holds a negative or repeated token id; give each id once")
        if len(ids) < self.length:
            raise ArgumentError(
                f"vocabulary has {len(ids)} token ids and length is {self.length}; take a shorter length"
            )
        _check_number_of_prompts(
            self.name, self.n_prompts, _number_of_repetitions(len(ids), self.length, self.n_repeated)
        )

    @property
    def ids(self) -> Sequence[int]:
        """The token ids to draw from."""
        return range(self.vocabulary) if isinstance(self.vocabulary, int) else self.vocabulary

    def prompts(self, tokenizer: Any = None) -> pd.DataFrame:
        """The prompts as tuples of token ids, columns `prompt` and `target`."""
        random = numpy_generator(self.seed, self.name, "token ids", self.length, self.n_repeated)

        def draw(row: int) -> tuple[tuple[int, ...], int]:
            said, target = _repetition(random, self.ids, self.length, self.n_repeated)
            return tuple(said), target

        return _as_table(_distinct(self.n_prompts, draw))

    def batch(self, tokenizer: Any, *, vocabulary_size: int, context: int | None) -> PromptBatch:
        """The token ids as they are; see `PromptTask.batch`. A tokenizer is needed for `prepend_bos` only."""
        table = self.prompts()
        start = [bos_id(tokenizer, self.name)] if self.prepend_bos else []
        rows = [[*start, *row] for row in table["prompt"]]
        return padded_batch(
            self.name, rows, table["target"].tolist(), id_texts(rows), vocabulary_size=vocabulary_size, context=context
        )

    def __repr__(self) -> str:
        return _call(self)


@dataclass(frozen=True, repr=False)
class TokenPrompts(PromptTask):
    """See `from_tokens`."""

    rows: tuple[tuple[int, ...], ...]
    targets: tuple[int, ...]
    name: str

    @property
    def n_prompts(self) -> int:
        return len(self.rows)

    def prompts(self, tokenizer: Any = None) -> pd.DataFrame:
        """The prompts as tuples of token ids, columns `prompt` and `target`."""
        return _as_table(list(zip(self.rows, self.targets, strict=True)))

    def batch(self, tokenizer: Any, *, vocabulary_size: int, context: int | None) -> PromptBatch:
        """The token ids as they are; see `PromptTask.batch`. The tokenizer is not used."""
        rows = [list(row) for row in self.rows]
        return padded_batch(
            self.name, rows, list(self.targets), id_texts(rows), vocabulary_size=vocabulary_size, context=context
        )

    def __repr__(self) -> str:
        key = digest(self.rows, self.targets)[:8]
        return f"from_tokens(name={self.name!r}, n_prompts={self.n_prompts}, key={key!r})"


# ---- Drawing prompts ------------------------------------------------------------------------------------------------


def _distinct(n: int, draw: Callable[[int], T]) -> list[T]:
    """`draw(row)` for each row, drawn again where it came up before; so more prompts begin with the fewer."""
    found: dict[T, None] = {}
    while len(found) < n:
        found.setdefault(draw(len(found)), None)
    return list(found)


def _draw(random: np.random.Generator, choices: Sequence[T], n: int) -> list[T]:
    """`n` different ones of `choices`, in random order."""
    return [choices[int(place)] for place in random.choice(len(choices), size=n, replace=False)]


def _repetition(random: np.random.Generator, choices: Sequence[T], length: int, n_repeated: int) -> tuple[list[T], T]:
    """`length` different choices and a stretch of `n_repeated` of them again; and what followed this stretch."""
    first = _draw(random, choices, length)
    # The first word may have no space before it in some tokenizers, so it is never the A of "A B ... A".
    place_of_a = int(random.integers(max(n_repeated - 1, 1), length - 1))
    return first + first[place_of_a - n_repeated + 1 : place_of_a + 1], first[place_of_a + 1]


def _number_of_repetitions(n_choices: int, length: int, n_repeated: int) -> int:
    return math.perm(n_choices, length) * (length - 1 - max(n_repeated - 1, 1))


def _numbered_list(words: Sequence[str]) -> tuple[str, str]:
    lines = [f"{number}. {word}\n" for number, word in enumerate(words, start=1)]
    return "".join(lines), str(len(words) + 1)


def _alternation(words: Sequence[str], length: int) -> tuple[str, str]:
    return " ".join(words[place % 2] for place in range(length)), f" {words[length % 2]}"


def _as_table(rows: Sequence[tuple[Any, Any]]) -> pd.DataFrame:
    prompts, targets = zip(*rows, strict=True)
    return pd.DataFrame({"prompt": prompts, "target": targets})


# ---- Checks ---------------------------------------------------------------------------------------------------------


def _check_at_least(argument: str, value: int, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or value < least:
        raise ArgumentError(f"{argument} is {value!r}; it must be a whole number, at least {least}")


def _check_number_of_prompts(name: str, n_prompts: int, most: int) -> None:
    _check_at_least("n_prompts", n_prompts, 1)
    if n_prompts > most:
        raise ArgumentError(
            f"n_prompts is {n_prompts}, but {name} has only {most} distinct prompts here; ask for fewer"
        )


def _check_repetition(n_prompts: int, length: int, n_repeated: int) -> None:
    _check_at_least("n_prompts", n_prompts, 1)
    _check_at_least("length", length, 3)
    _check_at_least("n_repeated", n_repeated, 1)
    if n_repeated >= length:
        raise ArgumentError(f"n_repeated is {n_repeated}; of {length} words at most {length - 1} can be said again")


def _whole_numbers(values: Any, what: str, shape: str) -> np.ndarray:
    try:
        array = np.asarray(values.tolist() if hasattr(values, "tolist") else values)  # tensors on any device
    except ValueError as error:
        raise ArgumentError(f"the rows of {what} differ in length; pad them on the right and give lengths") from error
    if array.size and array.dtype.kind not in "iu":
        raise ArgumentError(f"{what} must hold whole numbers, not {array.dtype}")
    if array.size and array.ndim != len(shape.split(",")):
        raise ArgumentError(f"{what} must have the shape {shape}, not {list(array.shape)}")
    return array


# ---- Tables of prompts ----------------------------------------------------------------------------------------------

# Not storage.read_table: pandas would read the target " 3" as the number 3, and "NA" as a missing value.
_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".csv": lambda path: pd.read_csv(path, dtype=str, keep_default_na=False),
    ".tsv": lambda path: pd.read_csv(path, dtype=str, keep_default_na=False, sep="\t"),
    ".json": lambda path: _records(json.loads(path.read_text("utf-8"))),
    ".jsonl": lambda path: _records([_json_line(*line) for line in enumerate(path.read_text("utf-8").split("\n"))]),
    ".parquet": pd.read_parquet,
}


def _json_line(number: int, line: str) -> object:
    try:
        return json.loads(line) if line.strip() else None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number + 1} is not JSON: {error}") from error


def _records(records: object) -> pd.DataFrame:
    if not isinstance(records, list) or not all(record is None or isinstance(record, dict) for record in records):
        raise ValueError('it must hold one object {"prompt": ..., "target": ...} for each prompt')
    return pd.DataFrame([record for record in records if record is not None])


def _read_as_text(path: Path) -> pd.DataFrame:
    if path.suffix not in _READERS:
        raise PromptError(
            f"cannot tell the format of {path} from its suffix {path.suffix!r}: use {', '.join(_READERS)}"
        )
    try:
        return _READERS[path.suffix](path)
    except FileNotFoundError as error:
        raise PromptError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:  # pandas' and pyarrow's errors of content are ValueErrors
        raise PromptError(f"cannot read prompts from {path}: {error}") from error


def _text_cells(table: pd.DataFrame, where: str) -> tuple[tuple[str, str], ...]:
    if len(table) == 0:
        raise PromptError(f"{where}: the table has no rows; give at least one prompt")
    if missing := [column for column in ("prompt", "target") if column not in table.columns]:
        there = ", ".join(str(column) for column in table.columns)
        raise PromptError(
            f"{where}: missing columns: {', '.join(missing)} (there are: {there}); a prompt table needs the columns "
            "prompt and target"
        )
    rows = list(zip(table["prompt"].tolist(), table["target"].tolist(), strict=True))
    for row, cells in enumerate(rows):
        for column, cell in zip(("prompt", "target"), cells, strict=True):
            if not isinstance(cell, str):
                raise PromptError(
                    f"{where}, row {row}: the {column} is {cell!r} ({type(cell).__name__}), not text; "
                    "read the table with dtype=str and keep_default_na=False, and fill empty cells"
                )
    return tuple(rows)


def _call(task: Any) -> str:
    """The call that makes the task again; long collections by their number and key."""

    def shown(value: object) -> str:
        if isinstance(value, tuple) and len(value) > 8:
            return f"<{len(value)} ids, key {digest(value)[:8]}>"
        return repr(value)

    arguments = sorted(fields(task), key=lambda argument: argument.kw_only is True)  # as in the signature
    shown_arguments = [f"{argument.name}={shown(getattr(task, argument.name))}" for argument in arguments]
    return f"{task.name}({', '.join(shown_arguments)})"
