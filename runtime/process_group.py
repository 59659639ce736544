"""The processes of one training (ranks): how they find each other, agree on decisions, and end together.

torchrun starts them and numbers them in the environment. Tensors and objects go through torch's process group; who is
alive, and who failed first, goes through the key-value store that the ranks share.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from thinker.runtime.errors import RunError, UserError

if TYPE_CHECKING:
    from torch import Tensor

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
CONNECT_SECONDS = 60.0  # until the store must answer
ROLL_CALL_SECONDS = 5.0  # in which all living ranks answer after one went silent


@dataclass
class DistContext:
    """This process among the ranks that train together, or alone."""

    rank: int = 0
    world_size: int = 1  # the number of ranks
    local_rank: int = 0  # on its machine
    local_world_size: int = 1
    store: Any = None  # the key-value store of torch.distributed that all ranks share
    under_torchrun: bool = False  # torchrun holds the store, which then outlives rank 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes, logs and prints."""
        return self.rank == 0

    @classmethod
    def from_environment(cls) -> DistContext:
        """The rank that torchrun's variables describe, or a single process. Raises UserError or RunError."""
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return cls()
        host, values = os.environ.get("MASTER_ADDR"), [os.environ.get(name, "") for name in VARIABLES]
        if not host or not all(value.isdigit() for value in values) or int(values[0]) >= int(values[1]):
            found = ", ".join(f"{name}={value}" for name, value in zip(VARIABLES, values))
            raise UserError(
                f"the environment's {found}, MASTER_ADDR={host} does not describe a rank; start several ranks with "
                "torchrun, or take those out of the environment"
            )
        rank, world_size, local_rank, local_world_size, port = map(int, values)
        if world_size == 1:
            return cls()
        from torch.distributed import DistError, PrefixStore, TCPStore

        under_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_master, timeout = rank == 0 and not under_torchrun, timedelta(seconds=CONNECT_SECONDS)
        try:
            store = TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)
        except DistError as error:
            where = f"{host}:{port} within {CONNECT_SECONDS:.0f} s"
            raise RunError(f"rank {rank} of {world_size} found nobody at {where}") from error
        # torchrun's store outlives a restart of the ranks, after a failure or when one joins: old keys must not count.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"thinker/{attempt}/{world_size}", store)
        return cls(rank, world_size, local_rank, local_world_size, store, under_torchrun)

    def init_process_group(self, device_type: str, timeout: float) -> None:
        """Make torch's process group: gloo, and NCCL for GPUs. Raises RunError, naming them, where ranks did not start.

        timeout: seconds that one rank waits for another, now and later.
        """
        self.device_type, self.timeout = device_type, timeout
        if self.world_size == 1:
            return
        import torch.distributed

        if missing := self._wait_for_ranks("here", timeout):
            raise RunError(f"{missing} did not start within {timeout:g} s")
        if device_type == "cuda":
            torch.cuda.set_device(self.local_rank)
        torch.distributed.Backend.register_backend("ordered_gloo", _new_gloo, devices=["cpu"])
        torch.distributed.init_process_group(
            "cpu:ordered_gloo,cuda:nccl" if device_type == "cuda" else "ordered_gloo",
            store=self.store, rank=self.rank, world_size=self.world_size, timeout=timedelta(seconds=timeout),
        )  # fmt: skip

    def all_gather_scalars(self, *values: float) -> list[list[float]]:
        """The numbers of every rank, equally many, in rank order, from host to host: no device is waited for."""
        if self.world_size == 1:
            return [list(values)]
        import torch.distributed

        gathered = [torch.empty(len(values), dtype=torch.float64) for _ in range(self.world_size)]
        torch.distributed.all_gather(gathered, torch.tensor(values, dtype=torch.float64))
        return [row.tolist() for row in gathered]

    def broadcast_object(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        return self.gather_objects(value)[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        import torch.distributed

        objects = [None] * self.world_size
        torch.distributed.all_gather_object(objects, value)
        return objects

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the body on rank 0 first, then on local rank 0 of each other machine, then on all others; only once.

        It may take hours, so the ranks wait without a limit, but not for ranks that have failed.
        """
        if self.world_size == 1:
            yield
            return
        done_here = f"done on/{socket.gethostname()}"
        if not self.is_main:
            self._wait_for_keys("done/0" if self.local_rank == 0 else done_here)
        yield
        self.store.set(f"done/{self.rank}", "")
        if self.local_rank == 0:
            self.store.set(done_here, "")
        self._wait_for_keys(*(f"done/{rank}" for rank in range(self.world_size)))

    def shutdown(self) -> None:
        """Wait until rank 0 has finished: whoever started the ranks ends the others once one has ended."""
        if self.world_size == 1:
            return
        import torch.distributed

        if self.is_main:
            self.store.set("done all", "")
        self._wait_for_keys("done all")
        last = torch.zeros(1)
        n_references = sys.getrefcount(last)
        torch.distributed.all_reduce(last)
        # To drop a tensor gloo's thread needs the GIL, with which destroying the group waits for the thread.
        while sys.getrefcount(last) > n_references:
            time.sleep(0.001)
        torch.distributed.destroy_process_group()

    def resolve_failure(self, error: BaseException) -> BaseException:
        """What this rank ends with: `error` if it was the first rank to fail, otherwise a quiet SystemExit.

        A collective that failed because another rank is missing becomes a RunError that names that rank.
        """
        import torch.distributed

        is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
        lost_contact = is_gloo or isinstance(error, torch.distributed.DistError)
        end = time.monotonic() + ROLL_CALL_SECONDS
        try:
            if lost_contact and (missing := self._wait_for_ranks("alive", ROLL_CALL_SECONDS)):
                reason = "has gone"
                if "timed out" in str(error).lower():
                    reason = f"gave no answer for {self.timeout:g} s (train.dist_timeout_s)"
                error = RunError(f"{missing} {reason}; the same command resumes from the last checkpoint")
            while not self.is_main and time.monotonic() < end and not self.store.check(["failed"]):
                time.sleep(0.02)  # rank 0 may have failed in the same way, and still be closing files
            first_to_fail = self.store.compare_set("failed", "", str(self.rank)).decode()
            self.store.set(f"left/{self.rank}", "")
            if self.is_main and not self.under_torchrun:  # the store ends with this process
                self._wait_for_ranks("left", ROLL_CALL_SECONDS, ignore_failure=True)
        except torch.distributed.DistError:  # the store ended with torchrun, or with rank 0
            if self.under_torchrun:
                return SystemExit(1)
            return RunError(f"rank 0 of {self.world_size}, which keeps the store, has gone")
        if first_to_fail == str(self.rank):
            return error
        return SystemExit(2 if isinstance(error, UserError) else 1)

    def _wait_for_keys(self, *keys: str) -> None:
        """Wait until the store has these keys. Raises SystemExit where a rank has failed, which prints why itself."""
        while not self.store.check(list(keys)):
            if self.store.check(["failed"]):
                raise SystemExit(1)
            time.sleep(0.02)

    def _wait_for_ranks(self, key: str, seconds: float, ignore_failure: bool = False) -> str:
        """Answer under `key`, wait for the answers of all until one has failed, and return who gave none, in words."""
        self.store.set(f"{key}/{self.rank}", f"process {os.getpid()} on {socket.gethostname()}")
        missing, end = list(range(self.world_size)), time.monotonic() + seconds
        while missing and time.monotonic() < end and (ignore_failure or not self.store.check(["failed"])):
            missing = [rank for rank in missing if not self.store.check([f"{key}/{rank}"])]
            time.sleep(0.02)
        if not missing:
            return ""
        processes = dict.fromkeys(missing[:4], "")
        for rank in processes:
            if self.store.check([f"here/{rank}"]):  # it had started: name its process
                processes[rank] = f" ({self.store.get(f'here/{rank}').decode()})"
        names = ", ".join(f"{rank}{process}" for rank, process in processes.items())
        return f"rank {names}{' and more' if len(missing) > 4 else ''} of {self.world_size}"


def _new_gloo(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """gloo with one thread, which drops the tensors of each collective before it begins the next."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = [ProcessGroupGloo.create_default_device()], 1, timeout
    return ProcessGroupGloo(store, rank, world_size, options)


SINGLE_PROCESS = DistContext()  # whatever the environment says


def full_tensor(tensor: Tensor) -> Tensor:
    """All rows of a tensor that the ranks share; all of them call this. Other tensors as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor that the ranks share. Other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def distributed_session() -> Iterator[DistContext]:
    """This process as a rank, from the environment. Only rank 0's standard output and error are shown.

    An error on any rank ends all of them, and is raised, and so shown, on the one that failed first.
    """
    dist = DistContext.from_environment()
    with contextlib.ExitStack() as stack:
        if not dist.is_main:
            devnull = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(devnull))
            stack.enter_context(contextlib.redirect_stderr(devnull))
        try:
            yield dist
            dist.shutdown()
        except KeyboardInterrupt:
            if dist.is_main:
                raise
            raise SystemExit(130) from None
        except Exception as error:
            resolved = error if dist.world_size == 1 else dist.resolve_failure(error)
            if resolved is error:
                raise
            raise resolved from error
