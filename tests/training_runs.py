"""What the tests of training share: a run of milliseconds, and comparing run folders."""

from pathlib import Path

import pandas as pd

from emergent_heads.models.small import SmallModelConfig
from emergent_heads.tasks.linear_map import LinearMap

CONFIG = SmallModelConfig(n_layers=1, d_model=16, n_heads=2)
TASK = LinearMap(state_size=4, sparsity=2, seed=0)
QUICK = {"steps": 24, "tokens_per_batch": 128, "warmup_steps": 5, "learning_rate": 3e-3, "evaluate_every": 5}
"""Settings under which a run of `CONFIG` on `TASK` takes well under a second."""


def same_runs(first: Path, second: Path) -> bool:
    """Whether two run folders hold the same checkpoints, byte for byte, and the same tables but for the seconds."""
    names = sorted(path.name for path in (first / "checkpoints").iterdir())
    assert names == sorted(path.name for path in (second / "checkpoints").iterdir())
    for name in names:
        assert (first / "checkpoints" / name).read_bytes() == (second / "checkpoints" / name).read_bytes(), name
    for table in ("metrics.parquet", "positions.parquet"):
        tables = [pd.read_parquet(run / table) for run in (first, second)]
        pd.testing.assert_frame_equal(
            *(table.drop(columns="seconds", errors="ignore") for table in tables), rtol=0, atol=0
        )
    return True
