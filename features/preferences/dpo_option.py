"""The key `train.dpo`: what it changes in a run. Everything else of preferences is imported only if
it is set."""

from __future__ import annotations

import math
from typing import Any

import torch

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import OrderedDataset
from thinker.data.corpus.corpus import Corpus
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import DistContext
from thinker.training.config.config import Config
from thinker.training.data.training_batches import DatasetOptions
from thinker.training.objective import Objective, next_token_loss
from thinker.training.settings.settings import Settings


def make_objective(
    config: Config, model: ThinkerConfig, corpus: Corpus, device: torch.device, objective: Objective
) -> Objective:
    """The loss of pairs, or a form of it from the caller of train(). Raises UserError if that is
    another objective, or if there is no model to start from."""
    if config.train.dpo is None:
        return objective
    if config.run.init_from is None:
        raise UserError("train.dpo needs a model to start from; set run.init_from")
    if model.prefix:
        raise UserError(
            "train.dpo cannot be combined with a bidirectional prefix in model.attention, in which "
            "an answer would see its own tokens"
        )
    if model.max_cached_len < config.data.seq_len:
        raise UserError(
            "train.dpo cannot be combined with dynamic model.rope_scaling, as several texts share "
            "a sequence"
        )
    from thinker.features.preferences.dpo import DPOLoss

    if isinstance(objective, DPOLoss):
        return objective
    if objective is not next_token_loss:
        raise UserError(
            "train.dpo cannot be combined with another objective; remove one of them, or derive "
            "it from DPOLoss"
        )
    return DPOLoss(config.train.dpo)


def make_dataset(options: DatasetOptions) -> OrderedDataset | None:
    """The training windows, with whole pairs."""
    settings = options.settings
    if settings.train.dpo is None:
        return None
    from thinker.features.preferences.pair_dataset import PairDataset
    from thinker.features.preferences.pair_windows import PairWindows

    windows = PairWindows(options.corpus.train, settings.data.seq_len)
    return PairDataset(windows, settings.run.seed)


def make_evaluator(
    settings: Settings, corpus: Corpus, loader: BatchLoader, dist: DistContext
) -> Any | None:
    """What compares the pairs of the validation split."""
    if settings.train.dpo is None:
        return None
    from thinker.data.tokenizers.text_bytes import scaled_byte_lengths
    from thinker.features.preferences.dpo_evaluator import PreferenceEvaluator
    from thinker.features.preferences.pair_dataset import PairDataset
    from thinker.features.preferences.pair_windows import PairWindows

    if not isinstance(loader.dataset, PairDataset):
        raise UserError("train.dpo reads the pairs of the config; pass no dataset to train()")
    return PreferenceEvaluator(
        windows=PairWindows(corpus.val, settings.data.seq_len, "validation"),
        batch_size=settings.train.micro_batch_size,
        beta=settings.train.dpo.beta,
        dataset=loader.dataset,
        byte_lengths=scaled_byte_lengths(corpus.val, corpus.tokenizer),
        limit=settings.train.eval_sequences,
        dist=dist,
    )


def describe_data(settings: Settings, corpus: Corpus, loader: BatchLoader) -> list[str]:
    """How many pairs there are, and how many are too long."""
    if settings.train.dpo is None:
        return []
    from thinker.features.preferences.pair_windows import PairWindows

    seq_len = settings.data.seq_len
    lines = []
    val = PairWindows(corpus.val, seq_len, "validation")
    for split, windows in (("training", loader.dataset.windows), ("validation", val)):
        n_used = windows.n_pairs - windows.n_left_out
        lines.append(f"{n_used:,} pairs in {len(windows):,} sequences for {split}")
        if windows.n_left_out:
            share = windows.n_left_out / windows.n_pairs
            lines.append(
                f"advice: {windows.n_left_out:,} pairs for {split} ({share:.1%}) are left out, as "
                f"both answers with their prompts have more than data.seq_len={seq_len} tokens; "
                "raise it"
            )
    return lines


def describe_evaluation(val: dict[str, Any]) -> list[str]:
    """The comparison of pairs."""
    if "val_dpo_loss" not in val:
        return []
    lines = [
        f"pairs: DPO loss {val['val_dpo_loss']:.4f} nats; the chosen answer has the higher reward "
        f"in {val['val_dpo_accuracy']:.1%}; mean margin {val['val_dpo_margin']:.2f}"
    ]
    if val["val_dpo_loss"] > math.log(2):
        lines.append(
            "advice: the DPO loss of the validation pairs is above ln 2 = 0.693, where training "
            "began; take fewer steps, lower optimizer.lr, or collect more pairs"
        )
    return lines


def comparable_losses(
    settings: Settings,
    corpus: Corpus,
    loader: BatchLoader,
    lines: list[dict[str, Any]],
    best_val_loss: float | None,
) -> list[dict[str, Any]] | None:
    """No lines: the cross-entropy of chosen answers may rise while the run learns."""
    return None if settings.train.dpo is None else []
