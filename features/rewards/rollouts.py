"""Answers that the model samples to prompts, with their rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinker.data.batches.permutation import permute
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.rewards.advantages import group_advantages, has_signal
from thinker.features.rewards.keys import GRPOConfig
from thinker.features.rewards.prompts import Prompt
from thinker.features.rewards.verifiers.verifier import Answer
from thinker.features.rewards.verifiers.verifier_process import Rewards, VerifierProcess
from thinker.generation.engine import Generator
from thinker.generation.sampling_params import SamplingParams
from thinker.generation.sequence import Completion
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext


@dataclass
class Rollouts:
    """R answers and what is learned from them. Row i is sample i of a batch.

    inputs, targets: (R, T) int64, IGNORE_INDEX where nothing was sampled. sampled, reference: ln P
    of each target when it was sampled, and by the reference, (R, T) fp32; 0 elsewhere, and without
    a reference. advantages: (R,) fp32. is_used: (R,) bool, False for answers that teach nothing.
    """

    inputs: Tensor
    targets: Tensor
    sampled: Tensor
    reference: Tensor
    advantages: Tensor
    is_used: Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    def window(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of an answer."""
        return self.inputs[index].numpy(), self.targets[index].numpy()


@dataclass(frozen=True)
class SampledAnswer:
    """An answer of the model: its tokens, their log-probabilities when they were sampled, and its
    rewards."""

    tokens: list[int]
    log_probs: list[float]
    text: str
    is_cut: bool  # at the longest length
    rewards: Rewards | None


class Sampler:
    """Lets a model answer prompts, and judges the answers."""

    def __init__(
        self,
        options: GRPOConfig,
        tokenizer: Tokenizer,
        verifiers: VerifierProcess,
        seed: int,
        exact: bool = False,
    ) -> None:
        """`exact`: as the option of Generator()."""
        self.options = options
        self.exact = exact
        self.tokenizer = tokenizer
        self.verifiers = verifiers
        self.seed = seed

    def answer(
        self, model: Thinker, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[SampledAnswer]:
        """An answer to each prompt, sampled with its seed, and judged."""
        policy = tempered(model, self.options.temperature)
        generator = Generator(policy, self.tokenizer, exact=self.exact)
        completions = [Completion(prompt.text) for prompt in prompts]
        shared = SamplingParams(max_new_tokens=self.options.max_new_tokens)
        params = [shared.with_seed(seed) for seed in seeds]
        tokens = [list(prompt.tokens) for prompt in prompts]
        for _ in generator.stream_batch(completions, params, tokens):
            pass
        answers = []
        for prompt, completion in zip(prompts, completions):
            is_complete = completion.finish_reason == "stop"
            answers.append(Answer(prompt.text, completion.text, prompt.row, is_complete))
        judged = self.verifiers.judge(answers)
        sampled = []
        for completion, answer, rewards in zip(completions, answers, judged):
            tokens = completion.token_ids
            is_cut = not answer.is_complete
            sampled.append(SampledAnswer(tokens, completion.logprobs, answer.text, is_cut, rewards))
        return sampled

    def total(self, rewards: Rewards | None) -> float:
        """The weighted sum of the rewards of an answer; NaN without."""
        if rewards is None:
            return float("nan")
        terms = []
        for name, weight in self.options.rewards.items():
            for reward in rewards[name].values():
                terms.append(weight * reward)
        return math.fsum(terms)  # exact, so that equal rewards in another order are equal


def tempered(model: Thinker, temperature: float) -> Thinker:
    """A model whose logits are divided by a temperature. It shares the other weights.

    With it the engine samples at temperature 1, so the log-probabilities that it stores are those
    of sampling. Raises UserError for a model with a soft cap on logits.
    """
    if temperature == 1:
        return model
    if model.config.logit_softcap is not None:
        raise UserError(
            "train.grpo.temperature (in thinker eval, --temperature) cannot be combined with "
            "model.logit_softcap; set it to 1"
        )
    config = ThinkerConfig.from_dict(model.config.to_dict() | {"tie_embeddings": False})
    with torch.device("meta"):
        changed = type(model)(config)
    weights = dict(model.state_dict())
    weights["lm_head.weight"] = model.lm_head.weight.detach() / temperature
    if model.lm_head.bias is not None:
        weights["lm_head.bias"] = model.lm_head.bias.detach() / temperature
    changed.load_state_dict(weights, assign=True)
    changed.activation_dtype = model.activation_dtype
    return changed.eval()


def chosen_prompts(n_prompts: int, first: int, n: int, seed: int) -> list[int]:
    """The prompts first, ..., first + n - 1 of a run, which takes them in a new order each time
    that all have been answered."""
    epochs, places = np.divmod(np.arange(first, first + n), n_prompts)
    found = np.empty(n, np.int64)
    for epoch in np.unique(epochs).tolist():
        is_in_epoch = epochs == epoch
        found[is_in_epoch] = permute(places[is_in_epoch], n_prompts, (seed, epoch))
    return found.tolist()


def make_rollouts(
    sampler: Sampler,
    model: Thinker,
    prompts: Sequence[Prompt],
    first: int,
    n_answers: int,
    seq_len: int,
    dist: DistContext = SINGLE_PROCESS,
) -> Rollouts:
    """Sample `n_answers` answers, in groups to the prompts that come next. Ranks share the work,
    and all have all answers.

    first: the number of the first answer in the run.
    """
    options = sampler.options
    n_prompts = n_answers // options.group_size
    first_prompt = first // options.group_size
    asked = []
    for number in chosen_prompts(len(prompts), first_prompt, n_prompts, sampler.seed):
        asked += [prompts[number]] * options.group_size
    seeds = [answer_seed(sampler.seed, first + row) for row in range(n_answers)]
    answers = _answers_of_all_ranks(sampler, model, asked, seeds, dist)
    if first == 0 and all(answer.rewards is None for answer in answers):
        raise UserError("verifiers could not judge any of the first answers, as said above")

    totals = [sampler.total(answer.rewards) for answer in answers]
    rewards = torch.tensor(totals, dtype=torch.float64)  # (R,)
    metrics = describe_rollouts(rewards, answers)
    if options.drop_cut_answers:
        is_cut = torch.tensor([answer.is_cut for answer in answers])
        rewards = rewards.masked_fill(is_cut, torch.nan)
    groups = rewards.view(n_prompts, options.group_size)
    with_signal = has_signal(groups)  # (n_prompts,)
    metrics["groups_with_signal"] = float(with_signal.double().mean())
    is_used = with_signal[:, None] & ~groups.isnan()
    advantages = group_advantages(groups, options.baseline, options.normalize)
    inputs, targets, sampled = answer_rows(asked, answers, seq_len)
    return Rollouts(
        inputs=inputs,
        targets=targets,
        sampled=sampled,
        reference=torch.zeros_like(sampled),
        advantages=advantages.flatten().float(),
        is_used=is_used.flatten(),
        metrics=metrics,
    )


def _answers_of_all_ranks(
    sampler: Sampler, model: Thinker, asked: list[Prompt], seeds: list[int], dist: DistContext
) -> list[SampledAnswer]:
    """An answer to each prompt. Ranks share the work, and all have all answers."""
    n_own = len(asked) // dist.world_size
    own = slice(dist.rank * n_own, (dist.rank + 1) * n_own)
    answers: list[SampledAnswer] = []
    for part in dist.gather_objects(sampler.answer(model, asked[own], seeds[own])):
        answers += part
    return answers


def empty_rollouts(n_answers: int, seq_len: int) -> Rollouts:
    """Rollouts without an answer, in the shapes that all have."""
    inputs = torch.zeros(n_answers, seq_len, dtype=torch.int64)
    return Rollouts(
        inputs=inputs,
        targets=torch.full_like(inputs, IGNORE_INDEX),
        sampled=torch.zeros(n_answers, seq_len),
        reference=torch.zeros(n_answers, seq_len),
        advantages=torch.zeros(n_answers),
        is_used=torch.zeros(n_answers, dtype=torch.bool),
    )


def answer_seed(seed: int, number: int) -> int:
    """The seed of answer `number` of a run."""
    return (seed << 32) + number


def answer_rows(
    prompts: Sequence[Prompt], answers: Sequence[SampledAnswer], seq_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """inputs, targets (R, T) int64 and ln P of the sampled targets (R, T) fp32."""
    shape = (len(answers), seq_len)
    inputs = np.zeros(shape, np.int64)
    targets = np.full(shape, IGNORE_INDEX, np.int64)
    sampled = np.zeros(shape, np.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        tokens = [*prompt.tokens, *answer.tokens]
        n = len(tokens) - 1
        is_answer = slice(len(prompt.tokens) - 1, n)
        inputs[row, :n] = tokens[:-1]
        targets[row, is_answer] = answer.tokens
        sampled[row, is_answer] = answer.log_probs
    return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(sampled)


def describe_rollouts(rewards: Tensor, answers: Sequence[SampledAnswer]) -> dict[str, float]:
    """Keys of metrics.jsonl: means over the answers."""
    n = len(answers)
    metrics = {
        "answers_cut": sum(answer.is_cut for answer in answers) / n,
        "answers_failed": sum(answer.rewards is None for answer in answers) / n,
        "answer_tokens": sum(len(answer.tokens) for answer in answers) / n,
    }
    if metrics["answers_failed"] < 1:
        metrics["reward"] = float(rewards.nanmean())
    return metrics | mean_parts([answer.rewards for answer in answers])


def mean_parts(judged: Sequence[Rewards | None]) -> dict[str, float]:
    """The mean of each part of a reward, such as reward/length or reward/my_rewards.py:score/a."""
    values: dict[str, list[float]] = {}
    for rewards in judged:
        if rewards is None:
            continue
        for verifier, parts in rewards.items():
            for part, reward in parts.items():
                key = f"reward/{verifier}"
                if part != "reward":  # the verifier returned several, by name
                    key += f"/{part}"
                values.setdefault(key, []).append(reward)
    return {key: sum(rewards) / len(rewards) for key, rewards in values.items()}
