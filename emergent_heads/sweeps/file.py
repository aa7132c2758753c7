"""A sweep in a Python file, for the command line."""

import traceback
from pathlib import Path

from emergent_heads.errors import ArgumentError, EmergentHeadsError
from emergent_heads.processes import load_module
from emergent_heads.storage import digest
from emergent_heads.sweeps.runs import RunSpec, check_runs


def load_runs(file: Path | str) -> list[RunSpec]:
    """The list `runs` that a Python file defines. The file is run: load only what you would run yourself.

    Mixers and tasks that it defines are known to the processes of a sweep, too.

    Raises:
        ArgumentError: there is no such file, it fails, or it does not define `runs` as a list of runs.
    """
    file = Path(file)
    if not file.is_file():
        raise ArgumentError(f"no sweep file {file}; give a Python file that defines runs = emergent_heads.grid(...)")
    try:
        module = load_module(f"sweep_file_{digest(str(file.resolve()))[:8]}", file.resolve())
    except EmergentHeadsError as error:
        raise ArgumentError(f"{file}{_line_in(error, file)}: {error}") from error
    except Exception as error:
        said = error.msg if isinstance(error, SyntaxError) else error
        raise ArgumentError(f"{file}{_line_in(error, file)}: {type(error).__name__}: {said}") from error
    if not hasattr(module, "runs"):
        raise ArgumentError(f"{file} does not define runs; end it with runs = emergent_heads.grid(...)")
    try:
        return check_runs(module.runs)
    except (ArgumentError, TypeError) as error:
        raise ArgumentError(f"runs in {file}: {error}") from error


def _line_in(error: BaseException, file: Path) -> str:
    """Where in the file an error came from, as ", line 3"."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f", line {error.lineno}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()
    ]
    return f", line {lines[-1]}" if lines else ""
