"""Overhead per step of exact resume, and of saving in the foreground and in the background."""

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from thinker import checkpoint
from thinker.benchmarks.environment import measure_seconds
from thinker.checkpoint import CheckpointManager
from thinker.checkpoint.model_files import to_cpu
from thinker.runtime.process.progress import Progress
from thinker.training.config.load import load_config
from thinker.training.optim.schedule import lr_multiplier
from thinker.training.run import build_trainer
from thinker.training.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="YAML file of the run to measure"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override keys of the config"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="pairs of a plain step and a resumable step"
    )
    parser.add_argument(
        "--saves", type=int, default=9, help="number of foreground saves, and of background saves"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both kinds of steps and of saves alternately, in one process, and print medians."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run.dir={folder}/run", "train.save_every=null", "train.eval_every=null", "train.max_minutes=null",
                 "train.max_steps=1000000", "train.fit_bigrams=off"]  # fmt: skip
        trainer = build_trainer(load_config(arguments.config, [*arguments.overrides, *fixed]))
        trainer.bar = Progress(disable=True)
        for _ in range(3):  # memory allocation and compilation
            bare_step(trainer)
            trainer.train_step()
        result = {"config": str(arguments.config), "overrides": arguments.overrides}
        result["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
        result |= measure_steps(trainer, arguments.rounds)
        result |= measure_saves(trainer, Path(folder), arguments.saves)
        trainer.batches.close()
        trainer.run.unlock()
    print(
        f"a resumable step takes {result['step_s']:.4f} s, {result['step_ratio']:.4f} times a plain one"
    )
    print(
        f"copying the state takes {result['copy_s']:.4f} s, saving it {result['foreground_save_s']:.4f} s"
    )
    print(
        f"a background save delays its step by {result['delay_s']:.4f} s (standard error "
        f"{result['delay_error_s']:.4f}) and the next step by {result['next_delay_s']:.4f} s"
    )
    return result


def bare_step(trainer: Trainer) -> None:
    """A plain training step, without the work for resuming and for checks of finite values."""
    multiplier = lr_multiplier(trainer.settings.train, trainer.state.step, trainer.progress())
    batch = trainer.batches.batch(trainer.state.step)
    trainer.step.skip_nonfinite = False
    loss, norm = trainer.step(batch, multiplier)
    trainer.step.skip_nonfinite = True
    trainer.state.step += 1
    line = {
        "train_loss": loss.item(),
        "lr": trainer.step.optimizers.lr * multiplier,
        "grad_norm": float(norm),
    }
    trainer.step_log.write(line | {"tokens_per_second": 1.0, "flops_per_second": 1.0})


def measure_steps(trainer: Trainer, rounds: int) -> dict[str, float]:
    """Seconds of a resumable step, and its median ratio to a bare step of the same round."""
    steps = {"bare": partial(bare_step, trainer), "resumable": trainer.train_step}
    step_seconds, ratios = [], []
    for number in Progress(range(rounds), desc="steps"):
        order = ("bare", "resumable") if number % 2 else ("resumable", "bare")
        seconds = {name: measure_seconds(steps[name], trainer.device) for name in order}
        step_seconds.append(seconds["resumable"])
        ratios.append(seconds["resumable"] / seconds["bare"])
    return {"step_s": statistics.median(step_seconds), "step_ratio": statistics.median(ratios)}


def measure_saves(trainer: Trainer, folder: Path, n_saves: int) -> dict[str, float]:
    """Seconds of a save, of a copy of the state, and of the delays that a background save
    causes."""
    foreground_folder, background_folder = folder / "foreground", folder / "background"
    foreground_folder.mkdir()
    background_folder.mkdir()
    foreground = CheckpointManager(foreground_folder, 1)
    background = CheckpointManager(
        background_folder, 1, background=True, cpu_share=trainer.checkpoints.cpu_share
    )

    def save(manager: CheckpointManager) -> None:
        tensors = trainer.step.optimizers.tensors()
        state = trainer.state.model_dump(mode="json")
        manager.save(
            "step", trainer.state.step, checkpoint.checkpoint_files(trainer.model, state, tensors)
        )

    def save_and_step() -> None:
        save(background)
        trainer.train_step()

    def copy() -> None:
        to_cpu(checkpoint.checkpoint_files(trainer.model, {}, trainer.step.optimizers.tensors()))

    delays: list[float] = []
    next_delays: list[float] = []
    copies: list[float] = []
    saves: list[float] = []
    for _ in Progress(range(n_saves), desc="saves"):
        before = measure_seconds(trainer.train_step, trainer.device)
        with_save = measure_seconds(save_and_step, trainer.device)
        following = measure_seconds(trainer.train_step, trainer.device)
        background.wait()
        undisturbed = (before + measure_seconds(trainer.train_step, trainer.device)) / 2
        delays.append(with_save - undisturbed)
        next_delays.append(following - undisturbed)
        copies.append(measure_seconds(copy, trainer.device))
        saves.append(measure_seconds(partial(save, foreground), trainer.device))
    background.close()
    samples = {
        "copy_s": copies,
        "foreground_save_s": saves,
        "delay_s": delays,
        "next_delay_s": next_delays,
    }
    result = {name: statistics.median(seconds) for name, seconds in samples.items()}
    result["delay_error_s"] = (
        1.25 * statistics.stdev(delays) / len(delays) ** 0.5
    )  # standard error of a median
    return result
