"""Training from the command line: the same runs as from Python, one line for wrong input, and honest statuses."""

import json
import shlex
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd
import pytest
from command_line import complaint, run
from pandas.testing import assert_frame_equal

from emergent_heads import cli, tasks
from emergent_heads.models.attention_bias import AttentionBias
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.tasks.cellular_automata import BOUNDARIES
from emergent_heads.training.loop import train
from emergent_heads.training.run import Run
from emergent_heads.training.settings import TrainingSettings

TASK = ["--task", "linear_map", "--state-size", 4, "--sparsity", 2]
TRAINING_TASKS = {name: getattr(tasks, name.title().replace("_", "")) for name in get_args(cli.TrainingTaskName)}
MODEL = ["--n-layers", 1, "--d-model", 16, "--n-heads", 2]
SHORT = ["--steps", 4, "--evaluate-every", 2, "--tokens-per-batch", 64, "--checkpoints", 0, 2]
SWEEP = """
from emergent_heads.sweeps import grid
from emergent_heads.tasks import LinearMap

runs = grid(
    LinearMap, state_size=4, sparsity={sparsity}, n_layers=1, d_model=16, n_heads=2, seed=range(2),
    steps=4, evaluate_every=2, tokens_per_batch=64, checkpoints=[0]{more}
)
"""
OWN_MIXER = """
from torch import nn

from emergent_heads.models.mixers import Mixer, register_mixer


@register_mixer("own_of_this_file")
class Own(Mixer):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.out = nn.Linear(config.d_model, config.d_model)

    def forward(self, x):
        return self.out(x)

"""


# --- train


def test_train_is_train(tmp_path, capsys):
    out, plot = tmp_path / "run", tmp_path / "run.svg"
    more = ["--seed", 3, "--attention-bias", 2, "--bias-until-step", 3, "--learning-rate", 0.01, "--norm", "rms"]
    assert run("train", *TASK, *MODEL, *SHORT, *more, "--no-biases", "--out", out, "--plot", plot) == 0
    printed = capsys.readouterr().out
    same = train(
        SmallModelConfig(1, 16, 2, norm="rms", biases=False),
        tasks.LinearMap(4, 2),
        tmp_path / "same",
        steps=4,
        seed=3,
        evaluate_every=2,
        tokens_per_batch=64,
        checkpoints=[0, 2],
        learning_rate=0.01,
        attention_bias=AttentionBias(2.0, anneal_until=3),
        progress=False,
    )
    assert_frame_equal(
        pd.read_parquet(out / "metrics.parquet").drop(columns="seconds"), same.metrics.drop(columns="seconds")
    )
    assert "Run(run: LinearMap, attention" in printed
    assert "loss_nats" in printed
    assert "<svg" in plot.read_text()

    before = (out / "metrics.parquet").stat().st_mtime_ns
    assert run("train", *TASK, *MODEL, *SHORT, *more, "--no-biases", "--out", out) == 0
    assert (out / "metrics.parquet").stat().st_mtime_ns == before
    assert run("train", *TASK, *MODEL, *SHORT, "--out", out) == 2
    assert "other settings" in capsys.readouterr().err


def test_train_takes_other_tasks_and_mixers(tmp_path):
    task = ["--task", "cellular_automaton", "--state-size", 4, "--states", 3, "--rules", 2, "--boundary", "fixed"]
    mixer = ["--mixer", "attention", "mlp_mixer", "--mixer-option", "hidden_units=3"]
    shape = ["--n-layers", 2, "--d-model", 16]
    assert run("train", *task, "--task-seed", 5, *shape, *mixer, *SHORT, "--out", tmp_path / "run") == 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["config"]["mixer"] == ["attention", "mlp_mixer"]
    assert manifest["config"]["mixer_options"] == {"hidden_units": 3}
    settings = manifest["task"]
    assert (settings["task"], settings["states"], settings["rules"], settings["seed"]) == (
        "CellularAutomaton",
        3,
        2,
        5,
    )
    assert settings["boundary"] == "fixed"


def test_a_training_that_diverges_is_status_1(tmp_path, monkeypatch, capsys):
    diverged = SimpleNamespace(status="diverged", metrics=pd.DataFrame({"step": [4], "loss_nats": [np.nan]}))
    monkeypatch.setattr("emergent_heads.training.loop.train", lambda *arguments, **settings: diverged)
    assert run("train", *TASK, *MODEL, *SHORT, "--out", tmp_path / "run") == 1
    assert "diverged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "task"),
    [
        (["addition", "--bits", 3, "--layout", "paper"], tasks.Addition(3, "paper")),
        (["minimum_spanning_tree", "--nodes", 5, "--weighted"], tasks.MinimumSpanningTree(5, weighted=True)),
        (["maximum_subarray", "--values", 5], tasks.MaximumSubarray(5)),
        (["breadth_first_search", "--nodes", 5, "--density", 0.6], tasks.BreadthFirstSearch(5, density=0.6)),
    ],
)
def test_algorithms_are_trained_by_their_names(tmp_path, options, task):
    out = tmp_path / "run"
    assert run("train", "--task", *options, *MODEL, "--transformer-pp", *SHORT, "--out", out) == 0
    found = Run.open(out)
    assert found.task == task
    assert found.config == SmallModelConfig.transformer_pp(1, 16, 2).for_task(task)


def test_every_task_that_models_are_trained_on_is_there():
    trained = {
        each
        for each in vars(tasks).values()
        if isinstance(each, type) and issubclass(each, tasks.SequenceTask) and hasattr(each, "__dataclass_fields__")
    }
    assert trained - {tasks.Mixture} == set(TRAINING_TASKS.values())


def test_options_are_those_of_the_library():
    """Every option is a setting of the library under its name, with the library's choices."""
    own = {
        "task",
        "task_seed",
        "repeated_share",
        "mixer_option",
        "bias_from_step",
        "bias_until_step",
        "seed",
        "device",
    }
    known = {
        cli.TrainingTask: {name for task in TRAINING_TASKS.values() for name in task.__dataclass_fields__},
        cli.Model: {*SmallModelConfig.__dataclass_fields__, "transformer_pp", "gpt_neox"},
        cli.Training: TrainingSettings.__dataclass_fields__,
    }
    for options, names in known.items():
        assert set(options.__dataclass_fields__) - own <= set(names)
    for options, library in ((cli.Model, SmallModelConfig), (cli.Training, TrainingSettings)):
        theirs, ours = get_type_hints(library), get_type_hints(options)
        chosen = [name for name in set(ours) & set(theirs) if get_origin(theirs[name]) is Literal]
        assert {"norm", "schedule"} & set(chosen)
        assert all(set(get_args(theirs[name])) == set(get_args(get_args(ours[name])[0])) for name in chosen)
    assert set(BOUNDARIES) == set(get_args(get_args(get_type_hints(cli.TrainingTask)["boundary"])[0]))


BEFORE_TEXT = {
    "dyck": (["--brackets", 2, "--max-depth", 3, "--p-open", 0.4, "--length", 8, "--balanced"], tasks.Dyck),
    "shuffle_dyck": (["--brackets", 2, "--max-depth", 3, "--length", 8], tasks.ShuffleDyck),
    "neural_cellular_automata": (
        [
            *("--grid", 4, "--colours", 2, "--length", 8, "--rules", 2, "--burn-in", 1, "--task-seed", 5),
            *("--complexity", 0.1, 1, "--token-bytes", 1),
        ],
        tasks.NeuralCellularAutomata,
    ),
}
OPTION_OF = {"task_seed": "seed"}


@pytest.mark.parametrize("name", BEFORE_TEXT)
def test_sequences_to_learn_from_before_text_are_trained_by_their_names(name, tmp_path):
    options, kind = BEFORE_TEXT[name]
    assert run("train", "--task", name, *options, *MODEL, *SHORT, "--out", tmp_path / "run") == 0
    values: dict[str, list] = {}
    for each in options:
        if isinstance(each, str):
            option = each.removeprefix("--").replace("-", "_")
            values[OPTION_OF.get(option, option)] = given = []
        else:
            given.append(each)
    settings = {
        key: (value[0] if len(value) == 1 else tuple(value)) if value else True for key, value in values.items()
    }
    assert Run.open(tmp_path / "run").task == kind(**settings)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"the cat number {i} sat on the mat and ate {i * 7} rats" for i in range(60)))
    return path


@pytest.mark.parametrize(
    ("name", "options", "around"),
    [
        ("text_corpus", [], lambda text: text),
        (
            "repeated_text",
            ["--repeated-share", 0.5, "--passage", 2, 4],
            lambda text: tasks.repeated_text(text, 0.5, (2, 4)),
        ),
        ("repeated_text", ["--passage", 2, 4], lambda text: tasks.repeated_text(text, passage=(2, 4))),
        ("shuffled_tokens", [], tasks.ShuffledTokens),
    ],
)
def test_text_is_trained_on(name, options, around, text_file, tmp_path):
    text = [
        "--paths",
        text_file,
        "--vocabulary-size",
        40,
        "--context",
        8,
        "--held-out-share",
        0.3,
        "--separator",
        "\n\n",
    ]
    assert run("train", "--task", name, *text, *options, *MODEL, *SHORT, "--out", tmp_path / "run") == 0
    corpus = tasks.TextCorpus(str(text_file), vocabulary_size=40, context=8, held_out_share=0.3, separator="\n\n")
    assert Run.open(tmp_path / "run").task == around(corpus)


def test_a_run_starts_from_another_and_is_taken_elsewhere(text_file, tmp_path, capsys):
    dyck = ["--task", "dyck", "--brackets", 3, "--length", 8, "--gpt-neox", *MODEL, *SHORT, "--out", tmp_path / "dyck"]
    assert run("train", *dyck) == 0
    text = [
        "--task",
        "text_corpus",
        "--paths",
        text_file,
        "--separator",
        "\n\n",
        "--vocabulary-size",
        40,
        "--context",
        8,
    ]
    start = ["--init-from", tmp_path / "dyck", "--carry", "all but embeddings"]
    line = [
        "train",
        *text,
        "--gpt-neox",
        *MODEL,
        *SHORT,
        *start,
        "--out",
        tmp_path / "text",
        "--export",
        tmp_path / "hf",
    ]
    assert run(*line) == 0
    captured = capsys.readouterr()
    assert "from dyck step 4 (all but embeddings)" in captured.out
    assert f"wrote {tmp_path / 'hf'}" in captured.err
    assert (Run.open(tmp_path / "text").init_from or {})["carry"] == "all but embeddings"
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["run.json", "step0", "step2", "step4"]
    assert Run.open(tmp_path / "text").config == SmallModelConfig.gpt_neox(1, 16, 2).for_task(
        Run.open(tmp_path / "text").task
    )
    assert run(*line) == 0  # the same again changes nothing

    earlier = ["--init-from", tmp_path / "dyck", "--init-step", 2]
    assert run("train", *dyck[:-2], "--seed", 1, *earlier, "--out", tmp_path / "more") == 0
    assert (Run.open(tmp_path / "more").init_from or {})["step"] == 2
    assert "from dyck step 2 (all)" in capsys.readouterr().out


WRONG_TRAIN = {
    "no task": ([*MODEL, *SHORT], "--task"),
    "unknown task": (["--task", "linear", *MODEL, *SHORT], "linear_map"),
    "no steps": ([*TASK, *MODEL], "--steps"),
    "no shape": ([*TASK, *SHORT], "--n-layers"),
    "unknown option": ([*TASK, *MODEL, *SHORT, "--learning-rat", "1"], "--learning-rate"),
    "another task's option": ([*TASK, *MODEL, *SHORT, "--rules", "3"], "--rules is no option of the task linear_map"),
    "sparsity above the size": ([*TASK, *MODEL, *SHORT, "--sparsity", "5"], "sparsity is 5"),
    "heads that do not divide": ([*TASK, *MODEL, *SHORT, "--n-heads", "3"], "does not divide into 3 heads"),
    "unknown mixer": ([*TASK, *MODEL, *SHORT, "--mixer", "attentoin"], "nearest: attention"),
    "unknown mixer option": (
        [*TASK, *MODEL, *SHORT, "--mixer", "mlp_mixer", "--mixer-option", "hidden=3"],
        "nearest: hidden_units",
    ),
    "mixer option without value": ([*TASK, *MODEL, *SHORT, "--mixer-option", "hidden_units"], "write NAME=VALUE"),
    "mixers for layers": ([*TASK, *MODEL, *SHORT, "--mixer", "attention", "linear"], "2 mixers for 1 layers"),
    "bias without attention": (
        [*TASK, *MODEL, *SHORT, "--mixer", "linear", "--attention-bias", "5"],
        "an attention bias needs attention",
    ),
    "bias times without bias": ([*TASK, *MODEL, *SHORT, "--bias-from-step", "1"], "goes with --attention-bias"),
    "no training steps": ([*TASK, *MODEL, *SHORT, "--steps", "0"], "steps is 0; it must be"),
    "checkpoint after the end": ([*TASK, *MODEL, *SHORT, "--checkpoints", "9"], "step 9"),
    "unknown device": ([*TASK, *MODEL, *SHORT, "--device", "abacus"], "no device 'abacus'"),
    "figure suffix": ([*TASK, *MODEL, *SHORT, "--plot", "x.csv"], ".png, .pdf, .svg"),
    "two kinds of model": ([*TASK, *MODEL, *SHORT, "--gpt-neox", "--transformer-pp"], "two kinds of model; give one"),
    "another text task's option": (
        ["--task", "text_corpus", *MODEL, *SHORT, "--passage", "2", "4"],
        "--passage is no option of the task text_corpus",
    ),
    "a text task without the file": (
        ["--task", "text_corpus", "--paths", "nowhere.txt", *MODEL, *SHORT],
        "nowhere.txt",
    ),
    "brackets of a task without": ([*TASK, *MODEL, *SHORT, "--brackets", "2"], "--brackets is no option"),
    "a start that is not there": ([*TASK, *MODEL, *SHORT, "--init-from", "nowhere"], "nowhere is no run folder"),
    "a step of a start that is not there": (
        [*TASK, *MODEL, *SHORT, "--init-from", "nowhere", "--init-step", "2"],
        "nowhere is no run folder",
    ),
    "carry without a start": ([*TASK, *MODEL, *SHORT, "--carry", "all"], "--carry goes with --init-from"),
    "a step without a start": ([*TASK, *MODEL, *SHORT, "--init-step", "2"], "--init-step goes with --init-from"),
    "unknown carry": ([*TASK, *MODEL, *SHORT, "--init-from", "x", "--carry", "some"], "all but embeddings"),
    "export of what cannot be": (
        [*TASK, *MODEL, *SHORT, "--export", "hf"],
        "positions is 'learned' and must be 'rotary'",
    ),
    "export of a biased run": (
        [*TASK, *MODEL, *SHORT, "--gpt-neox", "--attention-bias", "2", "--export", "hf"],
        "which a GPT-NeoX has no place for",
    ),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG_TRAIN.values(), ids=WRONG_TRAIN)
def test_wrong_training_is_one_line_and_leaves_nothing(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("train", *arguments, "--out", "run") == 2
    assert said in complaint(capsys)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "notes.txt").touch()
    assert run("train", *TASK, *MODEL, *SHORT, "--out", tmp_path) == 2
    assert "is no run folder" in complaint(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# --- sweep


def test_sweep_writes_tables_and_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SWEEP.format(sparsity=[1, 2], more=""))
    line = ["sweep", "mine.py", "--out", "out", "--workers", 0, "--x", "sparsity", "--y", "excess_loss_nats"]
    assert run(*line) == 0
    assert "sweep of 4 runs: 4 not solved" in capsys.readouterr().out
    table, summary = pd.read_csv("out/sweep.csv"), pd.read_csv("out/summary.csv")
    assert table[["sparsity", "seed"]].to_numpy().tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]
    assert summary[["sparsity", "n_seeds", "n_solved"]].to_numpy().tolist() == [[1, 2, 0], [2, 2, 0]]
    assert summary["excess_loss_nats"][0] == pytest.approx(table["excess_loss_nats"][:2].mean())
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    about = json.loads((tmp_path / "out" / "sweep.csv.about.json").read_text())
    assert shlex.split(about["command_line"])[1:3] == ["sweep", "mine.py"]

    first = (tmp_path / "out" / "sweep.csv").read_bytes()
    assert run(*line) == 0
    assert (tmp_path / "out" / "sweep.csv").read_bytes() == first  # nothing was trained again


def test_sweep_with_failed_runs_is_status_1_and_keeps_the_rest(tmp_path, capsys):
    """In processes of its own, which know the mixer that the file registers."""
    file = tmp_path / "mine.py"
    broken = OWN_MIXER.replace("return self.out(x)", "return self.out(x[..., 1:])")
    more = ", mixer=['own_of_this_file', 'linear']"
    file.write_text(broken + SWEEP.format(sparsity=2, more=more))
    assert run("sweep", file, "--out", tmp_path / "out", "--workers", 1) == 1
    captured = capsys.readouterr()
    assert "2 failed, 2 not solved" in captured.out
    said = captured.err.splitlines()[-1]
    assert said.startswith("emergent-heads: 2 of 4 runs failed")
    assert "no mixer" not in said
    table = pd.read_csv(tmp_path / "out" / "sweep.csv")
    assert table["status"].tolist() == ["failed", "not solved"] * 2
    reports = sorted(path.name for path in (tmp_path / "out").glob("*.error.txt"))
    assert reports == sorted(f"{name}.error.txt" for name in table["run"][::2])


WRONG_SWEEP = {
    "no file": ([], "PATH"),
    "no such file": (["nowhere.py"], "no sweep file nowhere.py"),
    "no out": (["mine.py"], "--out"),
    "nothing defined": (["empty.py"], "does not define runs"),
    "an error in it": (["wrong.py"], "wrong.py, line 2: ZeroDivisionError"),
    "unknown setting to draw": (["mine.py", "--x", "heads"], "no setting 'heads'"),
    "unknown measure to draw": (["mine.py", "--x", "sparsity", "--y", "loss"], "nearest: flops, loss_nats"),
    "measure without setting": (["mine.py", "--y", "loss_nats"], "--y goes with --x"),
    "workers": (["mine.py", "--workers", "-1"], "workers is -1"),
    "unknown device": (["mine.py", "--device", "abacus"], "no device 'abacus'"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG_SWEEP.values(), ids=WRONG_SWEEP)
def test_wrong_sweeps_are_one_line_and_leave_nothing(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SWEEP.format(sparsity=[1, 2], more=""))
    (tmp_path / "empty.py").touch()
    (tmp_path / "wrong.py").write_text("x = 1\nruns = x / 0\n")
    before = {path.name for path in tmp_path.iterdir()}
    out = [] if said == "--out" else ["--out", "out"]
    assert run("sweep", *arguments, *out) == 2
    assert said in complaint(capsys)
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == before


# --- reproduce


@pytest.mark.parametrize("arguments", [[], ["--list"]])
def test_reproduce_lists_the_findings(arguments, capsys):
    from emergent_heads.experiments.registry import EXPERIMENTS

    assert run("reproduce", *arguments) == 0
    printed = capsys.readouterr().out
    assert len(EXPERIMENTS) == 21
    assert all(f"{name}\n    {each.claim}" in printed for name, each in EXPERIMENTS.items())


def test_reproduce_runs_an_experiment(tmp_path, capsys):
    line = ["reproduce", "bits-one-at-a-time", "--max-steps", 2, "--workers", 0, "--out", tmp_path / "found"]
    assert run(*line) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("bits-one-at-a-time: not settled.")  # nothing is learned in two steps
    folder = tmp_path / "found" / "bits-one-at-a-time"
    assert str(folder) in captured.err
    assert json.loads((folder / "finding.json").read_text())["scale"] == "small"
    assert (folder / "figure.png").is_file()


def test_reproduce_with_failed_runs_is_status_1(tmp_path, monkeypatch, capsys):
    def failing_at_times(*arguments, seed, **settings):
        if seed == 1:
            raise RuntimeError("no memory")
        return train(*arguments, seed=seed, **settings)

    monkeypatch.setattr("emergent_heads.sweeps.running.train", failing_at_times)
    assert run("reproduce", "bits-one-at-a-time", "--max-steps", 2, "--workers", 0, "--out", tmp_path) == 1
    captured = capsys.readouterr()
    assert "not settled" in captured.out
    assert "1 of 5 runs failed" in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sparsty"], "nearest: sparsity"),
        (["sparsity", "--scale", "medium"], "small"),
        (["sparsity", "--max-steps", "0"], "max_steps is 0"),
        (["sparsity", "--workers", "-2"], "workers is -2"),
        (["sparsity", "--out", "file"], "does not take files"),
    ],
)
def test_wrong_reproductions_are_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert run("reproduce", *arguments) == 2
    assert said in complaint(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
