"""Figures per layer in metrics.jsonl: attention, on request, and the norms of gradients."""

import math
import time

import torch
from torch import Tensor

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.prefetch import Batch
from thinker.data.corpus.corpus import Corpus
from thinker.features.monitoring.validation_figures import write_validation_figures
from thinker.model import Thinker
from thinker.model.attention_statistics import FIGURES, measure_attention
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.process_group import full_tensor
from thinker.training.config.sections import TrainConfig
from thinker.training.nonfinite import unwrapped_copy
from thinker.training.run_state import RunState
from thinker.training.step import TrainingStep

MAX_SEQUENCES = 4  # of a batch, to measure attention on


class LayerLog:
    """Measures the layers of a model in the steps that are logged. Nothing that it does changes the training."""

    def __init__(self, train: TrainConfig, step: TrainingStep, state: RunState) -> None:
        self.train, self.state = train, state
        self.model, self.after_step, self.dist = step.model, step.after_step, step.dist
        self.values: dict[str, float] = {}  # of the newest logged step, by key of metrics.jsonl
        self._norms: dict[str, Tensor] = {}  # on the device
        if train.log_grad_norms:
            step.before_clipping = self._record_gradients

    def _record_gradients(self) -> None:
        """If the running step is logged, keep the norms of the gradients of each block and of the other modules."""
        if (self.state.step + 1) % self.train.log_every:
            return
        groups: dict[str, list[Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                depth = 2 if name.startswith("blocks.") else 1
                groups.setdefault(".".join(name.split(".")[:depth]), []).append(parameter.grad)
        self._norms = {
            name: full_tensor(torch.nn.utils.get_total_norm(grads))
            for name, grads in groups.items()
        }

    def measure(self, batch: Batch) -> float:
        """Measure what is due after a step that is logged, whose batch was `batch`. All ranks must call this.

        Attention is that of the weights that are evaluated. Returns the seconds that measuring it took, which do not
        count as training.
        """
        norms = torch.stack(list(self._norms.values())).tolist() if self._norms else []
        self.values = {
            f"grad_norm/{name}": norm
            for name, norm in zip(self._norms, norms)
            if math.isfinite(norm)
        }
        every, start = self.train.log_attention_every, time.perf_counter()
        if every is None or self.state.step % every:
            return 0.0
        with self.after_step.in_model():
            model = unwrapped_copy(
                self.model
            )  # with the same weights in memory, unless they are sharded
            if self.dist.is_main:
                self.values |= mean_attention(model, batch)
        return time.perf_counter() - start

    def write_reference(self, run: RunDirectory, corpus: Corpus, seq_len: int) -> None:
        """Store the figures of the validation set with the run, if attention is logged. All ranks must call this."""
        if self.train.log_attention_every is not None:
            model = unwrapped_copy(self.model)
            if run.writes:
                write_validation_figures(
                    run.path, self.state.step, model, corpus.val, corpus.tokenizer, seq_len
                )


def mean_attention(model: Thinker, batch: Batch) -> dict[str, float]:
    """The largest logit and the means of the other figures of each layer, by key of metrics.jsonl.

    Measured on the targets of the first sequences of the batch, except the first position of each document.
    """
    inputs, targets, document_ids = (
        tensor if tensor is None else tensor[:MAX_SEQUENCES].to(model.device)  # (B, T)
        for tensor in (batch.inputs, batch.targets, batch.document_ids)
    )
    counts = targets != IGNORE_INDEX  # (B, T)
    counts[:, 0] = False
    if document_ids is not None:
        counts[:, 1:] &= document_ids[:, 1:] == document_ids[:, :-1]
    figures, _ = measure_attention(
        model, inputs, document_ids, last_logits_only=True
    )  # (layers, 3, B, T)
    counted = figures[..., counts]  # (layers, 3, N)
    if not counted.shape[-1]:
        return {}
    means = torch.where(torch.tensor([name == "max_logit" for name in FIGURES], device=counted.device),
                        counted.amax(dim=-1), counted.mean(dim=-1))  # fmt: skip
    return {
        f"{name}/blocks.{layer}": value
        for layer, row in enumerate(means.tolist())
        for name, value in zip(FIGURES, row)
        if math.isfinite(value)
    }
