"""Validation of a run that learns from rewards: the loss of its text, and rewards of answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from thinker.evaluation.loss import Evaluation, Evaluator
from thinker.features.rewards.prompts import Prompt
from thinker.features.rewards.rollout_dataset import RolloutDataset
from thinker.features.rewards.rollouts import SampledAnswer, Sampler, answer_seed, mean_parts
from thinker.model import Thinker
from thinker.runtime.ranks import DistContext

WORST = sys.float_info.max  # the rank of a model whose answers could not be judged
FIRST_ANSWER = 1 << 31  # the number of the first answer, beyond those of training


@dataclass
class RewardEvaluator:
    """Measure the loss of the validation split, and let the model answer some of its prompts once.

    The checkpoint `best` is that with the highest mean reward, or without prompts the lowest loss.
    The answers have the same random numbers at each evaluation. Ranks share the prompts.
    """

    losses: Evaluator
    prompts: list[Prompt]
    dataset: RolloutDataset  # which has a sampler once training starts
    dist: DistContext

    def __call__(
        self, model: Thinker, stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Evaluate; None if stop(), called after each batch of text, returns True."""
        evaluation = self.losses(model, stop)
        if evaluation is None or not self.prompts:
            return evaluation
        sampler: Sampler = self.dataset.sampler
        numbers = list(range(self.dist.rank, len(self.prompts), self.dist.world_size))
        own = [self.prompts[number] for number in numbers]
        seeds = [answer_seed(sampler.seed, FIRST_ANSWER + number) for number in numbers]
        answered: list[SampledAnswer] = []
        for part in self.dist.gather_objects(sampler.answer(model, own, seeds)):
            answered += part
        totals = [sampler.total(each.rewards) for each in answered]
        metrics = {
            "val_answers_cut": sum(each.is_cut for each in answered) / len(answered),
            "val_answers_failed": float(np.isnan(totals).mean()),
            "val_answer_tokens": sum(len(each.tokens) for each in answered) / len(answered),
        }
        rank = WORST
        if not np.isnan(totals).all():
            metrics["val_reward"] = float(np.nanmean(totals))
            rank = -metrics["val_reward"]
        for name, value in mean_parts([each.rewards for each in answered]).items():
            metrics[f"val_{name}"] = value
        return replace(evaluation, metrics={**evaluation.metrics, **metrics}, rank=rank)
