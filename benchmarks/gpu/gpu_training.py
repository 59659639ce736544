"""GPU stages: facts, training steps compared with baselines, a profile, losses by precision."""

import importlib.metadata
import math
import os
import re
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinker.benchmarks.contenders import race, stream
from thinker.benchmarks.environment import describe_environment, device_seconds, measure_bandwidth
from thinker.benchmarks.speed.train import (
    SHAPES,
    Shape,
    add_rates,
    contender,
    make_batch,
    make_training_step,
)
from thinker.runtime.backend import configure_backend
from thinker.runtime.errors import RunError

Results = Iterator[dict[str, Any]]
PACKAGES = ("torch", "triton", "transformers", "pydantic", "tiktoken", "rustbpe", "numpy")
NVIDIA_SMI = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,memory.total"
SECTIONS = ("head and loss", "optimizer")  # named ranges of a step
GROUPS = {  # of kernels by their names; the first that matches counts
    "elementwise and norm": r"^triton_(poi|per|red)",
    "copies": r"(?i)memcpy|memset",
    "attention": r"(?i)flash|fmha|sdpa|attention|flex",
    "matrix products": r"(?i)gemm|nvjet|cutlass|xmma|splitk|cublas",
    "elementwise and norm, rest": "",
}


class Campaign(NamedTuple):
    """Settings shared by all stages."""

    device: torch.device
    precision: str
    is_rehearsal: bool  # every stage at toy size
    options: dict[str, Any]  # of each Worker
    memory_gb: float = math.inf  # of the device

    def shape(self, name: str) -> Shape:
        """A shape of benchmarks.train, or a tiny one with two micro-batches."""
        return SHAPES["tiny"]._replace(n_micro_batches=2) if self.is_rehearsal else SHAPES[name]

    @property
    def n_at_once(self) -> int:
        """Contenders that compile side by side."""
        return max(2, (os.cpu_count() or 2) - 4)


def facts(campaign: Campaign, deadline: float) -> Results:
    """Versions, clocks, power, and what the device can do: copies, and products of the models'
    shapes."""
    return stream(
        measure_facts, campaign.device, campaign.is_rehearsal, deadline=deadline, **campaign.options
    )


def measure_facts(device: torch.device, is_rehearsal: bool) -> Results:
    """The results of facts(), in a process of its own."""
    configure_backend(device)
    versions = {
        each.name: each.version
        for each in importlib.metadata.distributions()
        if each.name in PACKAGES
    }
    yield {
        "name": "environment",
        **describe_environment(),
        "cuda": torch.version.cuda,
        "packages": versions,
    }
    yield {"name": "state of the GPU, idle", **gpu_state()}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        yield {"name": "memory", "free_bytes": free, "total_bytes": total}
    yield {"name": "copy bandwidth", "bytes_per_second": measure_bandwidth(device)}
    n_rows = 64 if is_rehearsal else 32768
    sizes = {"8192 cubed": (8192, 8192, 8192)}
    for shape, C, F in (("124m", 768, 2048), ("350m", 1024, 2752)):
        sizes |= {
            f"{shape} qkv, forward": (n_rows, C, 3 * C),
            f"{shape} qkv, weight gradient": (C, n_rows, 3 * C),
            f"{shape} output": (n_rows, C, C),
            f"{shape} gate and up": (n_rows, C, 2 * F),
            f"{shape} down": (n_rows, F, C),
            f"{shape} head, a quarter": (n_rows // 4, C, 50304),
        }
    for name, (m, k, n) in sizes.items():
        if is_rehearsal:
            m, k, n = min(m, 64), min(k, 64), min(n, 64)
        a, b = (
            torch.randn(m, k, device=device).bfloat16(),
            torch.randn(k, n, device=device).bfloat16(),
        )
        seconds = device_seconds(partial(torch.mm, a, b), device)
        yield {
            "name": f"product: {name}",
            "size": [m, k, n],
            "flops_per_second": 2 * m * k * n / seconds,
        }
    yield {"name": "state of the GPU, after the products", **gpu_state()}


def gpu_state() -> dict[str, str]:
    """Return the output of nvidia-smi, or why there is none."""
    command = ["nvidia-smi", f"--query-gpu={NVIDIA_SMI}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": str(error)}
    return dict(zip(NVIDIA_SMI.split(","), done.stdout.strip().split(", ")))


def train_beside(name: str, campaign: Campaign, deadline: float) -> Results:
    """Steps of ours, of a plain GPT and of transformers, compiled, alone on the device in turn.

    Two of ours have twice the micro-batch, one of them heads of twice the width.
    """
    shape = campaign.shape(name)
    large = with_large_batches(shape)
    size = large.micro_batch_size
    cases = {  # with the gigabytes they may need; those that compile longest first
        "plain compiled, adamw": (shape, 30),
        "transformers compiled, adamw": (shape, 40),
        "thinker compiled, muon": (shape, 20),
        **wide_heads(large),
        "thinker compiled, adamw": (shape, 20),
        f"thinker compiled, muon, micro-batch {size}": (large, 35),
    }
    if campaign.is_rehearsal and name != "124m":  # importing transformers once is enough
        del cases["transformers compiled, adamw"]
    return race_steps(cases, campaign, deadline)


def training_rate(campaign: Campaign, deadline: float) -> Results:
    """Steps of 124M parameters, as its config trains them, beside those of a plain GPT."""
    shape = campaign.shape("124m")
    cases = {**wide_heads(with_large_batches(shape)), "plain compiled, adamw": (shape, 30)}
    return race_steps(cases, campaign, deadline)


def with_large_batches(shape: Shape) -> Shape:
    """The same step in half as many micro-batches."""
    n_micro_batches = shape.n_micro_batches // 2
    return shape._replace(
        micro_batch_size=shape.micro_batch_size * 2, n_micro_batches=n_micro_batches
    )


def wide_heads(shape: Shape) -> dict[str, tuple[Shape, float]]:
    """Ours with half as many heads, with its name and the gigabytes that it may need."""
    heads = shape.n_heads // 2
    name = f"thinker compiled, muon, micro-batch {shape.micro_batch_size}, {heads} heads"
    return {name: (shape._replace(n_heads=heads), 35)}


def race_steps(
    cases: dict[str, tuple[Shape, float]], campaign: Campaign, deadline: float
) -> Results:
    """Steps of each case in turn; see train_beside()."""
    args = campaign.device, campaign.precision
    contenders = [
        contender(case, shape, *args, gigabytes) for case, (shape, gigabytes) in cases.items()
    ]
    options = {
        "n_at_once": campaign.n_at_once,
        "memory_gb": campaign.memory_gb,
        "min_seconds": 0.0 if campaign.is_rehearsal else 1.0,
    }
    for result in race(contenders, campaign.device, 3, deadline, **options, **campaign.options):
        yield result if "error" in result else add_rates(result)


def profile(campaign: Campaign, deadline: float) -> Results:
    """Profile three steps."""
    args = campaign.shape("124m"), campaign.device, campaign.precision
    return stream(profile_steps, *args, deadline=deadline, **campaign.options)


def profile_steps(shape: Shape, device: torch.device, precision: str, n_steps: int = 3) -> Results:
    """Seconds per step of each group of kernels, the idle share, and the longest kernels (on a CPU:
    operations)."""
    from thinker.model.kernels import LOADED, load_kernel

    configure_backend(device)
    step = make_training_step(shape, device, precision, is_compiled=True)
    batch = make_batch(
        torch.randint(shape.vocab_size, (shape.batch_size, shape.seq_len + 1)), device
    )
    head_and_loss, update = load_kernel("loss"), step.optimizers.step
    LOADED["loss"] = torch.profiler.record_function(SECTIONS[0])(head_and_loss)
    step.optimizers.step = torch.profiler.record_function(SECTIONS[1])(update)
    for _ in range(3):
        step(batch, 0.1)[0].item()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(n_steps):
            loss = step(batch, 0.1)[0]
        loss.item()
    yield {"name": "three steps", **summarize(profiler.events(), device, n_steps)}


def summarize(events: Any, device: torch.device, n_steps: int) -> dict[str, Any]:
    """The table of profile_steps() from the profiler's events."""
    on_device = [each for each in events if each.device_type.name.lower() == device.type]
    sections = [each for each in on_device if each.name in SECTIONS]
    kernels = [each for each in on_device if not (each.is_user_annotation or each.cpu_children)]
    kernels.sort(key=lambda each: each.time_range.start)
    groups, names, counts = Counter(), Counter(), Counter()
    busy, end = 0.0, 0.0
    for kernel in kernels:
        start, stop = kernel.time_range.start, kernel.time_range.end  # in µs
        inside = [s.name for s in sections if s.time_range.start <= start < s.time_range.end]
        group = (
            inside[0]
            if inside
            else next(name for name, text in GROUPS.items() if re.search(text, kernel.name))
        )
        groups[group.split(", rest")[0]] += (stop - start) / 1e6 / n_steps
        names[kernel.name[:100]] += (stop - start) / 1e6 / n_steps
        counts[kernel.name[:100]] += 1
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    if not kernels:
        raise RunError("the profiler recorded no kernels")
    wall = end - kernels[0].time_range.start
    longest = [
        {"kernel": name, "seconds": seconds, "launches": counts[name] / n_steps}
        for name, seconds in names.most_common(25)
    ]
    return {"seconds": dict(groups.most_common()), "step_s": wall / 1e6 / n_steps, "idle_share": 1 - busy / wall,
            "launches": len(kernels) / n_steps, "longest": longest}  # fmt: skip


def precisions(campaign: Campaign, deadline: float) -> Results:
    """Losses of the same training in bf16 and in fp32."""
    shape = campaign.shape("124m")._replace(n_micro_batches=1)
    if not campaign.is_rehearsal:
        shape = shape._replace(micro_batch_size=16)
    n_steps = 6 if campaign.is_rehearsal else 150
    return stream(
        compare_precisions, shape, campaign.device, n_steps, deadline=deadline, **campaign.options
    )


def compare_precisions(shape: Shape, device: torch.device, n_steps: int) -> Results:
    """Train on the bytes of the standard library twice; the last result is the ratio of the last
    losses."""
    configure_backend(device)
    n_bytes = shape.batch_size * (shape.seq_len + 1)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text, last = b"".join(file.read_bytes() for file in files), {}
    for precision in ("bf16", "fp32"):
        step = make_training_step(shape, device, precision, is_compiled=False)
        losses = []
        for number in range(n_steps):
            start = number * n_bytes % (len(text) - n_bytes)
            tokens = torch.frombuffer(
                bytearray(text[start : start + n_bytes]), dtype=torch.uint8
            ).long()
            batch = make_batch(tokens.view(shape.batch_size, -1), device)
            losses.append(step(batch, min(1.0, (number + 1) / 10))[0])
        losses = torch.stack(losses).tolist()
        last[precision] = sum(losses[-20:]) / len(losses[-20:])
        yield {"name": precision, "losses": losses}
    yield {"name": "bf16 to fp32", "ratio": last["bf16"] / last["fp32"]}
