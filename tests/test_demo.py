"""The small language model's training, and the demo from trained checkpoints to figures."""

import json
import shutil
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from conftest import EARLY
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from emergent_heads.errors import ArgumentError
from emergent_heads.experiments import small_language_model
from emergent_heads.experiments.demo import run_demo, train_all
from emergent_heads.experiments.small_language_model import (
    TRAINING_FILE,
    Recipe,
    batches,
    standard_library_text,
    tokens_seen,
    train_series,
)

TINY = Recipe(
    steps=3, save_every=2, rows=4, repeated_rows=3, n_layers=1, d_model=8, n_heads=2, context=16, passage=(4, 8)
)


@pytest.fixture(autouse=True)
def _short_text(monkeypatch):
    whole = standard_library_text
    monkeypatch.setattr(small_language_model, "standard_library_text", lambda: whole(20_000))


def test_the_text_is_plain_and_as_long_as_asked():
    text = standard_library_text(20_000)
    assert len(text) == 20_000
    assert text.isascii()


def test_rows_of_a_batch():
    recipe = Recipe(steps=5)
    text = np.arange(10_000)
    for tokens in batches(text, recipe):
        assert tokens.shape == (recipe.rows, recipe.context)
        for row in tokens[: recipe.repeated_rows]:
            period = (row[1:] == row[0]).argmax() + 1
            assert recipe.passage[0] <= period <= recipe.passage[1]
            assert (row == row[0] + np.arange(recipe.context) % period).all()
        for row in tokens[recipe.repeated_rows :]:
            assert (row == row[0] + np.arange(recipe.context)).all()


def test_a_run_is_a_folder_of_hugging_face_models(tmp_path):
    path = train_series(tmp_path / "run", TINY)
    assert {folder.name for folder in path.iterdir()} == {"step0", "step2", "step3", TRAINING_FILE}
    model = AutoModelForCausalLM.from_pretrained(path / "step3")
    tokenizer = AutoTokenizer.from_pretrained(path / "step3")
    assert model.config.vocab_size == len(tokenizer) == TINY.vocabulary_size
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_same_seed_same_weights_other_seed_other_weights(tmp_path):
    def weights(name: str, seed: int):
        path = train_series(tmp_path / name, Recipe(**{**vars(TINY), "seed": seed}))
        return load_file(path / "step3" / "model.safetensors")

    first, again, other = weights("a", 0), weights("b", 0), weights("c", 1)
    assert all((first[name] == again[name]).all() for name in first)
    assert any((first[name] != other[name]).any() for name in first)


def test_tokens_seen_are_counted_over_the_batches(tmp_path):
    path = train_series(tmp_path / "run", TINY)
    tokenizer = AutoTokenizer.from_pretrained(path / "step0")
    text = np.array(tokenizer(standard_library_text(20_000))["input_ids"])
    counts = Counter(int(token) for tokens in batches(text, TINY) for token in tokens.ravel())
    assert tokens_seen(path, at_least=3) == sorted(token for token, count in counts.items() if count >= 3)


def test_a_finished_run_is_used_again_and_never_overwritten(tmp_path):
    path = train_series(tmp_path / "run", TINY)
    before = (path / "step3" / "model.safetensors").stat()
    assert train_series(path, TINY) == path
    with pytest.raises(ArgumentError, match=r"another recipe \(steps 3 there, 4 now\)"):
        train_series(path, Recipe(**{**vars(TINY), "steps": 4}))
    assert (path / "step3" / "model.safetensors").stat() == before
    (tmp_path / "other").mkdir()
    with pytest.raises(ArgumentError, match="no finished training run"):
        train_series(tmp_path / "other", TINY)


def test_an_interrupted_training_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(text, recipe):
        yield next(batches(text, recipe))
        raise KeyboardInterrupt

    monkeypatch.setattr(small_language_model, "batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_series(tmp_path / "run", TINY)
    assert not list(tmp_path.iterdir())


def test_processes_train_what_is_missing(tmp_path):
    recipes = [Recipe(**{**vars(TINY), "seed": seed}) for seed in range(3)]
    train_series(tmp_path / "seed0", recipes[0])
    before = (tmp_path / "seed0" / TRAINING_FILE).stat()
    folders = train_all(tmp_path, recipes)
    assert [json.loads((folder / TRAINING_FILE).read_text())["recipe"]["seed"] for folder in folders] == [0, 1, 2]
    assert (folders[0] / TRAINING_FILE).stat() == before


def test_demo_from_a_finished_training(emerging_series, tmp_path):
    shutil.copytree(emerging_series, tmp_path / "checkpoints" / "seed0")
    told = "\n".join(run_demo(tmp_path, seeds=1, recipe=EARLY))
    emergence = pd.read_csv(tmp_path / "emergence.csv")
    assert emergence["status"].tolist() == ["emerged"]
    assert "1 of 1 models came to repeat the tokens" in told
    heads = pd.read_csv(tmp_path / "heads-seed0.csv")
    assert len(heads) == 8
    assert heads["delta_p"].is_monotonic_decreasing
    pictures = {path.stem.removesuffix("-seed0") for path in tmp_path.glob("*.png")}
    assert pictures == {"overview", "emergence", "heads", "patterns", "recovery", "trajectories"}
    assert all(path.with_name(path.name + ".about.json").is_file() for path in tmp_path.glob("*.csv"))


def test_demo_where_nothing_emerges(tmp_path):
    train_series(tmp_path / "checkpoints" / "seed0", Recipe(seed=0, steps=30))
    told = "\n".join(run_demo(tmp_path, seeds=1, recipe=Recipe(steps=30)))
    assert "0 of 1 models came to repeat the tokens." in told
    assert "never emerged" in told
    assert not list(tmp_path.glob("heads*"))
    assert (tmp_path / "overview.png").is_file()
