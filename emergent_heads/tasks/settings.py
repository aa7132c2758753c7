"""From a task's settings back to the task, and to words."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from emergent_heads.errors import ArgumentError
from emergent_heads.tasks.task import SequenceTask


def from_settings(settings: Mapping[str, Any]) -> SequenceTask:
    """The task that `task.settings()` describes, also after it was written to JSON; tasks within tasks too.

    Raises:
        ArgumentError: no task of the library, or one that has other settings; a text that is not the same any more.
    """
    from emergent_heads import tasks

    name = settings.get("task")
    made: Any = getattr(tasks, name, None) if isinstance(name, str) else None
    if not (isinstance(made, type) and issubclass(made, SequenceTask) and dataclasses.is_dataclass(made)):
        raise ArgumentError(f"{name} is no task of the library: make it yourself, and give it where one is asked for")
    values = {key: _made(value) for key, value in settings.items() if key != "task"}
    known = {each.name for each in dataclasses.fields(made) if each.init}
    if unknown := sorted(values.keys() - known):
        raise ArgumentError(f"{name} has no setting {unknown[0]!r}: it was made by another version of the library")
    return made(**values)


def described(settings: Mapping[str, Any]) -> str:
    """Settings of a task as the call that makes it: "LinearMap(state_size=6, sparsity=2, ...)"."""
    values = [f"{key}={_words(value)}" for key, value in settings.items() if key != "task"]
    return f"{settings['task']}({', '.join(values)})"


def is_settings(value: Any) -> bool:
    """Whether a value among the settings of a task is a task itself."""
    return isinstance(value, Mapping) and "task" in value


def _made(value: Any) -> Any:
    if is_settings(value):
        return from_settings(value)
    return tuple(map(_made, value)) if isinstance(value, (list, tuple)) else value


def _words(value: Any) -> str:
    if is_settings(value):
        return described(value)
    if isinstance(value, (list, tuple)) and any(map(is_settings, value)):
        return f"[{', '.join(map(_words, value))}]"
    return str(value)
