"""Sharded checkpoints: one safetensors file per rank, written by torch's distributed checkpoint.

Each rank writes its rows, and the header of each file lists them. Any number of ranks can read
them, each its own rows. Several ranks can also read an unsharded checkpoint.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from thinker.checkpoint.format import DTYPES, SHARDS, CorruptCheckpoint
from thinker.runtime.ranks import DistContext

if TYPE_CHECKING:
    from torch.distributed.checkpoint import CheckpointException

# What torch raises for damaged files.
UNREADABLE = (
    SafetensorError,
    OSError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
)


def write(folder: Path, tensors: dict[str, Tensor], dist: DistContext) -> list[Path]:
    """Write this rank's rows of `tensors` into an existing folder. All ranks call this.

    Returns the files written.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    values = {name: tensor.detach() for name, tensor in tensors.items()}
    try:
        with _ignore_disabled_warning():
            save(values, storage_writer=writer, no_dist=dist.world_size == 1)
    except CheckpointException as error:
        raise _first_failure(error) from error
    written = []
    for path in folder.glob(SHARDS):
        number = int(path.name.split("-")[1])  # counts from 1
        if number == dist.rank + 1:
            written.append(path)
    return written


def read_header(folder: Path) -> dict[str, tuple]:
    """Read (dtype, *shape) of each unsharded tensor.

    Raises CorruptCheckpoint if a row is missing or duplicated.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except UNREADABLE as error:
        raise CorruptCheckpoint(f"{folder} contains an incomplete safetensors file") from error
    header: dict[str, tuple] = {}
    for name, tensor in metadata.items():
        shape = tuple(tensor.size)
        if shape and not _are_complete(tensor.chunks, shape):
            raise CorruptCheckpoint(f"{folder} has missing or duplicate rows of {name}")
        dtype = tensor.properties.dtype
        header[name] = (DTYPES.get(dtype, str(dtype)), *shape)
    return header


def _are_complete(chunks: list[Any], shape: tuple[int, ...]) -> bool:
    """Whether the ranks' rows together are all rows of a tensor."""
    # Sorted by their first rows, the chunks must follow one another.
    n_rows = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        start = (n_rows,) + (0,) * (len(shape) - 1)
        if tuple(chunk.offsets) != start or tuple(chunk.sizes[1:]) != shape[1:]:
            return False
        n_rows += chunk.sizes[0]
    return n_rows == shape[0]


def read(folder: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors by name. Compare their shapes with read_header() first.

    Fills sharded tensors in place and returns new tensors for the others. Raises CorruptCheckpoint.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load

    tensors = {}
    for name, tensor in expected.items():
        # Each rank fills its own rows.
        if hasattr(tensor, "to_local"):
            tensors[name] = tensor.detach()
        else:
            tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
    try:
        with _ignore_disabled_warning():  # each rank reads separately
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise CorruptCheckpoint(f"{folder} cannot be read: {_first_failure(error)}") from error
    return tensors


@contextlib.contextmanager
def _ignore_disabled_warning() -> Iterator[None]:
    """Without the warning that torch gives if a process reads or writes by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first_failure(error: CheckpointException) -> BaseException:
    """The error of the first rank in torch's error about several ranks."""
    failure, _ = next(iter(error.failures.values()))
    return failure
