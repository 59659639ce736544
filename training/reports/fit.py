"""Assess a finished run: the fit of the model, simple models of the same text, and what would lower
the loss most."""

from dataclasses import dataclass
from typing import Any

from thinker.evaluation.text_baselines import NGRAM
from thinker.training.reports.epochs import GOOD_EPOCHS, format_epochs, may_train_longer
from thinker.training.state.run_state import RunState

OVERFITTING = 0.02  # relative rise of the validation loss above its lowest value
LARGE_GAP = 1.5  # validation loss / training loss
SMALL_GAP = 0.05  # relative: the losses are about equal
FAR_FROM_FLOOR = 0.06

# Verdicts on a run. The last one: the validation loss has risen, but not because the training loss
# fell.
UNDERFITTED, WELL_FITTED, OVERFITTED = "underfitted", "well fitted", "overfitted"
NOT_IMPROVING = "no longer improving"
MEANINGS = {
    UNDERFITTED: "the model is still learning; longer training would lower its loss",
    WELL_FITTED: "there is no sign of too little or too much training",
    OVERFITTED: "the model has memorized parts of the training text and predicts new text worse",
    NOT_IMPROVING: "the validation loss has risen above its lowest value",
}


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
        unless its loss has risen. Nor is a run underfitted that already has as many epochs as help.
    """
    train = [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]
    if not train:
        return None
    validations = _comparable(evaluations(lines), state.best_val_loss)
    last = validations[-1]
    best = min(validations, key=lambda line: line["val_loss"])
    train_loss = _recent_mean(train)
    loss = last["val_loss"]
    verdict = WELL_FITTED
    if loss > best["val_loss"] * (1 + OVERFITTING):
        until_best = [(step, value) for step, value in train if step <= best["step"]]
        has_fallen = bool(until_best) and train_loss < _recent_mean(until_best)
        verdict = OVERFITTED if has_fallen else NOT_IMPROVING
    elif epochs > GOOD_EPOCHS and loss > LARGE_GAP * train_loss:
        verdict = OVERFITTED
    elif loss <= best["val_loss"] and not _is_near_floor(last):
        is_close = loss < train_loss * (1 + SMALL_GAP)
        has_room = may_train_longer(epochs, state.settings.model.dropout)
        if has_room and (is_close or is_worse_than_ngrams(last, baselines)):
            verdict = UNDERFITTED
    return Fit(verdict, epochs, train_loss, loss, best)


def _comparable(
    validations: list[dict[str, Any]], best_val_loss: float | None
) -> list[dict[str, Any]]:
    """The evaluations of the sequences that the last one measured.

    A loss below the best one is of other sequences, before train.eval_sequences was changed.
    """
    if best_val_loss is None:
        return validations
    kept = [line for line in validations if line["val_loss"] >= best_val_loss]
    return kept or validations[-1:]


def _is_near_floor(val: dict[str, Any]) -> bool:
    floor = val.get("entropy_floor")
    return bool(floor) and val["val_loss"] / floor - 1 <= FAR_FROM_FLOOR


def is_worse_than_ngrams(val: dict[str, Any], baselines: dict[str, float] | None) -> bool:
    """Whether the model of an evaluation is worse than a 5-gram model."""
    return baselines is not None and val["val_bits_per_byte"] > baselines[NGRAM]


def advise_on_fit(fit: Fit, remedy: str) -> list[str]:
    """What to do about a validation loss that rises, or that is far above the training loss."""
    step = fit.best["step"]
    best = f"{fit.best['val_loss']:.3f}"
    if fit.verdict == NOT_IMPROVING:
        return [
            f"the validation loss was lowest at step {step:,} ({best}); use the weights of that "
            f"step (thinker generate --checkpoint best)"
        ]
    if fit.verdict != OVERFITTED:
        return []
    if fit.val_loss <= fit.best["val_loss"] * (1 + OVERFITTING):
        return [f"against overfitting, try {remedy}"]
    return [
        f"overfitting: since step {step:,} the validation loss has risen from {best} to "
        f"{fit.val_loss:.3f} while the training loss fell; use the weights of step {step:,} "
        f"(thinker generate --checkpoint best), or train with fewer steps, {remedy}"
    ]


def describe_fit(fit: Fit) -> str:
    """The training loss, its distance from the validation loss, and the verdict, as one line."""
    gap = fit.val_loss - fit.train_loss
    where = "below" if gap >= 0 else "above"
    losses = f"training loss {fit.train_loss:.4f}, {abs(gap):.4f} {where} the validation loss"
    return f"{losses}, after {format_epochs(fit.epochs)}: {fit.verdict}"


def describe_baselines(val: dict[str, Any], baselines: dict[str, float]) -> str:
    """Compare a model with simple models of the same text (evaluation.text_baselines), as one
    line."""
    others = ", ".join(f"{name} {bits:.2f}" for name, bits in baselines.items())
    return (
        f"bits per byte: this model {val['val_bits_per_byte']:.2f}; on up to 100 KB of "
        f"validation text: {others}"
    )


def _recent_mean(train: list[tuple[int, float]]) -> float:
    """Mean loss of the last lines, each (step, loss)."""
    recent = [loss for _, loss in train[-10:]]
    return sum(recent) / len(recent)
