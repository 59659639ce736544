"""The learning rate over a run, as a factor of its peak."""

from __future__ import annotations

import math


def lr_multiplier(
    step: int, progress: float, *, schedule: str, warmup_steps: int, decay_fraction: float | None, final: float
) -> float:
    """The factor for the step about to be made (0 for the first).

    Args:
        progress: the share of the run that is done, in [0, 1]; of steps or of time, whichever is further.
        schedule: "cosine" falls from the start on; "wsd" (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395)
            stays at the peak and falls linearly over the last `decay_fraction` (None: 0.6).
        final: the factor at the end.
    """
    decay_fraction = 0.6 if decay_fraction is None else decay_fraction
    warmup = min(1.0, (step + 1) / (warmup_steps + 1))
    if schedule == "cosine":
        falling = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    else:
        falling = min(1.0, (1 - min(progress, 1.0)) / decay_fraction) if decay_fraction > 0 else 1.0
    return warmup * (final + (1 - final) * falling)
