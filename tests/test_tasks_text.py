"""Tasks on real text: what the sequences are made of, what is kept, and a small language model's tokenizer."""

import json
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from tokenizers import ByteLevelBPETokenizer
from training_runs import same_runs
from transformers import AutoTokenizer

import emergent_heads as eh
from emergent_heads.errors import ArgumentError, RunFolderError, UnsupportedModelError
from emergent_heads.tasks import (
    Mixture,
    RepeatedText,
    ShuffledTokens,
    TextCorpus,
    encoded_text,
    from_settings,
    repeated_text,
)
from emergent_heads.tasks.encoded_text import TextSource, held_out, train_tokenizer

WORDS = [*"0123456789", "the", "and", "of", "a", "in", "that", "with", "is", "on", "for"]
END = 0


def document(seed: int) -> str:
    draw = np.random.default_rng(seed)
    lines = [" ".join(draw.choice(WORDS, size=12)) for _ in range(40)]
    return f"document {seed}\n" + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty documents of some 2,000 characters, the last a copy of the first."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(document(number % 19), encoding="utf-8")
    return folder


@pytest.fixture
def text(folder) -> TextCorpus:
    return TextCorpus(f"{folder}/*.txt", vocabulary_size=64, context=16, held_out_share=0.2)


def documents_of(text: TextCorpus, split: str) -> list[str]:
    """What the split says, read back from its token ids."""
    pieces = np.split(text.tokens(split), np.flatnonzero(text.tokens(split) == END))
    return [text.tokenizer.decode([token for token in piece if token != END]) for piece in pieces[:-1]]


def stretches(tokens: np.ndarray, length: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[start : start + length].tolist()) for start in range(len(tokens) - length + 1)}


# ---- the text as token ids ----


def test_the_ids_of_a_split_are_its_documents_with_an_end_after_each(text, folder):
    written = [path.read_text() for path in sorted(folder.iterdir())]
    found = {split: documents_of(text, split) for split in ("train", "held-out")}
    assert sorted(found["train"] + found["held-out"]) == sorted(written)
    assert not set(found["train"]) & set(found["held-out"])
    assert found["train"] == [each for each in written if each in found["train"]]  # in the order of the files
    for split, documents in found.items():
        encode = text.tokenizer.backend_tokenizer.encode
        assert text.tokens(split).tolist() == [token for each in documents for token in [*encode(each).ids, END]]
    assert 0.1 < sum(map(len, found["held-out"])) / sum(map(len, written)) <= 0.2


def test_the_encoding_is_the_byte_pair_encoding_of_the_training_documents(text):
    peer = ByteLevelBPETokenizer()
    peer.train_from_iterator(documents_of(text, "train"), vocab_size=500, special_tokens=["<|endoftext|>"])
    merges = [json.loads(each.to_str())["model"]["merges"] for each in (text.tokenizer.backend_tokenizer, peer)]
    assert len(text.tokenizer) == 64
    assert len(merges[0]) > 20
    assert merges[0] == merges[1][: len(merges[0])]  # the peer has all 256 bytes, and then the same merges


def test_what_the_text_does_not_have_is_read_as_the_end_of_text(text):
    assert text.tokenizer("3Ω3")["input_ids"] == [
        *text.tokenizer("3")["input_ids"],
        END,
        END,
        *text.tokenizer("3")["input_ids"],
    ]
    assert text.tokenizer.bos_token_id == text.tokenizer.eos_token_id == text.tokenizer.unk_token_id == END


def test_a_vocabulary_smaller_than_the_bytes_of_the_text_is_refused(folder):
    with pytest.raises(ArgumentError, match=r"vocabulary_size 10 is too small.* or more") as refused:
        TextCorpus(f"{folder}/*.txt", vocabulary_size=10).tokens()
    least = int(str(refused.value).split("give ")[1].split()[0])
    assert len(TextCorpus(f"{folder}/*.txt", vocabulary_size=least).tokenizer) == least
    with pytest.raises(ArgumentError, match="too small"):
        TextCorpus(f"{folder}/*.txt", vocabulary_size=least - 1).tokens()


def test_documents_are_held_out_whatever_their_order_and_copies_go_together():
    documents = [document(seed) for seed in range(30)] + [document(3)]
    by_text = dict(zip(documents, held_out(documents, 0.3), strict=True))
    backwards = list(held_out(documents[::-1], 0.3))[::-1]
    assert backwards == [by_text[each] for each in documents]
    share = sum(len(each) for each, out in zip(documents, backwards, strict=True) if out) / sum(map(len, documents))
    assert 0.25 < share <= 0.3


def test_one_document_is_always_held_out_and_one_never():
    assert list(held_out(["long " * 9, "short", "longer " * 9], 0.01)) == [False, True, False]
    assert list(held_out(["one", "two"], 0.99)).count(True) == 1
    for documents in ([], ["alone"], ["twice", "twice"]):
        with pytest.raises(ArgumentError, match="one must be held out"):
            held_out(documents, 0.1)


def test_a_separator_parts_the_documents_of_a_file(tmp_path):
    (tmp_path / "all.txt").write_bytes(b"one\r\ntwo\n\nthree\n\n \n\nfour")
    source = TextSource((str(tmp_path / "all.txt"),), "\n\n")
    assert source.documents() == ["one\ntwo", "three", "four"]
    with pytest.raises(ArgumentError, match="separator"):
        TextCorpus(str(tmp_path / "all.txt")).tokens()


def test_long_documents_are_encoded_in_pieces(text, folder, monkeypatch):
    whole = {split: text.tokens(split).tolist() for split in ("train", "held-out")}
    monkeypatch.setattr(encoded_text, "_LONGEST_PIECE", 300)
    again = encoded_text._encode(text._source.documents(), 64, 0.2)
    assert {split: tokens.tolist() for split, tokens in again.splits.items()} == whole


def test_files_that_cannot_be_read_are_named(folder, tmp_path):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    for path, message in (
        (tmp_path / "none.txt", r"no text file .*none\.txt"),
        (folder, r"give a pattern: .*/\*\*/\*\.txt"),
        (f"{folder}/*.md", r"no text file .*\*\.md"),
        (tmp_path / "latin.txt", r"latin\.txt is no UTF-8 text"),
    ):
        with pytest.raises(ArgumentError, match=message):
            TextCorpus(path).tokens()
    for settings, message in (
        ({"paths": ()}, "paths is empty"),
        ({"context": 1}, "context is 1"),
        ({"held_out_share": 1.0}, "held_out_share"),
        ({"separator": ""}, "separator is empty"),
    ):
        with pytest.raises(ArgumentError, match=message):
            TextCorpus(**settings)
    with pytest.raises(ArgumentError, match=r"split 'held-out' has \d+ tokens, fewer than a context of 100000"):
        TextCorpus(f"{folder}/*.txt", 64, 100_000).tokens("held-out")


def test_the_standard_library_is_ascii_and_in_the_order_of_its_names():
    documents = TextSource(("stdlib",), None).documents()
    assert len(documents) > 100
    assert all(each.isascii() for each in documents)
    assert any("An abstract" in each or "Abstract Base Classes" in each for each in documents)
    assert TextSource(("stdlib",), None).digest() == TextSource(("stdlib",), None).digest()


# ---- what is kept ----


def test_a_text_is_encoded_once_and_mapped_from_then_on(text, tmp_path, monkeypatch):
    monkeypatch.setenv("EMERGENT_HEADS_CACHE", str(tmp_path))
    first = text.tokens()
    assert isinstance(first.base, np.memmap) or isinstance(getattr(first.base, "base", None), np.memmap)
    assert not first.flags.writeable
    encoded_text._kept.cache_clear()  # as another process would begin
    monkeypatch.setattr(encoded_text, "_encode", None)
    again = replace(text, context=8)
    assert again.tokens().tolist() == first.tolist()
    assert again.token_counts.tolist() == text.token_counts.tolist()
    assert again.tokenizer.backend_tokenizer.to_str() == text.tokenizer.backend_tokenizer.to_str()
    assert len(list((tmp_path / "texts").iterdir())) == 1


def test_two_processes_may_make_a_text_at_the_same_time(text, tmp_path):
    made = encoded_text._encode(text._source.documents(), 64, 0.2)
    encoded_text._keep(tmp_path / "texts" / "key", made)
    before = (tmp_path / "texts" / "key" / "train.npy").stat()
    encoded_text._keep(tmp_path / "texts" / "key", made)  # the second to be done
    assert (tmp_path / "texts" / "key" / "train.npy").stat() == before
    assert [each.name for each in (tmp_path / "texts").iterdir()] == ["key"]


def test_a_cache_that_cannot_be_written_changes_nothing(text, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    expected = text.batch(4, seed=1).tokens
    monkeypatch.setenv("EMERGENT_HEADS_CACHE", str(tmp_path / "file"))
    other = replace(text)
    assert (other.batch(4, seed=1).tokens == expected).all()
    assert other.plateau == text.plateau


def test_another_text_is_refused_where_a_task_is_made_again(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(document(number))
    text = TextCorpus([tmp_path / f"{number}.txt" for number in range(3)], 64, 16)
    settings = json.loads(json.dumps(text.settings()))
    assert settings["text_digest"] == text.digest
    made = from_settings(settings)
    assert made == text
    assert made.settings() == {**text.settings()}
    assert made.label == text.label
    (tmp_path / "1.txt").write_text(document(7))
    with pytest.raises(ArgumentError, match=rf"is not the one the task was made with.* was {text.digest}"):
        from_settings(settings)
    assert from_settings({**settings, "text_digest": None}).digest != text.digest


# ---- sequences ----


def test_sequences_are_stretches_of_their_split(text):
    known = {split: stretches(text.tokens(split), 16) for split in ("train", "held-out")}
    for split in known:
        batch = text.batch(200, seed=0, step=3, split=split)
        assert batch.tokens.shape == (200, 16)
        assert batch.tokens.dtype == torch.int64
        assert {tuple(row) for row in batch.tokens.tolist()} <= known[split]
        for mask in (batch.loss_mask, batch.answer_mask):
            assert not mask[:, 0].any()
            assert mask[:, 1:].all()


def test_places_are_drawn_evenly_and_to_the_very_end(text):
    long = replace(text, context=len(text.tokens("held-out")) - 1)
    starts = {tuple(row) for row in long.batch(64, seed=0, split="held-out").tokens[:, :40].tolist()}
    tokens = text.tokens("held-out")
    assert starts == {tuple(tokens[:40].tolist()), tuple(tokens[1:41].tolist())}


def test_batches_are_the_same_whatever_was_drawn_before(text):
    tasks = [text, RepeatedText(text, (2, 8)), ShuffledTokens(text), repeated_text(text, passage=(2, 8))]
    for task in tasks:
        batch = task.batch(8, seed=1, step=5)
        task.batch(3, seed=9)
        assert (pickle.loads(pickle.dumps(task)).batch(8, seed=1, step=5).tokens == batch.tokens).all()
        for other in ({"seed": 2}, {"step": 6}, {"split": "held-out"}, {"split": "report"}):
            assert (task.batch(8, **{"seed": 1, "step": 5, **other}).tokens != batch.tokens).any(), (task, other)
        held_out, report = (task.batch(8, seed=1, step=5, split=split).tokens for split in ("held-out", "report"))
        assert (held_out != report).any()
    with pytest.raises(ArgumentError, match="n is 0"):
        text.batch(0, seed=0)


def test_a_pickled_text_takes_its_settings_along_and_no_tokens(text):
    text.tokens()
    assert len(pickle.dumps(text)) < 1000


def test_plateau_and_frequencies(text):
    counts = Counter(text.tokens().tolist())
    assert text.plateau == pytest.approx(scipy.stats.entropy(list(counts.values())))
    assert text.floor == 0
    assert text.token_counts.tolist() == [counts[token] for token in range(64)]
    assert text.frequent_tokens(100) == sorted(token for token in counts if counts[token] >= 100 and token != END)
    assert END in counts
    assert END not in text.frequent_tokens(1)


def test_repeated_passages_are_of_the_text_and_said_over_and_over(text):
    task = RepeatedText(text, (3, 5))
    known = {split: stretches(text.tokens(split), 5) for split in ("train", "held-out")}
    lengths = Counter()
    for split in known:
        batch = task.batch(300, seed=0, split=split)
        for row, loss, answer in zip(batch.tokens.tolist(), batch.loss_mask, batch.answer_mask, strict=True):
            length = int(answer.nonzero()[0])
            assert answer.tolist() == [position >= length for position in range(16)]
            assert loss.tolist() == [position >= 1 for position in range(16)]
            assert row == [row[position % length] for position in range(16)]
            assert any(tuple(row[:length]) == each[:length] for each in known[split])
            lengths[length] += 1
    assert set(lengths) == {3, 4, 5}
    assert scipy.stats.chisquare(list(lengths.values())).pvalue > 1e-3
    assert (task.vocabulary_size, task.length, task.plateau, task.floor) == (64, 16, text.plateau, 0)
    for passage in ((0, 4), (5, 4), (4, 16)):
        with pytest.raises(ArgumentError, match="passage"):
            RepeatedText(text, passage)


def test_the_recipe_of_repeated_text(text):
    task = repeated_text(text, passage=(2, 4))
    assert task == Mixture((RepeatedText(text, (2, 4)), text), (0.75, 0.25))
    batch = task.batch(32, seed=0)
    answers_from = batch.answer_mask.int().argmax(dim=1)
    assert (answers_from >= 2).tolist() == [True] * 24 + [False] * 8
    assert repeated_text(text, 1, (2, 4)).rows(32, 0) == (32, 0)
    with pytest.raises(ArgumentError, match="share is"):
        repeated_text(text, share=1.5, passage=(2, 4))


def test_shuffled_tokens_are_the_same_tokens_in_another_order(text):
    task = ShuffledTokens(text)
    own, shuffled = (each.batch(64, seed=0, step=2) for each in (text, task))
    assert (own.tokens.sort(dim=1).values == shuffled.tokens.sort(dim=1).values).all()
    assert (own.tokens != shuffled.tokens).any(dim=1).all()
    assert shuffled.loss_mask[:, 1:].all()
    assert not shuffled.loss_mask[:, 0].any()
    rows = eh.tasks.CellularAutomaton(state_size=4, states=2, rules=1)
    positions = ShuffledTokens(Counting(12)).batch(4000, seed=0).tokens
    for place in range(12):  # every order is equally likely
        assert scipy.stats.chisquare(np.bincount(positions[:, place], minlength=12)).pvalue > 1e-4
    assert ShuffledTokens(rows).tokenizer is None
    assert task.tokenizer is not None


class Counting(eh.tasks.SequenceTask):
    """0, 1, 2, ..."""

    plateau = floor = 0.0

    def __init__(self, length: int) -> None:
        self.vocabulary_size = self.length = length

    def batch(self, n, *, seed, step=0, split="train", device="cpu"):
        tokens = torch.arange(self.length).expand(n, -1)
        return eh.tasks.SequenceBatch(tokens, tokens > 0, tokens > 0)


# ---- from settings ----


def test_tasks_within_tasks_are_made_again_from_json(text):
    task = Mixture(
        (ShuffledTokens(RepeatedText(text, (2, 3))), repeated_text(text, passage=(2, 3)), eh.tasks.Dyck()),
        ((0, (1, 0, 0)), (10, (0, 1, 1))),
        between="linear",
    )
    made = from_settings(json.loads(json.dumps(task.settings())))
    assert made == task
    assert (made.batch(9, seed=0, step=5).tokens == task.batch(9, seed=0, step=5).tokens).all()


def test_settings_that_are_no_task_are_refused(text):
    for settings, message in (
        ({"task": "Mine"}, "Mine is no task of the library"),
        ({"task": "from_table", "table": "x"}, "from_table is no task"),
        ({"task": "SequenceTask"}, "SequenceTask is no task"),
        ({}, "None is no task"),
        ({**text.settings(), "sort": 1}, "TextCorpus has no setting 'sort'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            from_settings(settings)


def test_runs_of_a_sweep_are_told_apart_by_their_tasks(text):
    settings = {"n_layers": 1, "d_model": 8, "n_heads": 2, "steps": 2}
    tasks = [text, repeated_text(text, passage=(2, 4)), repeated_text(text, passage=(2, 5))]
    runs = eh.grid(tasks, **settings)
    assert len({run.name for run in runs}) == 3
    assert runs[0].name.startswith("TextCorpus-paths=")
    assert runs[1].name.startswith("Mixture-RepeatedText+TextCorpus-attention-1x8x2-seed=0-")
    assert eh.grid(from_settings(text.settings()), **settings)[0].name == runs[0].name
    told = [run.columns["tasks"] for run in runs[1:]]
    assert all(each.startswith("RepeatedText-") and "+TextCorpus-" in each for each in told)
    assert told[0] != told[1]
    assert all(isinstance(value, (int, float, str, type(None))) for run in runs for value in run.columns.values())


# ---- a small language model ----

TRAINING = {"steps": 12, "tokens_per_batch": 128, "evaluate_every": 4, "checkpoints": (0, 6), "n_held_out": 16}
CONFIG = eh.SmallModelConfig(n_layers=1, d_model=16, n_heads=2)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    text = TextCorpus(f"{folder}/*.txt", vocabulary_size=64, context=32, held_out_share=0.2)
    path = tmp_path_factory.mktemp("runs") / "run"
    return eh.train(CONFIG, repeated_text(text, passage=(3, 8)), path, **TRAINING, progress=False)


def test_a_run_on_text_has_sensible_metrics_and_a_plot(run):
    assert run.status == "finished"
    assert run.manifest["plateau"] == run.task.plateau
    assert 0 < run.metrics["loss_nats"].iloc[-1] < run.metrics["loss_nats"].iloc[0]
    assert run.metrics["accuracy"].between(0, 1).all()
    assert run.metrics["tokens"].iloc[-1] == 12 * 128
    assert len(run.positions) == len(run.metrics) * 31
    assert run.plot() is not None
    assert "RepeatedText(text=TextCorpus(" in run._repr_html_()


def test_the_models_of_a_run_on_text_have_its_tokenizer(run):
    expected = run.task.tokenizer.backend_tokenizer.to_str()
    sentence = "the 3 of a 5"
    for tokenizer in (
        run.series.last.tokenizer(),
        run.series.last.load().tokenizer,
        eh.hooked(run.series.last).tokenizer,
        eh.hooked(run.series.last.load()).tokenizer,
        AutoTokenizer.from_pretrained(run.path),
    ):
        assert tokenizer.backend_tokenizer.to_str() == expected
        assert tokenizer.eos_token_id == END
        assert tokenizer.decode(tokenizer(sentence)["input_ids"]) == sentence
    try:
        converted = run.series.last.load(kind="hooked_transformer")
    except UnsupportedModelError:
        return  # transformer-lens 4 has none
    assert converted.to_tokens(sentence, prepend_bos=False).tolist() == [run.task.tokenizer(sentence)["input_ids"]]


def test_prompts_of_text_can_be_asked_of_the_run(run):
    point = eh.find_emergence(run.series, eh.tasks.string_repetition(4, digits=3), strategy="scan", progress=False)
    assert list(point.table["step"]) == [0, 6, 12]
    batch = eh.tasks.string_repetition(4, digits=3).batch(run.task.tokenizer, vocabulary_size=64, context=32)
    logits = run.series.last.load()(batch.tokens)
    log_p = logits[torch.arange(4), batch.positions].log_softmax(-1)[torch.arange(4), batch.targets]
    assert point.table["log_p_target_nats"].iloc[-1] == pytest.approx(log_p.mean().item(), abs=1e-5)
    words = eh.tasks.in_context_repetition(4, length=4, vocabulary=run.task.tasks[1].frequent_tokens(20))
    assert len(eh.evaluate(run.series.last, words).table) == 4


class Stop(Exception):
    pass


def stop(done, model, loss):
    if done == 7:
        raise Stop


def test_a_run_on_text_goes_on_bit_for_bit_and_refuses_another_tokenizer(run, tmp_path):
    with pytest.raises(Stop):
        eh.train(CONFIG, run.task, tmp_path, **TRAINING, progress=False, on_step=stop, save_every_seconds=0)
    kept = (tmp_path / "tokenizer.json").read_text()
    other = train_tokenizer([document(77)], 64).backend_tokenizer.to_str()
    for content, message in ((other, "another tokenizer of the same text"), ("{", "is damaged")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(RunFolderError, match=message):
            eh.train(CONFIG, run.task, tmp_path, **TRAINING, progress=False)
    (tmp_path / "tokenizer.json").write_text(kept)
    eh.train(CONFIG, run.task, tmp_path, **TRAINING, progress=False)
    assert same_runs(tmp_path, run.path)
    assert not list(tmp_path.glob(".tokenizer-*"))


def test_a_run_killed_before_its_manifest_begins_anew(run, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((run.path / name).read_bytes())
    assert same_runs(eh.train(CONFIG, run.task, tmp_path, **TRAINING, progress=False).path, run.path)


def test_a_run_on_a_text_that_is_gone_is_read_but_its_task_refused(run):
    manifest = json.loads(json.dumps(run.manifest))
    for part in (manifest["task"]["tasks"][0]["text"], manifest["task"]["tasks"][1]):
        part["paths"] = "/nowhere/none.txt"
    gone = eh.Run(run.path, manifest)
    with pytest.raises(ArgumentError, match=r"run was trained on a task that cannot be made again: .*none\.txt"):
        _ = gone.task
    assert gone.series.last.tokenizer() is not None


def test_tasks_are_imported_without_torch_and_tokenizers():
    code = "import sys, emergent_heads.tasks; assert not {'torch', 'tokenizers', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
