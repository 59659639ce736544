"""Time per token by cache length, for a full cache and a sliding window."""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinker.benchmarks.environment import measure_bandwidth, measure_seconds
from thinker.benchmarks.speed.decode import SHAPES, make_random_model
from thinker.benchmarks.speed.kv_cache import fill
from thinker.generation.caches.sink_cache import SinkCache
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.model import Thinker
from thinker.runtime.device import choose_device
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure
from thinker.runtime.process.progress import Progress

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
MAX_LEN = max(LENGTHS) + 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--shape", default="110m", choices=SHAPES, help="size of the model")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--window", type=int, default=256, help="length of the sliding window in tokens"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timing rounds; medians are reported"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot times")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time single steps at each length and print a table."""
    model = make_random_model(arguments.shape, MAX_LEN, choose_device(arguments.device))
    result = {"shape": arguments.shape, **measure(model, arguments.window, arguments.repeats)}
    print("cached   full ms  window ms  bytes ms   ratio")
    for row in result["lengths"]:
        print(
            f"{row['length']:6} {row['full_ms']:9.2f} {row['window_ms']:10.2f} {row['bytes_ms']:9.2f} "
            f"{row.get('ratio', float('nan')):7.2f}"
        )
    if arguments.png:
        plot(result, arguments.png)
    return result


@torch.no_grad()
def measure(model: Thinker, window: int, repeats: int) -> dict[str, Any]:
    """Milliseconds per step at each cached length, compared with the time needed to read the
    additional bytes."""
    inference_model = fuse_for_inference(model)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    caches: dict[tuple[int, str], Any] = {}
    for length in LENGTHS:
        caches[length, "full"] = inference_model.new_cache(1, MAX_LEN)
        caches[length, "window"] = SinkCache(inference_model, 1, window, 4)
    for cache in caches.values():
        fill(cache)
    seconds: dict[tuple[int, str], list[float]] = {case: [] for case in caches}
    bandwidths = []
    for _ in Progress(range(repeats), desc="lengths", leave=False):
        bandwidths.append(measure_bandwidth(model.device))
        for (length, kind), cache in caches.items():
            for step in range(4):  # consecutive steps on one cache, as in decoding
                cache.lengths = [length - 1]
                duration = measure_seconds(
                    partial(inference_model, token, cache=cache), model.device
                )
                if step > 0:  # the first step finds the processor's caches cold
                    seconds[length, kind].append(duration)
    bandwidth = statistics.median(bandwidths)
    bytes_per_token = caches[64, "full"].nbytes / MAX_LEN
    rows = []
    for length in LENGTHS:
        row = {"length": length, "bytes_ms": 1000 * (length - 64) * bytes_per_token / bandwidth,
               "full_cache_bytes": int(length * bytes_per_token),
               "window_cache_bytes": caches[length, "window"].nbytes}  # fmt: skip
        for kind in ("full", "window"):
            row[f"{kind}_ms"] = 1000 * statistics.median(seconds[length, kind])
        if rows:
            row["ratio"] = (row["full_ms"] - rows[0]["full_ms"]) / row["bytes_ms"]
        rows.append(row)
    return {"window": window, "bandwidth": bandwidth, "lengths": rows}


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot time per token by cache length, and the time to read the bytes."""
    rows = result["lengths"]
    lengths = [row["length"] for row in rows]
    base = rows[0]["full_ms"]
    figure, (axes,) = new_figure(8, 4.5)
    axes.plot(lengths, [row["full_ms"] for row in rows], color=BLUE, marker="o", label="full cache")
    axes.plot(lengths, [row["window_ms"] for row in rows], color=ORANGE, marker="o",
              label=f"window of {result['window']}, 4 sinks")  # fmt: skip
    for factor, linestyle, label in (
        (1, "--", "time to read the bytes"),
        (1.3, ":", "1.3 times that"),
    ):
        axes.plot(lengths, [base + factor * row["bytes_ms"] for row in rows], color=GREY, linestyle=linestyle,
                  label=label)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_ylim(0)
    axes.set(xlabel="tokens in the cache", ylabel="ms per token")
    axes.legend(frameon=False)
    figure.savefig(path)
