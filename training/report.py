"""What a run says at its end."""

from __future__ import annotations

import sys
from pathlib import Path

from thinker.checkpoint.run_directory import RunDirectory
from thinker.runtime.plotting import plot_loss
from thinker.training.resume import RunState


def report(run: RunDirectory, state: RunState, prefix: int = 0, talks: bool = False) -> None:
    """Say how the run ended, and draw it.

    Args: prefix: how many tokens a prompt must have; talks: it was trained on conversations.
    """
    if not run.writes:
        return
    lines = list(run.read_metrics())
    val = next((line for line in reversed(lines) if "val_loss" in line), None)
    if val is None:
        print(f"finished: {state.step} steps; {run.metrics} does not hold what came out", file=sys.stderr)
        return
    picture = run.path / "loss.png"
    plot_loss(lines, picture, f"{run.path.name}: {state.tokens:,} tokens in {state.elapsed_s / 60:.1f} minutes")
    floor = val.get("entropy_floor")
    print(f"finished: {state.step} steps, {state.tokens:,} tokens, {state.elapsed_s:.0f} s of training")
    print(f"validation loss {val['val_loss']:.4f} nats a token, {val['val_bits_per_byte']:.4f} bits a byte")
    if state.skipped:
        print(f"{state.skipped} steps were left out: their loss or gradient was not finite (nonfinite-step-*.json)")
    if floor is not None:
        above = val["val_loss"] / floor - 1
        print(f"entropy of the corpus {floor:.4f} nats a token: the model is {above:.1%} above the best possible")
    print(f"loss curve {picture}")
    python = Path(sys.executable)
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    prompt = f' --prompt "at least {prefix} tokens of text"' if prefix else ""  # the BOS token is one
    prompt = ' --chat --prompt "your message"' if talks else prompt
    print(f"sample from it: {python} generate.py {run.path}{prompt}")
