"""Contenders in separate processes: they warm up in parallel, then take turns on the device."""

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinker.benchmarks.environment import measure_median, measure_seconds
from thinker.runtime.backend import configure_backend
from thinker.runtime.errors import RunError, UserError
from thinker.training.metrics import MemoryMeter

PRELOADED = ["thinker.benchmarks.gpu.gpu", "torch._dynamo"]
WARM_UP_SHARE = 0.8  # of the time of a race; contenders that are not ready then are left out
start_method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def no_facts() -> dict[str, Any]:
    """Nothing is known only later."""
    return {}


class Calls(NamedTuple):
    """Calls of a contender by name, and facts that need no measurement.

    `late_facts` returns those that are known once each call has run.
    """

    calls: dict[str, Callable[[], Any]]
    facts: dict[str, Any]
    late_facts: Callable[[], dict[str, Any]] = no_facts


class Contender(NamedTuple):
    """make(*args) builds the calls; it must be importable. `gigabytes`: the memory it may need."""

    name: str
    make: Callable[..., Calls]
    args: tuple
    gigabytes: float = 0.0


class Worker:
    """function(connection, *args) in a process of its own, which can be killed with all that it has
    started.

    `log`: a file that gets its output; `eager`: torch.compile returns what it is given; `is_fresh`:
    the process has imported nothing before, not even what others preload.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *args: Any,
        log: Path | None = None,
        eager: bool = False,
        is_fresh: bool = False,
    ) -> None:
        method = "spawn" if is_fresh else start_method
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(PRELOADED)  # none of them may touch the GPU
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, log, eager, function, args))
        self.process.start()
        other.close()

    def receive(self, deadline: float) -> Any:
        """The next message, until `deadline` (time.monotonic()). Raises TimeoutError, RunError with
        a traceback, or the UserError that the function raised.
        """
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError("no result in time")
        try:
            error_type, message = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self.process.join(1)
            raise RunError(f"the process ended with exit code {self.process.exitcode}") from error
        if error_type is not None:
            raise error_type(message)
        return message

    def kill(self) -> None:
        """End the process and the processes it has started."""
        kill_group(self.process.pid)
        self.process.kill()
        self.process.join()
        self.connection.close()


def kill_group(pid: int) -> None:
    """Kill the processes of a group that process `pid` has made, if there still are any."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _work(
    connection: Connection,
    log: Path | None,
    eager: bool,
    function: Callable[..., None],
    args: tuple,
) -> None:
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a group of its own, to be killed as a whole
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
    if eager:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        function(connection, *args)
    except BaseException as error:  # also SystemExit; the parent reports it
        if isinstance(error, UserError):
            message = (UserError, str(error))
        else:
            message = (RunError, traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            connection.send(message)
    sys.stdout.flush()
    sys.stderr.flush()


def stream(
    function: Callable[..., Iterator[dict[str, Any]]], *args: Any, deadline: float, **options: Any
) -> Iterator[dict[str, Any]]:
    """What function(*args) yields in a process of its own, each as soon as it is there. Raises as
    Worker.receive()."""
    worker = Worker(_send_all, function, *args, **options)
    try:
        while (result := worker.receive(deadline)) is not None:
            yield result
    finally:
        worker.kill()


def _send_all(
    connection: Connection, function: Callable[..., Iterator[dict[str, Any]]], *args: Any
) -> None:
    for result in function(*args):
        connection.send((None, result))
    connection.send((None, None))


def race(
    contenders: list[Contender], device: torch.device, rounds: int, deadline: float, n_at_once: int = 1,
    min_seconds: float = 0.0, memory_gb: float = math.inf, **options: Any,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Warm all contenders up, `n_at_once` side by side, then let them take turns. Yields one result
    for each.

    Those that warm up side by side may need `memory_gb` in all, by their own estimates; one that
    needs more warms up alone.

    A result has the `name`, and the `error` or: `first_s` and `seconds` (one per round, each the
    median over at least `min_seconds`) of each call, `peak_memory_bytes` and the facts. `deadline`
    is a value of time.monotonic().
    """
    waiting, ready, workers = list(contenders), {}, {}
    warm_up_end = time.monotonic() + WARM_UP_SHARE * (deadline - time.monotonic())
    try:
        while waiting or workers.keys() - ready.keys():
            busy = [each for each in contenders if each.name in workers and each.name not in ready]
            memory = sum(each.gigabytes for each in busy)
            if waiting and (
                not busy or (len(busy) < n_at_once and memory + waiting[0].gigabytes <= memory_gb)
            ):
                each = waiting.pop(0)
                workers[each.name] = Worker(
                    _contend, each.make, each.args, device, min_seconds, **options
                )
                continue
            wait(
                [workers[each.name].connection for each in busy],
                max(0.0, warm_up_end - time.monotonic()),
            )
            for each in busy:
                worker = workers[each.name]
                if worker.connection.poll() or time.monotonic() >= warm_up_end:
                    try:
                        ready[each.name] = worker.receive(time.monotonic())
                    except (RunError, TimeoutError) as error:
                        yield {"name": each.name, "error": str(error)}
                        workers.pop(each.name).kill()
        seconds: dict[str, dict[str, list[float]]] = {}
        for name, result in ready.items():
            seconds[name] = {call: [] for call in result["first_s"]}
        for number in range(rounds):
            for name in list(workers):
                if number and time.monotonic() > deadline:
                    break
                try:
                    workers[name].connection.send(None)
                    limit = max(deadline, time.monotonic() + 10)
                    measured = workers[name].receive(limit)
                    for call, value in measured.items():
                        seconds[name][call].append(value)
                except (RunError, TimeoutError, BrokenPipeError) as error:
                    yield {"name": name, "error": str(error)}
                    workers.pop(name).kill()
        for name in workers:
            yield {"name": name, **ready[name], "seconds": seconds[name]}
    finally:
        for worker in workers.values():
            worker.kill()


def _contend(
    connection: Connection,
    make: Callable[..., Calls],
    args: tuple,
    device: torch.device,
    min_seconds: float,
) -> None:
    configure_backend(device)
    meter = MemoryMeter(device)
    calls, facts, late_facts = make(*args)
    first = {name: measure_seconds(call, device) for name, call in calls.items()}
    for call in calls.values():
        call()
    free_cache(device)
    facts |= late_facts()
    connection.send((None, {"first_s": first, "peak_memory_bytes": meter.peak(), **facts}))
    while True:
        connection.recv()
        seconds = {}
        for name, call in calls.items():
            if device.type == "cuda":
                call()  # takes its memory again
            seconds[name] = measure_median(call, device, min_seconds)
        free_cache(device)
        connection.send((None, seconds))


def free_cache(device: torch.device) -> None:
    """Return to the device what the allocator keeps, for other processes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
