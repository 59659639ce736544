"""Assess a finished run: the fit of the model, simple models of the same text, and what would lower
the loss most."""

import math
from dataclasses import dataclass
from typing import Any

from thinker.evaluation.text_baselines import NGRAM
from thinker.training.reports.scaling_law import count_parameters, predict_loss_changes
from thinker.training.state.run_state import RunState

GOOD_EPOCHS = 4  # nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)
OVERFITTING = 0.02  # relative rise of the validation loss above its lowest value
LARGE_GAP = 1.5  # validation loss / training loss
SMALL_GAP = 0.05  # relative: the losses are about equal
FAR_FROM_FLOOR = 0.06

# Verdicts on a run. The last one: the validation loss has risen, but not because the training loss
# fell.
UNDERFITTED, WELL_FITTED, OVERFITTED = "underfitted", "well fitted", "overfitted"
NOT_IMPROVING = "no longer improving"


@dataclass(frozen=True)
class Fit:
    """The fit of a finished run."""

    verdict: str  # UNDERFITTED, WELL_FITTED, OVERFITTED or NOT_IMPROVING
    epochs: float
    train_loss: float  # nats per token, the mean of the last lines
    val_loss: float
    best: dict[str, Any]  # the line of metrics.jsonl with the lowest validation loss


def evaluations(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The complete evaluations among the lines of metrics.jsonl."""
    return [line for line in lines if {"val_loss", "val_bits_per_byte"} <= line.keys()]


def assess_fit(
    lines: list[dict[str, Any]],
    state: RunState,
    epochs: float,
    baselines: dict[str, float] | None = None,
) -> Fit | None:
    """Compare the training and validation losses in the lines of metrics.jsonl; None without a
    training loss.

    baselines: from evaluation.text_baselines. A model that is worse than a 5-gram model is not well
    fitted
        unless its loss has risen.
    """
    train = [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]
    if not train:
        return None
    # A loss below the best one was measured on other sequences, before train.eval_sequences was
    # changed.
    vals = evaluations(lines)
    vals = [line for line in vals if line["val_loss"] >= (state.best_val_loss or 0.0)] or vals[-1:]
    best, loss, floor = (
        min(vals, key=lambda line: line["val_loss"]),
        vals[-1]["val_loss"],
        vals[-1].get("entropy_floor"),
    )
    until_best = [(step, value) for step, value in train if step <= best["step"]]
    now, verdict = _recent_mean(train), WELL_FITTED
    could_learn_more = loss < now * (1 + SMALL_GAP) or is_worse_than_ngrams(vals[-1], baselines)
    if loss > best["val_loss"] * (1 + OVERFITTING):
        verdict = OVERFITTED if until_best and now < _recent_mean(until_best) else NOT_IMPROVING
    elif epochs > GOOD_EPOCHS and loss > LARGE_GAP * now:
        verdict = OVERFITTED
    elif (
        loss <= best["val_loss"]
        and not (floor and loss / floor - 1 <= FAR_FROM_FLOOR)
        and could_learn_more
    ):
        verdict = UNDERFITTED
    return Fit(verdict, epochs, now, loss, best)


def is_worse_than_ngrams(val: dict[str, Any], baselines: dict[str, float] | None) -> bool:
    """Whether the model of an evaluation is worse than a 5-gram model."""
    return baselines is not None and val["val_bits_per_byte"] > baselines[NGRAM]


def advise_on_fit(fit: Fit, remedy: str) -> list[str]:
    """What to do about a validation loss that rises, or that is far above the training loss."""
    best = f"{fit.best['val_loss']:.3f}"
    if fit.verdict == NOT_IMPROVING:
        return [
            f"the validation loss was lowest at step {fit.best['step']:,} ({best}); use the "
            f"weights of that step "
            "(generate.py --checkpoint best)"
        ]
    if fit.verdict != OVERFITTED:
        return []
    if fit.val_loss <= fit.best["val_loss"] * (1 + OVERFITTING):
        return [f"against overfitting, try {remedy}"]
    return [
        f"overfitting: since step {fit.best['step']:,} the validation loss has risen from "
        f"{best} to "
        f"{fit.val_loss:.3f} while the training loss fell; use the weights of step "
        f"{fit.best['step']:,} "
        f"(generate.py --checkpoint best), or train with fewer steps, {remedy}"
    ]


def format_epochs(epochs: float) -> str:
    """Format a number of epochs, such as "0.37 epochs", "1 epoch" or "120 epochs". 0: an unknown
    share of the text."""
    if epochs == 0:
        return "less than 1 epoch"
    number = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
    return f"{number} epoch{'' if number == '1' else 's'}"


def describe_fit(fit: Fit) -> str:
    """The training loss, its distance from the validation loss, and the verdict, as one line."""
    gap = fit.val_loss - fit.train_loss
    losses = (
        f"training loss {fit.train_loss:.4f}, {abs(gap):.4f} "
        f"{'below' if gap >= 0 else 'above'} the validation loss"
    )
    return f"{losses}, after {format_epochs(fit.epochs)}: {fit.verdict}"


def describe_baselines(val: dict[str, Any], baselines: dict[str, float]) -> str:
    """Compare a model with simple models of the same text (evaluation.text_baselines), as one
    line."""
    others = ", ".join(f"{name} {bits:.2f}" for name, bits in baselines.items())
    return (
        f"bits per byte: this model {val['val_bits_per_byte']:.2f}; on up to 100 KB of "
        f"validation text: {others}"
    )


def describe_estimates(val: dict[str, Any], fit: Fit, state: RunState) -> str | None:
    """Estimate by how much more time, text or parameters would lower the loss, the largest change
    first, as one line.

    None for fine-tuning, if the entropy floor is known, and for losses that the law does not
    describe.
    """
    settings = state.settings
    is_described = fit.verdict != NOT_IMPROVING and val["val_loss"] < math.log(
        settings.model.vocab_size
    )
    if settings.run.init_from or val.get("entropy_floor") or not is_described:
        return None
    losses = val["val_loss"], val["val_bits_per_byte"], fit.train_loss
    changes = predict_loss_changes(
        *losses, count_parameters(settings.model), state.tokens, fit.epochs
    )
    if changes is None:
        return None
    estimates = [(changes.text, "text")]
    if fit.verdict != OVERFITTED:  # otherwise, more steps or parameters overfit more
        estimates.append(
            (changes.time, "steps" if settings.train.max_minutes is None else "minutes")
        )
        estimates.append((changes.parameters, "parameters"))
    (first, name), *others = sorted(estimates, reverse=True)
    rest = "".join(f", twice the {name} {_by_about(change)}" for change, name in others)
    return f"estimate: twice the {name} would lower the loss {_by_about(first)}{rest}"


def _by_about(change: float) -> str:
    return f"by about {change:.2f}" if change >= 0.01 else "by less than 0.01"


def _recent_mean(train: list[tuple[int, float]]) -> float:
    """Mean loss of the last lines, each (step, loss)."""
    recent = [loss for _, loss in train[-10:]]
    return sum(recent) / len(recent)
