"""Bits per byte after five minutes of training on each of two texts that need no download: pysource
and tales.

With `--out benchmarks/results/five_minutes.jsonl` it records the result of this machine. With
`--table` it writes benchmarks/leaderboard.md, which has a row per result.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import thinker.features.auto_size
from thinker.benchmarks.training_runs import train_all
from thinker.runtime.files import atomic_write
from thinker.training.processes.training_process import TrainingProcess

ROOT = Path(__file__).resolve().parents[1]
AUTO_SIZE = Path(thinker.features.auto_size.__file__).parent
RESULTS, LEADERBOARD = ROOT / "results" / "five_minutes.jsonl", ROOT / "leaderboard.md"
QUIET = [
    "train.save_every=null",
    "train.sample_every=null",
    "train.max_steps=null",
    "data.val_fraction=0.05",
]
# By text: config and overrides. The model of pysource suits the machine. Validation splits are equal on all machines with the same version
# of Python.
RUNS = {
    "pysource": (AUTO_SIZE / "any-text.yaml", ["data.source=pysource", *QUIET]),
    "tales": (ROOT.parent / "configs" / "quickstart.yaml", QUIET),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override keys of both configs"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="training time per text in minutes (default: 5)"
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help=f"only write {LEADERBOARD.name} from the recorded results",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train on both texts, one after the other, and measure bits per byte of the validation
    split."""
    if arguments.table:
        rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
        atomic_write(LEADERBOARD, leaderboard(rows))
        return {"rows": len(rows)}
    results: dict[str, Any] = {"minutes": arguments.minutes, "overrides": arguments.overrides}
    with tempfile.TemporaryDirectory(prefix="five-minutes-") as folder:
        runs = {}
        for name, (config, overrides) in RUNS.items():
            where = [f"data.cache_dir={folder}/cache", f"train.max_minutes={arguments.minutes}"]
            runs[name] = TrainingProcess(
                name, config, [*overrides, *where, *arguments.overrides], Path(folder) / name
            )
        train_all(list(runs.values()))
        for name, training in runs.items():
            results[name] = measure(training)
            print(f"{name:<10} {results[name]['text']} bits per byte")
    return results


def measure(training: TrainingProcess) -> dict[str, Any]:
    """Bits per byte of a finished run on its validation split, with a 95% interval, and what was
    trained."""
    from thinker.data.batches.windows import PackedDataset
    from thinker.data.tokenizers.text_bytes import scaled_byte_lengths
    from thinker.evaluation.perplexity import text_loss
    from thinker.interop import load
    from thinker.training.data.open_run import load_validation_data

    model, tokenizer = load(training.folder)
    config, tokens = load_validation_data(
        training.folder, tokenizer, "--read-data", training.folder
    )
    windows = PackedDataset(tokens, config.data.seq_len, config.data.val_packing)
    loss = text_loss(model, windows, scaled_byte_lengths(tokens, tokenizer))
    bits, state = loss.bits_per_byte, training.final
    return {
        "text": bits.format(4), "bits_per_byte": bits.mean, "low": bits.low, "high": bits.high,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokenizer": config.data.tokenizer, "tokens": state["tokens"], "steps": state["step"],
        "precision": training.resolved["train"]["precision"],
    }  # fmt: skip


def leaderboard(rows: list[dict[str, Any]]) -> str:
    """The table of all recorded results of five minutes, best on pysource first."""
    rows = sorted(
        (row for row in rows if row["minutes"] == 5),
        key=lambda row: row["pysource"]["bits_per_byte"],
    )
    lines = [
        "# Bits per byte after five minutes of training",
        "",
        "Held-out text, five minutes of training per text, with 95% intervals; lower is better.",
        "Add a row: `python scripts/benchmark.py five-minutes --out benchmarks/results/five_minutes.jsonl`, then",
        "`python scripts/benchmark.py five-minutes --table`. `pysource` is the standard library of the Python that",
        "runs the benchmark, so compare its column only between rows with the same version.",
        "",
        "| processor | GPU | threads | precision | pysource | tales | Python | torch | date | overrides |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        machine = row["environment"]
        cells = [machine["processor"], machine["gpu"], machine["threads"], row["pysource"]["precision"],
                 row["pysource"]["text"], row["tales"]["text"], machine["python"], machine["torch"], machine["date"],
                 " ".join(row["overrides"]) or "none"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
