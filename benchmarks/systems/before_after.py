"""Speed of this tree compared with that of an older commit, in alternating pairs."""

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from thinker.benchmarks.checkout import ROOT, check_out, environment, link_own_tree
from thinker.benchmarks.speed.decode import SHAPES
from thinker.benchmarks.speed.train import SHAPES as TRAINING_SHAPES
from thinker.benchmarks.systems.serving import (
    STREAM,
    free_port,
    save_random_model,
    start,
    stream_all,
)
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.process.progress import Progress

STEPS = {"step-quickstart": (40, 5), "step-12m": (6, 2)}  # timed ones, and those before them
DECODING = ("decode-32", "decode-16", "decode-8", "decode-4", "prefill-32", "prefill-16")
MEASURES = (*STEPS, *DECODING, "server")
DRIVER = Path(__file__).with_name("timing_driver.py")
PROMPT = 32  # tokens of each client's prompt

Seconds = dict[str, float]  # by measure


class Side(NamedTuple):
    """A tree, and a folder to run its commands in."""

    name: str
    tree: Path
    folder: Path
    environment: dict[str, str]

    def run(self, *command: str | Path) -> str:
        """Run a Python script. Returns its standard output. Raises RunError if it fails."""
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines()[-1:]
            raise RunError(f"{self.name}: {command[0]} ended with {done.returncode}: {reason}")
        return done.stdout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("commit", metavar="COMMIT", help="the older commit, such as main~5")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=MEASURES,
        default=list(MEASURES),
        metavar="MEASURE",
        help=f"measures to take, of {', '.join(MEASURES)} (default: all)",
    )
    parser.add_argument("--pairs", type=int, default=9, help="times that each side is measured")
    parser.add_argument("--steps", type=int, help="training steps to time (default: 40, 12M: 6)")
    parser.add_argument("--shape", default="110m", choices=SHAPES, help="model that generates")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt to prefill")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of a text in a process")
    parser.add_argument("--clients", type=int, default=8, help="clients of the server")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, help="threads of each process (default: torch's)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turns, each time in new processes, and print a table."""
    names = ("pairs", "prompt", "new", "repeats", "clients")
    sizes = [getattr(arguments, name) for name in names]
    if arguments.steps is not None:
        sizes.append(arguments.steps)
    if min(sizes) < 1:
        raise UserError(
            "--pairs, --steps, --prompt, --new, --repeats and --clients need at least 1"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides = make_sides(arguments, folder)
        model = folder / "model"
        if set(arguments.only) - set(STEPS):
            save_random_model(arguments.shape, max(1024, arguments.prompt + arguments.new), model)
        samples = take_turns(arguments, sides, model)
    rows = [summarize(measure, *samples[measure]) for measure in arguments.only]
    print(f"{'':16} {'old ms':>10} {'new ms':>10}   speed new / old")
    for row in rows:
        low, high = min(row["ratios"]), max(row["ratios"])
        times = f"{1000 * row['old_s']:10.3f} {1000 * row['new_s']:10.3f}"
        print(f"{row['measure']:16} {times}   {row['ratio']:.3f} ({low:.3f} to {high:.3f})")
    names = ("commit", "pairs", "shape", "prompt", "new", "repeats", "clients", "device")
    settings = {name: getattr(arguments, name) for name in names}
    return settings | {"tree": describe_tree(), "rows": rows}


def make_sides(arguments: argparse.Namespace, folder: Path) -> tuple[Side, Side]:
    """The older tree and this one. Raises RunError if a process would import another one."""
    trees = {
        "old": check_out(arguments.commit, folder / "old-tree"),
        "new": link_own_tree(folder / "new-tree"),
    }
    sides = []
    for name, tree in trees.items():
        side = Side(name, tree, folder / name, environment(tree, arguments.threads))
        side.folder.mkdir()
        imported = Path(side.run("-c", "import thinker; print(thinker.__file__)").strip())
        if imported.parent != tree:
            raise RunError(f"the {name} side would import {imported}, not {tree}")
        sides.append(side)
    return sides[0], sides[1]


def take_turns(
    arguments: argparse.Namespace, sides: tuple[Side, Side], model: Path
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of the old and of the new side in each pair, by measure."""
    config = sides[0].tree / "configs" / "quickstart.yaml"  # the same for both
    tasks: list[Callable[[Side], Seconds]] = []
    for measure in STEPS:
        if measure in arguments.only:
            tasks.append(lambda side, measure=measure: time_steps(side, measure, config, arguments))
    decoding = [measure for measure in DECODING if measure in arguments.only]
    if decoding:
        tasks.append(lambda side: time_decoding(side, decoding, model, arguments))
    if "server" in arguments.only:
        tasks.append(lambda side: time_server(side, model, arguments))

    samples: dict[str, tuple[list[float], list[float]]] = {
        measure: ([], []) for measure in arguments.only
    }
    for pair in Progress(range(arguments.pairs), desc="pairs"):
        order = (0, 1) if pair % 2 == 0 else (1, 0)  # so that neither side is always the first
        for task in tasks:
            for index in order:
                for measure, seconds in task(sides[index]).items():
                    samples[measure][index].append(seconds)
    return samples


def time_steps(side: Side, measure: str, config: Path, arguments: argparse.Namespace) -> Seconds:
    """Median seconds of a step of train.py, from the times in metrics.jsonl."""
    n_timed, n_first = STEPS[measure]
    n_timed = arguments.steps or n_timed
    overrides = [
        "run.dir=run",
        f"train.max_steps={n_first + n_timed}",
        "train.max_minutes=null",
        f"train.device={arguments.device}",
        "train.compile=false",
        "train.eval_every=null",
        "train.eval_sequences=8",
        "train.sample_every=null",
        "train.save_every=null",
        "data.max_documents=5000",
    ]
    if measure == "step-12m":
        shape = TRAINING_SHAPES["12m"]
        overrides += [
            f"model.n_layers={shape.n_layers}",
            f"model.d_model={shape.d_model}",
            f"model.n_heads={shape.n_heads}",
            f"model.vocab_size={shape.vocab_size}",
            "model.qk_norm=false",
            f"data.seq_len={shape.seq_len}",
            "data.packing=contiguous",
            f"train.batch_size={shape.batch_size}",
        ]
    side.run(side.tree / "train.py", config, *overrides)
    lines = map(json.loads, (side.folder / "run" / "metrics.jsonl").read_text().splitlines())
    times = [line["elapsed_s"] for line in lines if "train_loss" in line]
    shutil.rmtree(side.folder / "run")
    steps = [after - before for before, after in pairwise(times)]
    return {measure: statistics.median(steps[n_first - 1 :])}


def time_decoding(
    side: Side, measures: list[str], model: Path, arguments: argparse.Namespace
) -> Seconds:
    """Seconds per token, or of the prompt: see timing_driver.py."""
    names = ("new", "prompt", "repeats", "device")
    options = {name: getattr(arguments, name) for name in names} | {"measures": measures}
    return json.loads(side.run(DRIVER, model, json.dumps(options)))


def time_server(side: Side, model: Path, arguments: argparse.Namespace) -> Seconds:
    """Median seconds per token of a server whose clients all stream one answer at a time."""
    port, n_clients = free_port(), arguments.clients
    command = [sys.executable, "-m", "thinker.serving", str(model), "--device", arguments.device]
    command += ["--max-batch", str(n_clients), "--port", str(port)]
    rates = []
    with start(command, f"http://127.0.0.1:{port}/health", side.environment, side.folder):
        for turn in range(arguments.repeats + 1):
            bodies = []
            for client in range(n_clients):
                start_token = 97 * turn + 31 * client
                prompt = [300 + (start_token + i) % 200 for i in range(PROMPT)]
                body = {"model": model.name, "prompt": prompt, "max_tokens": arguments.new}
                bodies.append({**body, "seed": client, **STREAM})
            rates.append(asyncio.run(stream_all(port, bodies)))
    return {"server": 1 / statistics.median(rates[1:])}  # the first turn is a warm-up


def summarize(measure: str, old: list[float], new: list[float]) -> dict[str, Any]:
    """Medians of the seconds, and of the ratio of the speeds in each pair."""
    ratios = [before / after for before, after in zip(old, new)]
    return {
        "measure": measure,
        "old_s": statistics.median(old),
        "new_s": statistics.median(new),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def describe_tree() -> str:
    """The commit of this tree, with "-dirty" if it was changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
