"""The losses of steps, on their way from the device to metrics.jsonl."""

import math
from typing import Any

import torch
from torch import Tensor

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.prefetch import Prefetcher
from thinker.training.metrics import MemoryMeter, finite_or_none, part_losses, speed
from thinker.training.state.run_state import RunState
from thinker.training.step import TrainingStep


class StepLog:
    """Keeps the losses of steps on the device until they are read, and logs their mean."""

    def __init__(
        self,
        step: TrainingStep,
        state: RunState,
        run: RunDirectory,
        batches: Prefetcher,
        memory: MemoryMeter,
    ) -> None:
        self.step = step
        self.state = state
        self.run = run
        self.batches = batches
        self.memory = memory
        self.unread: list[tuple[int, Tensor]] = []  # steps, and their results on the device
        # At the last logged line.
        self.elapsed_s = state.elapsed_s
        self.tokens = state.tokens
        self.processed = state.processed_tokens
        self.waited = 0.0  # seconds that steps waited for data

    def add(self, number: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Keep the results of step `number`, counted from 0."""
        values = torch.cat((loss[None], grad_norm[None], self.step.part_sums.flatten()))
        self.unread.append((number, values))

    def read(self) -> list[tuple[int, float, float]]:
        """Fetch the losses and gradient norms of recent steps. Nothing else in a step waits for the
        device.

        Returns the steps that were not finite: number, loss and gradient norm.
        """
        if not self.unread:
            return []
        numbers = [number for number, _ in self.unread]
        rows = torch.stack([values for _, values in self.unread]).tolist()
        self.unread.clear()
        nonfinite = []
        for number, (loss, grad_norm, *parts) in zip(numbers, rows):
            # In fp16 gradients overflow by design; the loss scale skips these steps.
            has_norm = math.isfinite(grad_norm) or self.step.scaler.is_enabled()
            if math.isfinite(loss) and has_norm:
                self.state.add_step(loss, finite_or_none(grad_norm), parts)
            else:
                nonfinite.append((number, loss, grad_norm))
        return nonfinite

    def log_steps(self, multiplier: float, metrics: dict[str, float]) -> dict[str, Any] | None:
        """Log a line for the steps since the last one, and return it; None if there were none.

        multiplier: of the learning rates. metrics: those of the callbacks.
        """
        state = self.state
        seconds = max(state.elapsed_s - self.elapsed_s, 1e-9)
        n_trained = state.tokens - self.tokens
        n_processed = state.processed_tokens - self.processed
        waited = max(self.batches.waited - self.waited, 1e-9)
        self.elapsed_s = state.elapsed_s
        self.tokens = state.tokens
        self.processed = state.processed_tokens
        self.waited = self.batches.waited
        if not state.pending_steps:
            return None  # all were skipped, or had no targets
        line: dict[str, Any] = {
            "train_loss": state.pending_losses / state.pending_steps,
            "lr": self.step.optimizers.lr * multiplier,
        }
        if state.pending_norm is not None:
            line["grad_norm"] = state.pending_norm
        line |= part_losses(self.step.part_names, state.pending_sources)
        state.clear_pending()
        if state.skipped:
            line["skipped_steps"] = state.skipped
        line["data_wait"] = waited / seconds
        line |= speed(self.step.parts, self.step.device, n_processed, n_trained, seconds)
        line["peak_memory_bytes"] = self.memory.peak()
        return self.write(line | metrics)

    def write(self, line: dict[str, Any]) -> dict[str, Any]:
        """Write one line to metrics.jsonl, and tell the callbacks. Returns the line."""
        state = self.state
        place = {
            "step": state.step,
            "tokens": state.tokens,
            "processed_tokens": state.processed_tokens,
        }
        line = place | line | {"elapsed_s": self.state.elapsed_s}
        self.run.log(line)
        for callback in self.step.callbacks:
            callback.on_log(line)
        return line
