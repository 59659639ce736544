"""Sharded checkpoints: one safetensors file per rank, written by torch's distributed checkpoint.

Each rank writes its rows, and the header of each file lists them. Any number of ranks can read them, each its own
rows. Several ranks can also read an unsharded checkpoint.
"""

import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from thinker.runtime.errors import UserError
from thinker.runtime.process_group import DistContext

PATTERN = "shard-*.safetensors"
DTYPES = {torch.float32: "F32"}  # by their names in safetensors


class CorruptCheckpoint(UserError):
    """A checkpoint that is incomplete or damaged. The message names the file."""


def write(folder: Path, tensors: dict[str, Tensor], dist: DistContext) -> list[Path]:
    """Write this rank's rows of `tensors` into an existing folder. All ranks call this. Returns the files written."""
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled"
            )  # in a single process
            values = {name: tensor.detach() for name, tensor in tensors.items()}
            save(values, storage_writer=writer, no_dist=dist.world_size == 1)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    return [
        path for path in folder.glob(PATTERN) if int(path.name.split("-")[1]) == dist.rank + 1
    ]  # counts from 1


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint's tensors are in one file per rank."""
    return next(folder.glob(PATTERN), None) is not None


def read_header(folder: Path) -> dict[str, tuple]:
    """Read (dtype, *shape) of each unsharded tensor. Raises CorruptCheckpoint if a row is missing or duplicated."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        raise CorruptCheckpoint(f"{folder} contains an incomplete safetensors file") from error
    header: dict[str, tuple] = {}
    for name, tensor in metadata.items():
        shape, n_rows, fits = tuple(tensor.size), 0, True
        for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.offsets) if shape else ():
            fits &= (
                tuple(chunk.offsets) == (n_rows, *[0] * (len(shape) - 1))
                and tuple(chunk.sizes[1:]) == shape[1:]
            )
            n_rows += chunk.sizes[0]
        if shape and not (fits and n_rows == shape[0]):
            raise CorruptCheckpoint(f"{folder} has missing or duplicate rows of {name}")
        header[name] = DTYPES.get(tensor.properties.dtype, str(tensor.properties.dtype)), *shape
    return header


def read(folder: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors by name. Compare their shapes with read_header() first.

    Fills sharded tensors in place and returns new tensors for the others. Raises CorruptCheckpoint.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load

    tensors = {
        name: tensor.detach()
        if hasattr(tensor, "to_local")
        else torch.empty(tensor.shape, dtype=tensor.dtype)
        for name, tensor in expected.items()
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled"
            )  # each rank reads separately
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise CorruptCheckpoint(
            f"{folder} cannot be read: {next(iter(error.failures.values()))[0]}"
        ) from error
    return tensors
