"""Distillation: a student learns from the text and from what a teacher predicts for the same tokens.

Hinton et al. 2015 (arXiv:1503.02531); attention maps as in Jiao et al. 2020 (TinyBERT, arXiv:1909.10351), hidden states
by the similarity of positions as in Tung & Mori 2019 (arXiv:1907.09682), which needs no projection between widths.
"""

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model import Thinker
from thinker.model.kernels.linear_cross_entropy import loss_and_gradient
from thinker.model.layers import FusedKernels
from thinker.runtime.constants import IGNORE_INDEX
from thinker.training.distill_config import DistillConfig
from thinker.training.kernels import cached_weight_casts, fused_kernels
from thinker.training.teacher import Teacher, paired_layer
from thinker.training.teacher_logits import TopLogits


def full_kl(logits: Tensor, teacher_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """KL divergence of the student's softmax(logits / T) from the teacher's, (n, V) each.

    Returns it in nats, (n,), and its gradient with respect to `logits`.
    """
    student, teacher = ((x.float() / temperature).log_softmax(-1) for x in (logits, teacher_logits))
    probs = teacher.exp()
    return (probs * (teacher - student)).sum(-1), (student.exp() - probs) / temperature


def top_kl(logits: Tensor, teacher: TopLogits) -> tuple[Tensor, Tensor]:
    """As full_kl() at temperature 1, for n positions; all but the teacher's k most probable tokens count as one."""
    log_probs = logits.float().log_softmax(-1)  # (n, V)
    probs, top = log_probs.exp(), teacher.log_probs.exp()  # (n, V), (n, k + 1)
    others = probs.scatter(1, teacher.ids, 0.0)
    rest = others.sum(-1, keepdim=True).clamp_min(1e-30)  # (n, 1)
    student = torch.cat((log_probs.gather(1, teacher.ids), rest.log()), dim=1)  # (n, k + 1)
    kl = (top * (teacher.log_probs - student)).sum(-1)
    grad = probs.sub_(others * (top[:, -1:] / rest)).scatter_add_(1, teacher.ids, -top[:, :-1])
    return kl, grad


class LogitLoss:
    """The loss of the logits, as linear_cross_entropy() calls it: for chunks of positions, in order.

    (1 - weight) · cross-entropy + weight · T² · KL, whose gradients are comparable at any temperature T.
    """

    def __init__(
        self, options: DistillConfig, teacher: tuple[Tensor, nn.Module] | TopLogits, target_losses: Tensor | None
    ) -> None:
        """`teacher`: inputs of its LM head (N, C) and that head, or its largest logits.

        target_losses: (B, T) fp32, contiguous; is filled with the cross-entropy of each target.
        """
        self.options, self.teacher, self.start = options, teacher, 0
        self.target_losses = None if target_losses is None else target_losses.view(-1)
        self.cross_entropy = self.kl = 0.0  # sums over the targets

    def __call__(self, logits: Tensor, targets: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """logits (n, V), targets (n,) -> losses (n,) and the gradient in the logits' dtype."""
        rows = slice(self.start, self.start + len(targets))
        self.start = rows.stop
        weight, temperature = self.options.weight, self.options.temperature
        if isinstance(self.teacher, TopLogits):
            kl, kl_grad = top_kl(logits, TopLogits(*(x[rows] for x in self.teacher)))
        else:
            x, lm_head = self.teacher
            kl, kl_grad = full_kl(logits, lm_head(x[rows]), temperature)
        is_counted = targets != IGNORE_INDEX  # (n,)
        dtype, kl = logits.dtype, kl * is_counted
        losses, grad = loss_and_gradient(logits.float(), targets, True)
        if self.target_losses is not None:
            self.target_losses[rows] = losses
        self.cross_entropy = self.cross_entropy + losses.sum()
        self.kl = self.kl + kl.sum()
        losses = (1 - weight) * losses + weight * temperature**2 * kl
        if needs_gradient:
            kl_scale = (weight * temperature**2 * is_counted)[:, None]
            grad = grad.mul_(1 - weight).addcmul_(kl_grad, kl_scale.to(kl_grad.dtype)).to(dtype)
        return losses, grad if needs_gradient else None


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
        total, _ = self.model(inputs, targets=targets, document_ids=document_ids, target_losses=target_losses)
        return Loss(total, total.detach(), total.new_zeros(0, 2))


class DistilledLoss:
    """The loss of a student that learns from the text and from a teacher.

    `parts` are their names in metrics.jsonl: KL divergences in nats per token, and squared differences.
    """

    def __init__(self, model: nn.Module, student: Thinker, teacher: Teacher, kernels: FusedKernels | None) -> None:
        """`model`: the student, which may be wrapped for several ranks; `kernels`: those of the student."""
        self.model, self.student, self.teacher = model, student, teacher.model.eval().requires_grad_(False)
        self.options, self.files = teacher.options, teacher  # which has `logits` when training begins
        self.teacher.activation_dtype = student.activation_dtype
        self._contexts = contextlib.ExitStack()  # never closed: the teacher does nothing else
        self._contexts.enter_context(cached_weight_casts(self.teacher))
        self._contexts.enter_context(fused_kernels(self.teacher, kernels))
        n_student, n_teacher = len(student.blocks), len(self.teacher.blocks)
        self.maps, hidden = [], []  # names of activations of the student and of the teacher
        if self.options.attention:
            pairs = [(layer, paired_layer(layer, n_student, n_teacher)) for layer in range(n_student)]
            self.maps = [tuple(f"blocks.{layer}.attention.weights" for layer in pair) for pair in pairs]
        if self.options.hidden:
            hidden = [("norm", "norm")]
        self._names = list(zip(*self.maps, *hidden)) or [(), ()]  # what to record of each model
        self.parts = ("distill_kl", *["distill_attention"] * bool(self.maps), *["distill_hidden"] * bool(hidden))

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
            logit_loss = LogitLoss(self.options, self._teach(inputs, document_ids, windows), target_losses)
            objective, n_targets = self.model(inputs, targets=targets, document_ids=document_ids, chunk_loss=logit_loss)
        parts, is_counted = [logit_loss.kl], targets != IGNORE_INDEX  # (B, T)
        if self.maps:
            parts.append(attention_kl([(recorded[a], of_teacher[b]) for a, b in self.maps], is_counted))
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
        teacher = teacher.float().unflatten(1, (student.shape[1], -1)).mean(dim=2) * (student > 0)  # (B, H, T, S)
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
