"""What a finished run says about itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunSummary:
    """What a finished run says about itself, in words and numbers."""

    result: list[str]  # how long the run was, and its losses
    verdict: str  # of training.reports.fit, such as "underfitted"; "" without a training loss
    fit: str  # the training loss and the verdict as a sentence, or ""
    comparison: str  # with simple models of the same text, or ""
    estimates: str  # what more time, text or parameters would gain, or ""
    advice: list[str]  # what would lower the loss most; often empty
    next_commands: list[str]  # each says what it is for, then the command
    # Bits per byte of simple models, by name (evaluation.text_baselines); empty if not comparable.
    baselines: dict[str, float]
    # By name: the last evaluation with the keys of metrics.jsonl, train_loss (the mean of the last
    # lines), best_val_loss, epochs, and baseline_bits_per_byte/NAME.
    values: dict[str, float]

    @property
    def assessment(self) -> list[str]:
        """The sentences between result and advice."""
        return [text for text in (self.fit, self.comparison, self.estimates) if text]
