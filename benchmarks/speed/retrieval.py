"""Time per token and memory with a window, retrieval of evicted blocks, and a full cache, by cached
length."""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinker.benchmarks.environment import measure_seconds
from thinker.benchmarks.speed.decode import SHAPES
from thinker.features.retrieval.retrieval_cache import RetrievalCache, context_size
from thinker.generation.caches.sink_cache import SinkCache
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.runtime.device import choose_device
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure, save_figure
from thinker.runtime.process.progress import Progress

LENGTHS = (4096, 16384, 65536)
SINKS = 4
STEPS = 9  # per round; the first finds the processor's caches cold and is not counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--shape", choices=SHAPES, help="size of the model (default: 4 layers of width 192)"
    )
    parser.add_argument("--kv-heads", type=int, default=2, help="KV heads per layer")
    parser.add_argument("--window", type=int, default=128, help="length of the window in tokens")
    parser.add_argument("--retrieve", type=int, default=4, help="blocks that each query retrieves")
    parser.add_argument("--block", type=int, default=64, help="tokens per block")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="cached tokens")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot the times")
    parser.add_argument(
        "--repeats", type=int, default=30, help="timing rounds; medians are reported"
    )


@torch.no_grad()
def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time steps at each length, in turns, and print a table."""
    device, sizes = (
        choose_device(arguments.device),
        (arguments.window, SINKS, arguments.retrieve, arguments.block),
    )
    shape = SHAPES[arguments.shape] if arguments.shape else SHAPES["2m"] | {"n_layers": 4}
    shape = shape | {"n_kv_heads": arguments.kv_heads}
    with device:
        model = fuse_for_inference(
            Thinker(ThinkerConfig(**shape, max_seq_len=context_size(*sizes)))
        )
    caches: dict[tuple[str, int], KVCache] = {}
    for length in arguments.lengths:
        caches["window", length] = SinkCache(model, 1, arguments.window, SINKS)
        caches["retrieval", length] = filled_cache(model, sizes, length)
        caches["full", length] = KVCache(model.config, 1, length + 1, device, model.dtype)
    token, seconds = (
        torch.zeros(1, 1, dtype=torch.long, device=device),
        {case: [] for case in caches},
    )
    for _ in Progress(range(arguments.repeats), desc="rounds", leave=False):
        for (kind, length), cache in caches.items():
            for step in range(STEPS):
                # The store has all blocks, so that positions that are written again change nothing.
                cache.lengths = cache.high_water = [
                    length - arguments.block if kind == "retrieval" else length - 1
                ]
                duration = measure_seconds(partial(model, token, cache=cache), device)
                if step > 0:
                    seconds[kind, length].append(duration)
    rows = []
    print("cached   kind       ms per token      MB")
    for (kind, length), cache in caches.items():
        ms, n_bytes = 1000 * statistics.median(seconds[kind, length]), cache.nbytes
        rows.append({"length": length, "kind": kind, "ms": ms, "bytes": n_bytes})
        print(f"{length:6}   {kind:9} {ms:13.2f} {n_bytes / 1e6:7.1f}")
    ends = min(arguments.lengths), max(arguments.lengths)
    first, last = (statistics.median(seconds["retrieval", length]) for length in ends)
    print(
        f"with retrieval, a token takes {last / first:.3f} times as long at {ends[1]} as at {ends[0]}"
    )
    if arguments.png:
        plot(rows, arguments.png)
    config = {
        "shape": shape,
        "window": arguments.window,
        "sinks": SINKS,
        "retrieve": arguments.retrieve,
    }
    return config | {"block": arguments.block, "ratio": last / first, "rows": rows}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds per token by cached tokens, with a line per kind of cache."""
    figure, (axes,) = new_figure(6, 4)
    for kind, color in (("full", GREY), ("retrieval", BLUE), ("window", ORANGE)):
        points = [(row["length"], row["ms"]) for row in rows if row["kind"] == kind]
        axes.plot(*zip(*points), color=color, marker="o", label=kind)
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set(xlabel="cached tokens", ylabel="ms per token", ylim=(0, None))
    axes.legend(frameon=False)
    save_figure(figure, path)


def filled_cache(model: Thinker, sizes: tuple[int, int, int, int], length: int) -> RetrievalCache:
    """A cache of random keys and values whose store has every block of a text of this length."""
    window, sinks, retrieve, block = sizes
    cache = RetrievalCache(model, 1, window, sinks, retrieve, block)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            tensor.normal_()
        layer.store.grow(max(layer.store.capacity, -(-length // block)))
        layer.store.summaries.normal_()
        layer.store.scales.fill_(1 / 127)
        for stored in (layer.store.keys, layer.store.values):
            stored.random_(-127, 128)
    return cache
