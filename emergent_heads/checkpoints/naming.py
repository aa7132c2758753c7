"""Names that carry a step: of revisions ("stage1-step{step}-tokens{billions}B") or files ("checkpoints/*_{step}.pth").

In a pattern `{step}` stands for the step, `{billions}` for the tokens seen in 10^9, and `*` for what does not matter.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from emergent_heads.errors import ArgumentError

_FIELDS = {"{step}": r"(?P<step>\d+)", "{billions}": r"(?P<billions>\d+)", "*": ".*"}
_BILLION = 10**9


class Named(NamedTuple):
    """A name that fits a pattern, and the tokens seen that it tells; None where it tells none."""

    name: str
    tokens: int | None


def check_pattern(pattern: str) -> None:
    """Refuses patterns that cannot carry a step.

    Raises:
        ArgumentError: `{step}` is not there once, or `{billions}` more than once.
    """
    if pattern.count("{step}") != 1:
        raise ArgumentError(f"pattern={pattern!r} must hold {{step}} once, as in 'step{{step}}'")
    if pattern.count("{billions}") > 1:
        raise ArgumentError(f"pattern={pattern!r} holds {{billions}} more than once")


def tells_the_name(pattern: str) -> bool:
    """Whether a step is enough to write the name."""
    return "*" not in pattern and "{billions}" not in pattern


def name_at(pattern: str, step: int) -> str:
    """The name at `step`, of a pattern that `tells_the_name`."""
    return pattern.replace("{step}", str(step))


def tells_tokens(pattern: str) -> bool:
    return "{billions}" in pattern


def named_steps(pattern: str, names: Mapping[str, str], where: str) -> dict[int, Named]:
    """Step -> name, for the names that fit.

    Args:
        pattern: how a name is written.
        names: name -> key of what it names. Two names of one step are one checkpoint if their keys are equal.
        where: what has the names, for messages.

    Raises:
        ArgumentError: two names of one step stand for different things.
    """
    parts = re.split(r"(\{step\}|\{billions\}|\*)", pattern)
    regex = re.compile("".join(_FIELDS.get(part, re.escape(part)) for part in parts))
    found: dict[int, Named] = {}
    for name, key in names.items():
        match = regex.fullmatch(name)
        if match is None:
            continue
        step, billions = int(match["step"]), match.groupdict().get("billions")
        if step not in found:
            found[step] = Named(name, int(billions) * _BILLION if billions is not None else None)
        elif names[found[step].name] != key:
            raise ArgumentError(f"pattern={pattern!r}: {found[step].name} and {name} of {where} are both step {step}")
    return found
