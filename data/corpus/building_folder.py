"""Folders of the cache that are built under a lock.

tokens/KEY/           a finished corpus: shards, the tokenizer, and corpus.json (corpus_index.py)
tokens/KEY.building/  a corpus that is being built, or whose process was stopped; the next one
                      continues it
tokenizers/KEY/       the tokenizer of a mixture
locks/KEY.lock        locked by the process that builds KEY; the files stay, as removing them would
                      break the lock
"""

import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

BUILDING = ".building"
ABANDONED_SECONDS = 7 * 24 * 3600


@contextlib.contextmanager
def building_folder(folder: Path) -> Iterator[Path]:
    """Create or continue the folder where `folder` is built. One process at a time: the others
    wait.

    It stays if the process is killed, or interrupted after a shard was finished, and is removed
    after any other error. If it is not continued for a week, it is removed when another folder is
    built.
    """
    locks = folder.parent.parent / "locks"
    locks.mkdir(exist_ok=True)
    _remove_abandoned(folder.parent, locks)
    building = folder.with_name(f"{folder.name}{BUILDING}")
    lock = FileLock(locks / f"{folder.name}.lock")
    try:
        _acquire(lock, folder)
    except OSError:  # the file system has no locks: build in a folder of our own
        building = folder.with_name(f"{folder.name}{BUILDING}-{secrets.token_hex(4)}")
    try:
        building.mkdir(exist_ok=True)
        yield building
    except BaseException as error:
        if isinstance(error, Exception) or not list(building.glob("*.tokens")):
            shutil.rmtree(building, ignore_errors=True)
        raise
    finally:
        lock.release()


def _acquire(lock: FileLock, folder: Path) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another process that writes {folder}", file=sys.stderr)
        lock.acquire()


def _remove_abandoned(parent: Path, locks: Path) -> None:
    """Remove folders that nobody has continued for a week."""
    for building in parent.glob(f"*{BUILDING}*"):
        name = building.name.partition(BUILDING)[0]
        with contextlib.suppress(Timeout, OSError), FileLock(locks / f"{name}.lock", timeout=0):
            if time.time() - building.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(building, ignore_errors=True)


def publish(building: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, unless another process was faster on a file
    system without locks."""
    try:
        os.rename(building, folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(building)
