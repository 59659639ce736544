"""Let a model answer prompts several times, and judge the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from thinker.features.rewards.judging.pass_at_k import PassAtK, estimate, ks
from thinker.features.rewards.prompts import Prompt
from thinker.features.rewards.rollouts import SampledAnswer, Sampler, mean_parts
from thinker.model import Thinker
from thinker.runtime.process.progress import Progress

ANSWERS_AT_ONCE = 256


@dataclass
class Judged:
    """The answers of a model to P prompts, S to each.

    totals: the reward of each answer, (P, S); NaN if it could not be judged. parts: means by
    verifier and name. right: from which reward an answer is right.
    """

    prompts: list[Prompt]
    answers: list[list[SampledAnswer]]
    totals: np.ndarray
    right: float
    parts: dict[str, float] = field(default_factory=dict)

    def n_right(self) -> list[int]:
        """How many answers to each prompt are right."""
        return (self.totals >= self.right).sum(1).tolist()

    def shares(self, confidence: float) -> list[PassAtK]:
        """pass@1, pass@2, pass@4, ..."""
        n_answers = self.totals.shape[1]
        return [estimate(self.n_right(), n_answers, k, confidence) for k in ks(n_answers)]

    def to_dict(self, confidence: float) -> dict[str, Any]:
        """For JSON."""
        samples = []
        for prompt, answers, totals in zip(self.prompts, self.answers, self.totals):
            rows = []
            for answer, total in zip(answers, totals.tolist()):
                reward = None if np.isnan(total) else total
                rows.append({"text": answer.text, "reward": reward, "parts": answer.rewards})
            samples.append({"prompt": prompt.text, "answers": rows})
        return {
            "reward": mean_reward(self.totals),
            "parts": self.parts,
            "failed": int(np.isnan(self.totals).sum()),
            "pass_at_k": [asdict(share) for share in self.shares(confidence)],
            "samples": samples,
        }


def mean_reward(totals: np.ndarray) -> float | None:
    """The mean over the answers that were judged; None if there is none."""
    if np.isnan(totals).all():
        return None
    return float(np.nanmean(totals))


def judge_model(
    model: Thinker,
    prompts: Sequence[Prompt],
    sampler: Sampler,
    n_answers: int,
    right: float,
    description: str,
) -> Judged:
    """Sample `n_answers` answers to each prompt, with a progress bar. Answer n of prompt p has the
    seed sampler.seed + p · n_answers + n, so that models are compared with the same random
    numbers."""
    asked = [prompt for prompt in prompts for _ in range(n_answers)]
    answered: list[SampledAnswer] = []
    with Progress(total=len(asked), desc=description, unit="answers") as bar:
        for start in range(0, len(asked), ANSWERS_AT_ONCE):
            part = asked[start : start + ANSWERS_AT_ONCE]
            seeds = [sampler.seed + start + number for number in range(len(part))]
            answered += sampler.answer(model, part, seeds)
            bar.update(len(part))
    totals = np.array([sampler.total(each.rewards) for each in answered])
    groups = []
    for start in range(0, len(answered), n_answers):
        groups.append(answered[start : start + n_answers])
    parts = mean_parts([each.rewards for each in answered])
    return Judged(list(prompts), groups, totals.reshape(-1, n_answers), right, parts)
