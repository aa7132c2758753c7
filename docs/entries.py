"""For the API page: an entry that describes several names at once ("pre, post: ...") becomes one entry for each."""

import re
from typing import Any

import griffe

_SECTIONS = re.compile(r"^( *)(Args|Attributes|Raises):\n((?:\1 +.*\n?|\n)*)", flags=re.MULTILINE)
_ENTRY = re.compile(r"^( +)(\w+(?:, \w+)+): (.*\n?(?:\1 +.*\n?)*)", flags=re.MULTILINE)


class OneEntryPerName(griffe.Extension):
    """Splits such entries, so that each name stands with its own type and default."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = split_entries(obj.docstring.value)


def split_entries(docstring: str) -> str:
    """The docstring with one entry for each name."""

    def split(entry: re.Match[str]) -> str:
        return "".join(f"{entry[1]}{name}: {entry[3].rstrip()}\n" for name in entry[2].split(", "))

    def within(section: re.Match[str]) -> str:
        return f"{section[1]}{section[2]}:\n{_ENTRY.sub(split, section[3])}"

    return _SECTIONS.sub(within, docstring)
