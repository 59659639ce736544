"""What a run prints at its end."""

from __future__ import annotations

import sys
from pathlib import Path

from thinker.checkpoint.run_directory import RunDirectory
from thinker.runtime.plotting import plot_loss
from thinker.training.resume import RunState


def print_summary(run: RunDirectory, state: RunState, prefix_len: int = 0, is_chat: bool = False) -> None:
    """Print the result and plot the loss curve.

    Args: prefix_len: tokens that a prompt must have; is_chat: the model was trained on conversations.
    """
    if not run.writes:
        return
    lines = list(run.read_metrics())
    val = next((line for line in reversed(lines) if "val_loss" in line), None)
    if val is None:
        print(f"finished: {state.step} steps; {run.metrics} does not hold its result", file=sys.stderr)
        return
    plot = run.path / "loss.png"
    plot_loss(lines, plot, f"{run.path.name}: {state.tokens:,} tokens in {state.elapsed_s / 60:.1f} minutes")
    floor = val.get("entropy_floor")
    print(f"finished: {state.step} steps, {state.tokens:,} tokens, {state.elapsed_s:.0f} s of training")
    print(f"validation loss {val['val_loss']:.4f} nats per token, {val['val_bits_per_byte']:.4f} bits per byte")
    if state.skipped:
        print(f"{state.skipped} steps were skipped: their loss or gradient was not finite (nonfinite-step-*.json)")
    if floor is not None:
        above = val["val_loss"] / floor - 1
        print(f"entropy of the corpus {floor:.4f} nats per token: the model is {above:.1%} above the best possible")
    print(f"loss curve {plot}")
    python = Path(sys.executable)
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    prompt = f' --prompt "at least {prefix_len} tokens of text"' if prefix_len else ""  # the BOS token is one
    prompt = ' --chat --prompt "your message"' if is_chat else prompt
    print(f"sample from it: {python} generate.py {run.path}{prompt}")
