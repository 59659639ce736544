"""The key `train.grpo`: what it changes in a run. Everything else of rewards is imported only if it
is set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import OrderedDataset
from thinker.data.corpus.corpus import Corpus
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import DistContext
from thinker.training.config.config import Config
from thinker.training.data.training_batches import DatasetOptions, build_evaluator, pack_validation
from thinker.training.objective import Objective, next_token_loss
from thinker.training.settings.settings import Settings

if TYPE_CHECKING:
    from thinker.features.rewards.reward_evaluator import RewardEvaluator
    from thinker.training.callbacks.samples import SamplePrompt

MANY_CUT = 0.5  # share of answers
ROOM = 0.8  # share of a sequence; texts that need more do not waste much


def make_objective(
    config: Config, model: ThinkerConfig, corpus: Corpus, device: torch.device, objective: Objective
) -> Objective:
    """The loss of sampled answers. Raises UserError if the caller of train() has another, or if
    there is no model to start from."""
    if config.train.grpo is None:
        return objective
    if config.run.init_from is None:
        raise UserError("train.grpo needs a model to start from; set run.init_from")
    from thinker.features.rewards.verifiers.load_verifier import check_verifier

    for name in config.train.grpo.rewards:
        check_verifier(name)
    if model.prefix:
        raise UserError(
            "train.grpo cannot be combined with a bidirectional prefix in model.attention, in "
            "which an answer would see its own tokens"
        )
    if model.max_cached_len < config.data.seq_len:
        raise UserError(
            "train.grpo cannot be combined with dynamic model.rope_scaling, which depends on the "
            "length of a sequence"
        )
    if objective is not next_token_loss:
        raise UserError("train.grpo cannot be combined with another objective; remove one of them")
    from thinker.features.rewards.exact.engine_log_probs import EngineLogProbs
    from thinker.features.rewards.grpo import GRPOLoss

    engine = None
    if config.train.exact:
        engine = EngineLogProbs(corpus.tokenizer, config.train.grpo.temperature)
    return GRPOLoss(config.train.grpo, corpus.tokenizer.vocab_size, engine)


def make_dataset(options: DatasetOptions) -> OrderedDataset | None:
    """The answers of each batch."""
    settings = options.settings
    grpo = settings.train.grpo
    if grpo is None:
        return None
    from thinker.features.rewards.prompts import load_prompts
    from thinker.features.rewards.rollout_dataset import RolloutDataset

    prompts, n_too_long = load_prompts(settings, options.corpus.tokenizer, "train")
    dataset = RolloutDataset(prompts, settings.train.batch_size, grpo.group_size, grpo.updates)
    dataset.n_left_out = n_too_long
    return dataset


def make_evaluator(
    settings: Settings, corpus: Corpus, loader: BatchLoader, dist: DistContext
) -> RewardEvaluator | None:
    """What measures the loss of the validation split, and rewards."""
    grpo = settings.train.grpo
    if grpo is None:
        return None
    from thinker.features.rewards.prompts import load_prompts
    from thinker.features.rewards.reward_evaluator import RewardEvaluator
    from thinker.features.rewards.rollout_dataset import RolloutDataset

    if not isinstance(loader.dataset, RolloutDataset):
        raise UserError("train.grpo samples its own texts; pass no dataset to train()")
    prompts = []
    if grpo.eval_prompts:
        prompts, _ = load_prompts(settings, corpus.tokenizer, "val")
        prompts = prompts[: grpo.eval_prompts]
    windows = pack_validation(settings, corpus)
    losses = build_evaluator(settings, corpus, windows, settings.train.eval_sequences, dist)
    return RewardEvaluator(losses, prompts, loader.dataset, dist)


def sample_prompt(settings: Settings, corpus: Corpus) -> SamplePrompt | None:
    """The first prompt of the validation split, or of the training split if that has none."""
    if settings.train.grpo is None:
        return None
    from thinker.features.rewards.prompts import prompts_of_split
    from thinker.training.callbacks.samples import SamplePrompt

    for split in ("val", "train"):
        for prompt in prompts_of_split(settings, corpus.tokenizer, split):
            return SamplePrompt(prompt.text, list(prompt.tokens))
    return None


def describe_evaluation(val: dict[str, Any]) -> list[str]:
    """The rewards of answers to prompts of the validation split."""
    if "val_reward" not in val:
        return []
    lines = [
        f"reward {val['val_reward']:.3f} of answers to prompts of the validation split, "
        f"{val['val_answer_tokens']:.1f} tokens long"
    ]
    if val["val_answers_failed"]:
        lines.append(f"{val['val_answers_failed']:.1%} of these answers could not be judged")
    if val["val_answers_cut"] > MANY_CUT:
        lines.append(
            f"advice: {val['val_answers_cut']:.1%} of these answers were cut; raise "
            "train.grpo.max_new_tokens, or reward answers that end"
        )
    return lines


def comparable_losses(
    settings: Settings,
    corpus: Corpus,
    loader: BatchLoader,
    lines: list[dict[str, Any]],
    best_val_loss: float | None,
) -> list[dict[str, Any]] | None:
    """No lines: train_loss is that of the model's own answers."""
    return None if settings.train.grpo is None else []


def describe_data(settings: Settings, corpus: Corpus, loader: BatchLoader) -> list[str]:
    """How many prompts there are."""
    grpo = settings.train.grpo
    if grpo is None:
        return []
    prompts = loader.dataset.prompts
    n_prompts = settings.train.batch_size // grpo.group_size
    lines = [
        f"{len(prompts):,} prompts; each step answers {n_prompts} of them {grpo.group_size} times"
    ]
    n_left_out = loader.dataset.n_left_out
    if n_left_out:
        lines.append(
            f"advice: {n_left_out:,} other prompts leave fewer than train.grpo.max_new_tokens="
            f"{grpo.max_new_tokens} of data.seq_len={settings.data.seq_len} tokens for an answer "
            "and are left out; raise data.seq_len"
        )
    longest = max(len(prompt.tokens) for prompt in prompts) + grpo.max_new_tokens - 1
    seq_len = settings.data.seq_len
    if longest <= ROOM * seq_len:
        lines.append(
            f"advice: prompts and answers have at most {longest} tokens, and the rest of a "
            f"sequence is padding; lower data.seq_len={seq_len}"
        )
    return lines
