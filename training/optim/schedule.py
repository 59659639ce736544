"""The learning rate and the momentum in the course of a run."""

import math

from thinker.training.config.sections import TrainConfig

DEFAULT_DECAY_FRACTION = 0.6
FIRST_MOMENTUM = 0.9


def lr_multiplier(train: TrainConfig, step: int, progress: float) -> float:
    """Learning rate of a step (from 0) as a factor of the peak, when the share `progress` of the
    run is done.

    "cosine" decreases from the start. "wsd" (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395)
    stays at the peak and decreases linearly over the last `decay_fraction`.
    """
    progress = min(progress, 1.0)
    warmup = min(1.0, (step + 1) / (train.warmup_steps + 1))
    if train.schedule == "cosine":
        falling = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        falling = _stable_then_linear(progress, train.decay_fraction)
    return warmup * (train.min_lr_ratio + (1 - train.min_lr_ratio) * falling)


def _stable_then_linear(progress: float, decay_fraction: float | None) -> float:
    if decay_fraction is None:
        decay_fraction = DEFAULT_DECAY_FRACTION
    if decay_fraction == 0:
        return 1.0
    return min(1.0, (1 - progress) / decay_fraction)


def momentum_at(step: int, momentum: float, warmup_steps: int) -> float:
    """Momentum of Muon in a step (from 0). It rises linearly from 0.9 to `momentum`.

    Early gradients change their direction quickly, so a short memory works better. Later ones
    change slowly but are noisy, so a long one does.
    """
    if step >= warmup_steps or momentum <= FIRST_MOMENTUM:
        return momentum
    return FIRST_MOMENTUM + (momentum - FIRST_MOMENTUM) * step / warmup_steps
