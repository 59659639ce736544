"""No import goes up, and there are no cycles, not even inside a package."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [  # bottom to top; packages of one layer do not import each other
    {"runtime"},
    {"model", "data", "native"},
    {"checkpoint", "generation"},
    {"interop", "evaluation"},
    {"training"},
    {"features"},
    {"interpretability"},
    {"serving"},
    {"api"},
    {"benchmarks", "generate", "train"},
    {"lessons"},
    {"commands"},
    {"scripts"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).with_suffix("").parts[0] in LEVEL
]


def package(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["thinker", *(parts[:-1] if parts[-1] == "__init__" else parts)])


MODULES = {module_name(path): path for path in FILES}


def imported(path):
    """Names of our own modules that a file imports, anywhere in it and for whatever purpose."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in within]
        yield from (name for name in names if name.split(".")[0] == "thinker")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    for name in imported(path):
        if name == "thinker":  # its public names, which entry points may use as a user does
            assert LEVEL[package(path)] >= LEVEL["benchmarks"], f"{path} imports {name}"
            continue
        feature = re.match(r"thinker\.features\.(\w+)", name)
        if feature and not (ROOT / "features" / feature[1]).exists():
            continue  # benchmarks and lessons of a feature that has been deleted
        assert name in MODULES, f"{path} imports {name}, which is no module"
        other = package(MODULES[name])
        above = LEVEL[other] > LEVEL[package(path)]
        beside = LEVEL[other] == LEVEL[package(path)] and other != package(path)
        assert not above, f"{path} imports {name}, which is above it"
        assert not beside, f"{path} imports {name}, which is beside it"


def test_modules_have_no_cycles():
    uses = {name: set(imported(path)) - {name} for name, path in MODULES.items()}
    while uses:
        free = [name for name, needs in uses.items() if not needs & uses.keys()]
        assert free, f"a cycle among {sorted(uses)}"
        uses = {name: needs for name, needs in uses.items() if name not in free}


def test_model_needs_torch_alone():
    for path in [path for path in FILES if package(path) == "model"]:
        tree = ast.parse(path.read_text())
        names = {
            alias.name.split(".")[0]
            for n in ast.walk(tree)
            if isinstance(n, ast.Import)
            for alias in n.names
        }
        names |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert names <= {"torch", "thinker", *sys.stdlib_module_names}, path
        ours = {name.split(".")[1] for name in imported(path)}
        assert ours <= {"model", "runtime"}, path


def test_a_room_has_at_most_fifteen_files():
    rooms = {path.parent for path in FILES} - {ROOT}
    crowded = set()
    for room in rooms:
        files = [path for path in room.iterdir() if path.is_file() and path.suffix != ".pyc"]
        if len(files) > 15:
            crowded.add(str(room.relative_to(ROOT)))
    assert crowded == set()


def test_nothing_unpickles():
    for path in FILES:
        code = path.read_text()
        assert "import pickle" not in code
        # torch's loader of weights runs no code of a file.
        for call in re.findall(r"torch\.load\([^)]*\)", code):
            assert "weights_only=True" in call
        assert "allow_pickle=True" not in code
