"""Distillation: a student learns from the text and from what a teacher predicts for the same tokens.

Hinton et al. 2015 (arXiv:1503.02531); attention maps as in Jiao et al. 2020 (TinyBERT, arXiv:1909.10351), hidden states
by the similarity of positions as in Tung & Mori 2019 (arXiv:1907.09682), which needs no projection between widths.
"""

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.features.distillation.keys import DistillConfig
from thinker.features.distillation.teacher import Teacher, paired_layer
from thinker.features.distillation.teacher_logits import TopLogits
from thinker.model import Thinker
from thinker.model.layers import FusedKernels
from thinker.runtime.constants import IGNORE_INDEX
from thinker.training.kernels import cached_weight_casts, fused_kernels


class Comparison(NamedTuple):
    """A student's probabilities compared with a teacher's, at n positions."""

    kl: Tensor  # (n,) nats
    wanted: (
        Tensor  # (n, V): its gradient with respect to the logits is softmax(logits) · mass - wanted
    )
    mass: Tensor | float  # (n, 1): the sums of `wanted`


def compare_all(log_probs: Tensor, teacher_logits: Tensor) -> Comparison:
    """KL divergence of a student from a teacher, from (n, V) each."""
    teacher = teacher_logits.float().log_softmax(-1)
    probs = teacher.exp()
    return Comparison(torch.linalg.vecdot(probs, teacher.sub_(log_probs)), probs, 1.0)


def compare_top(log_probs: Tensor, teacher: TopLogits, target: Tensor) -> Comparison:
    """As compare_all(), from the teacher's k most probable tokens.

    Another token counts if it comes next in the text, `target` (n, 1). That happens as often as a good teacher expects,
    so the mean of the gradient is right. The divergence has an extra constant, the entropy of these others.
    """
    top, top_log_probs = teacher.log_probs[:, :-1].exp(), teacher.log_probs[:, :-1]  # (n, k)
    is_other = (teacher.ids != target).all(dim=1, keepdim=True).float()  # (n, 1)
    kl = torch.linalg.vecdot(top, top_log_probs - log_probs.gather(1, teacher.ids))
    kl = kl + (is_other * (teacher.log_probs[:, -1:] - log_probs.gather(1, target)))[:, 0]
    wanted = (
        torch.zeros_like(log_probs).scatter_(1, teacher.ids, top).scatter_add_(1, target, is_other)
    )
    return Comparison(kl, wanted, top.sum(-1, keepdim=True) + is_other)


class LogitLoss:
    """The loss of the logits, as linear_cross_entropy() calls it: for chunks of positions, in order.

    (1 - weight) · cross-entropy + weight · T² · KL, whose gradients are comparable at any temperature T.
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
        self.options, self.teacher, self.start = options, teacher, 0
        self.target_losses = None if target_losses is None else target_losses.view(-1)
        self.cross_entropy = self.kl = 0.0  # sums over the targets

    def __call__(
        self, logits: Tensor, targets: Tensor, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """logits (n, V), targets (n,) -> losses (n,) and the gradient in the logits' dtype."""
        rows = slice(self.start, self.start + len(targets))
        self.start = rows.stop
        weight, T = self.options.weight, self.options.temperature
        is_counted, target = targets != IGNORE_INDEX, targets.clamp(min=0)[:, None]  # (n,), (n, 1)
        log_probs = logits.float().log_softmax(-1)  # (n, V)
        tempered = log_probs if T == 1 else (logits.float() / T).log_softmax(-1)
        if isinstance(self.teacher, TopLogits):
            kl, wanted, mass = compare_top(
                tempered, TopLogits(*(x[rows] for x in self.teacher)), target
            )
        else:
            x, lm_head = self.teacher
            kl, wanted, mass = compare_all(tempered, lm_head(x[rows]) / T)
        kl, cross_entropy = (
            kl * is_counted,
            -(log_probs.gather(1, target)[:, 0] * is_counted),
        )  # (n,) each
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
        grad.scatter_add_(1, target, grad.new_full((), weight - 1.0).expand(target.shape))
        return losses, grad.mul_(is_counted[:, None]).to(logits.dtype)


class Loss(NamedTuple):
    """The loss of a micro-batch, on the device."""

    objective: Tensor  # sum over the targets, to be minimized
    cross_entropy: Tensor  # sum in nats
    part_sums: Tensor  # (P, 2): of each part of the objective its sum, and the number of targets


class TextLoss:
    """The cross-entropy with the text."""

    parts = ()

    def __init__(self, model: nn.Module) -> None:
        """`model`: a Thinker, which may be wrapped for several ranks."""
        self.model = model

    def __call__(
        self, inputs: Tensor, targets: Tensor, document_ids: Tensor | None = None,
        target_losses: Tensor | None = None, windows: Tensor | None = None,
    ) -> Loss:  # fmt: skip
        """Run the model on (B, T) tokens; arguments as in Thinker.forward()."""
        total, _ = self.model(
            inputs, targets=targets, document_ids=document_ids, target_losses=target_losses
        )
        return Loss(total, total.detach(), total.new_zeros(0, 2))


class DistilledLoss:
    """The loss of a student that learns from the text and from a teacher.

    `parts` are their names in metrics.jsonl: KL divergences in nats per token, and squared differences.
    """

    def __init__(
        self, model: nn.Module, student: Thinker, teacher: Teacher, kernels: FusedKernels | None
    ) -> None:
        """`model`: the student, which may be wrapped for several ranks; `kernels`: those of the student."""
        self.model, self.student, self.teacher = (
            model,
            student,
            teacher.model.eval().requires_grad_(False),
        )
        self.options, self.files = (
            teacher.options,
            teacher,
        )  # which has `logits` when training begins
        self.teacher.activation_dtype = student.activation_dtype
        self._contexts = contextlib.ExitStack()  # never closed: the teacher does nothing else
        self._contexts.enter_context(cached_weight_casts(self.teacher))
        self._contexts.enter_context(fused_kernels(self.teacher, kernels))
        n_student, n_teacher = len(student.blocks), len(self.teacher.blocks)
        self.maps, hidden = [], []  # names of activations of the student and of the teacher
        if self.options.attention:
            pairs = [
                (layer, paired_layer(layer, n_student, n_teacher)) for layer in range(n_student)
            ]
            self.maps = [
                tuple(f"blocks.{layer}.attention.weights" for layer in pair) for pair in pairs
            ]
        if self.options.hidden:
            hidden = [("norm", "norm")]
        self._names = list(zip(*self.maps, *hidden)) or [(), ()]  # what to record of each model
        self.parts = (
            "distill_kl",
            *["distill_attention"] * bool(self.maps),
            *["distill_hidden"] * bool(hidden),
        )

    def __call__(
        self, inputs: Tensor, targets: Tensor, document_ids: Tensor | None = None,
        target_losses: Tensor | None = None, windows: Tensor | None = None,
    ) -> Loss:  # fmt: skip
        """Run both models on (B, T) tokens.

        target_losses: (B, T) fp32, contiguous; is filled with the cross-entropy of each target.
        windows: (B,) indices of the sequences, for stored logits.
        """
        names, teacher_names = self._names
        with contextlib.ExitStack() as stack:
            if names:
                recorded = stack.enter_context(self.student.record(*names))
                of_teacher = stack.enter_context(self.teacher.record(*teacher_names))
            logit_loss = LogitLoss(
                self.options, self._teach(inputs, document_ids, windows), target_losses
            )
            objective, n_targets = self.model(
                inputs, targets=targets, document_ids=document_ids, chunk_loss=logit_loss
            )
        parts, is_counted = [logit_loss.kl], targets != IGNORE_INDEX  # (B, T)
        if self.maps:
            parts.append(
                attention_kl([(recorded[a], of_teacher[b]) for a, b in self.maps], is_counted)
            )
            objective = objective + self.options.attention * parts[-1]
        if self.options.hidden:
            parts.append(similarity_error(recorded["norm"], of_teacher["norm"], is_counted))
            objective = objective + self.options.hidden * parts[-1]
        sums = torch.stack([part.detach() for part in parts])  # (P,)
        part_sums = torch.stack((sums, n_targets.expand(len(parts)).to(sums.dtype)), dim=1)
        return Loss(objective, logit_loss.cross_entropy, part_sums)

    @torch.no_grad()
    def _teach(
        self, inputs: Tensor, document_ids: Tensor | None, windows: Tensor | None
    ) -> tuple[Tensor, nn.Module] | TopLogits:
        """What the teacher says about B·T positions."""
        stored = self.files.logits
        top = None if stored is None else stored.read(windows)
        if top is None:
            context = self.teacher.make_context(inputs, inputs, document_ids)
            x = self.teacher.forward_blocks(inputs, context).flatten(0, 1)  # (B · T, C)
            if stored is None:
                return x, self.teacher.lm_head
            stored.write(windows, x, self.teacher.lm_head)
            top = stored.read(windows)
        return TopLogits(*(x.to(inputs.device, non_blocking=True) for x in top))


def attention_kl(maps: list[tuple[Tensor, Tensor]], is_counted: Tensor) -> Tensor:
    """KL divergence of a student's attention weights from a teacher's, in nats per query, summed over the queries.

    maps: for each pair of layers the weights (B, H, T, S), where the teacher has a multiple of H heads, whose weights
    are averaged. Keys that the student cannot see do not count. is_counted: (B, T).
    """
    total = 0.0
    for student, teacher in maps:
        student = student.float()
        teacher = teacher.float().unflatten(1, (student.shape[1], -1)).mean(dim=2) * (
            student > 0
        )  # (B, H, T, S)
        teacher = teacher / teacher.sum(-1, keepdim=True).clamp_min(1e-30)
        log_ratio = teacher.clamp_min(1e-30).log() - student.clamp_min(1e-30).log()
        total = total + ((teacher * log_ratio).sum(-1).mean(1) * is_counted).sum()  # (B, T) summed
    return total / len(maps)


def similarity_error(student: Tensor, teacher: Tensor, is_counted: Tensor) -> Tensor:
    """Squared difference of the cosine similarities of all positions of a sequence, (B, T, C) of any two widths.

    Returns the mean over the other positions, summed over the counted ones, (B, T).
    """
    first, second = (F.normalize(x.float(), dim=-1) for x in (student, teacher))
    error = (first @ first.mT - second @ second.mT).square()  # (B, T, T)
    return (error.mean(-1) * is_counted).sum()


def make_loss(
    student: Thinker, model: nn.Module, teacher: Teacher | None, kernels: FusedKernels | None
) -> TextLoss | DistilledLoss:
    """The loss of a training step. `model`: the student, which may be wrapped for several ranks."""
    return TextLoss(model) if teacher is None else DistilledLoss(model, student, teacher, kernels)
