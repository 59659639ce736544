"""Folders of the cache, built under a lock and verified when they are opened.

tokens/KEY/           a finished corpus: shards, the tokenizer, and corpus.json with the sha256 of
each file tokens/KEY.building/  a corpus that is being built, or whose process was stopped; the next
one continues it tokenizers/KEY/       the tokenizer of a mixture
locks/KEY.lock        locked by the process that builds KEY; the files stay, as removing them would
break the lock
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from thinker.data.corpus.shards import DamagedShard
from thinker.runtime.files import atomic_write
from thinker.runtime.reading import read_json, sha256_of_file

INDEX = "corpus.json"
BUILDING = ".building"
ABANDONED_SECONDS = 7 * 24 * 3600


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write corpus.json with `index`, the sha256 of each file in the folder, and the sha256 of its
    own content."""
    index = index | {
        "files": {path.name: sha256_of_file(path) for path in sorted(folder.iterdir())}
    }
    atomic_write(folder / INDEX, json.dumps(index | {"index_sha256": _hash_of(index)}))


def read_index(folder: Path) -> dict[str, Any]:
    """Read corpus.json and verify all files in threads. Raises DamagedShard if any file has
    changed."""
    index = read_json(folder / INDEX, DamagedShard)
    if index.pop("index_sha256", None) != _hash_of(index):
        raise DamagedShard(f"{folder / INDEX} does not match its sha256")
    names = list(index["files"])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, digest in zip(names, pool.map(lambda name: sha256_of_file(folder / name), names)):
            if digest != index["files"][name]:
                raise DamagedShard(f"{folder / name} does not match its sha256")
    return index


def _hash_of(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


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
    building, lock = (
        folder.with_name(f"{folder.name}{BUILDING}"),
        FileLock(locks / f"{folder.name}.lock"),
    )
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
