"""Trains a run that is killed by SIGKILL again and again, each time in a process of its own, and then to its end.

    python killed_training.py FOLDER SEED KILLS

A process is killed at a random call of a function, in Python or C, which may be in the middle of a step, between a
file and its new name, or between two files. Prints, per process, the signal it died by; 0 for one that got to the end.
"""

import os
import random
import signal
import sys
from pathlib import Path

import torch
from training_runs import CONFIG, QUICK, TASK

from emergent_heads.training.loop import train


def main(folder: Path, seed: int, kills: int) -> None:
    torch.set_num_threads(1)
    draw = random.Random(seed)
    for _ in range(kills):
        process = os.fork()
        if process == 0:
            calls = draw.randrange(1, 300_000)
            sys.setprofile(lambda *_: countdown())

            def countdown() -> None:
                nonlocal calls
                calls -= 1
                if calls == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            run_once(folder)
            os._exit(0)
        print(os.waitpid(process, 0)[1] & 0x7F, flush=True)
        draw.random()
    run_once(folder)


def run_once(folder: Path) -> None:
    train(CONFIG, TASK, folder, **QUICK, seed=1, save_every_seconds=0, progress=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
