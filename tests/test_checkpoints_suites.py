"""Published suites: names and schedules against transformer-lens' own lists, revisions as their model cards name them
on a loopback hub, names that are wrong, and suites of the user's own.
"""

import subprocess
import sys

import pandas as pd
import pytest
import torch
from checkpoints_fixtures import logits, logits_of, save, tiny_llama
from hub_server import serving, use_hub

from emergent_heads.checkpoints import suites as module
from emergent_heads.checkpoints.series import CheckpointSeries
from emergent_heads.checkpoints.suites import (
    PYTHIA_STEPS,
    PYTHIA_V0_STEPS,
    STANFORD_STEPS,
    SUITES,
    register_suite,
    suite,
    suites,
)
from emergent_heads.cli import _suites_shown
from emergent_heads.errors import (
    ArgumentError,
    NoCheckpointsError,
    UnknownStepError,
    UnknownSuiteError,
    UnsupportedModelError,
)

BILLION = 10**9
# Revisions as the model cards and the READMEs of allenai/OLMo and OLMo-core name them, each with what does not belong.
OLMO_2_7B = (
    "main",
    "step150-tokens1B",  # an early upload without its stage (discussion 6 of the repository)
    "stage1-step150-tokens1B",
    "stage1-step1000-tokens5B",
    "stage1-step928646-tokens3896B",
    "stage2-ingredient1-step1000-tokens5B",
    "stage2-ingredient1-step11931-tokens50B",
    "stage2-ingredient2-step11931-tokens50B",
    "stage2-ingredient3-step11931-tokens50B",
)
REVISIONS = {
    "allenai/OLMo-1B-hf": ("main", "step1000-tokens4B", "step10000-tokens41B", "step738020-tokens3094B"),
    "allenai/OLMo-2-0425-1B-early-training": ("main", "stage1-step0-tokens0B", "stage1-step1000-tokens3B"),
    "allenai/OLMo-2-1124-7B": OLMO_2_7B,
    "allenai/OLMo-2-1124-13B": ("stage1-step596057-tokens5001B", "stage2-ingredient4-step35773-tokens300B"),
    "allenai/OLMo-2-0325-32B": ("stage1-step721901-tokens6056B", "stage2-ingredient3-step35763-tokens301B"),
    "allenai/Olmo-3-1125-32B": ("main", "stage1-step10000", "stage2-ingredient1-step1000", "stage3-step1000"),
    "HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints": ("main", "step-160000", "step-2560000"),
    "HuggingFaceTB/SmolLM3-3B-checkpoints": (
        "main",
        "stage1-step-40000",
        "stage1-step-3440000",
        "stage2-step-4200000",
        "stage3-step-4720000",
        "it-SFT",
        "it-mid-training",
    ),
    "LLM360/Amber": ("main", "ckpt_000", "ckpt_100", "ckpt_358"),
    "LLM360/K2": ("main", "ckpt_360"),
    "bigscience/bloom-1b1-intermediate": ("main", "global_step1000", "global_step600000"),
}


def all_repositories():
    return {repository for found in SUITES.values() for repository in found.repositories.values()}


def test_every_checkpointed_repository_that_transformer_lens_knows_is_a_suite():
    loading = pytest.importorskip("transformer_lens.loading_from_pretrained", reason="the list is in 3.x only")
    known = {name for name in loading.OFFICIAL_MODEL_NAMES if name.startswith(("EleutherAI/pythia", "stanford-crfm/"))}
    assert len(known) == 47
    assert known <= all_repositories()


def test_schedules_are_those_of_transformer_lens():
    try:
        from transformer_lens.tools.model_registry import checkpoints as theirs
    except ImportError:
        import transformer_lens.loading_from_pretrained as theirs
    assert list(PYTHIA_STEPS) == theirs.PYTHIA_CHECKPOINTS
    assert list(PYTHIA_V0_STEPS) == theirs.PYTHIA_V0_CHECKPOINTS
    assert list(STANFORD_STEPS) == theirs.STANFORD_CRFM_CHECKPOINTS


@pytest.mark.parametrize(
    ("name", "seed", "repository", "revision", "n"),
    [
        ("pythia-160m", 3, "EleutherAI/pythia-160m-seed3", "step1000", 154),
        ("pythia-14m", 0, "EleutherAI/pythia-14m", "step1000", 154),
        ("pythia-12b-deduped", 0, "EleutherAI/pythia-12b-deduped", "step1000", 154),
        ("pythia-1b-v0", 0, "EleutherAI/pythia-1b-v0", "step1000", 143),
        ("pythia-70m-deduped-v0", 0, "EleutherAI/pythia-70m-deduped-v0", "step1000", 143),
        ("pythia-160m-data-seed", 2, "EleutherAI/pythia-160m-data-seed2", "step1000", 154),
        ("pythia-160m-weight-seed3", 0, "EleutherAI/pythia-160m-weight-seed3", "step1000", 154),
        ("EleutherAI/pythia-410m-seed9", 0, "EleutherAI/pythia-410m-seed9", "step1000", 154),
        ("pythia-31m-seed9", 9, "EleutherAI/pythia-31m-seed9", "step1000", 154),
        ("stanford-gpt2-small", 0, "stanford-crfm/alias-gpt2-small-x21", "checkpoint-1000", 609),
        ("stanford-gpt2-medium", 4, "stanford-crfm/eowyn-gpt2-medium-x777", "checkpoint-1000", 609),
        ("darkmatter-gpt2-small-x343", 0, "stanford-crfm/darkmatter-gpt2-small-x343", "checkpoint-1000", 609),
    ],
)
def test_names_lead_to_repositories(name, seed, repository, revision, n):
    series = suite(name, seed)
    assert series.source.where(1000) == f"{repository}, revision {revision}"
    assert (len(series), series.name) == (n, repository.partition("/")[2])


def test_size_and_seed_are_known():
    series = suite("EleutherAI/pythia-410m-seed9")
    assert (series.size, series.seed) == ("410m", 9)
    assert (suite("stanford-gpt2-medium", 4).size, suite("pythia-1.4b").seed) == ("medium", 0)


def test_the_table_lists_every_suite():
    table = suites()
    rows = table.set_index("name").to_dict("index")
    assert list(rows) == list(SUITES)
    assert sum(name.startswith(("pythia", "stanford")) for name in rows) == 10 + 3 * 8 + 2 + 2
    assert rows["pythia-160m"] == {
        "repository": "EleutherAI/pythia-160m",
        "seeds": "0-9",
        "steps": 154,
        "first": 0,
        "last": 143000,
        "counted": "steps",
        "tokens_seen": "per step",
        "tokens_per_step": 2097152,
    }
    assert rows["olmo-2-13b-stage2"]["seeds"] == "1-4"
    assert pd.isna(rows["olmo-2-13b-stage2"]["steps"])
    assert {name: rows[name]["tokens_seen"] for name in ("olmo-1b", "gelu-1l", "amber-7b", "stanford-gpt2-small")} == {
        "olmo-1b": "name",
        "gelu-1l": "number",
        "amber-7b": "unknown",
        "stanford-gpt2-small": "unknown",
    }
    old = {repository for repository in all_repositories() if repository.startswith(("EleutherAI/", "stanford-crfm/"))}
    assert len(old) == 10 + 5 * 9 + 3 * 8 + 6 + 10


def test_the_table_fits_a_terminal():
    lines = _suites_shown(suites()).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["name", "seeds", "checkpoints", "repository", "of", "the", "first", "seed"]
    assert lines[1].split() == ["pythia-14m", "0-9", "154", "to", "143000", "EleutherAI/pythia-14m"]
    assert [line.split()[0] for line in lines[1:]] == list(SUITES)


@pytest.mark.parametrize(
    ("name", "seed", "message"),
    [
        ("pythia-16m", 0, r"no suite 'pythia-16m'; nearest: .*pythia-160m"),
        ("pythia-160", 0, r"nearest: .*pythia-160m"),
        ("pythia-14m-deduped", 0, r"nearest: .*pythia-410m-deduped"),
        ("gpt2", 0, r"nearest: .*stanford-gpt2-small"),
        ("pythia-160m", 10, r"pythia-160m has no seed 10; its seeds are 0-9"),
        ("pythia-1b", 1, r"pythia-1b has no seed 1; its seeds are 0$"),
        ("pythia-160m-data-seed", 0, r"its seeds are 1-3"),
        ("pythia-160m-seed3", 4, r"is seed 3, not 4; give 'pythia-160m'"),
    ],
)
def test_wrong_names_get_the_nearest_ones(name, seed, message):
    with pytest.raises(UnknownSuiteError, match=message):
        suite(name, seed)


def test_naming_a_suite_imports_neither_torch_nor_transformers():
    code = (
        "import sys, emergent_heads as eh; eh.suite('pythia-160m', seed=3).steps; eh.suites();"
        "print(sorted({'torch', 'transformers', 'transformer_lens', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# revisions, on the loopback hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tiny_llama(0), tmp_path_factory.mktemp("served"))


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    with serving({(name, revision): folder for name, names in REVISIONS.items() for revision in names}) as running:
        use_hub(monkeypatch, running, tmp_path / "cache")
        yield running


@pytest.mark.parametrize(
    ("name", "seed", "tokens"),
    [
        ("olmo-1b", None, {1000: 4 * BILLION, 10000: 41 * BILLION, 738020: 3094 * BILLION}),
        ("olmo-2-1b-early", None, {0: 0, 1000: 3 * BILLION}),
        ("olmo-2-7b", None, {150: BILLION, 1000: 5 * BILLION, 928646: 3896 * BILLION}),
        ("allenai/OLMo-2-1124-7B", None, {150: BILLION, 1000: 5 * BILLION, 928646: 3896 * BILLION}),
        ("olmo-2-7b-stage2", None, {1000: 5 * BILLION, 11931: 50 * BILLION}),
        ("olmo-2-7b-stage2", 3, {11931: 50 * BILLION}),
        ("olmo-2-13b", None, {596057: 5001 * BILLION}),
        ("olmo-2-13b-stage2", 4, {35773: 300 * BILLION}),
        ("olmo-2-32b", None, {721901: 6056 * BILLION}),
        ("olmo-2-32b-stage2", 3, {35763: 301 * BILLION}),
        ("olmo-3-32b", None, {10000: None}),
        # cards: about 250B tokens each 160,000 steps; 94.4B each 40,000, and counting on through the stages
        ("smollm2-360m", None, {160000: 251_658_240_000, 2560000: 4_026_531_840_000}),
        (
            "smollm3-3b",
            None,
            {
                40000: 94_371_840_000,
                3440000: 8_115_978_240_000,
                4200000: 9_909_043_200_000,
                4720000: 11_135_877_120_000,
            },
        ),
        ("amber-7b", None, {0: None, 100: None, 358: None}),
        ("k2-65b", None, {360: None}),
        ("bloom-1b1", None, {1000: None, 600000: None}),
    ],
)
def test_steps_and_tokens_come_from_the_revisions(hub, name, seed, tokens):
    hub.tags = {("bigscience/bloom-1b1-intermediate", f"global_step{step}") for step in (1000, 600000)}
    series = suite(name, seed)
    assert repr(series).endswith("steps not asked for yet)")
    assert hub.requests == []
    assert {step: series.tokens_seen(step) for step in series.steps} == tokens
    assert len(hub.requests) == 1


def test_tokens_of_fixed_schedules_need_no_hub():
    assert suite("pythia-160m", 3).tokens_seen(143000) == 299_892_736_000  # as the Pythia paper has it
    assert suite("pythia-70m-v0").tokens_seen(1000) == 2_097_152_000
    assert suite("stanford-gpt2-small").tokens_seen(1000) is None
    with pytest.raises(UnknownStepError):
        suite("pythia-160m").tokens_seen(700)


def test_tokens_of_other_series_are_not_known(folder, tmp_path):
    save(tiny_llama(0), tmp_path / "step5")
    assert CheckpointSeries.from_directory(tmp_path).tokens_seen(5) is None
    assert CheckpointSeries.from_loader([5], lambda step: None).tokens_seen(5) is None


def test_two_revisions_of_one_step_are_one_checkpoint_only_where_they_share_the_commit(tmp_path, monkeypatch, folder):
    repository, names = "allenai/OLMo-2-1124-7B", ("stage1-step1000-tokens4B", "stage1-step1000-tokens5B")
    with serving({(repository, name): folder for name in names}) as hub:
        use_hub(monkeypatch, hub, tmp_path)
        with pytest.raises(ArgumentError, match=f"{names[0]} and {names[1]} of {repository} are both step 1000"):
            _ = suite("olmo-2-7b").steps
        hub.same_commit[repository, names[1]] = names[0]
        assert suite("olmo-2-7b").steps == (1000,)


def test_a_stage_that_the_repository_lacks(hub):
    with pytest.raises(NoCheckpointsError, match="stage2-ingredient1-step"):
        _ = suite("olmo-2-13b-stage2", 1).steps
    with pytest.raises(UnknownSuiteError, match="olmo-2-7b-stage2 has no seed 4; its seeds are 1-3"):
        suite("olmo-2-7b-stage2", 4)


def test_weights_of_a_revision_with_tokens_in_its_name(hub, folder):
    series = suite("olmo-2-7b")
    series.hooked(1000)
    assert torch.equal(logits(series._resident.model), logits_of(folder))
    assert series.source.where(1000).startswith("allenai/OLMo-2-1124-7B, revision stage1-step1000-tokens5B, copy in ")


def test_a_tokenizer_that_only_the_finished_model_has(tmp_path, monkeypatch, folder):
    other = save(tiny_llama(1), tmp_path / "finished", tokenizer=True)
    served = {
        ("bigscience/bloom-560m-intermediate", "global_step1000"): folder,
        ("bigscience/bloom-560m", "main"): other,
    }
    with serving(served) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        assert suite("bloom-560m")[1000].tokenizer().get_vocab()["w7"] == 7
        assert suite("bloom-560m").hooked(1000).tokenizer.get_vocab()["w7"] == 7
        assert hub.fetched("tokenizer.json") == 1
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        hub.requests.clear()
        assert suite("bloom-560m").hooked(1000).tokenizer.get_vocab()["w7"] == 7
        assert hub.requests == []


# names


def test_models_of_transformer_lens_have_its_names():
    from transformer_lens.supported_models import MODEL_ALIASES

    ours = {name: next(iter(SUITES[name].repositories.values())) for name in module._TRANSFORMER_LENS}
    theirs = {alias: name for name, aliases in MODEL_ALIASES.items() for alias in aliases}
    assert ours == {alias: theirs[alias] for alias in ours}
    left_out = {name for name in MODEL_ALIASES if name.startswith("NeelNanda/")} - set(ours.values())
    assert {theirs[alias] for alias in ("attn-only-2l-demo", "solu-1l-wiki", "solu-4l-wiki")} == left_out


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("multiberts", UnsupportedModelError, "masked language models"),
        ("google/multiberts-seed_0-step_20k", UnsupportedModelError, "masked language models"),
        (
            "michahu8/pythia-160m-c4-only-10k",
            UnknownSuiteError,
            r"Hu et al. 2025 .*CheckpointSeries\.from_hub or register_suite",
        ),
        ("pre-pretraining", UnknownSuiteError, "michahu8: pythia-160m-shuffle-dyck-500steps, "),
        ("allenai/OLMo-7B", UnknownSuiteError, "need Python code .* use olmo-7b-0424"),
    ],
)
def test_public_checkpoints_that_are_no_suite_are_refused_with_the_reason(name, error, message):
    with pytest.raises(error, match=message):
        suite(name)


# suites of the user's own


@pytest.fixture
def own_suites(monkeypatch):
    monkeypatch.setattr(module, "SUITES", dict(SUITES))


@pytest.mark.usefixtures("own_suites")
def test_a_suite_of_ones_own(tmp_path, monkeypatch, folder):
    names = ("main", "seed1-at5-tok2B", "seed1-at10-tok4B", "seed2-at5-tok2B")
    with serving({("me/mine", name): folder for name in names}) as hub:
        use_hub(monkeypatch, hub, tmp_path)
        register_suite("mine", {1: "me/mine", 2: "me/mine"}, "seed{seed}-at{step}-tok{billions}B", size="1m")
        series = suite("mine")
        assert (series.seed, series.size, series.steps, series.tokens_seen(10)) == (1, "1m", (5, 10), 4 * BILLION)
        assert suite("mine", 2).steps == (5,)
        row = suites().iloc[-1]
        assert list(row[["name", "repository", "seeds", "tokens_seen"]]) == ["mine", "me/mine", "1-2", "name"]


@pytest.mark.usefixtures("own_suites")
def test_a_suite_of_ones_own_with_a_known_schedule():
    register_suite("mine", "me/mine", steps=(0, 5, 10), tokens_per_step=100)
    assert (suite("me/mine").steps, suite("mine").tokens_seen(5)) == ((0, 5, 10), 500)
    assert suite("mine").source.where(5) == "me/mine, revision step5"


@pytest.mark.usefixtures("own_suites")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "pythia-160m"}, "name='pythia-160m' is taken"),
        ({"name": "pythia-160m-seed3"}, "is taken"),
        ({"name": "EleutherAI/pythia-160m"}, "is taken"),
        ({"name": "olmo-7b"}, "is taken"),
        ({"name": ""}, "name is empty"),
        ({"repositories": {}}, "one repository for each"),
        ({"repositories": {"a": "me/mine"}}, "one repository for each"),
        ({"repositories": "https://example.org/me/mine"}, "write owner/name"),
        ({"pattern": "main"}, r"must hold \{step\} once"),
        ({"pattern": "{step}-{billions}B-{billions}B"}, r"\{billions\} more than once"),
        ({"pattern": "step{step}-*", "steps": (1, 2)}, "open beyond the step"),
        ({"pattern": "checkpoints/*_{step}.pth", "steps": (1, 2)}, "open beyond the step"),
        ({"pattern": "checkpoints/{step}.pth", "steps": (1, 2)}, "give no steps"),
        ({"pattern": "*/{step}.pth"}, "only the name of the file may be open"),
        ({"steps": ()}, "each step once, ascending"),
        ({"steps": (2, 1)}, "each step once, ascending"),
        ({"steps": (1, 1)}, "each step once, ascending"),
        ({"steps": (0.5,)}, "steps is 0.5; it must be a whole number"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0; it must be a whole number, at least 1"),
    ],
)
def test_what_cannot_be_registered(arguments, message):
    before = dict(module.SUITES)
    with pytest.raises(ArgumentError, match=message):
        register_suite(**({"name": "mine", "repositories": "me/mine"} | arguments))
    assert before == module.SUITES


@pytest.mark.usefixtures("own_suites")
def test_a_registered_suite_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("EMERGENT_HEADS_CACHE", str(tmp_path))
    register_suite("mine", "me/mine")
    code = "import emergent_heads as eh; eh.suite('mine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "no suite 'mine'" in done.stderr
    assert list(tmp_path.iterdir()) == []
