"""Extensions: modules of the user that register names.

The names are those of attention patterns, optimizers, callbacks and so on. A config lists them
(`extensions: [my_module]`), and the run records each with the folder where it was found, such as
"my_module @ /home/ann/project". Whoever opens the run imports them again: from that folder, or else
from the current one, or from the Python path. They are never imported from the run directory
itself, so that a run that was downloaded does not bring code of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from thinker.runtime.errors import UserError

_imported: dict[str, str] = {}  # by name, as they are recorded


def import_extensions(
    entries: Iterable[str], folders: Sequence[Path] = (), opened: Path | None = None
) -> list[str]:
    """Import modules, each "NAME" or "NAME @ FOLDER".

    Returns them with the folders where they were found. folders: where to search before the current
    folder and the Python path. opened: a run directory or checkpoint, in which nothing is searched.

    Raises UserError if a module is not found, or if another module has its name.
    """
    return [_import_extension(entry, folders, opened) for entry in entries]


def imported_extensions() -> list[str]:
    """The extensions of this process, as they are recorded."""
    return list(_imported.values())


def _import_extension(entry: str, folders: Sequence[Path], opened: Path | None) -> str:
    name, _, recorded = (part.strip() for part in entry.partition(" @ "))
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"extensions has {name!r}; write the name of a module, such as my_module")
    if name.split(".")[0] == "thinker":
        raise UserError(f"extensions has {name}, a module of Thinker itself; remove it")
    places = _places(recorded, folders, opened)
    for place in places:
        if _has_module(place, name):
            _check_same(_import_from(place, name), name, place)
            _imported[name] = f"{name} @ {place}"
            return _imported[name]
    if not _is_on_python_path(name):
        searched = " or ".join(str(place) for place in places)
        raise UserError(
            f"there is no extension {name} in {searched}, nor on the Python path; "
            "add its folder to PYTHONPATH, or work in its folder"
        )
    importlib.import_module(name)
    _imported[name] = name
    return name


def _places(recorded: str, folders: Sequence[Path], opened: Path | None) -> list[Path]:
    """The folders to search, in order."""
    places = [*folders, Path.cwd()]
    if recorded:  # may be relative to a config, but not in a run
        recorded_at = folders[0] / recorded if folders else Path(recorded)
        if recorded_at.is_absolute() or folders:
            places.insert(0, recorded_at)
    places = list(dict.fromkeys(place.resolve() for place in places))
    if opened is None:
        return places
    return [place for place in places if not place.is_relative_to(opened.resolve())]


def _has_module(folder: Path, name: str) -> bool:
    path = folder.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _is_on_python_path(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _import_from(folder: Path, name: str) -> ModuleType:
    """Import a module of a folder.

    The folder comes first only now, so that later imports find what they found before.
    """
    text = str(folder)
    sys.path.insert(0, text)
    importlib.invalidate_caches()  # the file may be new
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(text)
        if text not in sys.path:
            sys.path.append(text)


def _check_same(module: ModuleType, name: str, folder: Path) -> None:
    """Raise UserError if another module of this name had been imported before."""
    file = module.__file__
    if file is None or not Path(file).resolve().is_relative_to(folder):
        raise UserError(
            f"the extension {name} in {folder} has the name of another module ({file}); rename it"
        )
