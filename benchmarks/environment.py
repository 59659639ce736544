"""What every result is recorded with: command, machine, versions, date."""

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


def describe() -> dict[str, str]:
    """The machine and the versions, as a result needs them to be repeated."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "processor": processor_name(),
        "threads": str(torch.get_num_threads()),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def finish(result: dict[str, Any], out: Path | None = None) -> None:
    """Print a result and the machine as one line of JSON, and append it to a file."""
    line = json.dumps({**result, "machine": describe()})
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)


def read_bandwidth(device: torch.device, size: int = 1 << 28) -> float:
    """Bytes a second that the device reads from memory: the median of a few sums over `size` bytes."""
    data = torch.ones(size // 4, device=device)
    rates = []
    for _ in range(9):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        data.sum().item()
        rates.append(size / (time.perf_counter() - start))
    return statistics.median(rates)
