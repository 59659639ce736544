"""Ranks, the processes of distributed training: how they connect, share decisions, and end.

torchrun starts and numbers the ranks. They exchange tensors and objects through torch's process
group, and use a shared key-value store to find out which ranks are alive and which failed first.
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
from typing import Any

import torch.distributed
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo, TCPStore

from thinker.runtime.errors import RunError, UserError
from thinker.runtime.ranks import DistContext

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
CONNECT_SECONDS = 60.0  # to connect to the store
ROLL_CALL_SECONDS = 5.0  # for all live ranks to answer after one stopped responding
POLL_SECONDS = 0.02
MAX_NAMED_RANKS = 4  # in a message


def connect() -> DistContext:
    """Read the rank from torchrun's environment variables, and connect to the others' store.

    Raises UserError or RunError.
    """
    values = {name: os.environ.get(name, "") for name in VARIABLES}
    host = os.environ.get("MASTER_ADDR")
    if not host or not _describe_a_rank(values):
        found = ", ".join(f"{name}={value}" for name, value in values.items())
        raise UserError(
            f"the environment variables {found}, MASTER_ADDR={host} do not describe a rank; "
            "start with torchrun, or unset them"
        )
    rank, world_size, local_rank, local_world_size, port = map(int, values.values())
    if world_size == 1:
        return DistContext()
    under_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            host,
            port,
            is_master=rank == 0 and not under_torchrun,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_SECONDS),
        )
    except DistError as error:
        where = f"{host}:{port} within {CONNECT_SECONDS:.0f} s"
        raise RunError(
            f"rank {rank} of {world_size} could not connect to rank 0 at {where}"
        ) from error
    # torchrun's store outlives a restart of the ranks, so hide the keys of earlier attempts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"thinker/{attempt}/{world_size}", store)
    return Ranks(rank, world_size, local_rank, local_world_size, store, under_torchrun)


@dataclass
class Ranks(DistContext):
    """The rank of this process among several."""

    store: Any = None  # the key-value store of torch.distributed that all ranks share
    under_torchrun: bool = False  # torchrun owns the store, which then outlives rank 0

    def init_process_group(self, device_type: str, timeout: float) -> None:
        """Create torch's process group: gloo, and NCCL for GPUs.

        timeout: seconds that one rank waits for another, now and later. Raises RunError that names
        ranks that did not start.
        """
        self.device_type = device_type
        self.timeout = timeout
        # gloo would wait as long, but would not say which rank is missing.
        missing = self._wait_for_ranks("here", timeout)
        if missing:
            raise RunError(f"{missing} did not start within {timeout:g} s (train.dist_timeout_s)")
        torch.distributed.Backend.register_backend("ordered_gloo", _new_gloo, devices=["cpu"])
        backend = "ordered_gloo"
        if device_type == "cuda":
            torch.cuda.set_device(self.local_rank)
            backend = "cpu:ordered_gloo,cuda:nccl"
        torch.distributed.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout),
        )

    def all_gather_scalars(self, *values: float) -> list[list[float]]:
        """Gather the same number of values from each rank, in rank order.

        They travel between the CPUs, so that no rank waits for its GPU.
        """
        gathered = [torch.empty(len(values), dtype=torch.float64) for _ in range(self.world_size)]
        torch.distributed.all_gather(gathered, torch.tensor(values, dtype=torch.float64))
        return [row.tolist() for row in gathered]

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        objects = [None] * self.world_size
        torch.distributed.all_gather_object(objects, value)
        return objects

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the body on rank 0 first, then on local rank 0 of other machines, then on all others.

        Use it only once. The body may take hours, so ranks wait without a limit, but not for ranks
        that have failed.
        """
        done_here = f"done on/{socket.gethostname()}"
        if not self.is_main:
            first = "done/0" if self.local_rank == 0 else done_here
            self._wait_for_keys(first)
        yield
        self.store.set(f"done/{self.rank}", "")
        if self.local_rank == 0:
            self.store.set(done_here, "")
        self._wait_for_keys(*[f"done/{rank}" for rank in range(self.world_size)])

    def shutdown(self) -> None:
        """Wait until rank 0 has finished, as the launcher ends the other ranks when one exits."""
        if self.is_main:
            self.store.set("done all", "")
        self._wait_for_keys("done all")
        # Destroying the group waits for gloo's thread and holds the GIL, which that thread needs to
        # free the tensor of its last collective. So wait until that tensor is free.
        last = torch.zeros(1)
        n_references = sys.getrefcount(last)
        torch.distributed.all_reduce(last)
        while sys.getrefcount(last) > n_references:
            time.sleep(0.001)
        torch.distributed.destroy_process_group()

    def resolve_failure(self, error: BaseException) -> BaseException:
        """The error that this rank ends with.

        It is `error` if this rank failed first, otherwise a silent SystemExit. If a collective
        failed because a rank is missing, it is a RunError that names the missing rank.
        """
        end = time.monotonic() + ROLL_CALL_SECONDS
        try:
            if _lost_contact(error):
                error = self._name_missing_ranks(error)
            # Rank 0 may also have failed, and be closing files. Let it be the first.
            while not self.is_main and time.monotonic() < end and not self._has_failed():
                time.sleep(POLL_SECONDS)
            first_to_fail = self.store.compare_set("failed", "", str(self.rank)).decode()
            self.store.set(f"left/{self.rank}", "")
            if self.is_main and not self.under_torchrun:  # the store ends with this process
                self._wait_for_ranks("left", ROLL_CALL_SECONDS, ignore_failure=True)
        except torch.distributed.DistError:  # the store ended with torchrun, or with rank 0
            if self.under_torchrun:
                return SystemExit(1)
            return RunError(
                f"rank 0 of {self.world_size} ended unexpectedly; "
                "run the same command again to resume"
            )
        if first_to_fail == str(self.rank):
            return error
        if isinstance(error, UserError):
            return SystemExit(2)
        return SystemExit(1)

    def _name_missing_ranks(self, error: BaseException) -> BaseException:
        """A RunError that names the ranks that do not answer, or `error` if all do."""
        missing = self._wait_for_ranks("alive", ROLL_CALL_SECONDS)
        if not missing:
            return error
        reason = "ended unexpectedly"
        if "timed out" in str(error).lower():
            reason = f"did not respond for {self.timeout:g} s (train.dist_timeout_s)"
        return RunError(f"{missing} {reason}; run the same command again to resume")

    def _has_failed(self) -> bool:
        """Whether a rank has failed."""
        return self.store.check(["failed"])

    def _wait_for_keys(self, *keys: str) -> None:
        """Wait until the store has these keys.

        Raises SystemExit if a rank has failed, which prints its own error.
        """
        while not self.store.check(list(keys)):
            if self._has_failed():
                raise SystemExit(1)
            time.sleep(POLL_SECONDS)

    def _wait_for_ranks(self, key: str, seconds: float, ignore_failure: bool = False) -> str:
        """Answer under `key` and wait for all ranks to answer.

        Returns a description of the ranks without an answer, or "".
        """
        # The value says which process this is, should it end later.
        self.store.set(f"{key}/{self.rank}", f"process {os.getpid()} on {socket.gethostname()}")
        missing = list(range(self.world_size))
        end = time.monotonic() + seconds
        while missing and time.monotonic() < end:
            if not ignore_failure and self._has_failed():
                break
            missing = [rank for rank in missing if not self.store.check([f"{key}/{rank}"])]
            time.sleep(POLL_SECONDS)
        if not missing:
            return ""
        names = ", ".join(self._describe_rank(rank) for rank in missing[:MAX_NAMED_RANKS])
        if len(missing) > MAX_NAMED_RANKS:
            names += " and more"
        return f"rank {names} of {self.world_size}"

    def _describe_rank(self, rank: int) -> str:
        """Number of a rank, and its process if it had started."""
        if not self.store.check([f"here/{rank}"]):
            return str(rank)
        process = self.store.get(f"here/{rank}").decode()
        return f"{rank} ({process})"


def _describe_a_rank(values: dict[str, str]) -> bool:
    """Whether these values of VARIABLES make sense."""
    if not all(value.isdigit() for value in values.values()):
        return False
    return int(values["RANK"]) < int(values["WORLD_SIZE"])


def _lost_contact(error: BaseException) -> bool:
    """Whether an error may come from a rank that is gone."""
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    return is_gloo or isinstance(error, DistError)


def _new_gloo(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """gloo with one thread, which frees the tensors of each collective before the next one."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, world_size, options)
