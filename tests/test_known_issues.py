"""What is known of published checkpoints: the table, its page, warnings, refusals, and marks in every result."""

import re
import runpy
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from checkpoints_fixtures import VOCABULARY, save, tiny_neox
from command_line import run
from hub_server import serving, use_hub

import emergent_heads as eh
from emergent_heads.checkpoints import known_issues
from emergent_heads.checkpoints.known_issues import ISSUES, MEANING, as_markdown, issues_of
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.errors import CheckpointError, KnownBadCheckpointError, KnownIssueWarning

PAGE = Path(__file__).parents[1] / "docs" / "known_issues.md"
REPOSITORY = "EleutherAI/pythia-2.8b"
MARK = "wrong weights: EleutherAI/pythia#205"
BEFORE, AFTER = 1000, 66_000
WRONG = (BEFORE, 65_000)
DOUBTFUL = 143_000
STEPS = (BEFORE, 65_000, AFTER, DOUBTFUL)
PYTHIA_STEPS = (0, *(2**power for power in range(10)), *range(1000, 143_001, 1000))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, str], Path]:
    """One model at step 1000, another at all later steps, under the name of a repository with wrong steps."""
    path = tmp_path_factory.mktemp("served")
    early, late = save(tiny_neox(1), path / "early"), save(tiny_neox(2), path / "late")
    return {(REPOSITORY, f"step{step}"): early if step == BEFORE else late for step in STEPS}


@pytest.fixture
def hub(folders, tmp_path, monkeypatch):
    with serving(folders) as running:
        use_hub(monkeypatch, running, tmp_path / "cache")
        yield running


@pytest.fixture(scope="module")
def task(folders):
    """Prompts whose targets are what the later model says."""
    tokens = torch.randint(VOCABULARY, (40, 7), generator=torch.Generator().manual_seed(0))
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        said = AutoModelForCausalLM.from_pretrained(folders[REPOSITORY, f"step{AFTER}"])(tokens).logits[:, -1]
    return eh.tasks.from_tokens(tokens, said.argmax(-1))


@pytest.fixture(scope="module")
def feature():
    return eh.Feature("large", "binary", lambda tokens: tokens[:, 2:3] > VOCABULARY // 2, [4])


def hub_series(**options) -> CheckpointSeries:
    return CheckpointSeries.from_hub(REPOSITORY, **options)


def allowing():
    """The warnings that using these checkpoints brings are not what the test is about."""
    return pytest.warns(KnownIssueWarning)


# the table


def test_pythia_2_8b_has_the_branches_of_the_report():
    """76 branches with the file of main and 10 with another, of 154; the last step is one of the ten."""
    wrong = [step for step in PYTHIA_STEPS if any(issue.refused for issue in issues_of(REPOSITORY, step))]
    doubtful = [step for step in PYTHIA_STEPS if issues_of(REPOSITORY, step)[:1] and step not in wrong]
    assert (len(wrong), doubtful) == (76 + 10 - 1, [143_000])
    assert set(range(1000, 54_000, 1000)) < set(wrong)
    left = set(PYTHIA_STEPS) - {*wrong, *doubtful}
    assert len(left) == 68
    assert min(left) == 66_000
    assert all(step % 5000 for step in left if step < 70_000)


@pytest.mark.parametrize(
    ("repository", "step", "kinds"),
    [
        ("EleutherAI/pythia-12b", 50_000, ["wrong weights"]),
        ("EleutherAI/pythia-12b", 58_000, ["wrong weights"]),
        ("EleutherAI/pythia-12b", 51_000, []),
        ("EleutherAI/pythia-12b", 0, ["harmless"]),
        ("EleutherAI/pythia-12b-deduped", 32_000, ["mended"]),
        ("EleutherAI/pythia-160m-weight-seed1", 0, ["wrong weights"]),
        ("EleutherAI/pythia-160m-weight-seed2", 0, ["wrong weights"]),
        ("EleutherAI/pythia-160m-weight-seed2", 1, []),
        ("EleutherAI/pythia-160m-weight-seed3", 0, []),
        ("EleutherAI/pythia-160m-data-seed3", 1, ["harmless"]),
        ("EleutherAI/pythia-410m-seed9", 40_000, ["missing"]),
        ("EleutherAI/pythia-410m-seed6", 88_000, ["missing"]),
        ("EleutherAI/pythia-410m-seed2", 111_000, ["missing"]),
        ("EleutherAI/pythia-14m-seed9", 2, ["harmless"]),
        ("EleutherAI/pythia-14m-seed9", 4, []),
        ("EleutherAI/pythia-1.4b-v0", 1000, ["relabelled"]),
        ("EleutherAI/pythia-410m-deduped-v0", 143_000, ["relabelled"]),
        ("EleutherAI/pythia-70m-v0", 1000, []),
        ("allenai/OLMo-2-1124-7B", 175_000, ["wrong weights"]),
        ("allenai/OLMo-2-1124-7B", 102_000, []),
        ("allenai/OLMo-2-1124-13B", 102_400, ["missing"]),
        ("allenai/OLMo-2-1124-13B", 102_500, []),
    ],
)
def test_each_report_is_there_with_its_steps(repository, step, kinds):
    assert [issue.kind for issue in issues_of(repository, step)] == kinds


def test_every_entry_is_complete_and_the_gravest_come_first():
    order = list(MEANING)
    assert [issue.kind for issue in ISSUES] == sorted((issue.kind for issue in ISSUES), key=order.index)
    for issue in ISSUES:
        assert issue.repositories
        assert issue.report.startswith("https://github.com/")
        assert re.fullmatch(r"(\d{4}-\d\d-\d\d)?", issue.reported)
        assert issue.what.endswith(".")


def test_the_table_by_repository():
    found = eh.known_issues("pythia-12b")
    assert set(found["repository"]) == {"EleutherAI/pythia-12b"}
    assert found.equals(eh.known_issues("EleutherAI/pythia-12b"))
    row = found.loc[found["kind"] == "wrong weights"].iloc[0]
    assert (row["steps"], row["n_steps"], row["results"], row["on_use"]) == (
        "50000, 58000",
        2,
        "void",
        "warns, can be refused",
    )
    nothing = eh.known_issues("gpt2")
    assert nothing.empty
    assert list(nothing.columns) == list(eh.known_issues().columns)


def test_steps_in_words():
    (steps, *_) = eh.known_issues("pythia-2.8b")["steps"]
    assert steps == (
        "0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000 to 65000 by 1000, 70000 to 100000 by 10000, 103000, "
        "110000 to 140000 by 10000"
    )


def test_the_page_is_that_of_the_table(capsys):
    runpy.run_path(known_issues.__file__, run_name="__main__")
    printed = capsys.readouterr().out
    assert printed == as_markdown()
    assert PAGE.read_text() == printed, "python -m emergent_heads.checkpoints.known_issues > docs/known_issues.md"
    assert all(issue.report in printed for issue in ISSUES)


def test_what_the_table_says_of_published_scores(shared_data):
    scores = pd.read_csv(shared_data / "pythia_v1_zeroshot_acc_wide.csv").set_index(["model", "step"])
    models = scores.index.unique("model")
    assert len(models) == 16
    for model in models:
        steps = scores.loc[model]
        assert steps.loc[0].equals(steps.loc[1])
        assert not steps.loc[1].equals(steps.loc[2])
    pairs = [(name, f"{name.removesuffix('-bf16')}-deduped") for name in models if not name.endswith("-deduped")]
    shared = {one: (scores.loc[one] == scores.loc[other]).sum(axis=1) for one, other in pairs}
    twins = shared.pop("pythia-2.8b")
    (issue,) = (issue for issue in ISSUES if "EleutherAI/pythia-2.8b-deduped" in issue.repositories[1:2])
    assert (twins.loc[:1000] == 8).all()
    assert twins.loc[3000:33_000].between(4, 7).all()
    assert set(issue.steps) == set(twins.index[(twins.index >= 2) & (twins.index <= 33_000)])
    assert all((others.loc[2:] < 8).all() for others in shared.values())


# warnings and refusals


def test_a_wrong_step_warns_once_and_says_what_where_and_what_to_do(hub):
    series = hub_series()
    with pytest.warns(KnownIssueWarning) as caught:
        series.hooked(BEFORE)
    (warning,) = caught
    said = str(warning.message)
    assert said.startswith("step 1000 of pythia-2.8b, wrong weights: 86 of the 154 step branches")
    assert "https://github.com/EleutherAI/pythia/issues/205" in said
    assert "allow_known_bad=False" in said
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        series.hooked(65_000)
        series[BEFORE].load("huggingface")
        series.hooked(AFTER)
    with pytest.warns(KnownIssueWarning, match="in doubt.*look at its neighbours"):
        series.hooked(DOUBTFUL)
    with pytest.warns(KnownIssueWarning, match="step 65000"):
        hub_series()[65_000].load("huggingface")


def test_identical_weights_stay_noted_where_a_step_is_asked_for_again(hub):
    series = hub_series()
    with allowing():
        for step in (AFTER, 65_000, AFTER, AFTER):
            series.hooked(step)
    assert series.problems == {AFTER: "weights identical to step 65000"}


def test_harmless_steps_are_marked_without_a_word(tmp_path, monkeypatch):
    repository = "EleutherAI/pythia-14m"
    folder = save(tiny_neox(1), tmp_path / "model")
    with serving({(repository, f"step{step}"): folder for step in (0, 4)}) as hub, warnings.catch_warnings():
        warnings.simplefilter("error")
        use_hub(monkeypatch, hub, tmp_path / "cache")
        series = eh.suite("pythia-14m", allow_known_bad=False)
        series.hooked(0)
        assert series.known_issue(0) == "harmless: EleutherAI/pythia#83"
        assert series.known_issue(4) is None


def test_missing_weights_name_the_report(tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    with serving({("EleutherAI/pythia-410m-seed9", "step40000"): bare}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        with pytest.raises(CheckpointError, match=r"no weights; known since 2026-07-17: https://.*/pythia/issues/202"):
            eh.suite("pythia-410m", seed=9).hooked(40_000)


def test_refused_steps_are_never_fetched(hub):
    series = hub_series(allow_known_bad=False)
    for use in (series.hooked, lambda step: series[step].load("huggingface")):
        with pytest.raises(KnownBadCheckpointError, match=r"step 1000 of pythia-2.8b .*known to be wrong.*issues/205"):
            use(BEFORE)
    assert list(series.problems) == [BEFORE]
    assert hub.fetched("model.safetensors") == 0
    with allowing():
        series.hooked(DOUBTFUL)  # in doubt is not wrong


def test_a_suite_refuses_too():
    with pytest.raises(KnownBadCheckpointError):
        eh.suite("pythia-12b", allow_known_bad=False).hooked(58_000)


def test_searches_pass_over_refused_steps(hub, task):
    series = hub_series(allow_known_bad=False)
    with allowing():
        point = eh.find_emergence(series, task, "scan")
    assert point.table["step"].tolist() == [AFTER, DOUBTFUL]
    assert set(point.problems) >= set(WRONG)
    assert "known to be wrong" in point.problems[BEFORE]
    assert point.status == "from the start"


def test_a_reused_evaluation_warns_and_can_be_refused(hub, task):
    with allowing():
        first = eh.find_emergence(hub_series(), task, "scan")
    hub.requests.clear()
    series = hub_series()
    series.hooked(AFTER)  # whose tokenizer the task needs
    with pytest.warns(KnownIssueWarning, match="pythia-2.8b") as caught:
        again = eh.find_emergence(series, task, "scan")
    assert [str(each.message).partition(",")[0] for each in caught] == [
        "step 1000 of pythia-2.8b",
        "step 143000 of pythia-2.8b",
    ]
    assert again.table["reused"].all()
    assert first.table["known_issue"].tolist() == again.table["known_issue"].tolist()
    with allowing():
        refused = eh.find_emergence(hub_series(allow_known_bad=False), task, "scan")
    assert refused.table["step"].tolist() == [AFTER, DOUBTFUL]
    assert refused.table["reused"].all()


# marks in results


def test_rows_of_a_search_are_marked(hub, task, tmp_path):
    with allowing():
        point = eh.find_emergence(hub_series(), task, "scan")
    marks = dict(zip(point.table["step"], point.table["known_issue"], strict=True))
    assert marks == {BEFORE: MARK, 65_000: MARK, AFTER: "", DOUBTFUL: "in doubt: EleutherAI/pythia#205"}
    assert (point.pre, point.post) == WRONG
    for step in WRONG:
        assert any(f"rests on step {step}" in caveat and MARK in caveat for caveat in point.caveats)
    assert MARK in repr(point)
    assert point.about["known_issues"][f"pythia-2.8b at step {BEFORE}"] == MARK
    saved = pd.read_csv(point.save(tmp_path / "point.csv"))
    assert saved["known_issue"].fillna("").tolist() == list(marks.values())


def test_a_table_of_emergence_marks_the_steps_it_rests_on(hub, task):
    with allowing():
        table = eh.emergence_table([hub_series()], task, "scan")
    assert table.table["known_issue"].tolist() == [MARK]
    assert MARK in repr(table)


def test_results_of_a_pair_say_it_in_headline_and_about(hub, task):
    series = hub_series()
    with allowing():
        ranking = eh.rank_heads(series[BEFORE], series[AFTER], task)
        curve = eh.recovery_curve(series[BEFORE], series[AFTER], task, ranking, ks=(1,), controls=2)
        evaluation = eh.evaluate(series[BEFORE], task)
        sound = eh.evaluate(series[AFTER], task)
    for result in (ranking, curve, evaluation):
        assert result.about["known_issues"] == {"pythia-2.8b at step 1000": MARK}
        assert f"[pythia-2.8b at step 1000: {MARK}]" in result.headline()
    assert sound.about["known_issues"] == {}
    assert "[" not in sound.headline()


def test_trajectories_are_marked(hub, task):
    with allowing():
        found = eh.head_trajectories(hub_series(), task, [(0, 0), (1, 1)])
    assert found.table.loc[found.table["step"] == BEFORE, "known_issue"].tolist() == [MARK, MARK]
    assert found.table.loc[found.table["step"] == AFTER, "known_issue"].tolist() == ["", ""]


def test_probes_ablations_and_transplants_are_marked(hub, task, feature, tmp_path):
    series = hub_series()
    options = {"n_train": 60, "n_test": 20, "layers": [0], "penalties": (1.0,), "n_untrained": 0, "progress": False}
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(120, 7))
    prompts = eh.tasks.from_tokens(tokens, tokens[:, 0])
    with allowing():
        probes = eh.probe_series(series, prompts, feature, steps=[BEFORE, AFTER], path=tmp_path / "probes", **options)
        ablations = eh.ablation_series(
            series, prompts, probes, features=feature, controls=0, n=40, n_reference=40, progress=False
        )
        one = eh.fit_probes(series[BEFORE], prompts, feature, **options)
        transplant = eh.transplant_features(
            series[BEFORE], series[AFTER], prompts, probes, 0, features=feature, n=40, n_reference=40
        )
    for table in (probes.table, ablations.table, eh.open_probes(tmp_path / "probes").table):
        assert set(table.loc[table["step"] == BEFORE, "known_issue"]) == {MARK}
        assert set(table.loc[table["step"] == AFTER, "known_issue"]) == {""}
    for result in (probes[BEFORE], ablations.by_step[BEFORE], one, transplant):
        assert result.about["known_issues"] == {"pythia-2.8b at step 1000": MARK}
        assert MARK in result.headline()
    assert probes[AFTER].about["known_issues"] == {}
    assert MARK in repr(probes)
    assert MARK in repr(ablations)
    metrics = pd.DataFrame({"step": [0, BEFORE, AFTER], "loss_nats": [3.0, 2.0, 1.0]})
    task = eh.LossRange(plateau=3.0, floor=1.0)
    for result in (
        eh.classify_features(probes, metrics, task=task),
        eh.early_warning(probes, metrics, ["large"], task=task),
    ):
        assert result.about["known_issues"] == {"pythia-2.8b at step 1000": MARK}
        assert MARK in result.headline()


def test_kept_probes_of_refused_steps_are_not_taken(hub, feature, tmp_path):
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(120, 7))
    prompts = eh.tasks.from_tokens(tokens, tokens[:, 0])
    options = {"n_train": 60, "n_test": 20, "layers": [1], "penalties": (1.0,), "n_untrained": 0, "progress": False}
    options |= {"steps": [BEFORE, AFTER], "path": tmp_path / "probes"}
    with allowing():
        eh.probe_series(hub_series(), prompts, feature, **options)
    found = eh.probe_series(hub_series(allow_known_bad=False), prompts, feature, **options)
    assert found.steps == (AFTER,)
    assert "known to be wrong" in found.problems[BEFORE]


def test_a_series_of_ones_own_has_the_column_and_never_shows_it(tmp_path, task):
    for step in (0, 1, 2):
        save(tiny_neox(step), tmp_path / "pythia-2.8b" / f"step{step}")
    point = eh.find_emergence(CheckpointSeries.from_directory(tmp_path / "pythia-2.8b"), task, "scan")
    assert point.table["known_issue"].tolist() == ["", "", ""]
    assert "known_issue" not in repr(point)
    assert "known_issue" not in point._repr_html_()
    assert point.caveats == ()


# the command line


def test_the_command_line_passes_over_them_if_told_to(hub, tmp_path, capsys):
    arguments = ["emergence", "--hub", REPOSITORY, "--task", "in_context_repetition", "--vocabulary", VOCABULARY]
    arguments += ["--n-prompts", 4, "--strategy", "scan"]
    warned = "emergent-heads: warning: step"
    assert run(*arguments, "--out", tmp_path / "all.csv") == 0
    said = capsys.readouterr().err
    assert [line for line in said.splitlines() if "arning" in line and not line.startswith(warned)] == []
    assert said.count(f"{warned} {BEFORE} of pythia-2.8b, wrong weights: ") == 1
    assert run(*arguments, "--no-allow-known-bad", "--out", tmp_path / "sound.csv") == 0
    assert f"{warned} {BEFORE}" not in capsys.readouterr().err
    assert pd.read_csv(tmp_path / "all.csv")["step"].tolist() == list(STEPS)
    assert pd.read_csv(tmp_path / "sound.csv")["step"].tolist() == [AFTER, DOUBTFUL]
