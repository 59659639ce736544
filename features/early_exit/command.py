"""Measure what early exit saves and changes: python scripts/early_exit.py PATH."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import png_file


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. Raises UserError for values that cannot work."""
    examples = ("runs/quickstart", "runs/quickstart --early-exit 0.9,0.99 --text story.txt")
    description = (
        "Predict a text with all layers and with early exit: layers per token, the loss, and "
        "how far the predictions "
        "differ."
    )
    parser = ArgumentParser(description=description, examples=examples)
    parser.add_model("path", "PATH")
    exit_help = (
        "probabilities at which a token skips the later layers, as in thinker generate --early-exit"
    )
    thresholds = {"type": parse_thresholds, "default": [0.5, 0.8, 0.9, 0.95], "metavar": "P,..."}
    parser.add_argument("--early-exit", **thresholds, help=exit_help)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text file (default: the run's validation split)"
    )
    parser.add_argument(
        "--texts", type=int, default=64, metavar="N", help="number of sequences to predict"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.add_argument(
        "--png", type=png_file, metavar="FILE", help="plot the loss against the layers per token"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    arguments = parser.parse_args()
    if arguments.texts < 1:
        raise UserError(f"--texts is {arguments.texts}; use at least 1")
    return arguments


def parse_thresholds(text: str) -> list[float]:
    """Parse "0.8,0.9". Raises UserError for anything but probabilities above 0 and below 1."""
    try:
        thresholds = [float(part) for part in text.split(",")]
    except ValueError:
        thresholds = []
    if not thresholds or not all(0 < threshold < 1 for threshold in thresholds):
        raise UserError(
            f"--early-exit {text} is not a list of probabilities above 0 and below 1, such as "
            f"0.8,0.9"
        )
    return thresholds


def main() -> int:
    """Measure and print. Returns the exit status."""
    arguments = parse_arguments()

    from thinker.features.early_exit.agreement import early_exit_cost, format_table
    from thinker.interop import load
    from thinker.runtime.backend import configure_backend
    from thinker.runtime.checks import finite_json
    from thinker.runtime.device import choose_device
    from thinker.training.data.open_run import sample_sequences

    device = choose_device(arguments.device)
    configure_backend(device)
    model, tokenizer = load(arguments.path, device, arguments.checkpoint)
    if tokenizer is None:
        raise UserError(
            f"{arguments.path} has no tokenizer, so it cannot read text; use a model saved with one"
        )
    with tempfile.TemporaryDirectory() as scratch:
        texts = sample_sequences(
            model, tokenizer, Path(arguments.path), arguments.text, arguments.texts, Path(scratch)
        )
    costs = [early_exit_cost(model, *texts, threshold) for threshold in arguments.early_exit]
    if arguments.png is not None:
        plot(costs, arguments.png, len(model.blocks))
    if arguments.json:
        print(
            finite_json(
                {"model": str(arguments.path), "early_exit": [vars(cost) for cost in costs]}
            )
        )
    else:
        print(format_table(costs))
    return 0


def plot(costs: list[Any], path: Path, n_layers: int) -> None:
    """Draw the loss by the mean number of layers, with a point per probability."""
    from thinker.runtime.plot_style import BLUE, GREY, new_figure, save_figure

    figure, (axes,) = new_figure(6, 4)
    costs = sorted(costs, key=lambda cost: cost.mean_layers)
    axes.axhline(
        costs[0].loss,
        color=GREY,
        linestyle="--",
        label=f"all {n_layers} layers, {costs[0].loss:.3f}",
    )
    layers, losses = [cost.mean_layers for cost in costs], [cost.early_loss for cost in costs]
    axes.plot(layers, losses, color=BLUE, marker="o", label="early exit")
    for cost, x, y in zip(costs, layers, losses):
        axes.annotate(f"{cost.threshold:g}", (x, y), textcoords="offset points", xytext=(6, 4))
    axes.set(xlabel="layers per token", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    save_figure(figure, path)
