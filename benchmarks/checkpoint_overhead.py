"""What exact resume costs: bookkeeping in every step, and saves in the foreground and in the background."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm, trange

from thinker.benchmarks.environment import finish
from thinker.checkpoint import checkpoint
from thinker.checkpoint.manager import CheckpointManager
from thinker.training.config import load_config
from thinker.training.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--rounds", type=int, default=15, help="of a bare step and a step as training makes it")
    parser.add_argument("--saves", type=int, default=9, help="in the foreground, and as many in the background")
    parser.add_argument("--out", type=Path, help="a file that the result is appended to")


def run(arguments: argparse.Namespace) -> None:
    """Both sides in turn, in one process; print medians and a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run.dir={folder}/run", "train.save_every=null", "train.eval_every=null", "train.max_minutes=null",
                 "train.max_steps=1000000"]  # fmt: skip
        trainer = Trainer(load_config(arguments.config, [*arguments.overrides, *fixed]))
        trainer.bar = tqdm(disable=True)
        for _ in range(3):  # allocations, compiling
            bare_step(trainer)
            trainer.advance()
        result = {"benchmark": "saving", "config": str(arguments.config), "overrides": arguments.overrides}
        result |= {"parameters": sum(p.numel() for p in trainer.model.parameters())}
        result |= bookkeeping(trainer, arguments.rounds) | saves(trainer, Path(folder), arguments.saves)
        trainer.batches.close()
        trainer.run.unlock()
    step, ratio = result["step_s"], result["bookkeeping"]
    print(f"a step of training {step:.4f} s, {ratio:.4f} times a bare one")
    print(f"copying the state {result['copy_s']:.4f} s, writing it {result['foreground_save_s']:.4f} s")
    print(
        f"a background save delays its step by {result['delay_s']:.4f} s (error {result['delay_error_s']:.4f}), "
        f"the step after by {result['after_s']:.4f} s"
    )
    finish(result, arguments.out)


def bare_step(trainer: Trainer) -> None:
    """As most loops have it: batch, step, the loss read and logged; nothing looked at, counted or kept for resuming."""
    factor = trainer.lr_multiplier()
    batch = trainer.batches.batch(trainer.state.step)
    trainer.train_step.guarded = False
    loss, norm = trainer.train_step(batch, factor)
    trainer.train_step.guarded = True
    trainer.state.step += 1
    line = {"train_loss": loss.item(), "lr": trainer.train_step.optimizers.lr * factor, "grad_norm": float(norm)}
    trainer.log(line | trainer.speed(1.0))


def bookkeeping(trainer: Trainer, rounds: int) -> dict[str, float]:
    """Seconds of a step as training makes it, and the median ratio to a bare one of the same round."""
    steps, ratios = [], []
    for number in trange(rounds, desc="steps"):
        order = (bare_step, Trainer.advance) if number % 2 else (Trainer.advance, bare_step)
        seconds = {step: timed(trainer, step) for step in order}
        steps.append(seconds[Trainer.advance])
        ratios.append(seconds[Trainer.advance] / seconds[bare_step])
    return {"step_s": statistics.median(steps), "bookkeeping": statistics.median(ratios)}


def saves(trainer: Trainer, folder: Path, count: int) -> dict[str, float]:
    """Seconds of a save, of a copy of the state, and of what a background save adds to the step it starts in."""
    begun, after, copies, written = [], [], [], []
    for name in "fb":
        (folder / name).mkdir()
    foreground = CheckpointManager(folder / "f", 1)
    background = CheckpointManager(folder / "b", 1, background=True, share=trainer.saver.share)

    def save(saver: CheckpointManager) -> None:
        tensors = trainer.train_step.optimizers.tensors()
        state = trainer.state.model_dump(mode="json")
        saver.save("step", trainer.state.step, checkpoint.contents(trainer.model, state, tensors))

    def save_and_advance(trainer: Trainer) -> None:
        save(background)
        trainer.advance()

    def copy(trainer: Trainer) -> None:
        checkpoint.copied(checkpoint.contents(trainer.model, {}, trainer.train_step.optimizers.tensors()))

    for _ in trange(count, desc="saves"):
        before = timed(trainer, Trainer.advance)
        beginning = timed(trainer, save_and_advance)
        following = timed(trainer, Trainer.advance)
        background.wait()
        plain = (before + timed(trainer, Trainer.advance)) / 2  # of a step before and a step after
        begun.append(beginning - plain)
        after.append(following - plain)
        copies.append(timed(trainer, copy))
        written.append(timed(trainer, lambda trainer: save(foreground)))
    background.close()
    found = {"copy_s": copies, "foreground_save_s": written, "delay_s": begun, "after_s": after}
    error = 1.25 * statistics.stdev(begun) / len(begun) ** 0.5  # of a median
    return {name: statistics.median(seconds) for name, seconds in found.items()} | {"delay_error_s": error}


def timed(trainer: Trainer, action: Callable[[Trainer], None]) -> float:
    """Seconds until the device has finished."""
    start = time.perf_counter()
    action(trainer)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
