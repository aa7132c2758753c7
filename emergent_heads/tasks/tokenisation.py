"""From prompts as text to a batch of token ids, with one token for each answer."""

from collections.abc import Sequence
from typing import Any

from emergent_heads.errors import PromptError, TokenizerError
from emergent_heads.tasks.task import PromptBatch


def tokenise(
    name: str, tokenizer: Any, prompts: Sequence[str], targets: Sequence[str]
) -> tuple[list[list[int]], list[int]]:
    """Token ids of each prompt, and the one token of each answer.

    Prompt and target are tokenised together and the prompt's own tokens must come first, so the model reads what it
    would read in running text. Where a tokenizer gives " 3" as a space and "3", the space says nothing of the answer:
    tokens of white space between prompt and answer become the end of the prompt.

    Raises:
        PromptError: the answer is not one token, unknown to the tokenizer, or merged with the prompt; names the row.
    """
    together = _ids(tokenizer, [prompt + target for prompt, target in zip(prompts, targets, strict=True)])
    rows, answers = [], []
    for row, (prompt, joint) in enumerate(zip(_ids(tokenizer, prompts), together, strict=True)):
        where, target = f"{name}, row {row}", targets[row]
        if joint[: len(prompt)] != prompt:
            raise PromptError(
                f"{where}: the tokenizer merges the end of the prompt {_end(prompts[row])} with the target "
                f"{target!r}; put the boundary at a space, and the space into the target (' Paris')"
            )
        end = _end_of_prompt(tokenizer, joint, len(prompt))
        _check_answer(f"{where}: the target {target!r} after {_end(prompts[row])}", tokenizer, target, joint[end:])
        rows.append(joint[:end])
        answers.append(joint[end])
    return rows, answers


def one_token_words(name: str, tokenizer: Any, words: Sequence[str], at_least: int) -> list[str]:
    """The words that are one token where they follow a space in running text.

    Raises:
        PromptError: there are fewer than `at_least`.
    """
    before = "the"
    (start,), together = _ids(tokenizer, [before]), _ids(tokenizer, [f"{before} {word}" for word in words])
    found: dict[int, str] = {}  # by token: a tokenizer that drops case or accents may give two words the same one
    for word, ids in zip(words, together, strict=True):
        answer = ids[_end_of_prompt(tokenizer, ids, len(start)) :]
        if ids[: len(start)] == start and len(answer) == 1 and answer[0] != tokenizer.unk_token_id:
            found.setdefault(answer[0], word)
    if len(found) < at_least:
        raise PromptError(
            f"{name} needs {at_least} words that are one token, and only {len(found)} of the {len(words)} in its list "
            "are so with this tokenizer; ask for shorter prompts, or give your own with from_table or from_tokens"
        )
    return list(found.values())


def padded_batch(
    name: str,
    rows: Sequence[Sequence[int]],
    targets: Sequence[int],
    texts: tuple[tuple[str, ...], ...],
    *,
    vocabulary_size: int,
    context: int | None,
) -> PromptBatch:
    """The rows as one tensor, padded on the right with token 0, which no position before it sees.

    Raises:
        PromptError: an empty prompt, one longer than the context, or an id outside the vocabulary; names the row.
    """
    import torch

    for row, (tokens, target) in enumerate(zip(rows, targets, strict=True)):
        _check_row(f"{name}, row {row}", tokens, target, vocabulary_size, context)
    lengths = [len(tokens) for tokens in rows]
    padded = [[*tokens, *[0] * (max(lengths) - len(tokens))] for tokens in rows]
    return PromptBatch(torch.tensor(padded), torch.tensor(lengths) - 1, torch.tensor(targets), texts)


def token_texts(tokenizer: Any, rows: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
    """Each token as a reader would write it."""
    text_of = {token: _token_text(tokenizer, token) for token in {token for row in rows for token in row}}
    return tuple(tuple(text_of[token] for token in row) for row in rows)


def id_texts(rows: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
    """Each token by its id, for tasks that have no text."""
    return tuple(tuple(str(token) for token in row) for row in rows)


def usable(tokenizer: Any, name: str) -> Any:
    """The tokenizer, if it is one that can be called on text.

    Raises:
        TokenizerError: it is not.
    """
    if tokenizer is None:
        raise TokenizerError(
            f"{name} needs a tokenizer and there is none; give the model one (hooked(model, tokenizer=...)), or use "
            "token ids: from_tokens(...) or in_context_repetition(vocabulary=...)"
        )
    if not callable(tokenizer):
        raise TokenizerError(
            f"{name} needs a tokenizer of transformers, and {type(tokenizer).__name__} is none; wrap it, for example "
            "in PreTrainedTokenizerFast(tokenizer_object=...)"
        )
    return tokenizer


def bos_id(tokenizer: Any, name: str) -> int:
    """Id of the beginning-of-text token.

    Raises:
        TokenizerError: the tokenizer has none.
    """
    if usable(tokenizer, name).bos_token_id is None:
        raise TokenizerError(
            f"{name} has prepend_bos=True, and the tokenizer has no beginning-of-text token; use prepend_bos=False or "
            "set tokenizer.bos_token"
        )
    return tokenizer.bos_token_id


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    # verbose=False: a prompt longer than the context is an error of ours, the tokenizer need not warn of it as well
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def _end_of_prompt(tokenizer: Any, joint: Sequence[int], n_prompt: int) -> int:
    """Where the answer begins in prompt + target: after the prompt and the white space between the two."""
    while n_prompt < len(joint) - 1 and not _token_text(tokenizer, joint[n_prompt]).strip():
        n_prompt += 1
    return n_prompt


def _token_text(tokenizer: Any, token: int) -> str:
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    piece = tokenizer.convert_ids_to_tokens(token)
    if "\ufffd" in text:  # part of a character: only the piece's own name tells which
        return piece
    # SentencePiece decoders drop the space that a text begins with
    return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text


def _end(prompt: str, n_characters: int = 40) -> str:
    return repr(prompt if len(prompt) <= n_characters else f"…{prompt[-n_characters:]}")


def _check_answer(where: str, tokenizer: Any, target: str, answer: Sequence[int]) -> None:
    if not answer:
        raise PromptError(f"{where} is empty; give the text of one token")
    if len(answer) > 1:
        tokens = ", ".join(repr(text) for text in token_texts(tokenizer, [answer])[0])
        raise PromptError(f"{where} is {len(answer)} tokens ({tokens}); choose a target that is one token")
    if answer[0] == tokenizer.unk_token_id and tokenizer.unk_token not in target:
        raise PromptError(f"{where} is unknown to the tokenizer; choose a target that it knows")


def _check_row(where: str, tokens: Sequence[int], target: int, vocabulary_size: int, context: int | None) -> None:
    if not tokens:
        raise PromptError(f"{where}: the prompt is empty; the answer must follow at least one token")
    if context is not None and len(tokens) > context:
        raise PromptError(f"{where}: the prompt has {len(tokens)} tokens but the model takes {context}; shorten it")
    for token in (*tokens, target):
        if not 0 <= token < vocabulary_size:
            raise PromptError(
                f"{where}: the token id is {token} but the model knows {vocabulary_size} (0 to "
                f"{vocabulary_size - 1}); use the tokenizer that the model was trained with"
            )
