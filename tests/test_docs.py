"""The documentation: every code block runs, every public name and error has an entry, the site builds strictly."""

import ast
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest
from error_examples import EXAMPLES
from pages import blocks_of, command_lines, make_workplace, pythia_hub, run_python, with_digits

import emergent_heads as eh
from emergent_heads import cli
from emergent_heads.models.small import SmallModelConfig
from emergent_heads.results import Result
from emergent_heads.sweeps import RunSpec
from emergent_heads.training.run import Run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
GENERATED = ("findings.md", "architectures.md", "known_issues.md")
SMALLER = {
    '"steps": 200': '"steps": 20',
    '"steps": 100': '"steps": 10',
    "[1e8, 2e8, 4e8]": "[3e7, 6e7, 9e7]",
    "min_steps=10": "min_steps=5, n_held_out=50, evaluate_every=100",
    "n_activations=200_000": "n_activations=4_000",
    "bits=16": "bits=6",
    "steps=900": "steps=8",
    "steps=600": "steps=6",
    "range(20, 600, 20)": "(4, 8)",
    "tokens_per_batch=3328": "tokens_per_batch=256",
    "n_train=2000": "n_train=100, n_test=50, n_untrained=1",
    "n_train=200, n_test=100": "n_train=60, n_test=20, n_untrained=1",
    "n_train=400, n_test=100": "n_train=100, n_test=50, n_untrained=1",
    "controls=100": "controls=10",
    "controls=32": "controls=4, n=100, n_reference=400",
    "controls=8": "controls=2, n=100, n_reference=400",
    "--bits 16": "--bits 6",
    "--steps 900": "--steps 8",
    "--checkpoints 0 50 100 200 300 400 500 600": "--checkpoints 0",
    "--n-train 2000": "--n-train 100 --n-test 50",
    "Local(2)": "Local(1)",
    "--at-layers 0 --out": "--at-layers 0 --controls 2 --rows 50 --out",
}
"""What is changed in the blocks so that a training takes a second; all else runs as it stands."""


NEEDS = {
    "executors.md": "submitit",
    "nnsight.md": "nnsight",
    "notebooks.md": "circuitsvis",
    "sparse_autoencoders.md": "sae_lens",
}
"""What a page's blocks cannot do without, beside the core."""


def pages_with(language: str) -> list[str]:
    written = [page for page in PAGES if page.name not in GENERATED]
    return [page.name for page in written if any(of == language for of, _ in blocks_of(page))]


@pytest.fixture(scope="module")
def served(emerging_series, tmp_path_factory) -> list[Path]:
    """The checkpoints the hub has."""
    return with_digits(emerging_series, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def probed_run(tmp_path_factory) -> Path:
    """A folder with `runs/add` and `probes/add`, as the page on probes makes them, but smaller."""
    folder = tmp_path_factory.mktemp("probed")
    task = eh.tasks.Addition(bits=6)
    run = eh.train(
        SmallModelConfig.transformer_pp(n_layers=2, d_model=32),
        task,
        folder / "runs" / "add",
        steps=8,
        learning_rate=3e-3,
        tokens_per_batch=256,
        checkpoints=(0, 4),
    )
    eh.probe_series(run.series, task, n_train=100, n_test=50, n_untrained=1, path=folder / "probes" / "add")
    return folder


@pytest.fixture
def workplace(served, tmp_path, monkeypatch):
    """A working folder with the files that the pages name, and the hub in reach."""
    folder = make_workplace(tmp_path / "work", served[0].parent)
    monkeypatch.chdir(folder)
    with pythia_hub(monkeypatch, served, tmp_path / "cache"):
        yield folder


def link_probed_run(page: str, workplace: Path, request: pytest.FixtureRequest) -> None:
    """What the page on probes leaves behind, for the page that goes on with it."""
    if page in ("ablation.md", "sparse_autoencoders.md"):
        folder = request.getfixturevalue("probed_run")
        (workplace / "runs" / "add").symlink_to(folder / "runs" / "add")
        (workplace / "probes").symlink_to(folder / "probes")


def columns_of(value: object) -> set[str]:
    """Columns of a result's tables, or of a run's, under the names that the page on numbers explains."""
    if not isinstance(value, (Result, Run)):
        return set()
    fields = (
        "table",
        "summary",
        "seeds",
        "places",
        "curves",
        "runs",
        "controls",
        "norms",
        "autoencoders",
        "emergence",
        "metrics",
        "positions",
    )
    tables = [table for name in fields if isinstance(table := getattr(value, name, None), pd.DataFrame)]
    settings = {*RunSpec.__dataclass_fields__, *SmallModelConfig.__dataclass_fields__, "state_size", "batch_size"}
    names = {re.sub("_(low|high|pre|post)$", "", str(name)) for table in tables for name in table.columns}
    names = {re.sub("^(median|restricted_mean)_step_", "step_", name) for name in names}
    return {name.removesuffix("_low").removesuffix("_high") for name in names} - settings


def explained_columns() -> set[str]:
    found = re.findall(r"`([\w.]+)`", (DOCS / "numbers.md").read_text())
    return {re.sub("_(low|high|pre|post)$", "", name) for name in found}


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run_in_order(page, workplace, request):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page], reason=f"{NEEDS[page]} is not installed")
    link_probed_run(page, workplace, request)
    for name, value in run_python(DOCS / page, SMALLER).items():
        unexplained = columns_of(value) - explained_columns()
        assert not unexplained, f"{page}: numbers.md says nothing of {sorted(unexplained)} of {name}"


@pytest.mark.parametrize("page", pages_with("bash"))
def test_command_lines_run(page, workplace, request, capsys):
    link_probed_run(page, workplace, request)
    commands = command_lines(DOCS / page, SMALLER)
    assert commands
    for command in commands:
        assert cli.main(command) == 0, (command, capsys.readouterr().err)


def test_the_page_on_the_command_line_names_every_command():
    named = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "command_line.md").read_text(), flags=re.MULTILINE))
    assert named == set(cli.COMMANDS)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_every_block_is_run_or_says_that_it_cannot(page):
    for language, code in blocks_of(page):
        assert language in ("python", "bash", "console", "text"), language
        if language == "python":
            ast.parse(code)
        for line in code.splitlines() if language == "bash" else ():
            assert line.startswith("emergent-heads "), f"{line}: what cannot run has the language console or text"
    assert page.read_text().count("```") == 2 * len(blocks_of(page))


# ---- entries ----


def test_every_public_name_has_an_entry():
    entries = set(re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE))
    missing = [name for name in eh.__all__ if f"emergent_heads.{name}" not in entries and name != "__version__"]
    assert not missing
    assert "__version__" in (DOCS / "api.md").read_text()


def test_every_task_has_an_entry():
    entries = (DOCS / "api.md").read_text()
    functions = re.search(r"::: emergent_heads\.tasks\.language\n.*?members: \[(.*?)\]", entries, flags=re.DOTALL)
    assert functions is not None
    told = {*functions[1].split(", "), *re.findall(r"^::: emergent_heads\.(?:tasks\.)?(\w+)$", entries, re.MULTILINE)}
    assert set(eh.tasks.__all__) <= told


def test_every_name_of_autoencoders_has_an_entry():
    entries = re.findall(r"^::: emergent_heads\.sae\.\w+\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert set(entries) == set(eh.sae.__all__)


def test_every_error_has_an_entry():
    errors = [
        name
        for name, each in vars(eh.errors).items()
        if inspect.isclass(each) and issubclass(each, (eh.errors.EmergentHeadsError, Warning))
    ]
    headings = re.findall(r"^## (\w+)$", (DOCS / "errors.md").read_text(), flags=re.MULTILINE)
    assert headings == errors


def test_the_messages_are_those_that_the_user_sees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before the hub is asked again
    entries = re.split(r"^## (\w+)$", (DOCS / "errors.md").read_text(), flags=re.MULTILINE)[1:]
    quoted = {
        name: " ".join(match[1].split())
        for name, entry in zip(entries[::2], entries[1::2], strict=True)
        if (match := re.search(r"^```text\n(.*?)^```$", entry, flags=re.MULTILINE | re.DOTALL))
    }
    assert set(quoted) == set(EXAMPLES)
    for name, example in EXAMPLES.items():
        with pytest.raises(getattr(eh.errors, name)) as raised:
            example()
        assert type(raised.value).__name__ == name
        said = str(raised.value).replace(os.environ["HF_ENDPOINT"], "https://huggingface.co")
        assert quoted[name] == " ".join(said.split())


# ---- the site ----


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built strictly: a warning is an error."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    # Without --quiet, which keeps warnings from --strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class _Page(HTMLParser):
    """Anchors, links and embedded addresses of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.embedded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and (address := found.get("href")):
            self.links.append(address)
        if address := found.get("src") or (found.get("href") if tag == "link" else None):
            self.embedded.append(address)


def test_the_site_needs_no_network_and_its_links_lead_somewhere(site):
    pages = {path: _Page(path) for path in site.glob("*.html") if path.name != "404.html"}
    assert {path.stem for path in pages} == {page.stem for page in PAGES}
    for path, page in pages.items():
        for address in page.embedded:
            assert not urlsplit(address).netloc, f"{path.name} loads {address}"
            assert (path.parent / unquote(urlsplit(address).path)).exists(), f"{path.name}: {address}"
        for address in page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = path.parent / unquote(parts.path) if parts.path else path
            assert target.exists(), f"{path.name}: {address}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name}: {address}"


def test_every_entry_is_in_the_site(site):
    anchors = _Page(site / "api.html").anchors
    for entry in re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE):
        assert entry in anchors or entry == "emergent_heads.tasks.language", entry


def test_every_notebook_is_listed(site):
    listed = (site / "notebooks.html").read_text()
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        row = re.search(rf"<td><code>{notebook.name}</code></td>\s*<td>(.+?)</td>", listed)
        assert row is not None, notebook.name


def test_each_argument_stands_on_its_own(site):
    entry = (site / "api.html").read_text().split('id="emergent_heads.rank_heads"')[1].split("doc doc-object ")[0]
    cells = re.findall(r"<tr[^>]*>\s*<td>\s*<code>(\w+)</code>.*?</tr>", entry, flags=re.DOTALL)
    arguments = list(inspect.signature(eh.rank_heads).parameters)
    assert cells[: len(arguments)] == arguments


def test_no_table_is_broken(site):
    """A table that Markdown does not take for one leaves its rows as text."""
    for path in site.glob("*.html"):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        broken = re.search(r"\|\s*-{3,}\s*\|", text)
        assert broken is None, f"{path.name}: {text[broken.start() - 200 : broken.end()]}"


# ---- how to cite ----


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {eh.__version__}\n" in citation
    assert f"Version {eh.__version__}" in (DOCS / "citing.md").read_text()
    for paper in ("2606.25010", "2505.03997"):
        assert paper in citation
        assert paper in (DOCS / "citing.md").read_text()
