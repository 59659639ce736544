"""Keys for minimal pairs during training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinker.runtime.errors import UserError
from thinker.training.config.types import ConfigSection, PathText, Positive

if TYPE_CHECKING:
    from thinker.training.config.config import Config


class EvalSuiteKeys(ConfigSection):
    """Keys of the section `train`."""

    eval_suite: PathText | None = None
    """Minimal pairs to score during training: `tales-pairs`, or a JSONL file or folder as for
    `thinker eval --pairs` (features/eval_suites/guide.md). null: none."""
    eval_suite_every: Positive | None = None
    """Steps between scorings of train.eval_suite: a multiple of train.log_every. null: the multiple
    that is nearest to train.eval_every."""
    eval_suite_limit: Positive | None = None
    """Score only the first pairs of each phenomenon, this many. null: all."""


def check_eval_suite(config: Config) -> None:
    """Raise UserError for keys without effect, and for steps that are not logged."""
    train = config.train
    if train.eval_suite is None:
        for name in ("eval_suite_every", "eval_suite_limit"):
            if getattr(train, name) is not None:
                raise UserError(
                    f"train.{name} has no effect without train.eval_suite; set it to tales-pairs"
                )
        return
    every, log_every = train.eval_suite_every, train.log_every
    if every is not None and every % log_every:
        multiple = -(-every // log_every) * log_every
        raise UserError(
            f"train.eval_suite_every ({every}) is not a multiple of train.log_every ({log_every}); "
            f"use {multiple}"
        )
    if every is None and train.eval_every is None:
        raise UserError(
            "train.eval_suite needs train.eval_suite_every, as there is no train.eval_every"
        )
