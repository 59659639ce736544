"""A checkpoint's tensors in one safetensors file a rank: torch's distributed checkpoint, with its safetensors storage.

Each rank writes the rows that it has. They can be read by any number of ranks, each its own rows again, or by one
process whole; and so can the files of a checkpoint that was saved whole. A file says in its header which rows it holds.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from thinker.runtime.process_group import DistContext

PATTERN = "shard-*.safetensors"

Header = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # type and whole shape by name


class IncompleteShards(Exception):
    """Files that do not hold every row of every tensor once; the message says where."""


def write(folder: Path, tensors: dict[str, Tensor], dist: DistContext) -> list[Path]:
    """Write this rank's rows of `tensors` into a folder that is there; all ranks do at once. Returns its own files.

    Raises OSError where a disk is full.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter, save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process may write so, too
            values = {name: tensor.detach() for name, tensor in tensors.items()}
            save(values, storage_writer=writer, no_dist=dist.world_size == 1)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    return [path for path in folder.glob(PATTERN) if int(path.name.split("-")[1]) == dist.rank + 1]  # from 1


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint's tensors lie in a file a rank."""
    return next(folder.glob(PATTERN), None) is not None


def header(folder: Path) -> Header:
    """What the safetensors files of a folder hold together. Raises IncompleteShards if a row is missing or doubled."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise IncompleteShards(f"{folder} holds a file that is no whole safetensors file") from error
    shapes: Header = {}
    for name, tensor in found.items():
        shape, end = tuple(tensor.size), 0
        for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.offsets):
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if not shape:
                continue
            if offsets != (end,) + (0,) * (len(shape) - 1) or sizes[1:] != shape[1:]:
                raise IncompleteShards(f"{folder} does not hold every row of {name} once")
            end += sizes[0]
        if shape and end != shape[0]:
            raise IncompleteShards(f"{folder} does not hold every row of {name} once")
        shapes[name] = tensor.properties.dtype, shape
    return shapes


def read(folder: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of these names, whose shapes must have been compared with header().

    One that the ranks share is filled, each rank reading its own rows; of others the values are read into new ones, in
    the host's memory. Raises IncompleteShards where a file is another than header() saw.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load

    tensors = {
        name: tensor.detach() if hasattr(tensor, "to_local") else torch.empty(tensor.shape, dtype=tensor.dtype)
        for name, tensor in like.items()
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as each rank reads for itself
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise IncompleteShards(f"{folder} cannot be read: {next(iter(error.failures.values()))[0]}") from error
    return tensors
