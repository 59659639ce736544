"""Two trees of the repository, an older commit and the one in use, to run side by side."""

import os
import subprocess
import tarfile
from pathlib import Path

from thinker.runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def has_commit(commit: str) -> bool:
    """Whether the repository's history holds a commit; a shallow clone lacks the older ones."""
    return _git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0


def check_out(commit: str, folder: Path) -> Path:
    """Write the files of a commit to `folder`/thinker, which must not exist yet. Returns that path.

    Raises UserError if the history does not hold the commit.
    """
    if not has_commit(commit):
        remedy = "in a shallow clone, run git fetch --unshallow"
        raise UserError(f"the history of {ROOT} has no commit {commit}; {remedy}")
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "thinker.tar"
    packed = _git("archive", "--format=tar", f"--output={archive}", commit)
    if packed.returncode != 0:
        raise UserError(f"git cannot pack commit {commit}: {packed.stderr.strip()}")
    tree = folder / "thinker"
    tree.mkdir()
    with tarfile.open(archive) as files:
        files.extractall(tree)
    archive.unlink()
    return tree


def link_own_tree(folder: Path) -> Path:
    """Make `folder`/thinker a link to the tree in use, with its uncommitted changes. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = folder / "thinker"
    tree.symlink_to(ROOT)
    return tree


def environment(tree: Path, threads: int | None = None) -> dict[str, str]:
    """Environment variables of a process that imports thinker from `tree`."""
    others = {"PYTHONPATH": str(tree.parent), "PYTHONUTF8": "1"}
    if threads is not None:
        others["OMP_NUM_THREADS"] = str(threads)
    return os.environ | others


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError("git is not installed; install it to compare with a commit") from error
