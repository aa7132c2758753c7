"""What a study of many series costs: measures the unit costs, and writes the tables of the page.

    python tests/scaling.py docs/scaling.md

measures here, on one core, with random GPT-NeoX of the published shapes, and writes what stands between the page's
marks; the prose around them stays. Ranking the largest shape is not measured but scaled by floating-point operations.
Times are CPU seconds of one thread, so work beside it disturbs them little; it takes about three minutes. The other
tables follow from that one (`study_costs.py`).
"""

import multiprocessing
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pandas as pd
from hub_server import serving
from study_costs import (
    CAPABILITIES,
    KS,
    N_PROMPTS,
    OLMO_2_32B,
    OLMO_2_32B_CHECKPOINTS,
    PYTHIAS,
    Machine,
    Shape,
    Units,
    asked_by_search,
    mean_union,
    modelled,
    rank_flops,
    ranking_seconds,
    scaled,
    search_seconds,
    wall_seconds,
)

import emergent_heads as eh
from emergent_heads.analysis.search import STRATEGIES, search

DATA = Path(__file__).parents[1].parent / "shared" / "data"
TOKENIZER = DATA / "gpt-neox-tokenizer.json"
CURVES = DATA / "polypythias_410m_training_maps.tsv"  # of EleutherAI's public evaluation: 10 seeds at 27 steps
THRESHOLDS = (0.0, 0.5, 1.0)
SEEDS, CHECKPOINTS = 10, 154
SCALED = "410m"  # its ranking is not measured
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "pytorch_model.bin")
TOKENIZER_BYTES = 2.11e6
# Of a GPU: what an A100's data sheet gives for float32 without tensor cores is 19.5e12, and half of it is a good rate.
GPU = Machine(flops=10e12, read_bytes=2e9)
LINKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 1e10 / 8}
CORES = 16
GB = 1e9

# ---- measuring ----


@cache
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER))


def tasks() -> dict:
    return {name: getattr(eh.tasks, name)(n_prompts=N_PROMPTS) for name in CAPABILITIES}


def prompt_lengths() -> dict[str, int]:
    """Tokens of the longest prompt of each capability, to which the others are padded."""
    batches = {name: task.batch(tokenizer(), vocabulary_size=50304, context=2048) for name, task in tasks().items()}
    return {name: batch.tokens.shape[1] for name, batch in batches.items()}


def plant(shape: Shape, folder: Path) -> None:
    """Two checkpoints in half precision as safetensors, and one as the hub has them: pickled, with causal masks."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        hidden_size=shape.d_model,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        intermediate_size=4 * shape.d_model,
        vocab_size=shape.vocabulary,
        rotary_pct=0.25,
    )
    tokenizer().save_pretrained(folder)
    for step in (1, 2):
        torch.manual_seed(step)
        model = GPTNeoXForCausalLM(config).half()
        model.save_pretrained(folder / f"step{step}")
    weights = model.state_dict()
    weights["embed_out.weight"] = weights.pop("lm_head.weight")
    for layer in range(shape.n_layers):
        mask = torch.ones(1, 1, 2048, 2048, dtype=torch.bool).tril()
        weights[f"gpt_neox.layers.{layer}.attention.bias"] = mask
    (folder / "step3").mkdir()
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(folder / "step3")
    torch.save(weights, folder / "step3" / "pytorch_model.bin")


def seconds(run: Callable[[], object], times: int = 1) -> float:
    """CPU seconds of this process; the least of several."""
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def measure(shape: Shape, folder: Path) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    series = eh.CheckpointSeries.from_directory(folder)
    large = shape.n_layers > 6

    def swap_in(step: int) -> float:
        series.hooked(1 if step == 3 else 3)
        return seconds(lambda: series.hooked(step))

    for step in (1, 3, 2):
        series.hooked(step)  # the first of each kind of file learns its names
    swap, pickled = (min(swap_in(step) for _ in range(3)) for step in (2, 3))
    series.hooked(1)
    times = 1 if large else 3
    evaluate = sum(seconds(lambda task=task: eh.evaluate(series[1], task), times) for task in tasks().values())
    measured = {"swap": swap, "swap_pickled": pickled, "evaluate": evaluate}
    if shape.name != SCALED:
        task, rankings, curves = tasks()[CAPABILITIES[0]], [], []
        pair, few = (series[1], series[2]), 1 if large else 4
        rank = seconds(lambda: rankings.append(eh.rank_heads(*pair, task)))
        curve = seconds(lambda: curves.append(eh.recovery_curve(*pair, task, rankings[0], ks=KS, controls=few)))
        sets = int(curves[0].table["n_sets"].sum())
        measured |= {"rank": rank - 2 * swap, "head_set": (curve - 2 * swap) / sets}
    measured["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
    return measured


def measured_in_processes_of_their_own() -> dict[str, dict[str, float]]:
    """By size; a process each, so that the peak of memory is its own."""
    found = {}
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as planting, spawn.Pool(1, maxtasksperchild=1) as measuring:
        for shape in PYTHIAS:
            with TemporaryDirectory() as folder:
                planting.apply(plant, (shape, Path(folder)))
                found[shape.name] = measuring.apply(measure, (shape, Path(folder)))
    return found


def said_of_requests() -> str:
    """What a checkpoint asks of a hub: the second of a series, as the first also asks for the branches."""
    repository = "me/tiny"
    with TemporaryDirectory() as folder:
        for name in FILES:
            (Path(folder) / name).write_bytes(b"{}")
        with (
            serving({(repository, f"step{step}"): Path(folder) for step in (1, 2)}) as hub,
            patch.dict(os.environ, hub.environment(Path(folder) / "cache")),
        ):
            source = eh.CheckpointSeries.from_hub(repository, cache="evict").source
            for step in (1, 2):
                hub.requests.clear()
                with source.fetched(step):
                    pass
    paths = [request.split()[1] for request in hub.requests]
    api, files = (sum(part in path for path in paths) for part in ("/api/", "/resolve/"))
    return f"One checkpoint takes {api} request to the API and {files} for files; a series asks once for its branches."


# ---- the tables ----

_UNITS = ("swap", "swap_pickled", "evaluate", "rank", "head_set", "peak_gb")


def units_table(measured: Mapping[str, Mapping[str, float]], lengths: Mapping[str, int]) -> str:
    """With the rows that were not measured scaled from the largest that was."""
    rows = []
    for shape in PYTHIAS:
        costs, note = dict(measured[shape.name]), ""
        if shape.name == SCALED:
            base, at, note = PYTHIAS[-2], lengths[CAPABILITIES[0]], "*"
            units = Units(
                costs["swap"], costs["evaluate"], measured[base.name]["rank"], measured[base.name]["head_set"]
            )
            units = scaled(units, base, shape, at)
            costs |= {"rank": units.rank, "head_set": units.head_set}
        gflops = rank_flops(shape, N_PROMPTS, lengths[CAPABILITIES[0]]) / costs["rank"] / 1e9
        cells = [f"{costs[name]:.3g}" for name in _UNITS]
        cells[3:5] = [f"{cell}{note}" for cell in cells[3:5]]
        rows.append([shape.name, *cells, f"{gflops:.0f}{note}"])
    heads = [
        "size",
        "swap in, safetensors (s)",
        "swap in, as on the hub (s)",
        f"evaluate 4 tasks of {N_PROMPTS} prompts (s)",
        "rank all heads (s)",
        "one head set (s)",
        "peak memory (GB)",
        "10⁹ operations a second, ranking",
    ]
    return table(heads, rows)


def units_on(page: str) -> dict[str, Units]:
    """Those of a worker, from the page's own table, so that all other tables follow from it."""
    lines = between(page, "units").splitlines()[2:]
    found = {}
    for line in lines:
        name, *cells = (cell.strip().rstrip("*") for cell in line.strip("|").split("|"))
        costs = dict(zip(_UNITS, map(float, cells), strict=False))
        found[name] = Units(costs["swap_pickled"], costs["evaluate"], costs["rank"], costs["head_set"])
    assert [field.name for field in fields(Units)] == ["swap", "evaluate", "rank", "head_set"]
    return found


def lengths_on(page: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"`(\w+)` (\d+)", between(page, "lengths"))}


def loads(strategy) -> float:
    """Checkpoints of one series that four capabilities need together; the mean."""
    return mean_union(asked_by_search(strategy, CHECKPOINTS), len(CAPABILITIES))


def sizes_table() -> str:
    rows = [
        [
            shape.name,
            f"{shape.parameters:,}",
            f"{shape.n_layers} of {shape.n_heads}",
            f"{shape.file_bytes / 1e6:,.0f}",
            f"{CHECKPOINTS * SEEDS * shape.file_bytes / GB:,.0f}",
        ]
        for shape in PYTHIAS
    ]
    return table(["size", "parameters", "layers of heads", "one checkpoint (MB)", f"all of {SEEDS} seeds (GB)"], rows)


def searches_table() -> str:
    rows = []
    for strategy in STRATEGIES:
        asked = asked_by_search(strategy, CHECKPOINTS)
        counts = [len(each) for each in asked]
        series = len(PYTHIAS) * SEEDS
        loaded, tasks = loads(strategy), len(CAPABILITIES)
        cells = [f"{sum(counts) / len(counts):.1f}", max(counts), f"{loaded:.1f}"]
        rows.append([f"`{strategy}`", *cells, f"{series * loaded:,.0f}", f"{series * loaded * tasks:,.0f}"])
    one, all_four = "one capability", "four capabilities"
    heads = ["strategy", f"{one}, mean", f"{one}, most", f"{all_four}, mean", "study: checkpoints", "evaluations"]
    return table(heads, rows)


def said_of_real_curves() -> str:
    """What searches ask for on curves that also fall, taken as constant between the steps that were evaluated."""
    steps = eh.suite("pythia-410m").steps
    curves = pd.read_csv(CURVES, sep="\t").sort_values("step").groupby("seed")
    counts: dict[str, list[int]] = {"bisect": [], "verify": []}
    for (_, curve), threshold, strategy in product(curves, THRESHOLDS, counts):
        at = np.searchsorted(curve["step"].to_numpy(), steps, side="right") - 1
        passes = (curve["score"].to_numpy()[at] >= threshold).tolist()
        counts[strategy].append(len(search(strategy, len(steps), passes.__getitem__).answers))
    asked = [
        f"`{strategy}` asks for {min(of)} to {max(of)}, {sum(of) / len(of):.1f} in the mean"
        for strategy, of in counts.items()
    ]
    return f"{asked[0]}; {asked[1]}, of {len(steps)}."


def disk_table() -> str:
    largest = max(shape.file_bytes for shape in PYTHIAS) + TOKENIZER_BYTES
    rows = []
    for strategy in STRATEGIES:
        bytes_ = sum(SEEDS * loads(strategy) * shape.file_bytes for shape in PYTHIAS)
        tokenizers = len(PYTHIAS) * SEEDS * loads(strategy) * TOKENIZER_BYTES
        kept = f"{bytes_ / GB:,.0f}"
        rows.append([f"`{strategy}`", f"{(bytes_ + tokenizers) / GB:,.0f}", kept])
        rows[-1] += [f"{workers * largest / GB:,.1f}" for workers in (1, CORES)]
    heads = ["strategy", "downloads (GB)", "disk, `keep` (GB)", "budget that makes no worker wait: 1 (GB)"]
    return table([*heads, f"{CORES} workers (GB)"], rows)


def hours_table(units: Mapping[str, Units], lengths: Mapping[str, int]) -> str:
    on_gpu = {shape.name: modelled(shape, GPU, lengths) for shape in PYTHIAS}
    rows = []
    for strategy in STRATEGIES:
        jobs = {
            where: [search_seconds(costs[shape.name], loads(strategy)) for shape in PYTHIAS for _ in range(SEEDS)]
            for where, costs in (("cpu", units), ("gpu", on_gpu))
        }
        bytes_ = sum(SEEDS * loads(strategy) * (shape.file_bytes + TOKENIZER_BYTES) for shape in PYTHIAS)
        rows.append([f"search, `{strategy}`", *_hours(jobs), *_hours_of_links(bytes_)])
    jobs = {
        where: [ranking_seconds(costs[shape.name], shape, lengths) for shape in PYTHIAS for _ in range(SEEDS)]
        for where, costs in (("cpu", units), ("gpu", on_gpu))
    }
    both = sum(SEEDS * len(CAPABILITIES) * 2 * (shape.file_bytes + TOKENIZER_BYTES) for shape in PYTHIAS)
    rows.append(["ranking and recovery", *_hours(jobs), *_hours_of_links(both)])
    heads = ["part", "1 core", f"{CORES} cores", "1 GPU", f"{CORES} GPUs"]
    return table([*heads, *(f"download at {name}" for name in LINKS)], rows)


def _hours(jobs: Mapping[str, list[float]]) -> list[str]:
    return [_time(wall_seconds(jobs[where], workers)) for where in ("cpu", "gpu") for workers in (1, CORES)]


def _hours_of_links(bytes_: float) -> list[str]:
    return [_time(bytes_ / rate) for rate in LINKS.values()]


def by_size_table(units: Mapping[str, Units], lengths: Mapping[str, int]) -> str:
    rows = []
    for shape in PYTHIAS:
        cost = units[shape.name]
        search_s = [search_seconds(cost, loads(strategy)) for strategy in ("bisect", "scan")]
        ranking_s = ranking_seconds(cost, shape, lengths)
        sets = ranking_seconds(replace(cost, swap=0, rank=0), shape, lengths)
        rows.append([shape.name, *map(_time, [*search_s, ranking_s]), f"{sets / ranking_s:.0%}"])
    heads = ["size", "search, `bisect`", "search, `scan`", "ranking and recovery", "of which head sets"]
    return table(heads, rows)


def olmo_table(lengths: Mapping[str, int]) -> str:
    shape, n = OLMO_2_32B, OLMO_2_32B_CHECKPOINTS
    small = PYTHIAS[-1]
    units = {each.name: modelled(each, GPU, lengths) for each in (small, shape)}
    per = {each.name: asked_by_search("bisect", steps) for each, steps in ((small, CHECKPOINTS), (shape, n))}
    mean = {name: mean_union(asked, len(CAPABILITIES)) for name, asked in per.items()}

    def row(what: str, value: Callable[[Shape], object]) -> list[object]:
        return [what, *(value(each) for each in (small, shape))]

    steps = {small.name: CHECKPOINTS, shape.name: n}
    rows = [
        row("checkpoints of one run", lambda each: steps[each.name]),
        row("parameters", lambda each: f"{each.parameters:,}"),
        row("heads", lambda each: each.n_layers * each.n_heads),
        row("one checkpoint (GB)", lambda each: f"{each.file_bytes / GB:,.1f}"),
        row("memory of the resident model, float32 (GB)", lambda each: f"{4 * each.parameters / GB:,.1f}"),
        row("checkpoints, `bisect`, four capabilities", lambda each: f"{mean[each.name]:.1f}"),
        row("downloads, `bisect` (GB)", lambda each: f"{mean[each.name] * each.file_bytes / GB:,.0f}"),
        row("downloads, `scan` (GB)", lambda each: f"{steps[each.name] * each.file_bytes / GB:,.0f}"),
        *(
            row(f"one checkpoint at {name}", lambda each, rate=rate: _time(each.file_bytes / rate))
            for name, rate in LINKS.items()
        ),
        row("swap in, one GPU", lambda each: _time(units[each.name].swap)),
        row("evaluate four capabilities, one GPU", lambda each: _time(units[each.name].evaluate)),
        row(
            "ranking and recovery of four capabilities, one GPU",
            lambda each: _time(ranking_seconds(units[each.name], each, lengths)),
        ),
    ]
    return table(["", "Pythia 410m", "OLMo-2 32B"], rows)


def _time(seconds_: float) -> str:
    for unit, size in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds_ >= size or unit == "s":
            return f"{seconds_ / size:.2g} {unit}"
    raise AssertionError


def table(heads: list[str], rows: list[list[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# ---- the page ----


def between(page: str, name: str) -> str:
    """What stands between the marks of that name."""
    match = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- end of {name} -->", page, flags=re.DOTALL)
    assert match, f"the page has no marks for {name}"
    return match[1].strip()


def put(page: str, name: str, text: str) -> str:
    between(page, name)
    mark, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return page.partition(mark)[0] + f"{mark}\n{text}\n{end}" + page.partition(end)[2]


def derived(page: str) -> str:
    """The page with all tables that follow from the measured one and from the model."""
    units, lengths = units_on(page), lengths_on(page)
    parts = {
        "sizes": sizes_table(),
        "searches": searches_table(),
        "disk": disk_table(),
        "hours": hours_table(units, lengths),
        "by size": by_size_table(units, lengths),
        "olmo": olmo_table(lengths),
    }
    for name, text in parts.items():
        page = put(page, name, f"\n{text}\n")
    return page


def write_page(path: Path) -> None:
    if not TOKENIZER.exists():
        sys.exit(f"the prompts are counted in tokens of Pythia's tokenizer, and {TOKENIZER} is not there")
    lengths = prompt_lengths()
    measured = measured_in_processes_of_their_own()
    page = path.read_text()
    said = ", ".join(f"`{name}` {length}" for name, length in lengths.items())
    page = put(page, "lengths", f"The longest prompts have, in tokens: {said}.")
    page = put(page, "units", "\n" + units_table(measured, lengths) + "\n")
    page = put(page, "requests", said_of_requests())
    page = put(page, "real curves", said_of_real_curves())
    path.write_text(derived(page))


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
