"""No import runs back up, there are no circles, and the files stay small."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "errors": 0,
    "device": 0,
    "ranks": 0,
    "kernels": 0,
    "attention": 1,
    "model": 2,
    "data": 1,
    "storage": 3,
    "generation": 3,
    "evaluation": 4,
    "training": 4,
    "analysis": 5,
    "benchmarks": 5,
}
FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0]
    in {*ROOMS, "train.py", "generate.py", "errors.py", "device.py", "ranks.py", "scripts"}
]


def imported(path):
    """Names of our own modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
        yield from (name for name in names if name.split(".")[0] in ROOMS)


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    floor = ROOMS.get(room(path), 6)
    for name in imported(path):
        other = name.split(".")[0]
        assert other == room(path) or ROOMS[other] <= floor, f"{path} imports {name}, which is above it"
    below = {"kernels": set(), "attention": {"kernels"}, "model": {"attention", "kernels"}, "data": set()}
    if room(path) in below:
        assert {name.split(".")[0] for name in imported(path)} <= {room(path), "errors", *below[room(path)]}


def test_rooms_have_no_circles():
    uses = {name: set() for name in ROOMS}
    for path in FILES:
        if room(path) in ROOMS:
            uses[room(path)] |= {name.split(".")[0] for name in imported(path)} - {room(path)}
    order = []
    while uses:
        free = [name for name, needs in uses.items() if not needs & uses.keys()]
        assert free, f"a circle among {sorted(uses)}"
        order += free
        uses = {name: needs for name, needs in uses.items() if name not in free}
    assert order[0] == "errors"


def test_model_needs_torch_alone():
    ours = {"kernels", "attention", "model"}
    library = {
        "ast",
        "collections",
        "contextlib",
        "dataclasses",
        "fnmatch",
        "functools",
        "inspect",
        "math",
        "operator",
        "re",
        "typing",
        "__future__",
    }
    for path in [path for path in FILES if room(path) in ours]:
        tree = ast.parse(path.read_text())
        names = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        names |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert names <= {"torch", "errors", "typing", *ours, *library}, path


def test_sizes():
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    extras = ("linear_attention.py", "lora.py", "taps.py")  # off the main path
    assert sum(n for path, n in lengths.items() if room(path) == "model" and path.name not in extras) <= 900
    assert sum(n for path, n in lengths.items() if room(path) == "model") <= 1250
    of_benchmarks = sum(n for path, n in lengths.items() if room(path) == "benchmarks")
    assert of_benchmarks <= 2400  # they measure the toolkit, as tests do
    assert sum(lengths.values()) - of_benchmarks <= 15250
    assert {path.name: n for path, n in lengths.items() if n > 400} == {}


def test_nothing_unpickles():
    for path in FILES:
        code = path.read_text()
        assert "import pickle" not in code
        assert "torch.load(" not in code
        assert "allow_pickle=True" not in code
