"""List the checkpoints of a run, and find the newest one that is intact."""

import os
import re
import sys
from pathlib import Path

from thinker.checkpoint.format import CorruptCheckpoint
from thinker.checkpoint.read_files import verify
from thinker.runtime.errors import UserError

CHECKPOINTS = "checkpoints"  # the folder in a run directory


def list_checkpoints(folder: Path, kind: str = "step") -> list[Path]:
    """The checkpoints KIND-N in a folder, oldest first, including damaged ones."""
    matching = list(folder.glob(f"{kind}-*"))
    folders = []
    for path in matching:
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder and re.fullmatch(rf"{kind}-\d+", path.name):
            folders.append(path)
    if not all(os.path.lexists(path) for path in matching):
        # A running training has just replaced one.
        return list_checkpoints(folder, kind)
    return sorted(folders, key=number_of)


def number_of(folder: Path) -> int:
    """The step of a checkpoint."""
    return int(folder.name.split("-")[1])


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest intact checkpoint in a folder, or None if there are none.

    Raises UserError if all are damaged.
    """
    damaged: set[Path] = set()
    while True:
        folders = list_checkpoints(checkpoints)  # a running training may change them
        intact = [folder for folder in folders if folder not in damaged]
        if not intact:
            break
        newest = intact[-1]
        try:
            verify(newest)
            if damaged:
                print(f"using {newest} instead", file=sys.stderr)
            return newest
        except CorruptCheckpoint as error:
            if newest.exists():  # otherwise the training has just replaced it
                print(f"skipping a damaged checkpoint: {error}", file=sys.stderr)
                damaged.add(newest)
    if not damaged:
        return None
    hint = ""
    if list_checkpoints(checkpoints, "best"):
        hint = "sample with --checkpoint best, or "
    raise UserError(
        f"all checkpoints in {checkpoints} are damaged; {hint}train again in another run.dir"
    )
