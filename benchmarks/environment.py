"""The environment that every result is recorded with: command, date, hardware and versions."""

from __future__ import annotations

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
from tqdm import tqdm

from thinker.runtime.device import processor_name


def describe_environment() -> dict[str, str]:
    """What somebody needs to know to repeat a measurement."""
    return {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "processor": processor_name(),
        "threads": str(torch.get_num_threads()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def record_result(benchmark: str, result: dict[str, Any], out: Path | None = None) -> None:
    """Print a result with its environment as one line of JSON, and append the line to the file `out`."""
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
    """Seconds of each call in each round, after a warm-up round; the median where it is repeated for `min_seconds`.

    In a round all calls take turns, so that a slow moment of the machine affects all of them alike.
    """
    results: list[list[float]] = [[] for _ in calls]
    for _ in tqdm(range(rounds + 1), desc="rounds", leave=False):
        for call, result in zip(calls, results):
            seconds = [measure_seconds(call, device)]
            while sum(seconds) < min_seconds:
                seconds.append(measure_seconds(call, device))
            result.append(statistics.median(seconds))
    return [result[1:] for result in results]


def measure_bandwidth(device: torch.device, n_bytes: int = 1 << 28) -> float:
    """Bytes per second that the device reads from memory: the median over nine sums of `n_bytes` of fp32."""
    data = torch.ones(n_bytes // 4, device=device)
    return statistics.median(n_bytes / measure_seconds(data.sum, device) for _ in range(9))
