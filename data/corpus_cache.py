"""Folders of the token cache, built under a lock and verified when they are opened.

KEY/                        a finished corpus: shards, the tokenizer, and corpus.json with the sha256 of each file
KEY.building-XXXXXXXX/      a corpus that is being built
KEY.building-XXXXXXXX.lock  locked by the process that builds the corpus until it ends
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from thinker.data.shards import DamagedShard
from thinker.runtime.files import atomic_write, sha256_of_file
from thinker.runtime.reading import read_json

INDEX = "corpus.json"


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write corpus.json with `index`, the sha256 of each file in the folder, and the sha256 of its own content."""
    index = index | {"files": {path.name: sha256_of_file(path) for path in sorted(folder.iterdir())}}
    atomic_write(folder / INDEX, json.dumps(index | {"index_sha256": _hash_of(index)}))


def read_index(folder: Path) -> dict[str, Any]:
    """Read corpus.json and verify all files in threads. Raises DamagedShard if any file has changed."""
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
    """Create a folder beside `folder` and remove it at the end unless it was renamed, even after a signal.

    First removes folders that killed processes left behind.
    """
    for lock_path in folder.parent.glob("*.building-*.lock"):
        # Timeout: its process is still running. OSError: the file system has no locks.
        with contextlib.suppress(Timeout, OSError), FileLock(lock_path, timeout=0):
            _remove(lock_path)
    lock_path = folder.with_name(f"{folder.name}.building-{secrets.token_hex(4)}.lock")
    lock, building = FileLock(lock_path, timeout=10), lock_path.with_suffix("")
    try:
        with contextlib.suppress(OSError):
            lock.acquire()
        building.mkdir()
        yield building
    finally:
        _remove(lock_path)
        lock.release()


def _remove(lock_path: Path) -> None:
    """Remove the folder of a lock that this process holds, and the lock file."""
    shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
    lock_path.unlink(missing_ok=True)
