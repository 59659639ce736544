"""corpus.json, the index of a finished corpus in the cache, which is verified when it is opened."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from thinker.data.corpus.shards import DamagedShard
from thinker.runtime.files import atomic_write
from thinker.runtime.reading import read_json, sha256_of_file

INDEX = "corpus.json"


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write corpus.json with `index`, the sha256 of each file in the folder, and the sha256 of its
    own content."""
    files = {path.name: sha256_of_file(path) for path in sorted(folder.iterdir())}
    index = index | {"files": files}
    atomic_write(folder / INDEX, json.dumps(index | {"index_sha256": _hash_of(index)}))


def read_index(folder: Path) -> dict[str, Any]:
    """Read corpus.json and verify all files in threads. Raises DamagedShard if any file has
    changed."""
    index = read_json(folder / INDEX, DamagedShard)
    if index.pop("index_sha256", None) != _hash_of(index):
        raise DamagedShard(f"{folder / INDEX} does not match its sha256")
    names = list(index["files"])
    paths = [folder / name for name in names]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, digest in zip(names, pool.map(sha256_of_file, paths)):
            if digest != index["files"][name]:
                raise DamagedShard(f"{folder / name} does not match its sha256")
    return index


def _hash_of(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
