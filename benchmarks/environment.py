"""Timing, and the environment recorded with every result: command, date, hardware, versions."""

import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from thinker.runtime.backend import processor_name
from thinker.runtime.process.invocation import this_command
from thinker.runtime.process.progress import Progress


def describe_environment() -> dict[str, str]:
    """Describe what is needed to repeat a measurement."""
    return {
        "command": " ".join([this_command(), *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "processor": processor_name(),
        "threads": str(torch.get_num_threads()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def record_result(benchmark: str, result: dict[str, Any], out: Path | None = None) -> None:
    """Print a result with its environment as one line of JSON, and append the line to the file
    `out`."""
    line = json.dumps({"benchmark": benchmark, **result, "environment": describe_environment()})
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def time_alternately(
    calls: list[Callable[[], Any]], rounds: int, device: torch.device, min_seconds: float = 0.0
) -> list[list[float]]:
    """Seconds of each call in each round, after a warm-up round; the median where it is repeated
    for `min_seconds`.

    Calls take turns in each round, so that noise affects all of them equally.
    """
    results: list[list[float]] = [[] for _ in calls]
    for _ in Progress(range(rounds + 1), desc="rounds", leave=False):
        for call, result in zip(calls, results):
            result.append(measure_median(call, device, min_seconds))
    return [result[1:] for result in results]


def measure_median(
    call: Callable[[], Any], device: torch.device, min_seconds: float = 0.0
) -> float:
    """Median seconds of a call that is repeated for at least `min_seconds`."""
    seconds = [measure_seconds(call, device)]
    while sum(seconds) < min_seconds:
        seconds.append(measure_seconds(call, device))
    return statistics.median(seconds)


def device_seconds(call: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    """Mean seconds of a call on the device, launches that overlap not counted; after two warm-up
    calls."""
    for _ in range(2):
        call()
    if device.type != "cuda":
        return statistics.fmean(measure_seconds(call, device) for _ in range(repeats))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second that the device moves: on a GPU copies of 4 GiB, read and written; elsewhere
    sums of 256 MiB."""
    if device.type == "cuda":
        source = torch.randint(
            2**31 - 1, (2**30,), dtype=torch.int32, device=device
        )  # zeros may be compressed
        target = torch.empty_like(source)
        return 2 * source.nbytes / device_seconds(lambda: target.copy_(source), device)
    data = torch.ones(1 << 26, device=device)
    return statistics.median(data.nbytes / measure_seconds(data.sum, device) for _ in range(9))
