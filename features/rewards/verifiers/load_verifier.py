"""Find a verifier by its name, or in a file of the user."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from thinker.features.rewards.verifiers.verifier import VERIFIERS, Verifier
from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.reading import sha256_of_file

_files: list[Path] = []  # of verifiers that were loaded


def load_verifier(name: str) -> Verifier:
    """The verifier that a config names: one in VERIFIERS, or FILE.py:FUNCTION.

    Raises UserError if there is none.
    """
    check_verifier(name)
    path, _, function = name.rpartition(":")
    if not path:
        return VERIFIERS.get(name)
    values = vars(_load_module(path))
    if function not in values:
        functions = [each for each, value in values.items() if inspect.isfunction(value)]
        hint = did_you_mean(function, functions)
        raise UserError(f"{path} has no function {function}{hint}")
    found = values[function]
    if not callable(found):
        raise UserError(f"{function} in {path} is {type(found).__name__}; it must be a function")
    return found


def check_verifier(name: str) -> None:
    """Raise UserError for an unknown name or a missing file. Runs no code of the file."""
    path, _, _ = name.rpartition(":")
    if name.endswith(".py"):
        raise UserError(f"{name} names no function; use FILE.py:FUNCTION")
    if not path.endswith(".py"):
        for separator in (":", "."):
            module, _, function = name.rpartition(separator)
            if Path(f"{module}.py").is_file():
                raise UserError(f"unknown verifier {name}; did you mean {module}.py:{function}?")
        from thinker.features.rewards.verifiers import built_in

        built_in.check_packages(VERIFIERS.get(name))
    elif not Path(path).is_file():
        raise UserError(f"{path} is not a file; use FILE.py:FUNCTION")


def file_digests(names: list[str]) -> dict[str, str]:
    """A digest of each file of the user among these verifiers, by path."""
    digests = {}
    for name in names:
        path, _, _ = name.rpartition(":")
        if path:
            digests[path] = sha256_of_file(Path(path))
    return digests


def _check_neighbours(file: Path) -> None:
    """Raise UserError if a module next to this file has the name of one next to another verifier:
    Python would import the same one for both."""
    for other in _files:
        if other.parent == file.parent:
            continue
        shared = _modules_beside(file) & _modules_beside(other)
        shared -= {file.stem, other.stem}
        if shared:
            raise UserError(
                f"{file.parent} and {other.parent} both have a module {min(shared)}; rename one of "
                "them, or put the verifiers into one folder"
            )
    _files.append(file)


def _modules_beside(file: Path) -> set[str]:
    """The names of the modules and packages in the folder of a file."""
    modules = {path.stem for path in file.parent.glob("*.py")}
    packages = {path.parent.name for path in file.parent.glob("*/__init__.py")}
    return modules | packages


@cache
def _load_module(path: str) -> ModuleType:
    """The module in a file, which may import its neighbours."""
    folder = str(Path(path).resolve().parent)
    _check_neighbours(Path(path).resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module
