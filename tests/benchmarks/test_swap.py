"""Swapping a checkpoint into the resident model, against reading its file: time and memory at the 160m shape."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from emergent_heads.checkpoints.series import CheckpointSeries

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def series_160m(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSeries:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("160m")
    config = GPTNeoXConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=50304
    )
    for step in (1, 2):
        torch.manual_seed(step)
        GPTNeoXForCausalLM(config).save_pretrained(folder / f"step{step}")
    return CheckpointSeries.from_directory(folder)


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def test_a_swap_takes_at_most_one_and_a_half_times_the_reading(series_160m: CheckpointSeries) -> None:
    files = {step: series_160m.source.folder(step) / "model.safetensors" for step in (1, 2)}

    def read(step: int) -> None:
        for tensor in load_file(files[step]).values():
            tensor.clone()  # load_file only maps the file; a clone has read it

    series_160m.hooked(1)
    swaps, reads = [], []
    for _ in range(5):
        for step in (2, 1):
            reads.append(seconds(lambda step=step: read(step)))
            swaps.append(seconds(lambda step=step: series_160m.hooked(step)))
    ratio = min(swaps) / min(reads)
    print(f"\nswap {min(swaps):.3f} s, reading into tensors {min(reads):.3f} s, ratio {ratio:.2f}")
    assert ratio <= 1.5


def test_twenty_swaps_do_not_grow_memory(series_160m: CheckpointSeries) -> None:
    for step in (1, 2):
        series_160m.hooked(step)
    before = resident_mb()
    for swap in range(20):
        series_160m.hooked(1 + swap % 2)
    growth = resident_mb() - before
    print(f"\ngrowth over 20 swaps: {growth:.1f} MB")
    assert growth < 50


def resident_mb() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc to read the memory of this process")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
