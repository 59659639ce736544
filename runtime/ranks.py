"""The ranks of distributed training, as all other code sees them: here one process.

Code asks its context what the ranks share. Several processes have another context
(training/distributed/process_group.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class DistContext:
    """The rank of this process: the only one."""

    rank: int = 0
    world_size: int = 1  # the number of ranks
    local_rank: int = 0  # on its machine
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes, logs and prints."""
        return self.rank == 0

    def init_process_group(self, device_type: str, timeout: float) -> None:
        """Connect the ranks. timeout: seconds that one rank waits for another."""

    def all_gather_scalars(self, *values: float) -> list[list[float]]:
        """Gather the same number of values from each rank, in rank order."""
        return [list(values)]

    def broadcast_object(self, value: Any = None) -> Any:
        """The value of rank 0, on every rank."""
        return self.gather_objects(value)[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        return [value]

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the body on rank 0 first, then on the other ranks. Use it only once."""
        yield

    def shutdown(self) -> None:
        """Wait until rank 0 has finished."""

    def resolve_failure(self, error: BaseException) -> BaseException:
        """The error that this rank ends with."""
        return error


SINGLE_PROCESS = DistContext()  # independent of the environment


def full_tensor(tensor: Tensor) -> Tensor:
    """All rows of a sharded tensor; returns other tensors unchanged. All ranks must call this."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.full_tensor()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor; returns other tensors unchanged."""
    if not hasattr(tensor, "to_local"):
        return tensor
    return tensor.to_local()
