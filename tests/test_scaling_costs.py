"""The costs on the page about scaling, against sums worked by hand, transformers' own counts, and the page itself."""

from itertools import product
from math import ceil, log2
from pathlib import Path

import numpy as np
import pytest
import scaling
import torch
from study_costs import (
    OLMO_2_32B,
    PYTHIAS,
    Machine,
    Shape,
    Units,
    asked_by_search,
    evaluate_flops,
    head_sets,
    mean_union,
    modelled,
    pythia,
    rank_flops,
    ranking_seconds,
    scaled,
    search_seconds,
    set_flops,
    wall_seconds,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Olmo2Config, Olmo2ForCausalLM

import emergent_heads as eh

TINY = pythia("tiny", n_layers=3, n_heads=2, d_model=16)
LENGTHS = {"string_repetition": 10, "in_context_repetition": 20}
# As the hub lists the files of EleutherAI/pythia-14m, -31m, -70m, -160m-seed1 and -410m.
LISTED_MB = {"14m": 53.3, "31m": 86.2, "70m": 166, "160m": 375, "410m": 911}


def meta_model(shape: Shape):
    sizes = {"hidden_size": shape.d_model, "num_hidden_layers": shape.n_layers, "num_attention_heads": shape.n_heads}
    with torch.device("meta"):
        if shape.parallel:
            return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=50304, intermediate_size=4 * shape.d_model, **sizes))
        config = Olmo2Config(vocab_size=100352, num_key_value_heads=8, intermediate_size=27648, **sizes)
        return Olmo2ForCausalLM(config)


@pytest.mark.parametrize("shape", [*PYTHIAS, OLMO_2_32B], ids=lambda shape: shape.name)
def test_parameters_are_those_of_transformers_model(shape):
    assert sum(parameter.numel() for parameter in meta_model(shape).parameters()) == shape.parameters


@pytest.mark.parametrize("shape", PYTHIAS, ids=lambda shape: shape.name)
def test_files_are_as_large_as_the_hub_lists_them(shape):
    listed = LISTED_MB[shape.name]
    assert shape.file_bytes / 1e6 == pytest.approx(listed, abs=0.05 if listed < 100 else 0.5)


@pytest.mark.parametrize("shape", [PYTHIAS[0], PYTHIAS[3], OLMO_2_32B], ids=lambda shape: shape.name)
def test_a_pass_takes_the_operations_that_torch_counts(shape):
    model, tokens = meta_model(shape), torch.zeros(3, 20, dtype=torch.long, device="meta")
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(tokens, logits_to_keep=1)
    assert evaluate_flops(shape, 3, 20) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_ranking_takes_the_operations_that_torch_counts():
    config = GPTNeoXConfig(
        vocab_size=50304, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
    )
    pre, post = (GPTNeoXForCausalLM(config).eval() for _ in range(2))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1000, size=(5, 12)))
    task = eh.tasks.from_tokens(tokens, [0] * 5)
    models = [eh.hooked(each) for each in (pre, post)]
    assert all(each.engine.uses_shortcuts for each in models)  # made here: its trial runs are no part of a ranking
    with FlopCounterMode(display=False) as counter:
        eh.rank_heads(*models, task)
    shape = pythia("small", n_layers=4, n_heads=4, d_model=64)
    assert rank_flops(shape, 5, 12) == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_operations_by_hand():
    """d = 16: a block is 2 * 12 * 256 + 4 * 10 * 16 = 6784 a token, the unembedding 2 * 16 * 50304 = 1,609,728."""
    assert evaluate_flops(TINY, 2, 10) == 2 * (10 * 3 * 6784 + 1_609_728)
    assert set_flops(TINY, 2, 10) == evaluate_flops(TINY, 2, 10)
    # layer 0: a whole block and the last one's 2 * 768 + 640 = 2176; layer 1: the last one's; layer 2: none; each 512
    blocks = 10 * (6784 + 2176 + 512 + 2176 + 512 + 512)
    assert rank_flops(TINY, 2, 10) == 2 * 2 * (blocks + 3 * 1_609_728) + 2 * evaluate_flops(TINY, 2, 10)


@pytest.mark.parametrize("n", [5, 27, 154])
def test_searches_ask_for_what_their_docstrings_promise(n):
    bisect, scan, verify = (asked_by_search(strategy, n) for strategy in ("bisect", "scan", "verify"))
    assert max(map(len, bisect)) <= ceil(log2(n)) + 2
    assert {len(each) for each in scan} == {n}
    assert all(few <= more for few, more in zip(bisect, verify, strict=True))


@pytest.mark.parametrize("n_tasks", [1, 2, 3])
def test_the_mean_union_is_that_of_all_combinations(n_tasks):
    asked = asked_by_search("bisect", 9)
    counts = [len(frozenset().union(*each)) for each in product(asked, repeat=n_tasks)]
    assert mean_union(asked, n_tasks) == pytest.approx(np.mean(counts))


def test_head_sets_by_hand():
    assert head_sets(12) == 5 + 1 + 12 + 4 * 100
    assert head_sets(200) == 5 + 1 + 5 * 100
    assert head_sets(4, ks=(1, 2), controls=3) == 2 + 1 + 3 + 3


def test_seconds_by_hand():
    units = Units(swap=2.0, evaluate=3.0, rank=50.0, head_set=0.25)
    assert search_seconds(units, 154) == 770
    once = ranking_seconds(units, TINY, {"string_repetition": 10})
    assert once == 4 * 2 + 50 + (5 + 1 + 2 + 400) * 0.25
    twice = ranking_seconds(units, TINY, LENGTHS)
    ratios = [flops(TINY, 32, 20) / flops(TINY, 32, 10) for flops in (rank_flops, set_flops)]
    assert twice == pytest.approx(once + 4 * 2 + 50 * ratios[0] + 408 * 0.25 * ratios[1])


def test_modelled_units_by_hand():
    units = modelled(TINY, Machine(flops=1e9, read_bytes=1e6), LENGTHS)
    assert units.swap == TINY.file_bytes / 1e6
    assert units.evaluate == (evaluate_flops(TINY, 32, 10) + evaluate_flops(TINY, 32, 20)) / 1e9
    assert units.rank == rank_flops(TINY, 32, 10) / 1e9
    larger = scaled(units, TINY, PYTHIAS[0], 10)
    assert larger.rank == pytest.approx(modelled(PYTHIAS[0], Machine(1e9, 1e6), LENGTHS).rank)
    assert (larger.swap, larger.evaluate) == (units.swap, units.evaluate)


def test_the_wall_clock_of_workers():
    assert wall_seconds([3, 1, 2], 1) == 6
    assert wall_seconds([3, 1, 2], 2) == 3
    assert wall_seconds([5, 1, 1], 3) == 5
    jobs = np.random.default_rng(0).integers(1, 20, size=7).tolist()
    best = min(
        max(sum(job for job, at in zip(jobs, places, strict=True) if at == worker) for worker in range(3))
        for places in product(range(3), repeat=7)
    )
    assert best <= wall_seconds(jobs, 3) <= 4 / 3 * best  # Graham's bound for the longest job first


# the page

PAGE = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text()


def test_all_tables_of_the_page_follow_from_the_measured_one():
    assert scaling.derived(PAGE) == PAGE


def test_the_page_says_how_many_requests_a_checkpoint_takes():
    assert scaling.between(PAGE, "requests") == scaling.said_of_requests()


def test_the_page_says_how_long_prompts_are_and_what_searches_ask_for_on_real_curves():
    if not scaling.TOKENIZER.exists():
        pytest.skip("needs shared/data")
    assert scaling.lengths_on(PAGE) == scaling.prompt_lengths()
    assert scaling.between(PAGE, "real curves") == scaling.said_of_real_curves()


def test_units_are_measured_as_the_page_says(tmp_path):
    """The measurement itself, at a size that takes a moment."""
    if not scaling.TOKENIZER.exists():
        pytest.skip("needs shared/data")
    small = pythia("small", n_layers=2, n_heads=2, d_model=16)
    scaling.plant(small, tmp_path)
    assert (tmp_path / "step3" / "pytorch_model.bin").stat().st_size == pytest.approx(small.file_bytes, rel=0.01)
    costs = scaling.measure(small, tmp_path)
    assert set(costs) == {"swap", "swap_pickled", "evaluate", "rank", "head_set", "peak_gb"}
    assert all(cost > 0 for cost in costs.values())


def test_a_table_that_was_written_is_read_back():
    measured = {shape.name: dict.fromkeys(scaling._UNITS, 1.0 + place) for place, shape in enumerate(PYTHIAS)}
    lengths = dict.fromkeys(scaling.CAPABILITIES, 12)
    page = scaling.put(PAGE, "units", scaling.units_table(measured, lengths))
    found = scaling.units_on(page)
    assert found["70m"] == Units(3.0, 3.0, 3.0, 3.0)
    assert found["410m"].evaluate == 5.0
    ratio = rank_flops(PYTHIAS[4], 32, 12) / rank_flops(PYTHIAS[3], 32, 12)
    assert found["410m"].rank == pytest.approx(4.0 * ratio, rel=0.01)  # three digits are written
