"""Probing and ablating from the command line: the same numbers as from Python, and one line for wrong input."""

import pandas as pd
import pytest
from command_line import complaint, run
from pandas.testing import assert_frame_equal

from emergent_heads.analysis.ablation import ablate_features
from emergent_heads.analysis.probes import open_probes, probe_series
from emergent_heads.experiments.quiet_demo import run_quiet_demo
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.tasks import Addition, LinearMap
from emergent_heads.training.loop import train

FEW = ["--n-train", 120, "--n-test", 60]


def trained(path, task, **settings):
    settings = {"steps": 6, "checkpoints": [0, 3], "tokens_per_batch": 64, "n_held_out": 16, **settings}
    return train(SmallModelConfig.transformer_pp(2, 16, 2), task, path, progress=False, **settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [trained(folder / f"add{seed}", Addition(5), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def probed(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("probes")
    several = [word for each in runs for word in ("--run", each.path)]
    assert run("probe", *several, "--feature", "carry", *FEW, "--out", out, "--plot", out / "quiet.svg") == 0
    return out


def test_probe_is_probe_series_and_classify_features(runs, probed):
    for one in runs:
        kept = open_probes(probed / one.name)
        same = probe_series(one.series, one.task, ["carry"], n_train=120, n_test=60, progress=False)
        assert_frame_equal(kept.table, same.table, check_exact=False, atol=1e-6)
        assert kept.steps == (0, 3, 6)
        assert kept.last.headline().startswith(f"Probes: {one.name} at step 6, Addition")
    features = pd.read_csv(probed / "features.csv")
    assert features["feature"].tolist() == ["carry"]
    assert features["verdict"].iloc[0] in ("undecided", "not learned")
    assert "<svg" in (probed / "quiet.svg").read_text()


def test_the_same_line_again_probes_nothing(runs, probed, monkeypatch):
    monkeypatch.setattr("emergent_heads.analysis.probe_fits.Fitting.fit", None)
    several = [word for each in runs for word in ("--run", each.path)]
    assert run("probe", *several, "--feature", "carry", *FEW, "--out", probed) == 0


def test_ablate_is_ablate_features(runs, probed, tmp_path, capsys):
    out, plot = tmp_path / "carry.csv", tmp_path / "carry.svg"
    options = ["--how", "leace", "--at-layers", 0, "--controls", 2, "--rows", 40, "--step", 3, "--out", out]
    for probes in (probed, probed / "add0"):  # the folder of all runs, or that of the run itself
        assert run("ablate", "--run", runs[0].path, "--probes", probes, *options, "--plot", plot) == 0
    assert "carry: " in capsys.readouterr().out
    chosen = open_probes(probed / "add0")[3].at_layers([0])
    same = ablate_features(runs[0].series[3], Addition(5), chosen, 2, "leace", n=40, progress=False)
    assert_frame_equal(pd.read_csv(out), same.table, check_exact=False, atol=1e-6, check_dtype=False)
    assert "<svg" in plot.read_text()


WRONG_PROBE = {
    "no run": ([], "--run"),
    "no folder": (["--run", "nowhere"], "nowhere"),
    "unknown feature": (["--run", "{run}", "--feature", "cary"], "nearest: carry"),
    "no such step": (["--run", "{run}", "--steps", 4], "no checkpoint at step 4"),
    "the same run twice": (["--run", "{run}", "--run", "{run}"], "two runs are named add0"),
    "too few rows": (["--run", "{run}", "--n-train", 3], "n_train"),
    "a task without features": (["--run", "{map}"], "feature"),
    "different tasks": (["--run", "{run}", "--run", "{map}"], "different tasks"),
    "no figure": (["--run", "{run}", "--plot", "quiet.txt"], ".png"),
}


@pytest.fixture(scope="module")
def linear_map(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "map", LinearMap(4, 2), checkpoints=[0]).path


@pytest.mark.parametrize("case", WRONG_PROBE)
def test_wrong_input_to_probe_is_one_line(case, runs, linear_map, tmp_path, capsys):
    arguments, message = WRONG_PROBE[case]
    filled = [str(word).format(run=runs[0].path, map=linear_map) for word in arguments]
    assert run("probe", *filled, "--out", tmp_path / "out") == 2
    assert message in complaint(capsys)


WRONG_ABLATE = {
    "no probes": (["--probes", "nowhere"], "nowhere"),
    "a feature without probes": (["--probes", "{probes}", "--feature", "first_operand"], "first_operand"),
    "no such step": (["--probes", "{probes}", "--step", 4], "no checkpoint at step 4"),
    "unknown way": (["--probes", "{probes}", "--how", "erase"], "leace"),
    "a layer without probes": (["--probes", "{probes}", "--at-layers", 7], "layer 7"),
    "no rows": (["--probes", "{probes}", "--rows", 0], "n is 0"),
}


@pytest.mark.parametrize("case", WRONG_ABLATE)
def test_wrong_input_to_ablate_is_one_line(case, runs, probed, capsys):
    arguments, message = WRONG_ABLATE[case]
    filled = [str(word).format(probes=probed) for word in arguments]
    assert run("ablate", "--run", runs[0].path, *filled) == 2
    assert message in complaint(capsys)


def test_the_second_part_of_the_demo(tmp_path):
    told = "\n".join(run_quiet_demo(tmp_path, steps=12))
    assert "The loss never left its plateau" in told
    assert "carry: erased after the first block (LEACE), exact match goes from" in told
    assert {"features.png", "ablation.png", "features.csv", "ablation.csv"} <= {
        path.name for path in tmp_path.iterdir()
    }
