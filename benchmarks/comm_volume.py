"""Bytes that each of several ranks sends a step, as the loopback device counts them, beside the arithmetic."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from multiprocessing.queues import Queue
from pathlib import Path

import torch

from thinker.benchmarks.environment import finish
from thinker.data.prefetch import Batch
from thinker.model import ThinkerConfig
from thinker.runtime.process_group import DistContext
from thinker.training.config import validate_config
from thinker.training.step import TrainingStep, build_model

CPU = torch.device("cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="how many processes (default: 2 and 4)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step, of all ranks together")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5, help="of a few steps each; medians are reported")
    parser.add_argument("--steps", type=int, default=3, help="in a round")
    parser.add_argument("--out", type=Path, help="a file that the result is appended to")


def run(arguments: argparse.Namespace) -> None:
    """Every form with every number of ranks, and one process with as many threads; print a table and a line of JSON."""
    size = {"layers": arguments.layers, "width": arguments.width, "batch_size": arguments.batch_size}
    result = {"benchmark": "wire", **size, "seq_len": arguments.seq_len, "precision": arguments.precision, "forms": []}
    print(f"{'ranks':>5} {'form':>11} {'sent a step':>12} {'by the sum':>12} {'ratio':>6} {'seconds':>8} {'of one':>7}")
    for optimizer in ("adamw", "muon"):
        alone = together(1, arguments, "ddp", optimizer)
        result["parameters"] = alone["parameters"]
        for ranks in arguments.ranks:
            for parallel in ("ddp", "fsdp"):
                found = together(ranks, arguments, parallel, optimizer)
                found |= {"ranks": ranks, "parallel": parallel, "optimizer": optimizer}
                found |= {"ratio": found["bytes"] / found["sum"], "of_one": found["seconds"] / alone["seconds"]}
                result["forms"].append(found)
                print(
                    f"{ranks:>5} {parallel:>5} {optimizer} {found['bytes']:>12,.0f} {found['sum']:>12,.0f} "
                    f"{found['ratio']:>6.3f} {found['seconds']:>8.3f} {found['of_one']:>7.2f}"
                )
    finish(result, arguments.out)


def expected(step: TrainingStep, ranks: int, parallel: str, precision: str, gloo: bool = True) -> float:
    """Bytes that a rank sends in a step with one micro-batch, by docs/scaling-out.md.

    `gloo`: as gloo does it, which sums a whole gradient where NCCL sums a rank's part of it alone.
    """
    others = (ranks - 1) / ranks
    numbers = {name: parameter.numel() for name, parameter in step.model.named_parameters()}
    total, blocks = sum(numbers.values()), sum(n for name, n in numbers.items() if name.startswith("blocks."))
    if parallel == "ddp":
        return 2 * others * 4 * total  # a sum of fp32 gradients: each part goes round to be added, and round again
    width = 2 if precision == "bf16" else 4
    gathered = others * (2 * width * blocks + 4 * (total - blocks))  # blocks for both passes, the rest once, in fp32
    summed = (2 if gloo else 1) * others * 4 * total
    shared = step.optimizers.optimizers[0].param_groups if len(step.optimizers.optimizers) == 2 else []
    matrices = sum(parameter.numel() for group in shared for parameter in group["params"])
    return gathered + summed + 2 * others * width * matrices / ranks  # to a matrix's owner and back


def together(ranks: int, arguments: argparse.Namespace, parallel: str, optimizer: str) -> dict[str, float]:
    """What rank 0 has found: bytes and seconds a step, and what the sum says."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = context.Queue()
    given = (ranks, port, arguments, parallel, optimizer, queue)
    processes = [context.Process(target=work, args=(rank, *given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return queue.get(timeout=10)


def work(
    rank: int, size: int, port: int, arguments: argparse.Namespace, parallel: str, optimizer: str, queue: Queue
) -> None:
    """One rank: steps on random tokens, and between rounds, in which nobody sends, a look at the device's counter."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    torch.set_flush_denormal(True)
    dist, rows = DistContext(), arguments.batch_size // size
    dist.init_process_group("cpu", 600)
    train = {"max_steps": 1, "batch_size": arguments.batch_size, "micro_batch_size": rows, "compile": False}
    train |= {"precision": arguments.precision, "parallel": parallel}
    tree = {"train": train, "optimizer": {"name": optimizer}, "data": {"seq_len": arguments.seq_len}}
    config = validate_config(tree)
    model_config = ThinkerConfig(
        vocab_size=4096, d_model=arguments.width, n_layers=arguments.layers, n_heads=4, max_seq_len=arguments.seq_len
    )
    step = TrainingStep(build_model(model_config, 1, CPU), config, dist=dist)
    tokens = torch.randint(4096, (rows, arguments.seq_len), generator=torch.Generator().manual_seed(rank))
    batch = Batch(tokens, tokens, tokens.numel() * size)
    for _ in range(2):  # allocations, buckets
        step(batch, 1.0)
    sent, seconds = [], []
    for _ in range(arguments.rounds):
        time.sleep(0.1)
        dist.all_gather_scalars(0)
        time.sleep(0.1)
        before, start = loopback_bytes(), time.perf_counter()
        time.sleep(0.1)
        for _ in range(arguments.steps):
            step(batch, 1.0)
        seconds.append((time.perf_counter() - start - 0.1) / arguments.steps)
        time.sleep(0.1)
        sent.append((loopback_bytes() - before) / size / arguments.steps)
    if rank == 0:
        found = {"bytes": statistics.median(sent), "seconds": statistics.median(seconds)}
        found["parameters"] = sum(parameter.numel() for parameter in step.model.parameters())
        queue.put(found | {"sum": expected(step, size, parallel, arguments.precision)})
    if size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def loopback_bytes() -> int:
    """What went over the loopback device since the machine was started, with the headers of TCP and IP."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())
