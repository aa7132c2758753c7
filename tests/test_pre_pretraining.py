"""The experiment on pre-pretraining: what its rule says of planted results, and one tiny run of all of it."""

import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from emergent_heads.experiments import pre_pretraining
from emergent_heads.experiments.pre_pretraining import CAPABILITIES, CONTROLS, NONE, OUTCOMES, SIZES, SYNTHETIC
from emergent_heads.experiments.recipes import Recipes
from emergent_heads.experiments.registry import find_experiment
from emergent_heads.experiments.reproduce import run_experiment

SEEDS = 8


@pytest.fixture
def planted(tmp_path):
    """Judges runs whose steps to every outcome are `steps[arm](seed)`, None for never; others are at 600 + 10 seed."""

    def judge(heads=lambda arm, seed: ([], []), **steps):
        rows = []
        for arm in (NONE, *SYNTHETIC, *CONTROLS):
            for seed in range(SEEDS):
                step = steps.get(arm.replace(" ", "_"), lambda seed: 600 + 10 * seed)(seed)
                before, after = heads(arm, seed)
                content = {
                    "steps": dict.fromkeys(OUTCOMES, step),
                    "last_step": 2000 if arm == NONE else 1500,
                    "steps_before": 0 if arm == NONE else 500,
                    "delta_p_before": before,
                    "delta_p_after": after,
                }
                folder = tmp_path / f"{arm}-{seed}"
                folder.mkdir(exist_ok=True)
                (folder / "pre_pretraining.json").write_text(json.dumps(content))
                rows.append({"x": arm, "seed": seed, "run": folder.name, "status": "not solved"})
        return find_experiment("pre-pretraining").study().judge(pd.DataFrame(rows), tmp_path)

    return judge


def verdicts(judgement, arm, clock):
    said = {check.part: check.holds for check in judgement.checks}
    return [said[f"{arm}, {capability}, {pre_pretraining.CLOCKS[clock]}"] for capability in CAPABILITIES]


def test_no_difference_does_not_hold(planted):
    judgement = planted()
    assert judgement.final == "does not hold"
    assert verdicts(judgement, "Dyck", "after") == [False, False]
    assert verdicts(judgement, "Dyck", "total") == [False, False]  # 500 steps later


def test_an_arm_that_is_sooner_on_text_but_not_in_all(planted):
    judgement = planted(NCA=lambda seed: 300 + 10 * seed)
    assert judgement.final == "holds"
    assert verdicts(judgement, "NCA", "after") == [True, True]
    assert verdicts(judgement, "NCA", "total") == [False, False]  # 800 against 600
    row = judgement.table.set_index(["pre-pretraining", "outcome"]).loc[("NCA", "string repetition")]
    assert row["against none, after"] == "-300 (-322 to -278)" or row["against none, after"].startswith("-300 (-3")
    assert row["against none, total"].startswith("+200 (+")


def test_a_control_that_is_sooner_is_not_the_claim(planted):
    judgement = planted(more_text=lambda seed: 300)
    assert verdicts(judgement, "more text", "after") == [True, True]
    assert judgement.final == "does not hold"


def test_seeds_that_differ_widely_settle_nothing(planted):
    judgement = planted(Dyck=lambda seed: (200, None)[seed % 2])
    assert verdicts(judgement, "Dyck", "after") == [None, None]
    assert judgement.final == "not settled"


def test_never_is_censored_and_not_the_last_step_that_counts_as_reached(planted):
    judgement = planted(Dyck=lambda seed: None)
    row = judgement.table.set_index(["pre-pretraining", "outcome"]).loc[("Dyck", "induction head")]
    assert row["emerged"] == f"0 of {SEEDS}"
    assert row["steps after"] == "1500 (1500 to 1500)"
    assert np.isnan(row["first"])
    curves = judgement.curves
    assert curves.loc[curves["arm"] == "Dyck", "never"].all()


def test_heads_carry_over_where_a_seed_is_more_like_itself(planted):
    draw = np.random.default_rng(0)
    own = draw.normal(size=(SEEDS, 8))

    def heads(arm, seed):
        if arm == "NCA":
            return own[seed].tolist(), (own[seed] + 0.1 * draw.normal(size=8)).tolist()
        return [1.0] * 8, own[seed].tolist()

    said = {check.part: check for check in planted(heads).checks}
    assert said["NCA, heads carry over"].holds is True
    assert said["NCA, heads carry over"].value > 0.5
    assert said["Dyck, heads carry over"].holds is None  # no order before: nothing to carry


def test_too_few_emergences_settle_nothing_about_heads(planted):
    judgement = planted(lambda arm, seed: ([1.0, 2.0], [1.0, 2.0] if seed < 2 else []))
    assert {check.holds for check in judgement.checks if "carry over" in check.part} == {None}


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_all_arms_see_as_many_tokens(scale):
    for arm in pre_pretraining.PRE_PRETRAINING.arms(Recipes(scale)):
        assert len({run.seed for run in arm.runs}) == len(arm.runs) >= 8
        for run in arm.runs:
            parts = [run] if run.init_from is None else [run, run.init_from]
            assert (len(parts) == 1) == (arm.x == NONE)
            tokens = {part.training.batch_size(part.task) * part.task.length for part in parts}
            sizes = SIZES[scale]
            assert tokens == {sizes.training["tokens_per_batch"]}
            assert sum(part.training.steps for part in parts) == sizes.before + sizes.after


def test_all_of_it_at_a_tiny_size(tmp_path, monkeypatch):
    sizes = SIZES["small"]
    config = replace(sizes.config, d_model=16, n_heads=2, d_mlp=16)
    tiny = replace(
        sizes, config=config, before=4, after=8, seeds=1, training={**sizes.training, "tokens_per_batch": 256}
    )
    monkeypatch.setitem(pre_pretraining.SIZES, "small", tiny)
    monkeypatch.setattr(pre_pretraining, "_PROMPTS", 4)
    finding = run_experiment("pre-pretraining", tmp_path, workers=0, progress=False)
    assert finding.verdict in ("holds", "does not hold", "not settled")
    assert set(finding.runs["status"]) == {"not solved"}
    assert len(finding.table) == 7 * len(OUTCOMES)
    assert finding.figure.is_file()
    first = run_experiment("pre-pretraining", tmp_path, workers=0, progress=False)
    pd.testing.assert_frame_equal(first.checks, finding.checks)
    plt.close("all")
