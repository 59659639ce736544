"""Steps with a non-finite loss or gradient: a report, and the end of the run if there are too
many."""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinker import checkpoint
from thinker.checkpoint import CheckpointManager
from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import WindowRemoved
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.model import Thinker
from thinker.runtime.errors import RunError
from thinker.runtime.files import atomic_write
from thinker.training.distributed.parallel_model import unwrapped_copy
from thinker.training.metrics import finite_or_none

MAX_TEXT_CHARS = 200  # per sample of a report


@dataclass
class NonfiniteSteps:
    """Reports non-finite steps, which changed no weights, and ends the run after too many."""

    model: Thinker
    loader: BatchLoader
    tokenizer: Tokenizer
    directory: RunDirectory
    checkpoints: CheckpointManager
    n_allowed: int  # train.max_nonfinite_steps

    def report(self, step: int, loss: float, grad_norm: float, n_skipped: int) -> str:
        """Write a report on a step, counted from 0. `n_skipped`: non-finite steps so far, with this
        one.

        Returns one line for users. All ranks must call this.
        """
        report = {
            "step": step + 1,
            "loss": finite_or_none(loss),
            "grad_norm": finite_or_none(grad_norm),
            "sample_ids": self.loader.sample_ids(step),
        }
        is_last = n_skipped > self.n_allowed
        if is_last:
            report |= diagnose(self.model, self.loader, self.tokenizer, step)
        path = self.directory.path / f"nonfinite-step-{step + 1:08d}.json"
        if self.directory.writes:
            atomic_write(path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        message = f"step {step + 1}: loss {loss:g}, gradient norm {grad_norm:g}"
        if is_last:
            return f"{message}; {self._explain(path, report)}"
        return f"{message}; step skipped ({n_skipped} of {self.n_allowed}, see {path})"

    def end_run(self, step: int, message: str, resume_hint: str) -> None:
        """Save the weights and raise RunError."""
        state = {"step": step + 1}
        files = checkpoint.checkpoint_files(self.model, state)
        self.checkpoints.save("nonfinite", step + 1, files)
        self.checkpoints.dist.all_gather_scalars(step)  # the first rank to end ends the others
        raise RunError(f"{message}; {resume_hint}")

    def _explain(self, path: Path, report: dict[str, Any]) -> str:
        name, size = report["largest_weight"]
        size = "not finite" if size is None else f"{size:g}"
        folder = f"{self.directory.checkpoints}/nonfinite-{report['step']:08d}"
        return (
            f"the weights are unchanged. {path} lists the samples of this step. {folder} contains "
            f"the weights (largest absolute value: {size}, in {name}). Lower optimizer.lr, or skip "
            f"rare bad samples with train.max_nonfinite_steps={self.n_allowed + 1}"
        )


def diagnose(
    model: Thinker, loader: BatchLoader, tokenizer: Tokenizer, step: int
) -> dict[str, Any]:
    """Run each sample of a step (from 0) separately, forward and backward without dropout, on the
    current weights.

    Returns "samples": id, loss (nats per token), gradient norm and first characters of each sample;
    "first_not_finite": the first module with a non-finite output; "gradients_not_finite": the
    parameters with a non-finite gradient; "largest_weight": [name, absolute value]. Non-finite
    numbers become None. Samples whose text is no longer on the disk are left out.
    """
    copy = unwrapped_copy(model)
    modules = _record_nonfinite_outputs(copy)
    parameters: set[str] = set()  # with a non-finite gradient
    samples: list[dict[str, Any]] = []
    for row, sample_id in enumerate(loader.sample_ids(step)):
        try:
            inputs, targets = loader.batch(step, slice(row, row + 1))  # (1, T)
        except WindowRemoved:
            break  # the step was long ago
        loss = _backward(copy, inputs, targets, loader.document_ids(inputs))
        gradients = {name: p.grad for name, p in copy.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        if not math.isfinite(norm):
            for name, gradient in gradients.items():
                if not math.isfinite(gradient.norm()):
                    parameters.add(name)
        copy.zero_grad(set_to_none=True)
        samples.append(
            {
                "id": sample_id,
                "loss": finite_or_none(loss),
                "grad_norm": finite_or_none(norm),
                "text": tokenizer.decode(inputs[0].tolist())[:MAX_TEXT_CHARS],
            }
        )
    return {
        "samples": samples,
        "first_not_finite": modules[0] if modules else None,
        "gradients_not_finite": sorted(parameters),
        "largest_weight": _largest_weight(copy),
    }


def _record_nonfinite_outputs(model: Thinker) -> list[str]:
    """A list that gets the names of modules with a non-finite output, in the order of the forward
    pass."""
    names: list[str] = []

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        tensors = [part for part in outputs if isinstance(part, Tensor)]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            names.append(name)

    for name, module in model.named_modules():
        module.register_forward_hook(partial(record, name or "loss"))
    return names


def _backward(
    model: Thinker, inputs: Tensor, targets: Tensor, document_ids: Tensor | None
) -> Tensor:
    """Run forward and backward on (1, T) tokens. Returns the loss in nats per token."""
    if document_ids is not None:
        document_ids = document_ids.to(model.device)
    loss_sum, n_targets = model(
        inputs.to(model.device), targets=targets.to(model.device), document_ids=document_ids
    )
    loss = loss_sum / max(int(n_targets), 1)
    loss.backward()
    return loss.detach()


def _largest_weight(model: Thinker) -> list[str | float | None]:
    """The name of the parameter with the largest absolute value, and that value."""
    sizes = {}
    for name, parameter in model.named_parameters():
        size = parameter.detach().abs().max().item()
        sizes[name] = math.inf if math.isnan(size) else size
    largest = max(sizes, key=sizes.__getitem__)
    return [largest, finite_or_none(sizes[largest])]
