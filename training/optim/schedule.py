"""Learning-rate schedules."""

import math

from thinker.training.config.sections import TrainConfig


def lr_multiplier(train: TrainConfig, step: int, progress: float) -> float:
    """Learning rate of a step (from 0) as a factor of the peak, when the share `progress` of the run is done.

    "cosine" decreases from the start. "wsd" (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395) stays at the peak
    and decreases linearly over the last `decay_fraction`.
    """
    decay_fraction = 0.6 if train.decay_fraction is None else train.decay_fraction
    warmup = min(1.0, (step + 1) / (train.warmup_steps + 1))
    if train.schedule == "cosine":
        falling = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    else:
        falling = min(1.0, (1 - min(progress, 1.0)) / decay_fraction) if decay_fraction > 0 else 1.0
    return warmup * (train.min_lr_ratio + (1 - train.min_lr_ratio) * falling)
