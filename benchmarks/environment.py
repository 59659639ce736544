"""The environment that every result is recorded with: command, date, hardware and versions."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

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
    """Wait until a GPU has finished its work, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_bandwidth(device: torch.device, n_bytes: int = 1 << 28) -> float:
    """Bytes per second that the device reads from memory: the median over nine sums of `n_bytes` of fp32."""
    data = torch.ones(n_bytes // 4, device=device)
    rates = []
    for _ in range(9):
        synchronize(device)
        start = time.perf_counter()
        data.sum().item()
        rates.append(n_bytes / (time.perf_counter() - start))
    return statistics.median(rates)
