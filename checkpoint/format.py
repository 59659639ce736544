"""Write, verify and read the files of one checkpoint, whose folder is always complete or absent.

A checkpoint is written under a temporary name, with a manifest of sizes and sha256 sums, flushed to
the disk and then renamed. Nothing is unpickled.

    step-00000500/                       best-00000400/, nonfinite-00000512/
        config.json           model config        config.json
        model.safetensors     weights             model.safetensors
        training.safetensors  optimizer state
        state.json            everything else     state.json
        manifest.json         format version,     manifest.json
                              {file: [bytes, sha256]}

If several ranks train a large model, one file per rank replaces both files of tensors (see
sharded.py).
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinker.checkpoint import sharded
from thinker.checkpoint.sharded import DTYPES, CorruptCheckpoint
from thinker.runtime.errors import UserError
from thinker.runtime.files import sha256_of_file, sync_to_disk
from thinker.runtime.process_group import DistContext
from thinker.runtime.reading import read_json as read_json_file

FORMAT_VERSION = 2  # increased with every incompatible change
MANIFEST = "manifest.json"
CONFIG = "config.json"
STATE = "state.json"
MODEL = "model.safetensors"
TRAINING = "training.safetensors"
TENSORS = ".safetensors"  # suffix of files of tensors; other files are JSON
CHUNK_BYTES = 1 << 18  # to write and hash at once

Files = dict[str, dict[str, Any]]  # a checkpoint's files by name: tensors, or a JSON object
Expected = Mapping[str, Tensor | None]  # tensors with the dtypes and shapes to expect


class UnsupportedFormat(UserError):
    """A checkpoint of another format version. The message names both versions."""


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


def verify(folder: Path) -> None:
    """Compare all files with the manifest.

    Raises UnsupportedFormat, or CorruptCheckpoint that names the wrong file.
    """
    path = folder / MANIFEST
    manifest = read_json(path)
    version = manifest.get("format_version", 1)  # format 1 had no version
    if version != FORMAT_VERSION:
        raise UnsupportedFormat(
            f"{folder} has checkpoint format {version}, but this version of Thinker reads format "
            f"{FORMAT_VERSION}; use the version that wrote it, or another run.dir"
        )
    try:
        if not _is_manifest(manifest) or path.read_bytes() != _to_json(manifest):
            raise CorruptCheckpoint(f"{path} is damaged: it differs from what was written")
        entries = manifest["files"]
        for name in _required_files(folder, entries):
            if name not in entries:
                raise CorruptCheckpoint(f"{path} does not list {name}")
        for name, entry in entries.items():
            file = folder / name
            if file.is_symlink() or not file.is_file():
                raise CorruptCheckpoint(f"{file} is missing or not a regular file")
            if [file.stat().st_size, sha256_of_file(file)] != entry:
                raise CorruptCheckpoint(
                    f"{file} is damaged: its size or sha256 differs from manifest.json"
                )
    except OSError as error:
        raise CorruptCheckpoint(f"{folder} cannot be read: {error}") from error
    # A run would resume a renamed or copied folder at the wrong step.
    number = re.fullmatch(r"(?:step|best|nonfinite)-(\d+)", folder.name)
    if number and read_json(folder / STATE).get("step") != int(number[1]):
        raise CorruptCheckpoint(f"{folder / STATE} is from a different step than its folder")


def _is_manifest(manifest: dict[str, Any]) -> bool:
    """Whether a manifest has the right keys, and lists plain names of files."""
    if set(manifest) != {"format_version", "files"} or not isinstance(manifest["files"], dict):
        return False
    return all(re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII) for name in manifest["files"])


def _required_files(folder: Path, names: Iterable[str]) -> list[str]:
    """Names of the files that a checkpoint must have."""
    if any(name.startswith("shard-") for name in names):
        return [CONFIG, STATE]
    if folder.name.startswith("step-"):
        return [CONFIG, STATE, MODEL, TRAINING]
    return [CONFIG, STATE, MODEL]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises CorruptCheckpoint if the file is missing or contains anything else.
    """
    return read_json_file(path, CorruptCheckpoint)


def load_tensors(folder: Path, name: str, expected: Expected) -> dict[str, Tensor]:
    """Read the tensors of a file of a checkpoint, or of the shards that ranks wrote instead.

    Checks names, shapes and dtypes against `expected` before it loads any tensor. A tensor expected
    as None may have any shape and is not loaded. If `expected` has sharded tensors, each rank reads
    its own rows into them. Raises CorruptCheckpoint if a tensor differs, or a file is missing or
    damaged.
    """
    has_shards = sharded.is_sharded(folder)
    where = folder if has_shards else folder / name
    _compare(read_header(folder, name), expected, where)
    # Sharded tensors are filled in place; others are new.
    wanted = {key: tensor for key, tensor in expected.items() if tensor is not None}
    if has_shards or any(hasattr(tensor, "to_local") for tensor in wanted.values()):
        return sharded.read(folder, wanted)
    with open_safetensors(folder / name) as file:
        # A mapped tensor would change with the file.
        return {key: file.get_tensor(key).clone() for key in wanted}


def _compare(header: dict[str, tuple], expected: Expected, where: Path) -> None:
    """Raise CorruptCheckpoint if there are other tensors than expected."""
    for key in sorted(header.keys() | expected.keys()):
        tensor = expected.get(key)
        found = header.get(key)
        if key in expected and tensor is None and found is not None:
            continue  # it may have any shape
        wanted = None
        if tensor is not None:
            wanted = (DTYPES[tensor.dtype], *tensor.shape)
        if found != wanted:
            raise CorruptCheckpoint(
                f"{where}: tensor {key}: found {_words(found)}, expected {_words(wanted)}"
            )


def _words(shape: tuple | None) -> str:
    """A dtype and a shape, such as "F32 4 8"."""
    if shape is None:
        return "nothing"
    return " ".join(map(str, shape))


def read_header(folder: Path, name: str = MODEL) -> dict[str, tuple]:
    """Read (dtype, *shape) of each tensor in a checkpoint's file, or in the shards instead.

    Raises CorruptCheckpoint.
    """
    header = {}
    if sharded.is_sharded(folder):
        # The shards have the tensors of both files.
        for key, shape in sharded.read_header(folder).items():
            if key.startswith("optimizer.") == (name == TRAINING):
                header[key] = shape
        return header
    with open_safetensors(folder / name) as file:
        for key in file.keys():  # noqa: SIM118 - not a dict
            part = file.get_slice(key)
            header[key] = (part.get_dtype(), *part.get_shape())
    return header


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises CorruptCheckpoint if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{path} is missing") from error
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: removed while mapping
        raise CorruptCheckpoint(f"{path} is not a complete safetensors file") from error


def _to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _write_file(
    path: Path, file: dict[str, Any], throttle: Callable[[float], None] | None
) -> list[int | str]:
    """Write and sync one file. Returns its size and sha256."""
    chunks: Iterable[bytes | memoryview]
    if path.name.endswith(TENSORS):
        chunks = _to_safetensors(file)
    else:
        chunks = [_to_json(file)]
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
