"""For the page on notebooks: a row for each notebook of `examples/`, by its title."""

import json
from pathlib import Path
from typing import Any

PLACE = "<!-- notebooks -->"


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    if PLACE not in markdown:
        return markdown
    folder = Path(config["config_file_path"]).parent / "examples"
    rows = [f"| `{path.name}` | {title(path)} |" for path in sorted(folder.glob("*.ipynb"))]
    return markdown.replace(PLACE, "\n".join(["| notebook | what it is about |", "| --- | --- |", *rows]))


def title(notebook: Path) -> str:
    """The first heading of a notebook."""
    cells = json.loads(notebook.read_text())["cells"]
    lines = (line for cell in cells if cell["cell_type"] == "markdown" for line in "".join(cell["source"]).split("\n"))
    return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "")
