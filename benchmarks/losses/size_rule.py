"""Validation loss of the size that model.size=auto chooses and of fixed sizes, by size of the text
and minutes."""

import argparse
import statistics
from pathlib import Path
from typing import Any

import thinker.features.auto_size
from thinker.benchmarks.training_runs import parse_shapes, train_all
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write
from thinker.training.processes.training_process import TrainingProcess

CONFIG = Path(thinker.features.auto_size.__file__).with_name("any-text.yaml")
QUIET = ["train.eval_every=null", "train.save_every=null", "train.sample_every=null"]
AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "text", type=Path, metavar="FILE", help="text file, as long as the largest of --characters"
    )
    sizes = [100_000, 1_000_000, 10_000_000]
    parser.add_argument("--characters", type=int, nargs="+", default=sizes, metavar="N",
                        help="characters to read from the start (default: 100000 1000000 10000000)")  # fmt: skip
    parser.add_argument("--minutes", type=float, nargs="+", default=[2.0, 10.0], metavar="M",
                        help="training times (default: 2 10)")  # fmt: skip
    parser.add_argument("--shapes", default="64x2x2,96x4x3,128x4x4,192x4x6,256x6x8", metavar="WIDTHxLAYERSxHEADS,...",
                        help="fixed sizes (default: five)")  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=1, help="training runs in parallel, which share the cores"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/size_rule"),
                        help="folder for runs; finished runs are reused")  # fmt: skip


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all sizes and print a table. Everything but the size is as the rule chooses it."""
    text = arguments.text.read_text(encoding="utf-8")
    if len(text) < max(arguments.characters):
        raise UserError(f"{arguments.text} has only {len(text):,} characters; lower --characters")
    shapes = {AUTO: []} | parse_shapes(arguments.shapes)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    runs: dict[tuple[int, float, str], TrainingProcess] = {}
    for size in arguments.characters:
        part = arguments.folder / f"{arguments.text.stem}-{size}.txt"
        atomic_write(part, text[:size])
        for minutes in arguments.minutes:
            for shape, overrides in shapes.items():
                name = f"{arguments.text.stem}-{size}-{minutes:g}-{shape}"
                where = [f"data.path={part}", f"data.cache_dir={arguments.folder}/cache"]
                runs[size, minutes, shape] = TrainingProcess(
                    name,
                    CONFIG,
                    [*where, f"train.max_minutes={minutes}", *QUIET, *overrides],
                    arguments.folder / name,
                )
    train_all(list(runs.values()), arguments.jobs)
    losses = {key: each.final["val_bits_per_byte"] for key, each in runs.items()}
    cases = list(dict.fromkeys(key[:2] for key in runs))
    print(f"{'characters':>12} {'minutes':>8}  " + "".join(f"{shape:>10}" for shape in shapes))
    for size, minutes in cases:
        cells = "".join(f"{losses[size, minutes, shape]:10.4f}" for shape in shapes)
        print(f"{size:12,} {minutes:8g}  {cells}")
    means = {}
    for shape in shapes:
        means[shape] = statistics.fmean(losses[(*case, shape)] for case in cases)
    print(f"{'mean':>21}  " + "".join(f"{mean:10.4f}" for mean in means.values()))
    excess = []
    for case in cases:
        best = min(losses[(*case, shape)] for shape in shapes)
        excess.append(losses[(*case, AUTO)] / best - 1)
    print(f"bits per byte; {AUTO} is at most {max(excess):.1%} above the best size")
    rows = [
        {"characters": n, "minutes": m, "shape": s, "bits_per_byte": loss}
        for (n, m, s), loss in losses.items()
    ]
    return {
        "text": arguments.text.name,
        "jobs": arguments.jobs,
        "rows": rows,
        "worst_excess": max(excess),
    }
