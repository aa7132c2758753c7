"""What a user gets by `pip install` and `import`, and the order of the house."""

import ast
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import emergent_heads

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "emergent_heads"

# From the ground up; a room imports only from rooms below it, and its own.
ROOMS = ("ground", "tasks", "models", "checkpoints", "training", "analysis", "sae", "sweeps", "experiments", "cli")
GROUND = {
    "errors",
    "randomness",
    "statistics",
    "storage",
    "notebook",
    "results",
    "plots",
    "processes",
    "jobs",
    "executors",
    "workers",
}


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout


def room_of(module: str) -> str:
    """Room of a dotted name below the package."""
    first = module.split(".")[0]
    return "ground" if first in GROUND else first


def imported_modules(path: Path) -> set[str]:
    """Dotted names below the package that a file imports anywhere, also inside functions and for types only."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "emergent_heads":
            names |= {f"emergent_heads.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name, as everywhere"
            names.add(node.module or "")
    return {name.removeprefix("emergent_heads.") for name in names if name.startswith("emergent_heads.")}


@pytest.mark.parametrize("statement", ["import emergent_heads", "import emergent_heads.cli"])
def test_import_is_light(statement):
    heavy = ("torch", "transformers", "transformer_lens", "pandas", "matplotlib")
    loaded = python("-c", f"{statement}, sys; print([name for name in {heavy} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_help_imports_no_torch():
    script = (
        "import sys\nfrom emergent_heads.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)\n"
    )
    for command in ([], ["emergence"], ["rank"]):
        assert python("-c", script, *command, "--help").splitlines()[-1] == "0 False"


@pytest.mark.parametrize("name", emergent_heads.__all__)
def test_every_public_name_is_there(name):
    assert getattr(emergent_heads, name) is not None
    assert name in dir(emergent_heads)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'find_emergense'"):
        _ = emergent_heads.find_emergense


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_from_rooms_below(path):
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    if module == "__init__":
        return
    own = ROOMS.index(room_of(module))
    above = {name for name in imported_modules(path) if ROOMS.index(room_of(name)) > own}
    assert not above


def test_no_room_for_odds_and_ends():
    stray = {"utils", "util", "common", "helpers", "misc"}
    assert not [path for path in PACKAGE.rglob("*") if path.stem in stray]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, of the extra dev")
    (built,) = builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")))
    return Path(built)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert folders == {"emergent_heads", f"emergent_heads-{emergent_heads.__version__}.dist-info"}
    assert "emergent_heads/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installing_the_wheel_changes_nothing_that_is_installed(wheel):
    """pip's own resolver, offline, in this environment: `make test` runs it beside transformer-lens 3.x and 4.x."""
    command = ["-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-", str(wheel)]
    report = json.loads(python(*command))
    assert {item["metadata"]["name"] for item in report["install"]} <= {"emergent-heads"}
