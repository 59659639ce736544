"""Needle test with a window and retrieval: python scripts/needle.py PATH."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import png_file


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. Raises UserError for a value that is not possible."""
    description = (
        "Needle test on tales with a window, with and without retrieval of the tokens that left it."
    )
    examples = (
        "runs/quickstart --window 32 --sinks 4 --retrieve 4 --retrieve-block 16 --times 8,16",
    )
    parser = ArgumentParser(description=description, examples=examples)
    parser.add_model("run", "PATH")
    parser.add_argument("--window", type=int, default=32, help="attend to the newest N tokens")
    parser.add_argument("--sinks", type=int, default=4, help="also attend to the first N tokens")
    parser.add_argument(
        "--retrieve", type=int, default=4, metavar="N", help="blocks that each query retrieves"
    )
    parser.add_argument(
        "--retrieve-block", type=int, default=16, metavar="N", help="tokens per block"
    )
    times_help = "distances of the facts, as multiples of the window (default: 8,16,32,64)"
    parser.add_argument("--times", default="8,16,32,64", metavar="N,...", help=times_help)
    parser.add_argument("--examples", type=int, default=64, help="needles per distance")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument(
        "--png", type=png_file, metavar="FILE", help="plot the accuracy by distance"
    )
    arguments = parser.parse_args()
    try:
        arguments.times = [int(part) for part in arguments.times.split(",")]
    except ValueError:
        raise UserError(
            f"--times {arguments.times} is not a list of numbers, such as 8,16,32,64"
        ) from None
    if min(arguments.times) < 1 or arguments.examples < 1 or arguments.retrieve < 1:
        raise UserError("--times, --examples and --retrieve need numbers of at least 1")
    return arguments


def main() -> int:
    """Measure needle accuracy at each distance, with the same texts for each cache. Returns the
    exit status."""
    arguments = parse_arguments()
    from thinker.evaluation import needle
    from thinker.features.retrieval.windowed_needle import cached_log_probs
    from thinker.generation import Generator
    from thinker.interop import load
    from thinker.runtime.checks import finite_json
    from thinker.runtime.device import choose_device

    model, tokenizer = load(arguments.run, choose_device(arguments.device), arguments.checkpoint)
    if tokenizer is None:
        raise UserError(
            f"{arguments.run} has no tokenizer, so it cannot read text; use a model saved with one"
        )
    options = {"window": arguments.window, "sinks": arguments.sinks}
    retrieval = {"retrieve": arguments.retrieve, "retrieve_block": arguments.retrieve_block}
    caches = {"window": {}, "retrieval": retrieval}
    results = {}
    # Both are created first, which checks the options.
    generators = {
        name: Generator(model, tokenizer, **options, **more) for name, more in caches.items()
    }
    for name, generator in generators.items():
        scorer = partial(cached_log_probs, partial(generator.caches.new, model, 1, 0))
        results[name] = [
            needle.needle_test(
                model, tokenizer, times * arguments.window, arguments.examples, scorer=scorer
            )
            for times in arguments.times
        ]
        if not arguments.json:
            print(f"{name}\n{needle.format_table(results[name])}\n", flush=True)
    if arguments.json:
        print(finite_json({"run": arguments.run, **options, **retrieval, **results}))
    if arguments.png is not None:
        plot(results, arguments.window, arguments.png)
    return 0


def plot(results: dict[str, list[dict[str, Any]]], window: int, path: Path) -> None:
    """Draw the accuracy of both caches and the chance level by distance, where the test was
    possible.

    Raises UserError if it was possible nowhere.
    """
    from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure, save_figure

    reasons = [row["unreachable"] for row in results["window"] if "unreachable" in row]
    if len(reasons) == len(results["window"]):
        raise UserError(f"--png has nothing to plot: {reasons[0]}")
    figure, (axes,) = new_figure(6, 4)
    reachable = [row for row in results["window"] if "accuracy" in row]
    distances = [row["distance"] for row in reachable]
    for (name, rows), color in zip(results.items(), (ORANGE, BLUE)):
        accuracies = [row["accuracy"] for row in rows if "accuracy" in row]
        axes.plot(distances, accuracies, color=color, marker="o", label=name)
    chances = [row["chance"] for row in reachable]
    axes.plot(distances, chances, color=GREY, linestyle="--", label="chance")
    labels = [f"{distance}\n{distance / window:g} windows" for distance in distances]
    axes.set_xscale("log", base=2)
    axes.set_xticks(distances, labels)
    axes.set(xlabel="tokens since the fact", ylabel="needle accuracy", ylim=(0, 1.03))
    axes.legend(frameon=False)
    save_figure(figure, path)
