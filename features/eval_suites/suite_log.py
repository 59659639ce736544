"""The accuracy on minimal pairs in metrics.jsonl, every few steps of training."""

from pathlib import Path

from thinker.features.eval_suites.minimal_pairs import (
    MinimalPair,
    check_pairs,
    first_pairs,
    read_pairs,
    score_pairs,
)
from thinker.features.eval_suites.tales_pairs import tales_pairs
from thinker.training.callback import Callback, StepInfo, TrainingRun
from thinker.training.distributed.parallel_model import unwrapped_copy
from thinker.training.settings.settings import Settings

TALES_PAIRS = "tales-pairs"
ALL_PAIRS = "pairs_accuracy"  # the key of all pairs; /NAME follows for a phenomenon


def suite_logs(settings: Settings) -> list[Callback]:
    """The log that the config asks for, or none."""
    train = settings.train
    if train.eval_suite is None:
        return []
    every = train.eval_suite_every
    if every is None:
        # At evaluations, or at the nearest steps that are logged.
        every = max(1, round(train.eval_every / train.log_every)) * train.log_every
    if train.eval_suite == TALES_PAIRS:
        pairs = tales_pairs()
    else:
        pairs = read_pairs(Path(train.eval_suite))
    return [SuiteLog(first_pairs(pairs, train.eval_suite_limit), every)]


class SuiteLog(Callback):
    """The accuracy on minimal pairs, by the weights that are evaluated.

    The first rank scores all pairs, while the others wait. Scoring draws no random numbers and
    changes no weights.
    """

    def __init__(self, pairs: list[MinimalPair], every: int) -> None:
        self.pairs = pairs
        self.every = every

    def on_start(self, run: TrainingRun) -> None:
        """Keep the run. Raises UserError for pairs that its model cannot score."""
        self.run = run
        check_pairs(run.parts.settings.model, run.corpus.tokenizer, self.pairs)

    def after_step(self, info: StepInfo) -> None:
        """Keep the number of the step."""
        self.step = info.step

    def metrics(self) -> dict[str, float]:
        """The accuracy on all pairs and on each phenomenon, if they are due."""
        if self.step % self.every:
            return {}
        parts = self.run.parts
        self.run.show_status(f"step {self.step}, scoring minimal pairs")
        with self.run.evaluated_weights():
            # With the same weights in memory, unless they are sharded.
            model = unwrapped_copy(parts.model)
            if not parts.dist.is_main:
                return {}
            scores = score_pairs(model, self.run.corpus.tokenizer, self.pairs)
        rows = scores.accuracies()
        values = {ALL_PAIRS: rows[-1].accuracy}
        if len(rows) > 1:
            for row in rows[:-1]:
                values[f"{ALL_PAIRS}/{row.name}"] = row.accuracy
        return values
