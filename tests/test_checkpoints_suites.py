"""Published suites: names and schedules against transformer-lens' own lists, and names that are wrong."""

import subprocess
import sys

import pandas as pd
import pytest

from emergent_heads.checkpoints.suites import PYTHIA_STEPS, PYTHIA_V0_STEPS, STANFORD_STEPS, SUITES, suite, suites
from emergent_heads.errors import UnknownSuiteError


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
