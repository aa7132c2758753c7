"""The command line does what the functions do, and meets wrong input with one line and status 2."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest
from command_line import complaint, run
from pandas.testing import assert_frame_equal

import emergent_heads as eh
from emergent_heads import cli
from emergent_heads.analysis.search import Strategy

THRESHOLD = 0.3


@pytest.fixture(scope="module")
def prompts(emerging_series, tmp_path_factory) -> Path:
    """Ten random characters said twice without the last one, each one token: what the trained series learns."""
    tokenizer = eh.CheckpointSeries.from_directory(emerging_series).last.tokenizer()
    assert tokenizer is not None
    characters = sorted(piece for piece in tokenizer.get_vocab() if len(piece) == 1 and piece.isalnum())
    rng = np.random.default_rng(0)
    said = ["".join(rng.permutation(characters)[:10]) for _ in range(150)]
    said = [text for text in said if len(tokenizer(text + text)["input_ids"]) == 20]
    table = pd.DataFrame({"prompt": [text + text[:-1] for text in said], "target": [text[-1] for text in said]})
    path = tmp_path_factory.mktemp("prompts") / "said_twice.csv"
    table.to_csv(path, index=False)
    return path


@pytest.fixture
def scores(tmp_path) -> Path:
    table = pd.DataFrame(
        {
            "model": ["small"] * 3 + ["large"] * 3,
            "step": [10, 20, 30] * 2,
            "lambada_openai": [0.0, 0.1, 0.15, 0.1, 0.25, 0.3],
        }
    )
    table.to_csv(tmp_path / "scores.csv", index=False)
    return tmp_path / "scores.csv"


# --- the same as in Python


def test_emergence_writes_what_save_writes(emerging_series, prompts, tmp_path, capsys):
    out, plot = tmp_path / "point.csv", tmp_path / "point.png"
    arguments = ["--directory", emerging_series, "--prompts", prompts, "--threshold", THRESHOLD, "--strategy", "scan"]
    assert run("emergence", *arguments, "--out", out, "--plot", plot) == 0
    point = eh.find_emergence(
        eh.CheckpointSeries.from_directory(emerging_series), eh.tasks.from_table(prompts), "scan", threshold=THRESHOLD
    )
    assert point.status == "emerged"
    assert f"between step {point.pre} and step {point.post}" in capsys.readouterr().out
    written = pd.read_csv(out, keep_default_na=False)  # known_issue is empty
    assert_frame_equal(written.drop(columns="reused"), point.table.drop(columns="reused"), check_dtype=False)
    about = json.loads((tmp_path / "point.csv.about.json").read_text())
    assert (about["pre"], about["post"], about["threshold"]) == (point.pre, point.post, THRESHOLD)
    assert about["versions"]["torch"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_rank_searches_first_and_its_own_line_reproduces_it(emerging_series, prompts, tmp_path, capsys):
    out, recovery = tmp_path / "heads.csv", tmp_path / "recovery.json"
    arguments = ["--directory", emerging_series, "--prompts", prompts, "--threshold", THRESHOLD, "--controls", 5]
    assert run("rank", *arguments, "--top", 3, "--out", out, "--recovery", recovery, "--plot", tmp_path / "m.svg") == 0
    printed = capsys.readouterr().out
    series, task = eh.CheckpointSeries.from_directory(emerging_series), eh.tasks.from_table(prompts)
    pre, post = eh.find_emergence(series, task, threshold=THRESHOLD).require()
    ranking = eh.rank_heads(series[pre], series[post], task)
    assert_frame_equal(pd.read_csv(out), ranking.table, check_dtype=False)
    curve = eh.recovery_curve(series[pre], series[post], task, ranking, controls=5)
    assert_frame_equal(pd.read_json(recovery), curve.table, check_dtype=False, rtol=1e-8)
    assert f"step {pre}" in printed
    assert "<svg" in (tmp_path / "m.svg").read_text()

    first = out.read_bytes()
    out.unlink()
    line = json.loads((tmp_path / "heads.csv.about.json").read_text())["command_line"]
    program, *again = shlex.split(line)
    assert program == "emergent-heads"
    assert run(*again) == 0
    assert out.read_bytes() == first


def test_rank_between_given_steps(emerging_series, prompts, capsys):
    steps = ["--pre", 350, "--post", 400]
    arguments = ["--directory", emerging_series, "--prompts", prompts, "--rows", "last", "--prompts-used", "flipped"]
    assert run("rank", *arguments, *steps, "--top", 2) == 0
    header, columns, *heads = capsys.readouterr().out.splitlines()
    assert "step 350" in header
    assert "step 400" in header
    assert columns.split()[:3] == ["layer", "head", "delta_p"]
    assert len(heads) == 2


def test_several_tasks_share_one_call_and_get_a_file_each(emerging_series, prompts, tmp_path):
    tasks = ["--task", "in_context_repetition", "--vocabulary", 128, "--n-prompts", 4, "--prompts", prompts]
    assert run("emergence", "--directory", emerging_series, *tasks, "--out", tmp_path / "point.csv") == 0
    names = {path.name for path in tmp_path.glob("*.csv")}
    assert names == {"point.in_context_repetition.csv", "point.said_twice.csv"}
    assert set(pd.read_csv(tmp_path / "point.in_context_repetition.csv")["n_prompts"]) == {4}


def test_emergence_from_scores(scores, tmp_path, capsys):
    arguments = ["--group", "model", "--score", "lambada_openai", "--threshold", 0.2, "--out", tmp_path / "t.parquet"]
    assert run("emergence", "--from-table", scores, *arguments) == 0
    rows = pd.read_parquet(tmp_path / "t.parquet").set_index("series")
    assert rows["status"].to_dict() == {"small": "never", "large": "emerged"}
    assert (rows.loc["large", "pre"], rows.loc["large", "post"]) == (10, 20)  # 0.25 is the first score above 0.2
    assert "1 never" in capsys.readouterr().out


def test_suites_lists_what_suites_gives(tmp_path, capsys):
    assert run("suites", "--out", tmp_path / "suites.csv") == 0
    assert_frame_equal(pd.read_csv(tmp_path / "suites.csv"), eh.suites(), check_dtype=False)
    assert "pythia-160m-weight-seed" in capsys.readouterr().out


def test_choices_are_those_of_the_functions():
    assert get_args(cli.Strategy) == get_args(Strategy)
    assert all(hasattr(eh.tasks, name) for name in get_args(cli.TaskName))


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_an_example_that_parses(name, capsys):
    with pytest.raises(SystemExit) as stop:
        run(name, "--help")
    assert stop.value.code == 0
    assert f"Example: emergent-heads {name}" in capsys.readouterr().out
    documentation = cli.COMMANDS[name].__doc__ or ""
    examples = [line.split("Example:")[1] for line in documentation.splitlines() if "Example:" in line]
    for example in examples:
        assert isinstance(cli._parse(shlex.split(example)[1:]), cli.COMMANDS[name])


# --- wrong input

TASK = ["--task", "string_repetition"]
WRONG = {
    "no command": (
        [],
        "Expected one of {suites, verify, emergence, rank, train, probe, ablate, sweep, reproduce, demo}",
    ),
    "unknown command": (
        ["ranks"],
        "Available subcommands: suites, verify, emergence, rank, train, probe, ablate, sweep, reproduce, demo",
    ),
    "unknown option": (["rank", "--suit", "x"], "Perhaps you meant: --suite"),
    "not a number": (["rank", "--top", "many"], "--top"),
    "unknown choice": (["emergence", "--task", "juggling"], "string_repetition"),
    "no source": (["emergence", *TASK], "--suite, --hub, --directory, --run"),
    "two sources": (["emergence", *TASK, "--suite", "pythia-14m", "--run", "x"], "--suite and --run are given"),
    "seed without suite": (["rank", *TASK, "--directory", "x", "--seed", "1"], "--seed goes with --suite"),
    "pattern without hub": (["rank", *TASK, "--suite", "pythia-14m", "--pattern", "x"], "--pattern goes with --hub"),
    "no task": (["emergence", "--suite", "pythia-14m"], "--task NAME or --prompts FILE"),
    "two tasks to rank": (["rank", "--suite", "pythia-14m", *TASK, "--task", "indirect_object"], "one task, not 2"),
    "a task twice": (["emergence", "--suite", "pythia-14m", *TASK, *TASK], "named twice"),
    "pre without post": (["rank", *TASK, "--suite", "pythia-14m", "--pre", "0"], "both --pre and --post"),
    "unknown suite": (["emergence", *TASK, "--suite", "pythia-15m"], "nearest: pythia-"),
    "unknown seed": (["emergence", *TASK, "--suite", "pythia-14m", "--seed", "10"], "its seeds are 0-9"),
    "unknown step": (["rank", *TASK, "--suite", "pythia-14m", "--pre", "0", "--post", "3"], "nearest: 1, 2, 4"),
    "no such folder": (["emergence", *TASK, "--directory", "nowhere"], "nowhere"),
    "no such run": (["emergence", *TASK, "--run", "nowhere"], "manifest.json"),
    "no such prompts": (["emergence", "--prompts", "no.csv", "--suite", "pythia-14m"], "no.csv"),
    "no such scores": (["emergence", "--from-table", "no.csv", "--threshold", "1"], "no.csv"),
    "scores without threshold": (["emergence", "--from-table", "no.csv"], "needs --threshold"),
    "scores and a task": (["emergence", *TASK, "--from-table", "no.csv", "--threshold", "1"], "leave out"),
    "group without scores": (["emergence", *TASK, "--suite", "pythia-14m", "--group", "x"], "goes with --from-table"),
    "threshold": (["emergence", *TASK, "--suite", "pythia-14m", "--threshold", "1.5"], "threshold is 1.5"),
    "table suffix": (["rank", *TASK, "--suite", "pythia-14m", "--out", "heads.xlsx"], ".csv, .parquet, .json"),
    "figure suffix": (["rank", *TASK, "--suite", "pythia-14m", "--plot", "map.csv"], ".png, .pdf, .svg"),
    "suites suffix": (["suites", "--out", "suites.txt"], ".csv, .parquet, .json"),
    "one file for two tables": (
        ["rank", *TASK, "--suite", "pythia-14m", "--out", "a.csv", "--recovery", "a.csv"],
        "name two files",
    ),
    "no heads to print": (["rank", *TASK, "--suite", "pythia-14m", "--top", "0"], "--top is 0"),
    "negative controls": (["rank", *TASK, "--suite", "pythia-14m", "--controls", "-1"], "--controls is -1"),
    "unknown device": (["emergence", *TASK, "--suite", "pythia-14m", "--device", "abacus"], "no device 'abacus'"),
    "no seeds": (["demo", "--seeds", "0"], "at least one model"),
    "no steps": (["demo", "--steps", "0"], "steps"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line_and_leaves_nothing(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert said in complaint(capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--out", "--plot", "--recovery"])
def test_output_is_checked_before_the_work(option, tmp_path, capsys):
    """The suite's checkpoints are out of reach here, so work would end with another message."""
    (tmp_path / "file").touch()
    place = tmp_path / "file" / ("x.png" if option == "--plot" else "x.csv")
    assert run("rank", "--suite", "pythia-14m", *TASK, option, place) == 2
    assert "does not take files" in complaint(capsys)


def test_prompts_with_missing_columns(tmp_path, emerging_series, capsys):
    (tmp_path / "p.csv").write_text("prompt,answer\na,b\n")
    assert run("emergence", "--directory", emerging_series, "--prompts", tmp_path / "p.csv") == 2
    assert "target" in complaint(capsys)


def test_demo_into_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run("demo", "--out", tmp_path / "file") == 2
    assert "does not take files" in complaint(capsys)


def test_nothing_emerged_says_so_and_writes_nothing(emerging_series, tmp_path, capsys):
    task = ["--task", "in_context_repetition", "--vocabulary", 128, "--n-prompts", 4, "--threshold", 1]
    assert run("rank", "--directory", emerging_series, *task, "--out", tmp_path / "heads.csv") == 2
    captured = capsys.readouterr()
    assert "never emerged" in captured.out
    assert "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [(KeyboardInterrupt(), 130, "interrupted"), (RuntimeError("out of\nmemory"), 1, "RuntimeError: out of memory")],
)
def test_other_ends(raised, status, said, monkeypatch, capsys):
    def fail():
        raise raised

    monkeypatch.setattr("emergent_heads.checkpoints.suites.suites", fail)
    assert run("suites") == status
    assert complaint(capsys) == f"emergent-heads: {said}\n"


def test_hub_that_does_not_answer_is_status_1(monkeypatch, capsys):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the retries
    assert run("emergence", "--hub", "nobody/nothing", *TASK) == 1
    assert "nobody/nothing" in capsys.readouterr().err


def test_as_a_program(tmp_path):
    script = "import sys; from emergent_heads.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "emergence", "--suite", "gpt5", *TASK, "--out", str(tmp_path / "p.csv")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
