"""GPU stage: the fastest tiles of the fused kernels, for the constants of fused_step.py.

One constant after the other is set to each of its candidates, and keeps that of the fastest step.
Whole steps are timed, because a single kernel would find its weights in the L2 cache.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinker.benchmarks.contenders import stream
from thinker.benchmarks.environment import measure_seconds
from thinker.benchmarks.gpu.first_text import NO_TRITON
from thinker.benchmarks.gpu.gpu_training import Campaign, Results
from thinker.benchmarks.speed.decode import make_random_model
from thinker.generation.decoders.inference_model import KINDS, fuse_for_inference
from thinker.model import Thinker
from thinker.model.layers import Linear

if TYPE_CHECKING:
    from thinker.generation.fused.fused_step import FusedStep

CAPACITY = 256  # positions
POSITION = 160  # of the token that is read
N_STEPS = 4  # in a graph
REPEATS = 15
MAX_ERROR = 0.02  # of logits, relative to those of the first tiles
Numbers = tuple[int, int, int]  # outputs of a program, columns at once, warps
CANDIDATES: dict[str, tuple[Numbers, ...]] = {  # by constant; the head's outputs are fixed
    "QKV_TILES": ((8, 1024, 4), (4, 1024, 4), (2, 1024, 4), (8, 1024, 8), (4, 256, 2)),
    "OUT_TILES": ((4, 1024, 4), (2, 1024, 4), (8, 1024, 8), (4, 512, 4), (4, 256, 2)),
    "GATE_TILES": ((8, 1024, 4), (4, 1024, 4), (8, 1024, 8), (8, 512, 4), (4, 512, 4)),
    "DOWN_TILES": ((4, 2048, 4), (2, 2048, 4), (4, 1024, 4), (4, 2048, 8), (8, 1024, 8)),
    "HEAD_TILES": ((16, 1024, 4), (16, 512, 4), (16, 256, 4), (16, 1024, 8)),
}
REHEARSED: dict[str, tuple[Numbers, ...]] = dict.fromkeys(
    ("QKV_TILES", "HEAD_TILES"), ((16, 64, 4), (16, 32, 4))
)


def tile_search(campaign: Campaign, deadline: float) -> Results:
    """For each shape and constant: every candidate with the time of a step, and the fastest."""
    if importlib.util.find_spec("triton") is None:
        yield {"name": "kernels", "note": NO_TRITON}
        return
    shapes = ("tiny",) if campaign.is_rehearsal else ("124m", "1.1b")
    for number, shape in enumerate(shapes):
        left = deadline - time.monotonic()
        end = time.monotonic() + left / (len(shapes) - number)
        options = {**campaign.options, "is_fresh": True}
        yield from stream(search_tiles, shape, campaign, end, deadline=end, **options)


def search_tiles(shape: str, campaign: Campaign, deadline: float) -> Results:
    """The results of a shape, in a process of its own; constants for which no time is left are
    not tried."""
    candidates, dtype, repeats = CANDIDATES, torch.bfloat16, REPEATS
    if campaign.is_rehearsal:
        os.environ["TRITON_INTERPRET"] = "1"
        candidates, dtype, repeats = REHEARSED, torch.float32, 1
    # Only now: whether the kernels are interpreted is decided when their module is imported.
    from thinker.generation.fused import fused_step

    plain = make_random_model(shape, CAPACITY, campaign.device)
    model = fuse_for_inference(plain, dtype, kinds=KINDS - {Linear})
    for name, tiles in candidates.items():
        setattr(fused_step, name, fused_step.Tiles(*tiles[0]))
    known = logits_of(new_step(model))
    for name, tiles in candidates.items():
        trials: list[dict[str, Any]] = []
        start = time.monotonic()
        for numbers in tiles:
            setattr(fused_step, name, fused_step.Tiles(*numbers))
            step = new_step(model)
            error = float((logits_of(step) - known).norm() / known.norm())
            seconds = graph_seconds(step.step, N_STEPS, campaign.device, repeats)
            trials.append({"tiles": list(numbers), "step_s": seconds, "relative_error": error})
        best = min(trials, key=lambda trial: trial["step_s"])
        setattr(fused_step, name, fused_step.Tiles(*best["tiles"]))
        result = {"name": f"{shape}: {name}", **best, "trials": trials}
        if not all(trial["relative_error"] < MAX_ERROR for trial in trials):
            result["error"] = f"wrong logits: {trials}"
        yield result
        if time.monotonic() + (time.monotonic() - start) > deadline:
            yield {"name": f"{shape}: rest", "note": "not run: too little time was left"}
            return


def new_step(model: Thinker) -> FusedStep:
    """A step of one text, whose cache has random keys and values."""
    from thinker.generation.fused.fused_step import FusedStep

    cache = model.new_cache(1, CAPACITY)
    random = torch.Generator(model.device).manual_seed(0)
    for layer in cache.layers:
        layer.keys.normal_(generator=random)
        layer.values.normal_(generator=random)
    overlap = model.device.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    step = FusedStep(model, cache, 1, overlap)
    step.tokens.fill_(3)
    step.positions.fill_(POSITION)
    return step


def logits_of(step: FusedStep) -> Tensor:
    """The logits after a step."""
    step.step()
    return step.logits.clone()


def graph_seconds(
    call: Callable[[], None], n_calls: int, device: torch.device, repeats: int
) -> float:
    """Median seconds of a call among `n_calls` in one CUDA graph; on a CPU, of a single one."""
    if device.type != "cuda":
        return measure_seconds(call, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(n_calls):
                call()
        graph.replay()
        seconds = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1000 / n_calls)
    return statistics.median(seconds)
