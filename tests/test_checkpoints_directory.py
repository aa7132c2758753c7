"""Series from folders: which steps there are, and that the hub is never asked."""

import json
import os
import socket

import numpy as np
import pytest
from checkpoints_fixtures import save, tiny_neox

from emergent_heads.checkpoints.series import Checkpoint, CheckpointSeries
from emergent_heads.errors import ArgumentError, NoCheckpointsError, UnknownStepError


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_args):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def make_folders(path, *names):
    for name in names:
        (path / name).mkdir(parents=True)
        (path / name / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    "names",
    [
        ("step2", "step10", "step1"),
        ("checkpoint-10", "checkpoint-2", "checkpoint-1"),
        ("step_00010", "step_1", "step-2"),
    ],
)
def test_steps_are_ordered_by_number(tmp_path, names):
    series = CheckpointSeries.from_directory(make_folders(tmp_path, *names))
    assert series.steps == (1, 2, 10)
    assert [checkpoint.step for checkpoint in series] == [1, 2, 10]
    assert (series.first.step, series.last.step, len(series)) == (1, 10, 3)


def test_other_entries_are_left_out(tmp_path):
    make_folders(tmp_path, "checkpoint-5", "runs", "tmp-checkpoint-6", "logs-2024", "step")
    (tmp_path / "step7").write_text("a file")
    assert CheckpointSeries.from_directory(tmp_path).steps == (5,)


def test_a_checkpoint_is_found_by_step_never_by_place(tmp_path):
    series = CheckpointSeries.from_directory(make_folders(tmp_path / "my-run", "step0", "step100", "step1000"))
    assert series[100] == Checkpoint(series, 100)
    assert series[np.int64(100)].step == 100
    assert 100 in series
    assert 1 not in series
    assert repr(series[100]) == "Checkpoint(my-run, step 100)"
    assert repr(series) == "CheckpointSeries(my-run, 3 checkpoints, steps 0 to 1000)"


def test_an_unknown_step_names_the_numerically_nearest(tmp_path):
    series = CheckpointSeries.from_directory(
        make_folders(tmp_path, "step9", "step80", "step100", "step1000", "step10000")
    )
    with pytest.raises(UnknownStepError, match=r"no checkpoint at step 99; nearest: 9, 80, 100$"):
        series[99]
    with pytest.raises(UnknownStepError, match="'last'; a step is a number between 9 and 10000"):
        series["last"]


def test_a_folder_without_checkpoints_says_what_is_read(tmp_path):
    with pytest.raises(NoCheckpointsError, match=r"step\*/ or checkpoint-\*/"):
        CheckpointSeries.from_directory(tmp_path)
    with pytest.raises(NoCheckpointsError, match="is no folder"):
        CheckpointSeries.from_directory(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoCheckpointsError, match="one model itself"):
        CheckpointSeries.from_directory(tmp_path)


def test_two_folders_of_one_step_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="step_05 and step_5 are both step 5"):
        CheckpointSeries.from_directory(make_folders(tmp_path, "step_5", "step_05"))


def test_loading_and_swapping_use_no_network(tmp_path, no_network):
    for step in (1, 2):
        save(tiny_neox(step), tmp_path / f"checkpoint-{step}", tokenizer=step == 1)
    series = CheckpointSeries.from_directory(tmp_path)
    assert series[1].load().tokenizer.get_vocab()["w7"] == 7
    assert series[2].load().tokenizer is None
    assert series.hooked(1).tokenizer.get_vocab()["w7"] == 7
    assert series[2].hooked() is series.hooked(2)


def test_a_tokenizer_beside_the_step_folders_is_found(tmp_path, no_network):
    save(tiny_neox(1), tmp_path / "checkpoint-1")
    save(tiny_neox(2), tmp_path, tokenizer=True)
    assert CheckpointSeries.from_directory(tmp_path).first.tokenizer().get_vocab()["w7"] == 7


def test_identity_changes_when_the_weights_are_written_again(tmp_path):
    folder = save(tiny_neox(1), tmp_path / "step1")
    series = CheckpointSeries.from_directory(tmp_path)
    before = series.identity(1)
    assert before == CheckpointSeries.from_directory(tmp_path).identity(1)
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert series.identity(1) != before
    weights.unlink()
    assert series.identity(1) is None


def test_kept_evaluations_are_in_the_users_cache_only_where_weights_have_an_identity(tmp_path, monkeypatch):
    monkeypatch.setenv("EMERGENT_HEADS_CACHE", str(tmp_path / "cache"))
    folders = CheckpointSeries.from_directory(make_folders(tmp_path, "step1"))
    assert folders.evaluations.folder == tmp_path / "cache" / "evaluations"
    assert folders.evaluations is folders.evaluations
    assert CheckpointSeries.from_loader([1], tiny_neox).evaluations.folder is None


def test_a_run_folder_is_a_series(tmp_path):
    run = tmp_path / "lm-7"
    save(tiny_neox(1), run / "checkpoints" / "step_00000000")
    save(tiny_neox(2), run / "checkpoints" / "step_00000500")
    with pytest.raises(NoCheckpointsError, match=r"no manifest\.json"):
        CheckpointSeries.from_run(run)
    (run / "manifest.json").write_text(json.dumps({"seed": 7}))
    series = CheckpointSeries.from_run(run)
    assert (series.name, series.seed, series.steps) == ("lm-7", 7, (0, 500))
    (run / "manifest.json").write_text("{")
    with pytest.raises(NoCheckpointsError, match="cannot be read"):
        CheckpointSeries.from_run(run)


def test_a_wrong_kind_names_the_kinds(tmp_path):
    with pytest.raises(ArgumentError, match="bridge, hooked_transformer, huggingface"):
        CheckpointSeries.from_directory(make_folders(tmp_path, "step1"), kind="onnx")
