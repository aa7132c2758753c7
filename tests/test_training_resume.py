"""A run folder survives kills, full disks and other processes, and refuses what it was not made for."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from training_runs import CONFIG, QUICK, TASK, same_runs

import emergent_heads.training.folder as folder_module
from emergent_heads import storage
from emergent_heads.errors import ArgumentError, NoCheckpointsError, OutputError, RunFolderError, RunInUseError
from emergent_heads.tasks.linear_map import LinearMap
from emergent_heads.training.loop import train
from emergent_heads.training.run import Run


def quick(path, **changes):
    return train(CONFIG, TASK, path, **{**QUICK, "seed": 1, **changes})


class Stop(Exception):
    pass


def stop_at(step):
    def on_step(done, model, loss):
        if done == step:
            raise Stop

    return on_step


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    return quick(tmp_path_factory.mktemp("runs") / "whole")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(tmp_path, whole):
    script = Path(__file__).with_name("killed_training.py")
    command = [sys.executable, str(script), str(tmp_path / "run"), "1", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    died_by = [int(line) for line in done.stdout.split()]
    assert len(died_by) == 8
    assert died_by.count(signal.SIGKILL) >= 3
    assert same_runs(tmp_path / "run", whole.path)
    assert not [path for path in (tmp_path / "run").rglob(".*") if path.name != ".lock"]
    assert not (tmp_path / "run" / "resume.safetensors").exists()


@pytest.mark.parametrize("step", [2, 7, 20, 23])
def test_a_run_goes_on_from_its_last_saved_step(tmp_path, whole, step):
    with pytest.raises(Stop):
        quick(tmp_path, on_step=stop_at(step), save_every_seconds=0)
    half = Run.open(tmp_path)
    assert half.status == "unfinished"
    assert list(half.metrics["step"]) == [row for row in whole.metrics["step"] if row < step]
    steps = []
    run = quick(tmp_path, on_step=lambda done, model, loss: steps.append(done))
    assert steps == list(range(step, 25))  # the step that was stopped had not been saved
    assert run.status == "finished"
    assert same_runs(tmp_path, whole.path)


def test_what_a_killed_process_had_not_renamed_yet_is_cleared_away(tmp_path, whole):
    with pytest.raises(Stop):
        quick(tmp_path, on_step=stop_at(12), save_every_seconds=0)
    left = [tmp_path / ".resume-x1y2.safetensors", tmp_path / "checkpoints" / ".step_00000016-x1y2.safetensors"]
    for path in left:
        path.write_bytes(b"half a file")
    quick(tmp_path)
    assert not any(path.exists() for path in left)
    assert same_runs(tmp_path, whole.path)


def test_a_run_stopped_before_anything_was_saved_begins_anew(tmp_path, whole):
    with pytest.raises(Stop):
        quick(tmp_path, on_step=stop_at(12))
    half = Run.open(tmp_path)
    assert len(half.metrics) == len(half.positions) == 0
    assert "unfinished at step 0" in repr(half)
    quick(tmp_path)
    assert same_runs(tmp_path, whole.path)


def test_a_finished_run_is_returned_as_it_is(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.path.rglob("*")}
    calls = []
    again = quick(whole.path, on_step=lambda *arguments: calls.append(arguments))
    assert again.manifest == whole.manifest
    assert not calls
    assert {path: path.stat().st_mtime_ns for path in whole.path.rglob("*")} == before


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"steps": 30}, "training.steps 24 there, 30 now"),
        ({"seed": 2}, "seed 1 there, 2 now"),
        ({"learning_rate": 1e-3}, r"training.learning_rate 0.003 there, 0.001 now"),
        ({"attention_bias": 5.0}, "training.attention_bias None there, {'strength': 5.0"),
    ],
)
def test_a_run_of_other_settings_is_refused_with_what_differs(whole, changes, told):
    before = whole.manifest
    with pytest.raises(RunFolderError, match=told):
        quick(whole.path, **changes)
    assert Run.open(whole.path).manifest == before


def test_numbers_of_numpy_are_the_same_settings(whole):
    numbers = {"steps": np.int64(24), "learning_rate": np.float32(3e-3).astype(float).round(6), "seed": np.int32(1)}
    assert quick(whole.path, **numbers).manifest == whole.manifest


def test_a_run_of_another_task_or_model_is_refused(whole):
    with pytest.raises(RunFolderError, match=r"task\.sparsity 2 there, 3 now"):
        train(CONFIG, LinearMap(state_size=4, sparsity=3, seed=0), whole.path, **QUICK, seed=1)
    other = type(CONFIG)(n_layers=2, d_model=16, n_heads=2)
    with pytest.raises(RunFolderError, match=r"config\.n_layers 1 there, 2 now.*name another folder"):
        train(other, TASK, whole.path, **QUICK, seed=1)


def test_a_run_of_another_version_is_refused(tmp_path):
    run = quick(tmp_path, steps=2)
    manifest = {**run.manifest, "format_version": 99, "versions": {"emergent-heads": "7.1"}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for use in (lambda: quick(tmp_path, steps=2), lambda: Run.open(tmp_path)):
        with pytest.raises(RunFolderError, match=r"format version 99, made by emergent-heads 7\.1"):
            use()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="is no run folder; name another folder"):
        quick(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(NoCheckpointsError, match=r"no manifest\.json"):
        Run.open(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"seed": 1}))
    with pytest.raises(RunFolderError, match="not trained by this library"):
        quick(tmp_path)
    with pytest.raises(NoCheckpointsError, match="not trained by this library"):
        Run.open(tmp_path)


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((OutputError, RunFolderError), match="file"):
        quick(tmp_path / "file")
    with pytest.raises(OutputError, match="choose a folder"):
        quick(tmp_path / "file" / "run")


def test_two_processes_do_not_train_into_one_folder(tmp_path, whole):
    with FileLock(tmp_path / ".lock"), pytest.raises(RunFolderError, match="another process is training into"):
        quick(tmp_path)
    quick(tmp_path)
    with FileLock(tmp_path / ".lock"):  # reading a finished run needs no lock
        quick(tmp_path)
    assert same_runs(tmp_path, whole.path)


def test_a_run_whose_manifest_is_not_written_yet_is_one_to_be(tmp_path, monkeypatch):
    """A process was killed before it, or another is at that point right now: then the lock says so."""

    def stopped(*_):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.RunFolder, "_write_manifest", stopped)
        with pytest.raises(Stop):
            quick(tmp_path / "run", attention_bias=2.0)
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["attention_bias.safetensors"]
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(RunInUseError):
        quick(tmp_path / "run", attention_bias=2.0)
    again = quick(tmp_path / "run", attention_bias=2.0)
    assert same_runs(again.path, quick(tmp_path / "whole", attention_bias=2.0).path)


def test_clearing_up_after_a_kill_leaves_the_files_of_other_processes_alone(tmp_path, whole):
    """Of a run, only who holds its lock writes or clears; what others write beside it has names of its own."""
    (tmp_path / "run").mkdir()
    left = tmp_path / "run" / ".metrics-abc.parquet"
    left.touch()
    with storage.atomic_path(tmp_path / "run.error.txt") as beside:
        beside.write_text("said")
        quick(tmp_path / "run")
    assert not left.exists()
    assert (tmp_path / "run.error.txt").read_text() == "said"
    assert same_runs(tmp_path / "run", whole.path)


@pytest.mark.parametrize("left", [0, 1, 2, 5, 6, 7, 8, 12, 20, 60])
def test_a_disk_that_fills_loses_nothing(tmp_path, whole, monkeypatch, left):
    """`left` files fit on the disk, then it is full; once there is room again, the run goes on."""
    atomic_path, written = storage.atomic_path, []

    def full_disk(path):
        written.append(path)
        if len(written) > left:
            raise OutputError(f"cannot write {path}: No space left on device") from OSError(errno.ENOSPC, "full")
        return atomic_path(path)

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "atomic_path", full_disk)
        patch.setattr(storage, "atomic_path", full_disk)
        with pytest.raises(OutputError, match="No space left on device"):
            quick(tmp_path, save_every_seconds=0)
    quick(tmp_path)
    assert same_runs(tmp_path, whole.path)


def test_a_full_disk_is_told_as_such(tmp_path, monkeypatch):
    def full(self, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match=r"step_00000000.*No space left on device\. .*call the training again"):
        quick(tmp_path)


def test_a_damaged_resume_point_is_told(tmp_path):
    with pytest.raises(Stop):
        quick(tmp_path, on_step=stop_at(9), save_every_seconds=0)
    (tmp_path / "resume.safetensors").write_bytes(b"nonsense")
    with pytest.raises(RunFolderError, match=r"damaged .*delete it to begin the run anew"):
        quick(tmp_path)


def test_nothing_is_written_for_settings_that_make_no_sense(tmp_path):
    with pytest.raises(ArgumentError, match="learning_rat"):
        quick(tmp_path / "run", learning_rat=1e-3)
    assert not (tmp_path / "run").exists()
