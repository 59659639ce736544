"""Bytes that each rank sends per step, measured on loopback and computed."""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from thinker.benchmarks.rank_launcher import launch_ranks
from thinker.data.batches.prefetch import Batch
from thinker.model import ThinkerConfig
from thinker.runtime.ranks import DistContext
from thinker.training.config.load import validate_config
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep, build_model

CPU = torch.device("cpu")
SETTLE_S = 0.1  # seconds in which the loopback device comes to rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--width", type=int, default=256, help="d_model of the model")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="sequences per step, summed over ranks"
    )
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sequence")
    parser.add_argument(
        "--precision", default="bf16", choices=["fp32", "bf16"], help="training precision"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timing rounds; medians are reported")
    parser.add_argument("--steps", type=int, default=3, help="steps per round")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure DDP and FSDP2 with each number of ranks, and one process with as many threads; print
    a table."""
    print(
        f"{'ranks':>5} {'mode':>11} {'sent bytes':>12} {'computed':>12} {'ratio':>6} {'seconds':>8} {'to single':>9}"
    )
    rows = []
    for optimizer in ("adamw", "muon"):
        single = launch_ranks(1, measure_steps, arguments, "ddp", optimizer)
        for n_ranks in arguments.ranks:
            for parallel in ("ddp", "fsdp"):
                row = {"ranks": n_ranks, "parallel": parallel, "optimizer": optimizer}
                row |= launch_ranks(n_ranks, measure_steps, arguments, parallel, optimizer)
                row["bytes_ratio"] = row["sent_bytes"] / row["computed_bytes"]
                row["seconds_ratio"] = row["seconds"] / single["seconds"]
                rows.append(row)
                print(
                    f"{n_ranks:>5} {parallel:>5} {optimizer} {row['sent_bytes']:>12,.0f} "
                    f"{row['computed_bytes']:>12,.0f} {row['bytes_ratio']:>6.3f} {row['seconds']:>8.3f} "
                    f"{row['seconds_ratio']:>9.2f}"
                )
    settings = {
        name: getattr(arguments, name)
        for name in ("layers", "width", "batch_size", "seq_len", "precision")
    }
    return {**settings, "parameters": single["parameters"], "rows": rows}


def computed_bytes(
    step: TrainingStep, n_ranks: int, parallel: str, precision: str, gloo: bool = True
) -> float:
    """Bytes that a rank sends in a step with one micro-batch; docs/guides/scaling-out.md explains
    the formula.

    With FSDP2, gloo reduces whole gradients where NCCL reduces only the part that a rank keeps.
    """
    remote = (n_ranks - 1) / n_ranks
    sizes = {name: parameter.numel() for name, parameter in step.model.named_parameters()}
    total = sum(sizes.values())
    in_blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
    if parallel == "ddp":
        return (
            2 * remote * 4 * total
        )  # all-reduce of fp32 gradients: reduce-scatter, then all-gather
    width = 2 if precision == "bf16" else 4
    # Blocks are gathered for both passes, everything else once and in fp32.
    gathered = remote * (2 * width * in_blocks + 4 * (total - in_blocks))
    reduced = (2 if gloo else 1) * remote * 4 * total
    optimizers = step.optimizers.optimizers
    muon_groups = optimizers[0].param_groups if len(optimizers) == 2 else []
    in_matrices = sum(parameter.numel() for group in muon_groups for parameter in group["params"])
    return (
        gathered + reduced + 2 * remote * width * in_matrices / n_ranks
    )  # Muon: to the matrix's rank and back


def measure_steps(
    dist: DistContext, arguments: argparse.Namespace, parallel: str, optimizer: str
) -> dict[str, float]:
    """One rank: make steps on random tokens and read the device's counter between rounds, while
    nobody sends.

    Returns bytes and seconds per step, and the computed bytes.
    """
    n_ranks = dist.world_size
    rows = arguments.batch_size // n_ranks
    train = {
        "max_steps": 1,
        "batch_size": arguments.batch_size,
        "micro_batch_size": rows,
        "compile": False,
    }
    train |= {"precision": arguments.precision, "parallel": parallel}
    tree = {
        "train": train,
        "optimizer": {"name": optimizer},
        "data": {"seq_len": arguments.seq_len},
    }
    config = validate_config(tree)
    model_config = ThinkerConfig(
        vocab_size=4096,
        d_model=arguments.width,
        n_layers=arguments.layers,
        n_heads=4,
        max_seq_len=arguments.seq_len,
    )
    settings = resolve_settings(config, model_config, CPU, dist=dist)
    step = TrainingStep(build_model(model_config, 1, CPU), settings, dist=dist)
    tokens = torch.randint(
        4096, (rows, arguments.seq_len), generator=torch.Generator().manual_seed(dist.rank)
    )
    batch = Batch(tokens, tokens, tokens.numel() * n_ranks)
    for _ in range(2):  # allocates memory and gradient buckets
        step(batch, 1.0)
    sent, seconds = [], []
    for _ in range(arguments.rounds):
        time.sleep(SETTLE_S)
        dist.all_gather_scalars(0)
        time.sleep(SETTLE_S)
        bytes_before = loopback_bytes()
        start = time.perf_counter() + SETTLE_S
        time.sleep(SETTLE_S)
        for _ in range(arguments.steps):
            step(batch, 1.0)
        seconds.append((time.perf_counter() - start) / arguments.steps)
        time.sleep(SETTLE_S)
        sent.append((loopback_bytes() - bytes_before) / n_ranks / arguments.steps)
    result = {"sent_bytes": statistics.median(sent), "seconds": statistics.median(seconds)}
    result["computed_bytes"] = computed_bytes(step, n_ranks, parallel, arguments.precision)
    n_parameters = sum(parameter.numel() for parameter in step.model.parameters())
    return result | {"parameters": n_parameters}


def loopback_bytes() -> int:
    """Bytes sent over the loopback device since the machine started, TCP and IP headers
    included."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())
