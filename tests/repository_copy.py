"""A copy of the repository's files, as a clone would have them."""

import shutil
import subprocess

from conftest import ROOT


def copy_repository(folder, leave_out=()):
    """Copy what git tracks, and new files that it does not ignore, without these folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for file in listed.stdout.splitlines():
        is_left_out = any(file.startswith(f"{name}/") for name in leave_out)
        if is_left_out or not (ROOT / file).is_file():
            continue
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    return folder
