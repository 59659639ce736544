"""Verify and read the files of a checkpoint. Nothing is unpickled."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinker.checkpoint.format import (
    CONFIG,
    DTYPES,
    FORMAT_VERSION,
    MANIFEST,
    MODEL,
    STATE,
    TRAINING,
    CorruptCheckpoint,
    UnsupportedFormat,
    is_sharded,
    to_json,
)
from thinker.runtime import reading
from thinker.runtime.reading import sha256_of_file

Expected = Mapping[str, Tensor | None]  # tensors with the dtypes and shapes to expect


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
        if not _is_manifest(manifest) or path.read_bytes() != to_json(manifest):
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
    return reading.read_json(path, CorruptCheckpoint)


def load_tensors(folder: Path, name: str, expected: Expected) -> dict[str, Tensor]:
    """Read the tensors of a file of a checkpoint, or of the shards that ranks wrote instead.

    Checks names, shapes and dtypes against `expected` before it loads any tensor. A tensor expected
    as None may have any shape and is not loaded. If `expected` has sharded tensors, each rank reads
    its own rows into them. Raises CorruptCheckpoint if a tensor differs, or a file is missing or
    damaged.
    """
    has_shards = is_sharded(folder)
    where = folder if has_shards else folder / name
    _compare(read_header(folder, name), expected, where)
    # Sharded tensors are filled in place; others are new.
    wanted = {key: tensor for key, tensor in expected.items() if tensor is not None}
    if has_shards or any(hasattr(tensor, "to_local") for tensor in wanted.values()):
        from thinker.checkpoint import sharded

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
    if is_sharded(folder):
        from thinker.checkpoint import sharded

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
