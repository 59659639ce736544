"""Whether to compile the blocks: only if that saves time over the whole run."""

import math
import shutil
import sys

import torch

from thinker.runtime.device import matmul_flops
from thinker.runtime.errors import UserError
from thinker.training.metrics import peak_flops, planned_flops_per_token
from thinker.training.settings.settings import Settings

# Seconds to compile the blocks, and the share of a step that it saves by width, widest first.
# Measured on a CPU in fp32 (docs/benchmarks/training.md); a guess on a GPU.
COMPILE_COST = {"cpu": (35.0, {384: 0.12, 256: 0.04, 0: 0.0}), "cuda": (60.0, {0: 0.3})}
EXPECTED_MFU = 0.4  # for a first estimate of the time per step


def choose_compile(settings: Settings, device: torch.device) -> bool:
    """Whether to compile, and print why."""
    pays_off, reason = compiling_pays_off(settings, device)
    choice = "compiling" if pays_off else "not compiling"
    print(f"{choice} the blocks: {reason}", file=sys.stderr)
    return pays_off


def check_compiler(device: torch.device) -> None:
    """Raise UserError if a run with compiled blocks cannot resume here."""
    if has_compiler(device):
        return
    raise UserError(
        "the run uses compiled blocks, but this machine has no C++ compiler; install one, or add "
        "train.compile=false to continue without bitwise equal results"
    )


def compiling_pays_off(settings: Settings, device: torch.device) -> tuple[bool, str]:
    """Whether compiled steps save more time over the whole run than compilation takes, and why."""
    if device.type not in COMPILE_COST:
        return False, f"not tested on {device.type}"
    if not has_compiler(device):
        return False, "no C++ compiler found"
    cost, savings = COMPILE_COST[device.type]
    d_model = settings.model.d_model
    saving = next(saving for width, saving in savings.items() if d_model >= width)
    if not saving:
        return False, f"it does not save time on {device.type} at model.d_model={d_model}"
    planned = planned_run_seconds(settings, device)
    reason = (
        f"it takes about {cost:.0f} s and saves about {saving * planned:.0f} of {planned:.0f} s"
    )
    return saving * planned > cost, reason


def has_compiler(device: torch.device) -> bool:
    """Whether torch.compile can run: it needs a C++ compiler on a CPU, nothing on a GPU."""
    return device.type != "cpu" or any(shutil.which(name) for name in ("g++", "clang++"))


def planned_run_seconds(settings: Settings, device: torch.device) -> float:
    """Planned training time: the time limit, or an estimate from the FLOPs and the speed of the
    device."""
    train = settings.train
    seconds = math.inf if train.max_minutes is None else 60 * train.max_minutes
    if train.max_steps is None:
        return seconds
    flops = planned_flops_per_token(settings)
    flops_per_second = peak_flops(device, train.precision) or matmul_flops(device, train.precision)
    n_tokens = train.max_steps * train.batch_size * settings.data.seq_len
    return min(seconds, n_tokens * flops / (EXPECTED_MFU * flops_per_second))
