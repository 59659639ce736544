"""Measure available memory, and raise an error before too much is allocated."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from thinker.runtime.errors import UserError

if TYPE_CHECKING:
    import torch

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

# Where the system reports nothing: little memory, and so much swap that nothing is refused.
GUESSED_MEMORY = 4 * 2**30
GUESSED_SWAP = 2**50


class CgroupFiles(NamedTuple):
    """Names of the files of a control group, which differ between the two versions."""

    limit: str
    used: str
    file_pages: str  # a pattern of the lines in memory.stat that count cached pages of files


# By the name of the controller in /proc/self/cgroup.
CGROUP_VERSIONS = {
    "": CgroupFiles("memory.max", "memory.current", r"^(?:in)?active_file (\d+)$"),
    "memory": CgroupFiles(
        "memory.limit_in_bytes", "memory.usage_in_bytes", r"^total_(?:in)?active_file (\d+)$"
    ),
}


def free_memory(device: torch.device) -> int:
    """Bytes that this process can now allocate on the device without swapping."""
    if device.type == "cuda":
        return _gpu_memory(device)
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
        owner = "GPU"
        available = free_memory(device)
        n_processes = 1  # each has a GPU of its own
    else:
        owner = "machine"
        available = sum(_host_memory())
    if total * n_processes <= available:
        return
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in needed.items() if size)
    each = f" in each of {n_processes} processes" if n_processes > 1 else ""
    raise UserError(
        f"this needs at least {format_bytes(total)} of memory{each} ({parts}), "
        f"but the {owner} has only {format_bytes(available)} available; {remedy}"
    )


def format_bytes(size: float) -> str:
    """Format a size, such as "3.2 GB"."""
    size /= 1e3
    for unit in ("KB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:,.3g} {unit}"
        size /= 1e3
    if size < 1000:
        return f"{size:,.3g} PB"
    return f"{size:,.0f} PB"


def _gpu_memory(device: torch.device) -> int:
    """Bytes that this process can still take on a GPU, which set_per_process_memory_fraction() may
    have limited to a part of its memory."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    # By index, as it refuses a device without one; None is the current device.
    fraction = torch.cuda.get_per_process_memory_fraction(device.index)
    allowed = int(fraction * total)
    allowed -= torch.cuda.memory_reserved(device)
    return max(0, min(free, allowed))


def _host_memory() -> tuple[int, int]:
    """Bytes of available main memory, and of swap.

    Guesses on Windows, where the standard library has no function for this.
    """
    free = GUESSED_MEMORY
    swap = GUESSED_SWAP
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = _kilobytes(lines["MemAvailable"])
        swap = _kilobytes(lines["SwapFree"])
    elif hasattr(os, "sysconf"):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        swap = free
    return min(free, _free_in_cgroups(CGROUPS, MEMBERSHIP)), swap


def _kilobytes(text: str) -> int:
    """Bytes of a line's value in /proc/meminfo, such as "  1024 kB"."""
    return int(text.split()[0]) * 1024


def _free_in_cgroups(root: Path, membership: Path) -> float:
    """Bytes left by the limits of this process's control groups (version 1 or 2), or inf."""
    groups = ""
    if membership.exists():
        groups = membership.read_text()
    free = float("inf")
    for controller, files in CGROUP_VERSIONS.items():
        found = re.search(rf"^\d+:{controller}:/(.*)$", groups, re.MULTILINE)
        if not found:
            continue
        # The limit of each enclosing group applies, too.
        folder = root / controller
        free = min(free, _free_in_cgroup(folder, files))
        for part in found[1].split("/"):
            folder /= part
            free = min(free, _free_in_cgroup(folder, files))
    return free


def _free_in_cgroup(folder: Path, files: CgroupFiles) -> float:
    """Bytes left by the limit of one control group, or inf without a limit."""
    limit = folder / files.limit
    used = folder / files.used
    if not limit.exists() or not used.exists():
        return float("inf")
    limit_text = limit.read_text().strip()
    if limit_text == "max":
        return float("inf")
    # Cached pages of files count as used, but are freed when memory is needed.
    cached = 0
    stat = folder / "memory.stat"
    if stat.exists():
        counts = re.findall(files.file_pages, stat.read_text(), re.MULTILINE)
        cached = sum(map(int, counts))
    return int(limit_text) - int(used.read_text()) + cached
