"""The processes of one training (ranks): how they meet, agree on what each alone would decide, and end together.

torchrun starts them and tells each its place in the environment. Tensors go through torch's process group. All else
goes as JSON through the key-value store that they share, or as a few numbers a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from thinker.runtime.errors import RunError, UserError

if TYPE_CHECKING:
    from torch import Tensor

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CONNECTING = 60.0  # seconds in which the store must be there
ROLL_CALL = 5.0  # seconds in which all that live answer, after one was not heard of


class RankTimeout(Exception):
    """Another rank has not answered in time."""


class DistContext:
    """This process among those that train together, or on its own.

    Attributes:
        rank, size: its number, from 0, and how many there are.
        local_rank, local_size: the same on its machine.
        first: whether this is the one that writes, logs and talks.
    """

    def __init__(self) -> None:
        """Raises UserError where the environment names a place in part only or wrongly, RunError without a store."""
        self.rank, self.world_size, self.local_rank, self.local_world_size, port = 0, 1, 0, 1, 0
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            if missing := [name for name in PLACE if name not in os.environ]:
                raise UserError(
                    f"the environment says RANK or WORLD_SIZE, but not {', '.join(missing)}; start several ranks by "
                    "torchrun, or take those out of the environment"
                )
            texts = [os.environ[name] for name in PLACE if name != "MASTER_ADDR"]
            if all(text.isdigit() for text in texts):
                self.rank, self.world_size, self.local_rank, self.local_world_size, port = map(int, texts)
            if not all(text.isdigit() for text in texts) or self.rank >= self.world_size:
                said = ", ".join(f"{name}={os.environ[name]}" for name in PLACE)
                raise UserError(f"the environment's {said} is no place among ranks; start them by torchrun")
        self.is_main = self.rank == 0
        self._n_objects = 0
        if self.world_size == 1:
            return
        from torch.distributed import DistError, PrefixStore, TCPStore

        host, self.under_torchrun = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                host, port, is_master=self.is_main and not self.under_torchrun, wait_for_workers=False,
                timeout=timedelta(seconds=CONNECTING),
            )  # fmt: skip
        except DistError as error:
            raise RunError(
                f"rank {self.rank} of {self.world_size} found nobody at {host}:{port} within {CONNECTING:.0f} s"
            ) from error
        # What ranks said before torchrun started them anew stays in its store: after a failure, or because one came in.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"thinker/{attempt}/{self.world_size}", store)

    def init_process_group(self, device_type: str, timeout: float) -> None:
        """Make torch's process group, on gloo, and NCCL for GPUs.

        Args: timeout: seconds that one rank waits for another, now and later.

        Raises RunError, naming them, where ranks did not come.
        """
        self.device_type, self.timeout = device_type, timeout
        if self.world_size == 1:
            return
        import torch
        import torch.distributed

        if missing := self._wait_for_ranks("here", timeout):
            raise RunError(f"{missing} did not start within {timeout:g} s")
        if device_type == "cuda":
            torch.cuda.set_device(self.local_rank)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            store=self.store, rank=self.rank, world_size=self.world_size, timeout=timedelta(seconds=timeout),
        )  # fmt: skip

    def all_gather_scalars(self, *values: float) -> list[list[float]]:
        """What each rank has to say, in their order. All say so many numbers, at the same places.

        From host to host: no device is waited for.
        """
        if self.world_size == 1:
            return [list(values)]
        import torch
        import torch.distributed

        said = [torch.empty(len(values), dtype=torch.float64) for _ in range(self.world_size)]
        torch.distributed.all_gather(said, torch.tensor(values, dtype=torch.float64))
        return [row.tolist() for row in said]

    def broadcast_object(self, value: Any = None) -> Any:
        """What rank 0 gives, for all: anything that JSON can hold."""
        if self.world_size == 1:
            return value
        self._n_objects += 1
        key = f"said/{self._n_objects}"
        if self.is_main:
            self.store.set(key, json.dumps(value))
        self._await(key, seconds=self.timeout)
        return json.loads(self.store.get(key))

    def gather_objects(self, value: Any) -> list[Any]:
        """What each rank gives, anything that JSON can hold, in their order; for the others but rank 0 their own."""
        if self.world_size == 1:
            return [value]
        self._n_objects += 1
        keys = [f"said/{self._n_objects}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], json.dumps(value))
        if not self.is_main:
            return [value]
        self._await(*keys, seconds=self.timeout)
        return [json.loads(self.store.get(key)) for key in keys]

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Within it rank 0 goes first, then the first of each other machine, then all others. Once a training."""
        if self.world_size == 1:
            yield
            return
        machine = f"done on/{socket.gethostname()}"
        if not self.is_main:
            self._await("done" if self.local_rank == 0 else machine)
        yield
        for key in ["done"] * self.is_main + [machine] * (self.local_rank == 0) + [f"done/{self.rank}"]:
            self.store.set(key, "")
        self._await(*(f"done/{rank}" for rank in range(self.world_size)))

    def shutdown(self) -> None:
        """Wait until rank 0 has finished: whoever starts the ranks ends the others when one has gone."""
        if self.world_size > 1:
            import torch.distributed

            if self.is_main:
                self.store.set("done all", "")
            self._await("done all")
            self.all_gather_scalars(0)
            torch.distributed.destroy_process_group()

    def resolve_failure(self, error: BaseException) -> BaseException:
        """What a rank shall end with: the error itself where it is the first, otherwise quiet."""
        import torch.distributed

        gloos = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
        of_others = gloos or isinstance(error, torch.distributed.DistError | RankTimeout)
        end = time.monotonic() + ROLL_CALL
        try:
            if of_others and (missing := self._wait_for_ranks("alive", ROLL_CALL)):
                hangs = f"gave no answer for {self.timeout:g} s (train.dist_timeout_s)"
                what = hangs if "timed out" in str(error).lower() else "has gone"
                error = RunError(f"{missing} {what}; the same command goes on from the last checkpoint")
            while not self.is_main and time.monotonic() < end and not self.store.check(["failed"]):
                time.sleep(0.02)  # rank 0 may have failed alike, and still have files to close
            claimed = self.store.compare_set("failed", "", str(self.rank)).decode()
            self.store.set(f"left/{self.rank}", "")
            if self.is_main and not self.under_torchrun:  # the store goes with this process
                self._wait_for_ranks("left", ROLL_CALL, to_the_end=True)
        except torch.distributed.DistError:  # the store went with torchrun, or with the rank that held it
            return (
                SystemExit(1)
                if self.under_torchrun
                else RunError(f"rank 0 of {self.world_size}, which keeps the store, has gone")
            )
        if claimed == str(self.rank):
            return error
        return SystemExit(2 if isinstance(error, UserError) else 1)

    def _await(self, *keys: str, seconds: float = float("inf")) -> None:
        """Wait for these keys, but not for ranks of which one has failed. Raises RankTimeout after `seconds`."""
        end = time.monotonic() + seconds
        while not self.store.check(list(keys)):
            if self.store.check(["failed"]):
                raise SystemExit(1)  # the one that failed says why
            if time.monotonic() > end:
                raise RankTimeout(f"timed out: no answer for {seconds:g} s")
            time.sleep(0.02)

    def _wait_for_ranks(self, key: str, seconds: float, to_the_end: bool = False) -> str:
        """Answer, and wait for the answers of all. Returns those that are missing, in words, "" where all are there.

        Where one has failed nobody waits, unless `to_the_end`.
        """
        self.store.set(f"{key}/{self.rank}", f"process {os.getpid()} on {socket.gethostname()}")
        missing, end = list(range(self.world_size)), time.monotonic() + seconds
        while missing and time.monotonic() < end and (to_the_end or not self.store.check(["failed"])):
            missing = [rank for rank in missing if not self.store.check([f"{key}/{rank}"])]
            time.sleep(0.02)
        here = {rank: f"here/{rank}" for rank in missing if self.store.check([f"here/{rank}"])}
        who = [f"{rank} ({self.store.get(here[rank]).decode()})" if rank in here else str(rank) for rank in missing]
        return f"rank {', '.join(who[:4])}{' and more' * (len(who) > 4)} of {self.world_size}" if missing else ""


SINGLE_PROCESS = DistContext.__new__(DistContext)  # one process, whatever the environment says
(
    SINGLE_PROCESS.rank,
    SINGLE_PROCESS.world_size,
    SINGLE_PROCESS.local_rank,
    SINGLE_PROCESS.local_world_size,
    SINGLE_PROCESS.is_main,
) = (
    0,
    1,
    0,
    1,
    True,
)


def full_tensor(tensor: Tensor) -> Tensor:
    """All rows of a tensor that the ranks share, on each of them, which must all ask. Another one as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """The rows that this rank has of a tensor that the ranks share. Another one as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def distributed_session() -> Iterator[DistContext]:
    """This process's place among those that were started together. Only rank 0 is heard.

    An error on any rank ends all of them, and is raised, and so shown, on the one that was first to fail.
    """
    dist = DistContext()
    with contextlib.ExitStack() as stack:
        if not dist.is_main:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            yield dist
            dist.shutdown()
        except KeyboardInterrupt:
            if dist.is_main:
                raise
            raise SystemExit(130) from None
        except Exception as error:
            if dist.world_size == 1:
                raise
            verdict = dist.resolve_failure(error)
            if verdict is error:
                raise
            raise verdict from error
