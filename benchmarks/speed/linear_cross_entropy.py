"""Peak memory and time of the chunked LM head and loss, compared with the plain version."""

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.model.kernels.linear_cross_entropy import linear_cross_entropy
from thinker.runtime.backend import configure_backend
from thinker.runtime.device import DTYPES, choose_device, choose_precision
from thinker.training.metrics import MemoryMeter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--vocab", type=int, default=50304, help="vocabulary size")
    parser.add_argument("--rows", type=int, default=8192, help="tokens in the batch")
    parser.add_argument("--width", type=int, default=768, help="d_model of the model")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="device to time"
    )
    parser.add_argument(
        "--precision", choices=["auto", "fp32", "bf16"], default="auto", help="precision"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timing rounds; medians are reported"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both implementations alternately, each time in a fresh process, and print their
    medians."""
    device = choose_device(arguments.device)
    precision = choose_precision(arguments.precision, device)
    shape = (arguments.rows, arguments.width, arguments.vocab)
    measurements: dict[str, list[tuple[float, int]]] = {"plain": [], "chunked": []}
    spawn = multiprocessing.get_context("spawn")
    for _ in range(arguments.repeats):
        for name, results in measurements.items():
            with spawn.Pool(1) as pool:
                results.append(pool.apply(measure, (name, shape, str(device), precision)))
    seconds, peaks = {}, {}
    for name, results in measurements.items():
        seconds[name] = statistics.median(s for s, _ in results)
        peaks[name] = statistics.median(peak for _, peak in results)
        print(f"{name:<8} {seconds[name]:8.2f} s {peaks[name] / 2**20:8.0f} MiB")
    ratios = {
        "memory": peaks["chunked"] / peaks["plain"],
        "time": seconds["chunked"] / seconds["plain"],
    }
    print(f"chunked / plain: memory {ratios['memory']:.2f}, time {ratios['time']:.2f}")
    return {
        "shape": shape,
        "precision": precision,
        "seconds": seconds,
        "peak_bytes": peaks,
        "ratios": ratios,
    }


def measure(
    name: str, shape: tuple[int, int, int], device_name: str, precision: str
) -> tuple[float, int]:
    """Seconds of the faster of two passes, and the peak memory in bytes."""
    device = torch.device(device_name)
    configure_backend(device)
    time_pass(name, (64, 64, 64), device, precision)  # loads libraries and starts threads
    meter = MemoryMeter(device)
    return min(time_pass(name, shape, device, precision) for _ in range(2)), meter.peak()


def time_pass(
    name: str, shape: tuple[int, int, int], device: torch.device, precision: str
) -> float:
    """Seconds of one forward and backward pass."""
    rows, width, vocab = shape
    torch.manual_seed(0)
    x = torch.randn(1, rows, width, device=device, dtype=DTYPES[precision], requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width, device=device)).requires_grad_()
    targets = torch.randint(vocab, (1, rows), device=device)
    start = time.perf_counter()
    loss = (
        linear_cross_entropy(x, weight, targets)[0]
        if name == "chunked"
        else plain_loss(x, weight, targets)
    )
    (loss / rows).backward()
    weight.grad.sum().item()
    return time.perf_counter() - start


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of losses from all logits at once, in fp32, as most trainers compute it."""
    logits = F.linear(x, weight.to(x.dtype)).float()  # (1, rows, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
