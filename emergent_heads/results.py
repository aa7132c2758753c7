"""What every result has: a tidy table, where it comes from, saving, a readable repr and an HTML repr."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from emergent_heads import notebook
from emergent_heads.storage import save_table


def without_empty_marks(table: pd.DataFrame) -> pd.DataFrame:
    """The table, without the column `known_issue` where it says nothing in any row."""
    if "known_issue" in table and not table["known_issue"].astype(bool).any():
        return table.drop(columns="known_issue")
    return table


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """Base of the results.

    Attributes:
        table: tidy table, one row per thing measured; units stand in the column names.
        about: how the result came about (models, task, seeds, arguments), written beside every saved table.
    """

    table: pd.DataFrame
    about: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def caution(self) -> str:
        """What a headline adds where published weights with a known issue were used; else empty."""
        said = [f"{model}: {mark}" for model, mark in (self.about.get("known_issues") or {}).items()]
        more = f"; {len(said) - 3} more in .about" if len(said) > 3 else ""
        return f" [{'; '.join(said[:3])}{more}]" if said else ""

    def headline(self) -> str:
        """One line that says what came out."""
        return type(self).__name__

    def shown(self) -> pd.DataFrame:
        """The part of the table that a repr shows."""
        return without_empty_marks(self.table)

    def save(self, path: Path | str) -> Path:
        """Writes `.table` as .csv, .parquet or .json by the suffix, and `.about` to `<path>.about.json`.

        Raises:
            OutputError: unknown suffix, or a folder that does not take files.
        """
        return save_table(self.table, path, self.about)

    def notes(self) -> Iterable[str]:
        """Lines that a repr adds below the table."""
        return ()

    def __repr__(self) -> str:
        text = self.shown().to_string(index=False, max_rows=notebook.ROWS, float_format=lambda value: f"{value:.4g}")
        return "\n".join([self.headline(), text, *self.notes()])

    def _repr_html_(self) -> str:
        return notebook.page(
            notebook.paragraphs([self.headline()]),
            notebook.rows(self.shown()),
            notebook.paragraphs(self.notes()),
        )
