"""Measure what few bits cost each part of a model: python scripts/sensitivity.py PATH."""

import argparse
import json
import math
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write, output_file
from thinker.runtime.plot_style import png_file

BITS = (8, 4, 1)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. Raises UserError for flags that cannot be combined."""
    examples = ("runs/quickstart --png map.png", "runs/quickstart --budget 5 --out mixed.json")
    description = (
        "Measure what 8, 4 and 1 bits cost each matrix and the scores of each head, "
        "and choose bits by matrix."
    )
    parser = ArgumentParser(description=description, examples=examples)
    parser.add_model("path", "PATH")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text file (default: the run's validation split)"
    )
    parser.add_argument(
        "--texts",
        type=int,
        default=64,
        metavar="N",
        help="number of sequences to measure the loss on",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="X",
        help="choose 4 or 8 bits by matrix: X bits per weight at most",
    )
    out_help = "write the choice to FILE, for --bits mixed:FILE of thinker generate and serve"
    parser.add_argument("--out", type=output_file, metavar="FILE", help=out_help)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument("--png", type=png_file, metavar="FILE", help="draw the costs as a map")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    arguments = parser.parse_args()
    if (arguments.out is None) != (arguments.budget is None):
        raise UserError("--out and --budget need each other; use both or neither")
    if arguments.texts < 2:
        raise UserError(f"--texts is {arguments.texts}; use at least 2")
    return arguments


def main() -> int:
    """Measure, print and write. Returns the exit status."""
    arguments = parse_arguments()

    from thinker.features.quantization_study import sensitivity
    from thinker.interop import load
    from thinker.runtime.device import choose_device
    from thinker.training.data.open_run import sample_sequences

    model, tokenizer = load(arguments.path, choose_device(arguments.device), arguments.checkpoint)
    if tokenizer is None:
        raise UserError(
            f"{arguments.path} has no tokenizer, so it cannot read text; use a model saved with one"
        )
    if arguments.budget is not None:
        sensitivity.check_budget(model, arguments.budget)
    with tempfile.TemporaryDirectory() as scratch:
        texts = sample_sequences(
            model, tokenizer, Path(arguments.path), arguments.text, arguments.texts, Path(scratch)
        )
    changes = sensitivity.matrix_changes(model, BITS)
    try:
        changes |= sensitivity.head_changes(model, BITS)
    except UserError as error:
        print(f"only matrices are measured: {error}", file=sys.stderr)
    loss, costs = sensitivity.measure(model, *texts, changes)
    result: dict[str, Any] = {
        "loss": loss,
        "sequences": len(texts[0]),
        "costs": [vars(cost) for cost in costs],
    }
    if arguments.budget is not None:
        names = list(sensitivity.fused_matrices(model))
        mixed = sensitivity.assign_bits(model, costs, arguments.budget)
        for name, bits in (
            ("int8", dict.fromkeys(names, 8)),
            ("int4", dict.fromkeys(names, 4)),
            ("mixed", mixed),
        ):
            with sensitivity.rounded_model(model, bits):
                nats, counts = sensitivity.sequence_losses(model, *texts)
            result[name] = {
                "loss": float(nats.sum() / counts.sum()),
                "bits_per_weight": sensitivity.mean_bits(model, bits),
            }
        facts = {"model": str(arguments.path), **result["mixed"]}
        atomic_write(arguments.out, json.dumps(facts | {"bits": mixed}, indent=1) + "\n")
    if arguments.png is not None:
        plot(costs, arguments.png, str(arguments.path))
    if arguments.json:
        print(json.dumps(result))
    else:
        print_tables(result, arguments.out)
    return 0


def print_tables(result: dict[str, Any], out: Path | None) -> None:
    """Print the costs, and what the choice of bits gains."""
    print(
        f"loss: {result['loss']:.4f} nats per token on {result['sequences']} sequences; "
        f"change with fewer bits:\n"
    )
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for cost in result["costs"]:
        by_name.setdefault(cost["name"], {})[cost["bits"]] = cost
    width = max(map(len, by_name))
    print(f"{'':{width}}  " + "".join(f"{f'{n} bit' + 's' * (n > 1):>22}" for n in BITS))
    for name, costs in by_name.items():
        cells = (
            f"{costs[n]['loss']:+.4f} ± {(costs[n]['high'] - costs[n]['low']) / 2:.4f}"
            for n in BITS
        )
        print(f"{name:{width}}  " + "".join(f"{cell:>22}" for cell in cells))
    for name in ("int8", "int4", "mixed") if out is not None else ():
        row = result[name]
        print(
            f"{name:{width}}  {row['loss'] - result['loss']:+.4f} with "
            f"{row['bits_per_weight']:.2f} bits per weight"
        )
    if out is not None:
        print(f"wrote {out}; use it with --bits mixed:{out}")


def plot(costs: list[Any], path: Path, title: str) -> None:
    """Two maps per number of bits, of the matrices and of the heads, by layer."""
    from matplotlib.colors import LogNorm

    from thinker.runtime.plot_style import new_figure, plain_text, save_figure

    parts = ["attention.qkv", "attention.o", "mlp.gate_up", "mlp.down"]
    layers = 1 + max(
        int(cost.name.split(".")[1]) for cost in costs if cost.name.startswith("blocks")
    )
    heads = 1 + max(
        (int(cost.name.split(".")[-1]) for cost in costs if ".scores." in cost.name), default=-1
    )
    loss = {(cost.name, cost.bits): cost.loss for cost in costs}
    norm = LogNorm(1e-4, max(1e-2, *loss.values()), clip=True)
    kinds = [("matrices", parts)]
    if heads:
        kinds.append(("scores of heads", [f"attention.scores.{head}" for head in range(heads)]))
        kinds.append(("sums of heads", [f"attention.sums.{head}" for head in range(heads)]))
    width = sum(len(columns) for _, columns in kinds) * len(BITS)
    figure, panels = new_figure(
        0.55 * width + 3, 0.42 * layers + 1.9, columns=len(kinds) * len(BITS)
    )
    for axes, ((kind, columns), bits) in zip(panels, product(kinds, BITS)):
        cells = []
        for layer in range(layers):
            names = [f"blocks.{layer}.{column}" for column in columns]
            cells.append([loss.get((name, bits), math.nan) for name in names])
        image = axes.imshow(cells, norm=norm, cmap="cividis", aspect="auto")  # the norm clips
        labels = [column.split(".")[-1] for column in columns]
        rotation = 60  # of names; numbers of heads stand upright
        if heads and columns is not parts:
            rotation = 0
        axes.set_xticks(range(len(columns)), labels, rotation=rotation, fontsize=7)
        axes.set_yticks(range(layers), range(layers))
        plural = "s" if bits > 1 else ""
        axes.set_title(f"{kind}, {bits} bit{plural}", fontsize=8)
        axes.grid(visible=False)
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, label="change of the loss (nats per token)")
    figure.suptitle(plain_text(f"{title}: what few bits cost each part alone"), fontsize=10)
    save_figure(figure, path)
