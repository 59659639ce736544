"""Time per token and loss with keys and values in 16 or 32, 8 and 4 bits."""

import argparse
import itertools
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinker.benchmarks.environment import measure_seconds
from thinker.benchmarks.speed.decode import SHAPES, make_random_model
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.evaluation.perplexity import estimate_ratio
from thinker.generation import Generator
from thinker.generation.caches.quantized_cache import make_cache
from thinker.interop import load
from thinker.model import KVCache
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.device import DTYPES, choose_device
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure, save_figure
from thinker.runtime.process.progress import Progress
from thinker.training.data.open_run import sample_sequences

BITS = (None, 8, 4)  # None: the dtype of the model
TOKENIZER = make_tokenizer("byte", [])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--shape", default="110m", choices=SHAPES, help="size of the model that is timed"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32", "bf16"], choices=DTYPES, help="of the model"
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[512, 4096], help="tokens in the cache"
    )
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[1, 8], help="texts decoded together"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="timing rounds; medians are reported"
    )
    parser.add_argument(
        "--runs", nargs="*", default=[], metavar="RUN", help="runs whose loss is measured"
    )
    parser.add_argument(
        "--texts", type=int, default=200, help="sequences of the validation split for that"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="plot the times of the first number of rows"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time single steps and measure losses, and print two tables."""
    device, speeds, losses = choose_device(arguments.device), [], []
    model = make_random_model(arguments.shape, max(arguments.lengths) + 1, device)
    print("precision  tokens  rows  bits  ms per step  ratio    MB")
    for precision in arguments.precisions:
        generator = Generator(model, TOKENIZER, dtype=DTYPES[precision])
        for length, rows in itertools.product(arguments.lengths, arguments.rows):
            for row in time_steps(generator, length, rows, arguments.repeats):
                speeds.append({"precision": precision, "length": length, "rows": rows, **row})
                print(
                    f"{precision:9} {length:7} {rows:5} {row['bits'] or '-':>5} {1000 * row['seconds']:12.2f} "
                    f"{row['ratio']:6.2f} {row['bytes'] / 1e6:5.0f}"
                )
    for path in arguments.runs:
        rows = measure_losses(path, arguments.texts)
        losses.append({"run": path, "rows": rows})
        print(f"\n{path}: {rows[0]['loss']:.5f} nats per token")
        for row in rows[1:]:
            print(f"{row['bits']} bits  {row['change']:+.3%} ± {row['interval']:.3%}")
    if arguments.png:
        plot([row for row in speeds if row["rows"] == arguments.rows[0]], arguments.png)
    return {"shape": arguments.shape, "speeds": speeds, "losses": losses}


@torch.no_grad()
def time_steps(generator: Generator, length: int, rows: int, repeats: int) -> list[dict[str, Any]]:
    """Median seconds of a step after `length` cached tokens, with each kind of cache in turn."""
    device, caches, seconds = generator.model.device, {}, {bits: [] for bits in BITS}
    for bits in BITS:
        caches[bits] = make_cache(generator.model, rows, length + 1, bits=bits)
        fill(caches[bits])
    tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    for _ in Progress(range(repeats), desc=f"{rows} x {length}", leave=False):
        for bits, cache in caches.items():
            for step in range(
                3
            ):  # consecutive steps, as in decoding; the first finds the processor's caches cold
                cache.lengths = cache.high_water = cache.high_water_before = [length] * rows
                duration = measure_seconds(partial(generator.decoder.step, tokens, cache), device)
                if step > 0:
                    seconds[bits].append(duration)
    medians = {bits: statistics.median(durations) for bits, durations in seconds.items()}
    return [
        {
            "bits": bits,
            "seconds": medians[bits],
            "ratio": medians[None] / medians[bits],
            "bytes": caches[bits].nbytes,
        }
        for bits in BITS
    ]


def fill(cache: KVCache) -> None:
    """Fill all tensors with random numbers."""
    for layer in cache.layers:
        for tensor in (getattr(layer, name) for name in layer.tensors):
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.random_(0, 100)


@torch.no_grad()
def measure_losses(path: str, n_texts: int) -> list[dict[str, Any]]:
    """The loss in nats per token if keys and values are read from each kind of cache, and its
    relative change."""
    model, tokenizer = load(path)
    generator = Generator(model, tokenizer, dtype="fp32")
    with tempfile.TemporaryDirectory() as scratch:
        tokens, targets = sample_sequences(
            model, tokenizer, Path(path), None, n_texts, Path(scratch)
        )
    nats: dict[int | None, list[float]] = {bits: [] for bits in BITS}
    for row, wanted in zip(Progress(tokens, desc="losses", leave=False), targets):
        for bits in BITS:
            cache = make_cache(generator.model, 1, len(row), bits=bits)
            steps = row[None].split(1, dim=1)
            logits = torch.cat([generator.decoder.step(step, cache)[0] for step in steps]).float()
            loss = torch.nn.functional.cross_entropy(
                logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum"
            )
            nats[bits].append(float(loss))
    counts = (targets != IGNORE_INDEX).sum(1).double()
    plain = torch.tensor(nats[None], dtype=torch.float64)
    rows = [{"bits": None, "loss": float(plain.sum() / counts.sum())}]
    for bits in BITS[1:]:
        change = estimate_ratio(torch.tensor(nats[bits], dtype=torch.float64) - plain, plain, 0.95)
        rows.append(
            {"bits": bits, "change": change.mean, "interval": (change.high - change.low) / 2}
        )
    return rows


def plot(speeds: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds per step by cached tokens, with a panel per precision."""
    precisions = list(dict.fromkeys(row["precision"] for row in speeds))
    figure, panels = new_figure(4 * len(precisions), 3.5, columns=len(precisions))
    for axes, precision in zip(panels, precisions):
        for bits, color in zip(BITS, (GREY, BLUE, ORANGE)):
            rows = [row for row in speeds if (row["precision"], row["bits"]) == (precision, bits)]
            label = f"cache in {f'{bits} bits' if bits else precision}"
            milliseconds = [1000 * row["seconds"] for row in rows]
            axes.plot(
                [row["length"] for row in rows], milliseconds, color=color, marker="o", label=label
            )
        axes.set(title=f"model in {precision}", xlabel="tokens in the cache", ylim=(0, None))
        axes.legend(frameon=False)
    panels[0].set_ylabel("ms per token")
    save_figure(figure, path)
