"""Write the files of a checkpoint, so that its folder appears complete or not at all."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker.checkpoint.format import DTYPES, FORMAT_VERSION, MANIFEST, TENSORS, Files, to_json
from thinker.runtime.files import sync_to_disk
from thinker.runtime.ranks import DistContext
from thinker.runtime.reading import sha256_of_file

CHUNK_BYTES = 1 << 18  # to write and hash at once


def write_checkpoint(
    folder: Path,
    files: Files,
    throttle: Callable[[float], None] | None = None,
    dist: DistContext | None = None,
) -> None:
    """Write files so that `folder` appears complete or not at all. Replaces a folder of that name.

    throttle: called after every chunk with the seconds it took; may wait, to leave the processor to
    others. dist: the ranks that call this, each to write its part of the tensors. Raises OSError
    and cleans up on failure.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    is_main = dist is None or dist.is_main
    manifest = {}
    try:
        if is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        if dist is not None:
            dist.broadcast_object()  # waits until the folder exists
            manifest = _write_shards(temporary, files, dist)
            files = {name: file for name, file in files.items() if not name.endswith(TENSORS)}
        if not is_main:
            return
        for name in sorted(files):
            manifest[name] = _write_file(temporary / name, files[name], throttle)
        listing = {"format_version": FORMAT_VERSION, "files": dict(sorted(manifest.items()))}
        _write_file(temporary / MANIFEST, listing, throttle)
        # After a power failure, a folder with the final name is complete.
        sync_to_disk(temporary)
        _rename_to(temporary, folder)
    except BaseException as error:
        if is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(folder)
        raise


def _write_shards(folder: Path, files: Files, dist: DistContext) -> dict[str, list[int | str]]:
    """Write this rank's part of all tensors. Returns the manifest's entries for all ranks."""
    from thinker.checkpoint import sharded

    tensors = {}
    for name, file in files.items():
        if name.endswith(TENSORS):
            tensors.update(file)
    entries = {}
    for path in sharded.write(folder, tensors, dist):
        entries[path.name] = [path.stat().st_size, sha256_of_file(path)]
    manifest = {}
    for entries_of_rank in dist.gather_objects(entries):
        manifest.update(entries_of_rank)
    return manifest


def _rename_to(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name, in place of an older one."""
    replaced = folder.with_name(f".{folder.name}.replaced")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)  # recover() restores it if this process ends here
    temporary.rename(folder)
    sync_to_disk(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_file(
    path: Path, file: dict[str, Any], throttle: Callable[[float], None] | None
) -> list[int | str]:
    """Write and sync one file. Returns its size and sha256."""
    chunks: Iterable[bytes | memoryview]
    if path.name.endswith(TENSORS):
        chunks = _to_safetensors(file)
    else:
        chunks = [to_json(file)]
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for chunk in chunks:
            start = time.perf_counter()
            out.write(chunk)
            digest.update(chunk)
            if throttle is not None:
                throttle(time.perf_counter() - start)
        out.flush()
        os.fsync(out.fileno())
        return [out.tell(), digest.hexdigest()]


def _to_safetensors(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in chunks: the header, then the tensors.

    The library writes it in one call, which cannot be throttled, and hashing would have to read it
    again.
    """
    tensors = dict(sorted(tensors.items()))  # the same bytes for any order of insertion
    header = {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        # One tensor at a time, so that a GPU's tensors need little host memory.
        data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]
