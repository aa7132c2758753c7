"""Runs notebooks of `examples/` from nothing and keeps their new outputs: `python tests/run_notebooks.py [name ...]`.

A name is the beginning of a file's name ("01"); without any, all are run. What a run changes in a file is only what it
shows.
"""

import sys
import tempfile
from pathlib import Path

import notebooks
from indirect_object_models import train_all

from emergent_heads.storage import atomic_path


def main(names: list[str]) -> int:
    chosen = [path for path in notebooks.notebooks() if not names or path.name.startswith(tuple(names))]
    if not chosen:
        print(f"no notebook of {notebooks.EXAMPLES} begins with {' or '.join(names)}", file=sys.stderr)
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        needs_hub = any(path.stem in notebooks.NEEDS_HUB for path in chosen)
        stand_ins = train_all(scratch / "stand_ins") if needs_hub else None
        for path in chosen:
            print(path.name, flush=True)
            notebook = notebooks.run(path, scratch / path.stem, stand_ins)
            with atomic_path(path) as temporary:
                temporary.write_text(notebooks.written(notebook))
            for fault in notebooks.faults(notebook):
                wrong += 1
                print(f"  {fault}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
