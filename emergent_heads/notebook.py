"""For notebooks: HTML (a line of text, a table of rows, a list of fields), and when progress bars are shown.

What users wrote is shown as they wrote it: a notebook would take "<b>" for markup and "$...$" for mathematics, in a
prompt or the name of a feature as anywhere.
"""

from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

ROWS = 12
_LONGEST = 200


def bar(progress: bool) -> dict[str, Any]:
    """Arguments of tqdm for a bar that is wanted or not."""
    # Not `disable=None`, which takes a notebook for no terminal; not False, which would overrule TQDM_DISABLE.
    return {} if progress else {"disable": True}


def page(*parts: str) -> str:
    """The parts as one piece of HTML, with mathematics switched off."""
    return f'<div class="tex2jax_ignore mathjax_ignore">{"".join(parts)}</div>'


def paragraphs(lines: Iterable[str]) -> str:
    """Lines of text, a paragraph each."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def rows(table: "pd.DataFrame") -> str:
    """A table; of more than a dozen rows the first and the last, with their number."""
    shown = table.to_html(
        index=False, max_rows=ROWS, float_format=lambda value: f"{value:.4g}", border=0, show_dimensions=False
    )
    return shown + (f"<p>{len(table)} rows</p>" if len(table) > ROWS else "")


def card(title: str, fields: Mapping[str, object]) -> str:
    """A title above names and values; what is None is left out."""
    left = 'style="text-align: left"'
    lines = "".join(
        f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(_cut(value))}</td></tr>"
        for name, value in fields.items()
        if value is not None
    )
    return f"<p><b>{escape(title)}</b></p><table>{lines}</table>"


def _cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
