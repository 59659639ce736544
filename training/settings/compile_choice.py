"""Whether to compile the blocks: only if that saves time over the whole run."""

import importlib.util
import math
import shutil
import sys
import time

import torch

from thinker.model import Thinker
from thinker.runtime.device import TRITON_CAPABILITY, describe_gpu, has_capability, matmul_flops
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext
from thinker.training.metrics import peak_flops, planned_flops_per_token
from thinker.training.settings.settings import Settings

# Seconds to compile the blocks, and the share of a step that it saves by width, widest first.
# CPU: measured in fp32 (docs/benchmarks/training.md). GPU: an H100 took at most this long for the
# first step of two runs at once, an H200 10 to 14 s for one; the share is the least that the bytes
# account for on an H200 (tests/fake_cuda/test_compile_choice.py), as no GPU has timed it.
COMPILE_COST = {"cpu": (35.0, {384: 0.12, 256: 0.04, 0: 0.0}), "cuda": (45.0, {0: 0.3})}
EXPECTED_MFU = 0.4  # for a first estimate of the time per step
TIMED_PASSES = 3


def choose_compile(
    settings: Settings, device: torch.device, dist: DistContext = SINGLE_PROCESS
) -> bool:
    """Whether to compile, and print why."""
    pays_off, reason = compiling_pays_off(settings, device, dist)
    choice = "compiling" if pays_off else "not compiling"
    print(f"{choice} the blocks: {reason}", file=sys.stderr)
    return pays_off


def check_compiler(device: torch.device) -> None:
    """Raise UserError if a run with compiled blocks cannot resume here."""
    problem = compiler_problem(device)
    if not problem:
        return
    raise UserError(
        f"the run uses compiled blocks, but this machine cannot compile ({problem}); change that, "
        "or add train.compile=false to continue without bitwise equal results"
    )


def check_capability(device: torch.device) -> None:
    """Raise UserError if train.compile=true asks for code that the GPU cannot run."""
    if device.type == "cuda" and not has_capability(device, TRITON_CAPABILITY):
        raise UserError(f"train.compile=true: {_too_old(device)}; set it to false")


def compiling_pays_off(
    settings: Settings, device: torch.device, dist: DistContext = SINGLE_PROCESS
) -> tuple[bool, str]:
    """Whether compiled steps save more time over the whole run than compilation takes, and why."""
    if device.type not in COMPILE_COST:
        return False, f"not tested on {device.type}"
    problem = compiler_problem(device)
    if problem:
        return False, problem
    cost, savings = COMPILE_COST[device.type]
    d_model = settings.model.d_model
    saving = next(saving for width, saving in savings.items() if d_model >= width)
    if not saving:
        return False, f"it does not save time on {device.type} at model.d_model={d_model}"
    measured = ""
    step_seconds = None
    # Several ranks may hold a part of the model each.
    if device.type == "cuda" and settings.train.max_steps and dist.world_size == 1:
        try:
            step_seconds = measure_plain_step(settings, device)
        except torch.OutOfMemoryError:
            return True, "a step that is not compiled does not fit into memory"
        finally:
            torch.cuda.empty_cache()
        measured = f"a step takes {step_seconds:.3g} s without; "
    planned = planned_run_seconds(settings, device, step_seconds)
    reason = (
        f"{measured}it takes about {cost:.0f} s and saves about {saving * planned:.0f} of "
        f"{planned:.0f} s"
    )
    return saving * planned > cost, reason


def measure_plain_step(settings: Settings, device: torch.device) -> float:
    """The seconds of a training step that is not compiled: the passes of one micro-batch of a new
    model, times their number. Raises OutOfMemoryError."""
    from thinker.data.batches.prefetch import Batch
    from thinker.training.step import TrainingStep

    with device:
        model = Thinker(settings.model)
    step = TrainingStep(model, settings.with_train(compile=False))
    size = settings.train.micro_batch_size
    shape = (size, settings.data.seq_len)
    tokens = torch.randint(settings.model.vocab_size, shape, device=device)
    batch = Batch(tokens, tokens, tokens.numel())
    times = []
    for _ in range(1 + TIMED_PASSES):  # the first one loads the kernels
        start = time.perf_counter()
        with step.fast_model():
            step.objective(step.parallel_model, batch).sum.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    n_passes = settings.train.batch_size // size
    return n_passes * min(times[1:])


def compiler_problem(device: torch.device) -> str:
    """Why torch.compile cannot run, or "": on a CPU it needs a C++ compiler, on a GPU Triton."""
    if device.type == "cpu":
        names = ("cl",) if sys.platform == "win32" else ("g++", "clang++")  # torch takes these
        has_compiler = any(shutil.which(name) for name in names)
        return "" if has_compiler else "no C++ compiler found"
    if device.type == "cuda" and not has_capability(device, TRITON_CAPABILITY):
        return _too_old(device)
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return ""


def _too_old(device: torch.device) -> str:
    least = ".".join(map(str, TRITON_CAPABILITY))
    return f"{describe_gpu(device)} is too old for the compiler Triton, which needs {least}"


def planned_run_seconds(
    settings: Settings, device: torch.device, step_seconds: float | None = None
) -> float:
    """Planned training time: the time limit, or that of the steps.

    step_seconds: of one step. None: an estimate from the FLOPs and the speed of the device.
    """
    train = settings.train
    seconds = math.inf if train.max_minutes is None else 60 * train.max_minutes
    if train.max_steps is None:
        return seconds
    if step_seconds is not None:
        return min(seconds, train.max_steps * step_seconds)
    flops = planned_flops_per_token(settings)
    flops_per_second = peak_flops(device, train.precision) or matmul_flops(device, train.precision)
    n_tokens = train.max_steps * train.batch_size * settings.data.seq_len
    return min(seconds, n_tokens * flops / (EXPECTED_MFU * flops_per_second))
