"""A driver of its own: sweeps the gated runs of a gate, and writes the table.

python sweep_driver.py GATE SEEDS FOLDER WORKERS TABLE
"""

import sys
from pathlib import Path

import torch
from gated_runs import Gate

from emergent_heads.sweeps import run_sweep

if __name__ == "__main__":
    torch.set_num_threads(1)
    gate, seeds, folder, workers, table = sys.argv[1:]
    runs = Gate(Path(gate), int(seeds)).runs
    result = run_sweep(runs, folder, workers=int(workers), save_every_seconds=0, progress=False)
    result.table.to_csv(table, index=False)
