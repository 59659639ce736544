"""The command `thinker lessons`: list the lessons, copy their notebooks, or build them."""

import argparse
import shutil
import sys
from pathlib import Path

from thinker.lessons import build
from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError

NOTEBOOKS = build.FOLDER / "notebooks"


def main() -> int:
    """List, copy or build the lessons. Returns the exit status."""
    if sys.argv[1:2] == ["build"]:
        sys.argv = [f"{sys.argv[0]} build", *sys.argv[2:]]
        return build.main()
    parser = ArgumentParser(
        description="List the lessons on attention, or copy their notebooks to run them.",
        examples=("", "copy lessons", "build --out site/lessons"),
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    copy = commands.add_parser(
        "copy",
        help="copy the notebooks to a folder",
        description="Copy the notebooks to a folder; Jupyter runs them.",
    )
    copy.add_argument("folder", metavar="FOLDER", type=Path, help="new or empty folder")
    commands.add_parser("build", help="run the lessons, and write notebooks and pages")
    arguments = parser.parse_args()
    if arguments.command == "copy":
        return copy_notebooks(arguments)
    for number, lesson in enumerate(build.find_lessons(), start=1):
        print(f"{number}  {lesson.title.removeprefix('# ')}: {lesson.question}")
    print(f"\ncopy the notebooks, and open them with Jupyter: {sys.argv[0]} copy FOLDER")
    return 0


def copy_notebooks(arguments: argparse.Namespace) -> int:
    """Copy the notebooks. Returns the exit status. Raises UserError if files are in the way."""
    folder = arguments.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists; give a new or empty folder")
    shutil.copytree(NOTEBOOKS, folder, dirs_exist_ok=True)
    print(f"wrote {len(list(folder.glob('*.ipynb')))} notebooks to {folder}")
    print(f"run them: pip install jupyterlab, then jupyter lab {folder}")
    return 0
