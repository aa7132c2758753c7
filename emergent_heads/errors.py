"""Every error the library raises on purpose.

Each message says what is wrong, where, and what to do. The command line prints it as one line and exits with
`exit_status`: 2 for wrong arguments or input, 1 for trouble that is not the caller's (a hub that does not answer).
"""

import difflib
from collections.abc import Iterable
from operator import index
from typing import Any


class EmergentHeadsError(Exception):
    """Base class of the library's errors."""

    exit_status = 2


class ArgumentError(EmergentHeadsError, ValueError):
    """An argument has a value that makes no sense; the message names the argument and the values that do."""


class UnknownSuiteError(EmergentHeadsError, KeyError):
    """No suite, size or seed of that name; the message gives the nearest valid names."""

    __str__ = Exception.__str__  # KeyError would print the message quoted


class UnknownStepError(EmergentHeadsError, KeyError):
    """The series has no checkpoint at that step; the message gives the nearest steps."""

    __str__ = Exception.__str__


class NoCheckpointsError(EmergentHeadsError):
    """A folder or repository holds no checkpoints in any layout the library reads."""


class CheckpointError(EmergentHeadsError):
    """The weights of one step are missing, damaged or not finite."""


class KnownBadCheckpointError(CheckpointError):
    """The published weights of this step are known to be wrong, and `allow_known_bad` is False."""


class KnownIssueWarning(UserWarning):
    """Published weights in use are known to be wrong; said once per series and issue."""


class WaitingWarning(UserWarning):
    """A process has waited long for others: for room on the disk, or for a checkpoint that they fetch."""


class UnsafeWeightsError(CheckpointError):
    """Reading the weights would run code stored in the file."""


class RemoteCodeError(EmergentHeadsError):
    """The model needs code from its repository (`trust_remote_code`), which the library does not run unasked."""


class HubError(EmergentHeadsError):
    """The hub refused, did not answer or sent broken files; names repository, revision and cause."""

    exit_status = 1


class TokenizerError(EmergentHeadsError):
    """A task needs a tokenizer and the model has none."""


class PromptError(EmergentHeadsError, ValueError):
    """A prompt or its answer cannot be used; the message names the row."""


class ModelMismatchError(EmergentHeadsError, ValueError):
    """Two models that must have the same shape do not, or weights that a run is to start from do not fit its model."""


class UnsupportedModelError(EmergentHeadsError, TypeError):
    """The object is no model the library knows how to read."""


class InterventionHasNoEffect(EmergentHeadsError):
    """Editing attention patterns (or the residual stream) does not change the model's output.

    Some adapters call the hook after the value was used, so the edit is dropped without a word
    (TransformerLens issues 1526, 1688, 1740). Numbers from such a model would all read zero.
    """


class NotFiniteError(EmergentHeadsError, ValueError):
    """A model's logits are NaN or infinite."""


class RunFolderError(EmergentHeadsError):
    """A run folder cannot be used as asked: made by other settings or another version, or in use elsewhere."""


class RunInUseError(RunFolderError):
    """Another process is training into the run folder right now."""


class OutputError(EmergentHeadsError, OSError):
    """A result cannot be written: unknown suffix, or a folder that does not take files."""


class EmergenceError(EmergentHeadsError):
    """There is no point of emergence to work with (the capability never emerged, or was there from the start)."""


def nearest(name: object, valid: Iterable[object], n: int = 3) -> str:
    """Sentence part that names the valid choices most like `name`: "nearest: a, b, c"."""
    choices = [str(choice) for choice in valid]
    close = difflib.get_close_matches(str(name), choices, n=n, cutoff=0.0)
    return "nearest: " + ", ".join(close) if close else "there is none"


def whole_number(name: str, value: Any, *, least: int) -> int:
    """`value` as a plain int.

    Raises:
        ArgumentError: it is no whole number, or below `least`.
    """
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ArgumentError(f"{name} is {value!r}; it must be a whole number, at least {least}")
    return number
