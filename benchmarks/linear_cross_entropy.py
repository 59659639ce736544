"""Head and loss by chunks beside the plain ones: peak memory and time of a forward and a backward pass."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.benchmarks.environment import finish
from thinker.model.kernels.linear_cross_entropy import linear_cross_entropy
from thinker.runtime.device import DTYPES, choose_device, choose_precision, configure_backend
from thinker.training.metrics import MemoryMeter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--rows", type=int, default=8192, help="tokens in the batch")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--repeats", type=int, default=3)


def run(arguments: argparse.Namespace) -> None:
    """Each form in fresh processes, in turn; print a table and a line of JSON."""
    device = choose_device(arguments.device)
    precision = choose_precision(arguments.precision, device)
    shape = (arguments.rows, arguments.width, arguments.vocab)
    found: dict[str, list[tuple[float, int]]] = {"plain": [], "chunks": []}
    spawn = multiprocessing.get_context("spawn")
    for _ in range(arguments.repeats):
        for form, results in found.items():
            with spawn.Pool(1) as pool:
                results.append(pool.apply(measure, (form, shape, str(device), precision)))
    seconds = {form: statistics.median(s for s, _ in results) for form, results in found.items()}
    peaks = {form: statistics.median(p for _, p in results) for form, results in found.items()}
    for form in found:
        print(f"{form:<8} {seconds[form]:8.2f} s {peaks[form] / 2**20:8.0f} MiB")
    ratios = {"memory": peaks["chunks"] / peaks["plain"], "time": seconds["chunks"] / seconds["plain"]}
    print(f"chunks to plain: memory {ratios['memory']:.2f}, time {ratios['time']:.2f}")
    result = {"benchmark": "head", "shape": shape, "precision": precision, "seconds": seconds, "peak_bytes": peaks}
    finish(result | {"ratios": ratios})


def measure(form: str, shape: tuple[int, int, int], device_name: str, precision: str) -> tuple[float, int]:
    """Seconds of the faster of two passes, and the most bytes taken."""
    device = torch.device(device_name)
    configure_backend(device)
    rows, width, vocab = shape
    _pass(form, 64, 64, 64, device, precision)  # loads libraries, starts threads
    meter = MemoryMeter(device)
    return min(_pass(form, rows, width, vocab, device, precision) for _ in range(2)), meter.peak()


def _pass(form: str, rows: int, width: int, vocab: int, device: torch.device, precision: str) -> float:
    torch.manual_seed(0)
    x = torch.randn(1, rows, width, device=device, dtype=DTYPES[precision], requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width, device=device)).requires_grad_()
    targets = torch.randint(vocab, (1, rows), device=device)
    start = time.perf_counter()
    loss = linear_cross_entropy(x, weight, targets)[0] if form == "chunks" else plain(x, weight, targets)
    (loss / rows).backward()
    weight.grad.sum().item()
    return time.perf_counter() - start


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As most trainers do: all logits, in fp32, then the loss."""
    logits = F.linear(x, weight.to(x.dtype)).float()  # (1, rows, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
