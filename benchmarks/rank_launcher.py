"""Ranks on this machine: processes that gloo connects, for benchmarks."""

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

import torch

from thinker.runtime.errors import RunError
from thinker.training.distributed.session import context_from_environment

TIMEOUT_S = 600.0  # that a rank waits for another


def launch_ranks(n_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call function(dist, *args) in `n_ranks` new processes. Returns what rank 0 returns.

    The function must be importable. Raises RunError if a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = context.Queue()
    shared = (n_ranks, port, queue, function, args)
    processes = [context.Process(target=_run_rank, args=(rank, *shared)) for rank in range(n_ranks)]
    for process in processes:
        process.start()
    results = []
    # Before the processes are joined, as rank 0 only ends when its result has been read.
    while not results and any(process.is_alive() for process in processes):
        with contextlib.suppress(Empty):
            results.append(queue.get(timeout=0.5))
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RunError(f"one of {n_ranks} ranks failed; its error is above")
    if not results:  # rank 0 ended after the last look
        results.append(queue.get(timeout=10))
    return results[0]


def _run_rank(
    rank: int, n_ranks: int, port: int, queue: Queue, function: Callable[..., Any], args: tuple
) -> None:
    variables = {
        "RANK": rank,
        "WORLD_SIZE": n_ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": n_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // n_ranks))
    torch.set_flush_denormal(True)
    dist = context_from_environment()
    dist.init_process_group("cpu", TIMEOUT_S)
    result = function(dist, *args)
    if rank == 0:
        queue.put(result)
    if n_ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
