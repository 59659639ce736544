"""Time until gpu-124m.yaml reaches the loss of a plain GPT with nanoGPT's recipe, on one GPU.

Each side trains for a given time of its own clock, at the end of which its schedule ends. The clock
runs during steps, until the device has finished them; compiling and evaluating are outside. Both
read the same batches of a corpus of `gpu_corpus`, and are evaluated on the same held-out documents.
Every row is written to results.jsonl at once.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinker.benchmarks.baselines import PlainGPT
from thinker.benchmarks.contenders import stream
from thinker.benchmarks.environment import describe_environment, synchronize
from thinker.benchmarks.gpu.gpu import ENVIRONMENT, Recorder, first_worker
from thinker.benchmarks.gpu.gpu_corpus import unpack_corpus
from thinker.benchmarks.gpu.gpu_training import Results
from thinker.benchmarks.gpu.plain_training import RATES, PlainTraining
from thinker.data.batches.prefetch import Batch, Prefetcher
from thinker.data.batches.windows import PackedDataset
from thinker.evaluation.perplexity import Estimate, estimate_ratio
from thinker.runtime.backend import configure_backend
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure
from thinker.training.callback import Callback, StepInfo
from thinker.training.config.config import Config
from thinker.training.config.load import load_config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.data.training_batches import open_loader
from thinker.training.run import build_trainer
from thinker.training.step import TrainingStep

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gpu-124m.yaml"
THINKER = "thinker"
SIDES = (*RATES, THINKER)  # adamw and muon train the plain GPT
EVALUATIONS = 20  # of Thinker, whose time to the loss is wanted
PLAIN_EVALUATIONS = 8  # of a plain GPT, of which only the last one counts
WARMUP_STEPS = 10  # the default; the config's are for a run of hours, and half of this one
REPORT_SECONDS = 5.0
TOY = (  # of a rehearsal
    "model.d_model=64", "model.n_layers=2", "model.n_heads=2", "data.seq_len=64", "train.batch_size=8",
    "train.micro_batch_size=4", "train.device=cpu", "train.precision=fp32", "train.compile=false",
)  # fmt: skip
COLORS = {"adamw": GREY, "muon": ORANGE, THINKER: BLUE}
LABELS = {
    "adamw": "plain GPT, AdamW",
    "muon": "plain GPT, Muon",
    THINKER: "Thinker, `gpu-124m.yaml`",
}


class Side(NamedTuple):
    """What one process trains, and for how many seconds of its clock."""

    name: str
    seconds: float
    rate: float  # learning rate of a plain GPT
    evaluations: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--corpus", type=Path, required=True, metavar="DIR", help="folder of gpu_corpus"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="results.jsonl, log.txt and plot"
    )
    parser.add_argument(
        "--sides",
        default="adamw,thinker",
        metavar="SIDE,...",
        help="what to train, in this order: adamw, muon (of the plain GPT), thinker",
    )
    parser.add_argument(
        "--plain-seconds", type=float, default=240.0, help="training time of a plain GPT"
    )
    parser.add_argument(
        "--thinker-seconds", type=float, default=80.0, help="training time of gpu-124m.yaml"
    )
    parser.add_argument(
        "--rates",
        metavar="LR,...",
        help="learning rates of the plain GPT to try; the best one trains in full",
    )
    parser.add_argument(
        "--trial-seconds", type=float, default=30.0, help="training time of each rate that is tried"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="time limit with compiling and evaluating"
    )
    parser.add_argument("--rehearse", action="store_true", help="run it on the CPU at toy size")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train each side in a process of its own, compare, and draw the curves."""
    sides = parse_sides(arguments.sides)
    rates = parse_rates(arguments.rates, sides)
    for name in ("plain_seconds", "thinker_seconds", "trial_seconds", "minutes"):
        value = getattr(arguments, name)
        if not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {value}; use a positive number")
    deadline = time.monotonic() + 60 * arguments.minutes - REPORT_SECONDS
    os.environ.update(ENVIRONMENT)
    if not arguments.rehearse and not torch.cuda.is_available():
        raise UserError("no CUDA GPU is available; --rehearse runs everything on the CPU")
    device = torch.device("cuda")
    if arguments.rehearse:
        device = torch.device("cpu")
    folder = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    manifest = unpack_corpus(arguments.corpus, folder / "corpus")
    options = {"log": (folder / "log.txt").absolute(), "eager": arguments.rehearse}
    recorder = Recorder(folder / "results.jsonl", "loss")
    recorder.card = first_worker(device, recorder, options).get("card")
    facts = {"name": "environment", "corpus": manifest, **describe_environment()}
    recorder.write("environment", facts)

    for name in sides:
        if name == THINKER:
            side = Side(name, arguments.thinker_seconds, 0.0, EVALUATIONS)
        else:
            rate = RATES[name]
            if rates:
                trials = [Side(name, arguments.trial_seconds, rate, 1) for rate in rates]
                best = best_rate(trials, arguments, recorder, deadline, options)
                if best is None:  # the errors of all trials are recorded
                    continue
                rate = best
            side = Side(name, arguments.plain_seconds, rate, PLAIN_EVALUATIONS)
        train_side(side, side.name, arguments, recorder, deadline, options)
    for result in comparisons(recorder.results):
        recorder.write("comparison", result)
    if any(curve_of(recorder.results, name) for name in sides):
        plot_curves(recorder.results, folder / "time-to-loss.png")
    missing = [name for name in sides if not curve_of(recorder.results, name)]
    if missing:
        raise RunError(f"no result of {', '.join(missing)}; see {recorder.path}")
    failures = [f"{line['stage']}: {line['name']}" for line in recorder.results if "error" in line]
    compared = [line for line in recorder.results if line["stage"] == "comparison"]
    return {"comparisons": compared, "failures": failures}


def parse_sides(text: str) -> list[str]:
    """The names of the sides. Raises UserError for others."""
    sides = text.split(",")
    for side in sides:
        if side not in SIDES:
            raise UserError(f"--sides has {side!r}; choose from {', '.join(SIDES)}")
    return sides


def parse_rates(text: str | None, sides: list[str]) -> list[float]:
    """The learning rates to try. Raises UserError for other text, and if they fit no side or
    several."""
    if text is None:
        return []
    plain = [side for side in sides if side != THINKER]
    if len(plain) != 1:
        raise UserError("--rates is for one side of the plain GPT; set --sides adamw or muon")
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError as error:
        raise UserError(f"--rates {text} is no list of numbers; use 0.01,0.02") from error
    if not all(0 < rate < math.inf for rate in rates):
        raise UserError(f"--rates {text} has one that is not positive; use 0.01,0.02")
    return rates


def best_rate(
    trials: list[Side],
    arguments: argparse.Namespace,
    recorder: Recorder,
    deadline: float,
    options: dict[str, Any],
) -> float | None:
    """The learning rate with the lowest loss after a short training, whose schedule ends there.

    None if each failed or has a loss that is not finite.
    """
    losses = {}
    for trial in trials:
        train_side(trial, f"{trial.name}, trial", arguments, recorder, deadline, options)
        rows = [row for row in recorder.results if row["stage"] == f"{trial.name}, trial"]
        if math.isfinite(rows[-1].get("val_loss", math.nan)):
            losses[trial.rate] = rows[-1]["val_loss"]
    if not losses:
        return None
    return min(losses, key=lambda rate: losses[rate])


def train_side(
    side: Side,
    stage: str,
    arguments: argparse.Namespace,
    recorder: Recorder,
    deadline: float,
    options: dict[str, Any],
) -> None:
    """Train a side in a process of its own, and record its rows, or its error."""
    overrides = data_overrides(arguments.out / "corpus")
    if arguments.rehearse:
        overrides += TOY
    overrides.append(f"train.max_minutes={side.seconds / 60}")
    train = train_thinker if side.name == THINKER else train_plain
    with tempfile.TemporaryDirectory() as scratch:
        overrides.append(f"run.dir={scratch}/run")
        try:
            for row in stream(train, side, overrides, deadline=deadline, **options):
                recorder.write(stage, row)
        except (RunError, UserError, TimeoutError) as error:  # the other sides still run
            recorder.write(stage, {"name": "side", "error": f"{type(error).__name__}: {error}"})


def data_overrides(corpus: Path) -> list[str]:
    """What differs from the config: data, tokenizer, vocabulary and length, with the warmup that
    suits it."""
    from thinker.data.tokenizers.saved_tokenizer import load_tokenizer

    vocab_size = load_tokenizer(corpus).vocab_size
    rounded = -(-vocab_size // 64) * 64
    return [
        "data.source=tokens", f"data.path={corpus}", f"data.tokenizer={corpus}", "data.config=null",
        "data.max_documents=null", f"model.vocab_size={rounded}", "train.max_steps=null",
        f"train.warmup_steps={WARMUP_STEPS}",
    ]  # fmt: skip


# The sides, each in a process of its own


def train_plain(side: Side, overrides: list[str]) -> Results:
    """Rows of a plain GPT of the config's size, with its batches."""
    config = load_config(CONFIG, overrides)
    device = device_of(config)
    configure_backend(device)
    corpus = prepare_training_data(config)
    batches = Prefetcher(open_loader(config, corpus, 0), device.type == "cuda")
    model_config = config.model
    torch.manual_seed(config.run.seed)
    model = PlainGPT(
        model_config.n_layers,
        model_config.d_model,
        max(1, model_config.d_model // 64),  # GPT-2's width of heads
        model_config.vocab_size,
        config.data.seq_len,
    ).to(device)
    training = PlainTraining(
        model,
        side.name,
        side.rate,
        batches.batch,
        side.seconds,
        config.train.micro_batch_size,
        config.train.precision,
    )
    evaluate = HeldOut(config, corpus.val)
    try:
        started = time.monotonic()
        training.warm_up(dummy_batch(config, device))
        compile_s = time.monotonic() - started
        due = 0.0
        while training.progress < 1:
            training.train_step()
            if training.progress >= min(due, 1.0):
                due += 1 / side.evaluations
                yield {
                    "name": f"step {training.step}",
                    "seconds": training.seconds,
                    "planned_s": side.seconds,
                    "step": training.step,
                    "tokens": training.tokens,
                    "epochs": batches.loader.epochs(training.step)[0],
                    "rate": side.rate,
                    "compile_s": compile_s,
                    **evaluate(training.losses),
                }
    finally:
        batches.close()


def train_thinker(side: Side, overrides: list[str]) -> Results:
    """Rows of the config with its data replaced."""
    config = load_config(CONFIG, overrides)
    device = device_of(config)
    trainer = build_trainer(config, callbacks=[WaitForDevice(device)])
    evaluate = HeldOut(config, trainer.corpus.val)

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return trainer.model(inputs.to(device), targets=targets.to(device))[0]

    def evaluated() -> dict[str, Any]:
        trainer.model.eval()
        with torch.no_grad():
            found = evaluate(losses)
        trainer.model.train()
        return found

    try:
        started = time.monotonic()
        warm_up(trainer.step, dummy_batch(config, device), evaluated)
        compile_s = time.monotonic() - started
        due = 0.0
        while trainer.progress() < 1:
            trainer.train_step()
            if trainer.progress() >= min(due, 1.0):
                due += 1 / side.evaluations
                yield {
                    "name": f"step {trainer.state.step}",
                    "seconds": trainer.state.elapsed_s,
                    "planned_s": side.seconds,
                    "step": trainer.state.step,
                    "tokens": trainer.state.tokens,
                    "epochs": trainer.epochs,
                    "compile_s": compile_s,
                    **evaluated(),
                }
    finally:
        trainer.batches.close()
        trainer.run.unlock()


class WaitForDevice(Callback):
    """Waits in each step until the device has finished, within the clock of the run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def after_step(self, info: StepInfo) -> None:
        """The optimizers have stepped, as far as the host knows."""
        synchronize(self.device)


def warm_up(step: TrainingStep, batch: Batch, evaluate: Callable[[], Any]) -> None:
    """Compile with two steps on any batch of the right shape and an evaluation, then forget
    them."""
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    for _ in range(2):
        step(batch, 1.0)
    evaluate()
    with torch.no_grad():
        for name, tensor in step.model.state_dict().items():
            tensor.copy_(before[name])
    for optimizer in step.optimizers.optimizers:
        optimizer.state.clear()
    step.n_nonfinite.zero_()
    synchronize(step.device)


def dummy_batch(config: Config, device: torch.device) -> Batch:
    """A batch of random tokens of the shape of the config's batches."""
    shape = (config.train.batch_size, config.data.seq_len + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, shape, generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if device.type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return Batch(inputs, targets, inputs.numel())


def device_of(config: Config) -> torch.device:
    """A GPU, or the CPU of a rehearsal."""
    if config.train.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda")


class HeldOut:
    """The loss on the validation split, in whole windows; with the sum of each micro-batch, so that
    two models can be compared pair by pair."""

    def __init__(self, config: Config, tokens: Any) -> None:
        self.windows = PackedDataset(tokens, config.data.seq_len, "contiguous")
        self.size = config.train.micro_batch_size
        n_whole = len(self.windows) - len(tokens.shards)  # the last of a shard has padding
        self.n_blocks = n_whole // self.size
        if self.n_blocks < 2:
            raise UserError(f"the corpus holds out {n_whole} windows; use at least {2 * self.size}")

    def __call__(self, losses: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
        """losses: from inputs and targets (B, T) the sum in nats, on any device."""
        started = time.monotonic()
        sums = []
        for block in range(self.n_blocks):
            first = block * self.size
            inputs, targets = self.windows.batch(range(first, first + self.size))
            sums.append(losses(inputs, targets))
        nats = torch.stack(sums).double().cpu()
        n_targets = self.size * self.windows.seq_len
        estimate = mean_of_blocks(nats / n_targets)
        return {
            "val_loss": estimate.mean,
            "low": estimate.low,
            "high": estimate.high,
            "val_tokens": n_targets * self.n_blocks,
            "block_losses": [round(value, 5) for value in (nats / n_targets).tolist()],
            "evaluation_s": time.monotonic() - started,
        }


def mean_of_blocks(losses: Tensor) -> Estimate:
    """The mean over blocks (N,) of one size, with its 95% interval."""
    return estimate_ratio(losses.double(), torch.ones(len(losses)), 0.95)


# What comes out


def comparisons(rows: list[dict[str, Any]]) -> Results:
    """For each plain GPT: when Thinker reaches its final loss, and the difference at the end.

    `certain_s`: when the 95% interval of the difference, taken block by block, is at most zero. A
    side that was stopped is not compared, as its schedule did not end, nor are sides on two cards.
    """
    curves = {}
    for side in SIDES:
        points = curve_of(rows, side)
        if points and points[-1]["seconds"] >= points[-1]["planned_s"]:
            curves[side] = points
    if THINKER not in curves:
        return
    for side in RATES:
        if side not in curves:
            continue
        target = curves[side][-1]
        if target.get("card") != curves[THINKER][-1].get("card"):
            continue
        reached = certain = None
        for row in curves[THINKER]:
            difference = difference_of(row, target)
            if reached is None and difference.mean <= 0:
                reached = row["seconds"]
            if certain is None and difference.high is not None and difference.high <= 0:
                certain = row["seconds"]
        last = difference_of(curves[THINKER][-1], target)
        yield {
            "name": f"thinker to {side}",
            "plain": side,
            "plain_loss": target["val_loss"],
            "plain_s": target["seconds"],
            "plain_epochs": target["epochs"],
            "thinker_loss": curves[THINKER][-1]["val_loss"],
            "thinker_s": curves[THINKER][-1]["seconds"],
            "thinker_epochs": curves[THINKER][-1]["epochs"],
            "reached_s": reached,
            "certain_s": certain,
            "difference": last.mean,
            "low": last.low,
            "high": last.high,
        }


def curve_of(rows: list[dict[str, Any]], side: str) -> list[dict[str, Any]]:
    """The evaluations of a side in its last run, as results.jsonl may have several."""
    points: list[dict[str, Any]] = []
    for row in rows:
        if row["stage"] != side or "val_loss" not in row:
            continue
        if points and row["seconds"] <= points[-1]["seconds"]:  # another run begins
            points = []
        points.append(row)
    return points


def difference_of(row: dict[str, Any], other: dict[str, Any]) -> Estimate:
    """The loss of a row minus that of another, with the 95% interval over the same blocks."""
    losses = torch.tensor(row["block_losses"]) - torch.tensor(other["block_losses"])
    return mean_of_blocks(losses)


def plot_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Validation loss by seconds of training. rows: with those of one side at least."""
    figure, (axes,) = new_figure(7, 4.2)
    ends = []
    for side, color in COLORS.items():
        points = curve_of(rows, side)
        if not points:
            continue
        seconds = [row["seconds"] for row in points]
        losses = [row["val_loss"] for row in points]
        label = f"{LABELS[side].replace('`', '')}, {losses[-1]:.3f}"
        axes.plot(seconds, losses, color=color, marker="o", markersize=3, label=label)
        axes.axhline(losses[-1], color=color, linestyle="--", linewidth=0.8)
        ends.append(losses[-1])
    axes.set(xlabel="seconds of training", ylabel="validation loss (nats per token)")
    axes.set(xlim=(0, None), ylim=(min(ends) * 0.97, min(ends) * 1.8))
    axes.legend(frameon=False)
    figure.savefig(path)
