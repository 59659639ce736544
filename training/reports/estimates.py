"""What more time, text or parameters would gain, in words."""

import math
from typing import Any

from thinker.training.reports.epochs import most_epochs
from thinker.training.reports.fit import NOT_IMPROVING, OVERFITTED, Fit
from thinker.training.reports.scaling_law import FACTOR, count_parameters, predict_loss_changes
from thinker.training.state.run_state import RunState


def describe_estimates(val: dict[str, Any], fit: Fit, state: RunState) -> str | None:
    """Estimate by how much more time, text or parameters would lower the loss, the largest change
    first, as one line.

    None for fine-tuning, if the entropy floor is known, and for losses that the law does not
    describe.
    """
    settings = state.settings
    is_below_uniform = val["val_loss"] < math.log(settings.model.vocab_size)
    is_described = fit.verdict != NOT_IMPROVING and is_below_uniform
    if settings.run.init_from or val.get("entropy_floor") or not is_described:
        return None
    changes = predict_loss_changes(
        val_loss=val["val_loss"],
        bits_per_byte=val["val_bits_per_byte"],
        train_loss=fit.train_loss,
        n_parameters=count_parameters(settings.model),
        n_tokens=state.tokens,
        epochs=fit.epochs,
    )
    if changes is None:
        return None
    estimates = [(changes.text, "text")]
    if fit.verdict != OVERFITTED:  # otherwise, more steps or parameters overfit more
        estimates.append((changes.parameters, "parameters"))
        if FACTOR * fit.epochs <= most_epochs(settings.model.dropout):
            time = "steps" if settings.train.max_minutes is None else "minutes"
            estimates.append((changes.time, time))
    (first, name), *others = sorted(estimates, reverse=True)
    text = f"estimate: twice the {name} would lower the loss {_by_about(first)}"
    for change, name in others:
        text += f", twice the {name} {_by_about(change)}"
    return text


def _by_about(change: float) -> str:
    return f"by about {change:.2f}" if change >= 0.01 else "by less than 0.01"
