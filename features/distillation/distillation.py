"""Distillation: a student learns from the text and from what a teacher predicts for the same
tokens.

Hinton et al. 2015 (arXiv:1503.02531); attention maps as in Jiao et al. 2020 (TinyBERT,
arXiv:1909.10351), hidden states by the similarity of positions as in Tung & Mori 2019
(arXiv:1907.09682), which needs no projection between widths.
"""

import contextlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.data.batches.prefetch import Batch
from thinker.data.corpus.corpus import Corpus
from thinker.features.distillation.keys import DistillConfig
from thinker.features.distillation.teacher import Teacher, load_teacher, paired_layer
from thinker.features.distillation.teacher_logits import TopLogits
from thinker.model import ThinkerConfig
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.training.callback import Callback, TrainingParts, TrainingRun
from thinker.training.config.config import Config
from thinker.training.kernels import cached_weight_casts, fused_kernels, proven
from thinker.training.objective import Loss, Objective, next_token_loss
from thinker.training.state.resume import KeyChange


class Comparison(NamedTuple):
    """A student's probabilities compared with a teacher's, at n positions."""

    # The gradient of `kl` with respect to the logits is softmax(logits) · mass - wanted.
    kl: Tensor  # (n,) nats
    wanted: Tensor  # (n, V)
    mass: Tensor | float  # (n, 1): the sums of `wanted`


def compare_all(log_probs: Tensor, teacher_logits: Tensor) -> Comparison:
    """KL divergence of a student from a teacher, from (n, V) each."""
    teacher = teacher_logits.float().log_softmax(-1)
    probs = teacher.exp()
    return Comparison(torch.linalg.vecdot(probs, teacher.sub_(log_probs)), probs, 1.0)


def compare_top(log_probs: Tensor, teacher: TopLogits, target: Tensor) -> Comparison:
    """As compare_all(), from the teacher's k most probable tokens.

    Another token counts if it comes next in the text, `target` (n, 1). That happens as often as a
    good teacher expects, so the mean of the gradient is right. The divergence has an extra
    constant, the entropy of these others.
    """
    top_log_probs, rest_log_prob = teacher.log_probs[:, :-1], teacher.log_probs[:, -1:]
    top = top_log_probs.exp()  # (n, k)
    is_other = (teacher.ids != target).all(dim=1, keepdim=True).float()  # (n, 1)
    kl = torch.linalg.vecdot(top, top_log_probs - log_probs.gather(1, teacher.ids))
    kl = kl + (is_other * (rest_log_prob - log_probs.gather(1, target)))[:, 0]
    wanted = torch.zeros_like(log_probs).scatter_(1, teacher.ids, top)
    wanted.scatter_add_(1, target, is_other)
    return Comparison(kl, wanted, top.sum(-1, keepdim=True) + is_other)


class LogitLoss:
    """The loss of the logits, as linear_cross_entropy() calls it: for chunks of positions, in
    order.

    (1 - weight) · cross-entropy + weight · T² · KL, whose gradients are comparable at any
    temperature T.
    """

    def __init__(
        self,
        options: DistillConfig,
        teacher: tuple[Tensor, nn.Module] | TopLogits,
        target_losses: Tensor | None,
    ) -> None:
        """`teacher`: inputs of its LM head (N, C) and that head, or its largest logits.

        target_losses: (B, T) fp32, contiguous; is filled with the cross-entropy of each target.
        """
        self.options = options
        self.teacher = teacher
        self.start = 0  # the position of the next chunk
        self.target_losses = None if target_losses is None else target_losses.view(-1)
        self.cross_entropy = 0.0  # sums over the targets
        self.kl = 0.0

    def __call__(
        self, logits: Tensor, targets: Tensor, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """logits (n, V), targets (n,) -> losses (n,) and the gradient in the logits' dtype."""
        weight, T = self.options.weight, self.options.temperature
        rows = slice(self.start, self.start + len(targets))
        self.start = rows.stop
        is_counted = targets != IGNORE_INDEX  # (n,)
        target = targets.clamp(min=0)[:, None]  # (n, 1)
        log_probs = logits.float().log_softmax(-1)  # (n, V)
        tempered = log_probs
        if T != 1:
            tempered = (logits.float() / T).log_softmax(-1)
        kl, wanted, mass = self._compare(tempered, target, rows)
        kl = kl * is_counted  # (n,)
        cross_entropy = -(log_probs.gather(1, target)[:, 0] * is_counted)  # (n,)
        if self.target_losses is not None:
            self.target_losses[rows] = cross_entropy
        self.cross_entropy = self.cross_entropy + cross_entropy.sum()
        self.kl = self.kl + kl.sum()
        losses = (1 - weight) * cross_entropy + weight * T**2 * kl
        if not needs_gradient:
            return losses, None

        grad = log_probs.exp_()  # which may be `tempered`
        if T == 1:
            grad.mul_(1 - weight + weight * mass).sub_(wanted, alpha=weight)
        else:
            grad.mul_(1 - weight).add_(tempered.exp_().sub_(wanted), alpha=weight * T)
        at_target = grad.new_full((), weight - 1.0).expand(target.shape)
        grad.scatter_add_(1, target, at_target)
        return losses, grad.mul_(is_counted[:, None]).to(logits.dtype)

    def _compare(self, log_probs: Tensor, target: Tensor, rows: slice) -> Comparison:
        """Compare these rows, (n, V) at the temperature, with the teacher's."""
        if isinstance(self.teacher, TopLogits):
            ids, top_log_probs = self.teacher
            return compare_top(log_probs, TopLogits(ids[rows], top_log_probs[rows]), target)
        x, lm_head = self.teacher
        return compare_all(log_probs, lm_head(x[rows]) / self.options.temperature)


class DistillationLoss(Callback):
    """The loss of a student that learns from the text and from a teacher: an objective of training.

    Its parts are KL divergences in nats per token, and squared differences.
    """

    def __init__(self, teacher: Teacher) -> None:
        self.files = teacher  # which has `logits` when training begins
        self.options = teacher.options
        self.teacher = teacher.model.eval().requires_grad_(False)
        self._contexts = contextlib.ExitStack()  # never closed: the teacher does nothing else

    def setup(self, parts: TrainingParts) -> None:
        """Let the teacher run as the student does, and choose what is recorded of both."""
        self.student = parts.model
        self.dist = parts.dist
        self.teacher.activation_dtype = self.student.activation_dtype
        self._contexts.enter_context(cached_weight_casts(self.teacher))
        kernels = proven(parts.kernels, self.teacher)
        self._contexts.enter_context(fused_kernels(self.teacher, kernels))
        self.maps: list[tuple[str, str]] = []  # names of activations of the student, of the teacher
        if self.options.attention:
            n_student, n_teacher = len(self.student.blocks), len(self.teacher.blocks)
            for layer in range(n_student):
                paired = paired_layer(layer, n_student, n_teacher)
                names = (f"blocks.{i}.attention.weights" for i in (layer, paired))
                self.maps.append(tuple(names))
        self._recorded = list(self.maps)
        if self.options.hidden:
            self._recorded.append(("norm", "norm"))

    def on_start(self, run: TrainingRun) -> None:
        """Create the files for the teacher's logits, if they are kept."""
        if self.options.cached_logits is None:
            return  # a stream has no number of windows, and needs none
        n_windows, seq_len = len(run.dataset), run.parts.settings.data.seq_len
        self.files.create_files(run.directory.path, n_windows, seq_len, run.corpus, self.dist)

    def state_dict(self) -> dict[str, Any]:
        """Which teacher the run has."""
        return {"teacher": self.files.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise UserError if the run had another teacher."""
        if state["teacher"] != self.files.fingerprint:
            raise UserError(
                f"train.distill.teacher={self.options.teacher} has other weights than the teacher "
                "that this run started with; restore it"
            )

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """Run both models on a micro-batch."""
        with contextlib.ExitStack() as stack:
            if self._recorded:
                names, teacher_names = zip(*self._recorded)
                of_student = stack.enter_context(self.student.record(*names))
                of_teacher = stack.enter_context(self.teacher.record(*teacher_names))
            logit_loss = LogitLoss(self.options, self._teach(batch), batch.target_losses)
            total, n_targets = model(
                batch.inputs,
                targets=batch.targets,
                document_ids=batch.document_ids,
                chunk_loss=logit_loss,
            )
        parts = {"distill_kl": logit_loss.kl}
        is_counted = batch.targets != IGNORE_INDEX  # (B, T)
        if self.maps:
            maps = [(of_student[a], of_teacher[b]) for a, b in self.maps]
            loss = attention_kl(maps, is_counted)
            parts["distill_attention"] = loss
            total = total + self.options.attention * loss
        if self.options.hidden:
            loss = similarity_error(of_student["norm"], of_teacher["norm"], is_counted)
            parts["distill_hidden"] = loss
            total = total + self.options.hidden * loss
        counted = {name: (part, n_targets) for name, part in parts.items()}
        return Loss(total, n_targets, counted, logit_loss.cross_entropy)

    @torch.no_grad()
    def _teach(self, batch: Batch) -> tuple[Tensor, nn.Module] | TopLogits:
        """What the teacher says about B·T positions."""
        stored = self.files.logits
        top = None if stored is None else stored.read(batch.windows)
        if top is None:
            inputs = batch.inputs
            context = self.teacher.make_context(inputs, inputs, batch.document_ids)
            x = self.teacher.forward_blocks(inputs, context).flatten(0, 1)  # (B · T, C)
            if stored is None:
                return x, self.teacher.lm_head
            stored.write(batch.windows, x, self.teacher.lm_head)
            top = stored.read(batch.windows)
        device = batch.inputs.device
        ids = top.ids.to(device, non_blocking=True)
        return TopLogits(ids, top.log_probs.to(device, non_blocking=True))


def attention_kl(maps: list[tuple[Tensor, Tensor]], is_counted: Tensor) -> Tensor:
    """KL divergence of a student's attention weights from a teacher's, in nats per query, summed
    over the queries.

    maps: for each pair of layers the weights (B, H, T, S), where the teacher has a multiple of H
    heads, whose weights are averaged. Keys that the student cannot see do not count. is_counted:
    (B, T).
    """
    total = 0.0
    for student, teacher in maps:
        student = student.float()
        by_head = teacher.float().unflatten(1, (student.shape[1], -1))  # (B, H, n, T, S)
        teacher = by_head.mean(dim=2) * (student > 0)  # (B, H, T, S)
        teacher = teacher / teacher.sum(-1, keepdim=True).clamp_min(1e-30)
        log_ratio = teacher.clamp_min(1e-30).log() - student.clamp_min(1e-30).log()
        by_query = (teacher * log_ratio).sum(-1).mean(1)  # (B, T)
        total = total + (by_query * is_counted).sum()
    return total / len(maps)


def similarity_error(student: Tensor, teacher: Tensor, is_counted: Tensor) -> Tensor:
    """Squared difference of the cosine similarities of all positions of a sequence, (B, T, C) of
    any two widths.

    Returns the mean over the other positions, summed over the counted ones, (B, T).
    """
    first = F.normalize(student.float(), dim=-1)
    second = F.normalize(teacher.float(), dim=-1)
    error = (first @ first.mT - second @ second.mT).square()  # (B, T, T)
    return (error.mean(-1) * is_counted).sum()


def with_teacher(
    config: Config, model: ThinkerConfig, corpus: Corpus, device: torch.device, objective: Objective
) -> Objective:
    """The loss of a student, if the config names a teacher; otherwise `objective`.

    Raises UserError if the teacher does not fit, or the caller of train() has chosen another
    objective.
    """
    if config.train.distill is None:
        return objective
    if objective is not next_token_loss:
        raise UserError(
            "train.distill cannot be combined with another objective; remove one of them"
        )
    return DistillationLoss(load_teacher(config, model, corpus.tokenizer, device))


def distill_reason(change: KeyChange) -> str:
    """Why train.distill may not change so; "" if only the teacher's path differs, as its weights
    are compared."""
    if change.was is None or change.value is None:
        return change.reason
    is_moved = change.value | {"teacher": change.was["teacher"]} == change.was
    return "" if is_moved else change.reason
