"""Measure available memory, and raise an error before too much is allocated."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from thinker.runtime.errors import UserError

if TYPE_CHECKING:
    import torch

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes that this process can now allocate on the device without swapping."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        import torch

        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    return _host_memory()[0]


def check_memory(
    needed: dict[str, int], device: torch.device, remedy: str, n_processes: int = 1
) -> None:
    """Raise UserError if the sum of `needed`, bytes by purpose, exceeds the memory of the device.

    Swap counts as memory. Each of `n_processes` on this machine needs the same amount.
    """
    total = sum(needed.values())
    if device.type == "cuda":
        available, n_processes = free_memory(device), 1
    else:
        available = sum(_host_memory())
    if total * n_processes <= available:
        return
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in needed.items() if size)
    each = f" in each of {n_processes} processes" if n_processes > 1 else ""
    have = f"the {'GPU' if device.type == 'cuda' else 'machine'} has only {format_bytes(available)} available"
    raise UserError(
        f"this needs at least {format_bytes(total)} of memory{each} ({parts}), but {have}; {remedy}"
    )


def format_bytes(size: float) -> str:
    """Format a size, such as "3.2 GB"."""
    units = ["KB", "MB", "GB", "TB", "PB"]
    size /= 1e3
    while size >= 1000 and len(units) > 1:
        size /= 1e3
        del units[0]
    return f"{size:,.3g} {units[0]}" if size < 1000 else f"{size:,.0f} {units[0]}"


def _host_memory() -> tuple[int, int]:
    """Bytes of available main memory, and of swap. Guesses if the system does not report them.

    Windows: the standard library has no function for this.
    """
    free, swap = 4 * 2**30, 2**50
    if (meminfo := Path("/proc/meminfo")).exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free, swap = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    elif hasattr(os, "sysconf"):
        free = swap = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(free, _free_in_cgroups(CGROUPS, MEMBERSHIP)), swap


def _free_in_cgroups(root: Path, membership: Path) -> float:
    """Bytes left by the limits of this process's control groups (version 1 or 2), or inf without a limit.

    Cached pages of files count as used, but are freed when memory is needed.
    """
    free, groups = float("inf"), membership.read_text() if membership.exists() else ""
    versions = {
        "": ("max", "current", ""),
        "memory": ("limit_in_bytes", "usage_in_bytes", "total_"),
    }
    for controller, (limit_name, used_name, prefix) in versions.items():
        found = re.search(rf"^\d+:{controller}:/(.*)$", groups, re.MULTILINE)
        top = root / controller
        folders = (
            [top, *(top.joinpath(*part) for part in _beginnings(found[1].split("/")))]
            if found
            else []
        )
        for folder in folders:
            limit, used, stat = (
                folder / f"memory.{name}" for name in (limit_name, used_name, "stat")
            )
            if (
                not (limit.exists() and used.exists())
                or (text := limit.read_text().strip()) == "max"
            ):
                continue
            counts = stat.read_text() if stat.exists() else ""
            cached = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", counts, re.MULTILINE)
            free = min(free, int(text) - int(used.read_text()) + sum(map(int, cached)))
    return free


def _beginnings(parts: list[str]) -> list[list[str]]:
    return [parts[:n] for n in range(1, len(parts) + 1)]
