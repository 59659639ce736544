"""Figures per layer in metrics.jsonl: attention, on request, and the norms of gradients."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinker.data.batches.prefetch import Batch
from thinker.features.monitoring.validation_figures import write_validation_figures
from thinker.model import Thinker
from thinker.model.inspection.attention_statistics import FIGURES, measure_attention
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.ranks import full_tensor
from thinker.training.callback import Callback, StepInfo, TrainingParts, TrainingRun
from thinker.training.distributed.parallel_model import unwrapped_copy
from thinker.training.settings.settings import Settings

MAX_SEQUENCES = 4  # of a batch, to measure attention on


def layer_logs(settings: Settings) -> list[Callback]:
    """The logs that the config asks for."""
    callbacks: list[Callback] = []
    if settings.train.log_grad_norms:
        callbacks.append(GradientLog(settings.train.log_every))
    if settings.train.log_attention_every is not None:
        callbacks.append(AttentionLog(settings.train.log_attention_every))
    return callbacks


class GradientLog(Callback):
    """The norms of the gradients of each block and of the other modules, in the steps that are
    logged."""

    def __init__(self, log_every: int) -> None:
        self.log_every = log_every
        self.norms: dict[str, Tensor] = {}  # on the device

    def setup(self, parts: TrainingParts) -> None:
        """Keep the model."""
        self.model = parts.model

    def on_start(self, run: TrainingRun) -> None:
        """Keep the state, which counts the steps."""
        self.state = run.state

    def before_clip(self) -> None:
        """Measure if the running step is logged."""
        if (self.state.step + 1) % self.log_every:
            return
        groups: dict[str, list[Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                depth = 2 if name.startswith("blocks.") else 1
                group = ".".join(name.split(".")[:depth])
                groups.setdefault(group, []).append(parameter.grad)
        self.norms = {}
        for name, grads in groups.items():
            self.norms[name] = full_tensor(torch.nn.utils.get_total_norm(grads))

    def metrics(self) -> dict[str, float]:
        """The finite norms of the newest logged step."""
        if not self.norms:
            return {}
        norms = torch.stack(list(self.norms.values())).tolist()
        found = zip(self.norms, norms)
        return {f"grad_norm/{name}": norm for name, norm in found if math.isfinite(norm)}


class AttentionLog(Callback):
    """Figures of each layer's attention every few steps, with the weights that are evaluated.

    After an evaluation, those of the validation set are stored with the run.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def on_start(self, run: TrainingRun) -> None:
        """Keep the run."""
        self.run = run

    def after_step(self, info: StepInfo) -> None:
        """Keep the batch for metrics()."""
        self.info = info

    def metrics(self) -> dict[str, float]:
        """The figures on the newest batch, if they are due."""
        if self.info.step % self.every:
            return {}
        parts = self.run.parts
        with self.run.evaluated_weights():
            # With the same weights in memory, unless they are sharded.
            model = unwrapped_copy(parts.model)
            return mean_attention(model, self.info.batch) if parts.dist.is_main else {}

    def on_log(self, line: Mapping[str, Any]) -> None:
        """Store the figures of the validation set, if the line is that of an evaluation."""
        if "val_loss" not in line:
            return
        run = self.run
        model = unwrapped_copy(run.parts.model)
        if run.directory.writes:
            write_validation_figures(
                run.directory.path,
                run.state.step,
                model,
                run.corpus.val,
                run.corpus.tokenizer,
                run.parts.settings.data.seq_len,
            )


def mean_attention(model: Thinker, batch: Batch) -> dict[str, float]:
    """The largest logit and the means of the other figures of each layer, by key of metrics.jsonl.

    Measured on the targets of the first sequences of the batch, except the first position of each
    document.
    """
    first = batch.rows(slice(MAX_SEQUENCES), model.device)
    document_ids = first.document_ids
    counts = first.targets != IGNORE_INDEX  # (B, T)
    counts[:, 0] = False
    if document_ids is not None:
        counts[:, 1:] &= document_ids[:, 1:] == document_ids[:, :-1]
    figures, _ = measure_attention(
        model, first.inputs, document_ids, last_logits_only=True
    )  # (layers, 3, B, T)
    counted = figures[..., counts]  # (layers, 3, N)
    if not counted.shape[-1]:
        return {}
    is_max = torch.tensor([name == "max_logit" for name in FIGURES], device=counted.device)
    means = torch.where(is_max, counted.amax(dim=-1), counted.mean(dim=-1))  # (layers, 3)
    result = {}
    for layer, row in enumerate(means.tolist()):
        for name, value in zip(FIGURES, row):
            if math.isfinite(value):
                result[f"{name}/blocks.{layer}"] = value
    return result
