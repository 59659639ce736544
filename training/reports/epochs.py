"""How often a model may see its text."""

import math

GOOD_EPOCHS = 4  # nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)
MANY_EPOCHS = 10  # without dropout
MAX_EPOCHS = 24.0  # more make the validation loss rise
MIN_DROPOUT = 0.1  # with which MAX_EPOCHS still help
ROOM = 0.9  # of the epochs that help: above, a run is not advised to have more
FEW_STEPS = 20  # too few to learn from


def most_epochs(dropout: float) -> float:
    """The number of epochs beyond which the validation loss of most texts rises."""
    return MAX_EPOCHS if dropout >= MIN_DROPOUT else MANY_EPOCHS


def may_train_longer(epochs: float, dropout: float) -> bool:
    """Whether clearly more epochs than these would help."""
    return epochs <= ROOM * most_epochs(dropout)


def too_many_epochs(epochs: float, steps_per_epoch: float, at_most: str = "") -> str:
    """Say that a run has too many epochs, and what to change."""
    seen = f"the model will see the data {at_most}{epochs:,.0f} times and memorize it"
    steps = max(1, math.ceil(GOOD_EPOCHS * steps_per_epoch))
    if steps < FEW_STEPS:
        plural = "s" if steps > 1 else ""
        return f"{seen}; add text: {GOOD_EPOCHS} epochs are only {steps} step{plural}"
    return (
        f"{seen}; add text or lower train.max_steps (to {steps:,} for {GOOD_EPOCHS} epochs); "
        f"raising model.dropout helps a little"
    )


def format_epochs(epochs: float) -> str:
    """Format a number of epochs, such as "0.37 epochs", "1 epoch" or "120 epochs". 0: an unknown
    share of the text."""
    if epochs == 0:
        return "less than 1 epoch"
    number = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
    plural = "" if number == "1" else "s"
    return f"{number} epoch{plural}"
