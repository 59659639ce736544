"""The key `data.sources`: what it changes in a run. Everything else of mixtures is imported only if
it is set."""

from typing import Any

import torch

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import OrderedDataset
from thinker.data.batches.windows import check_fills_a_window
from thinker.data.corpus.corpus import Corpus
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.loss import Evaluator
from thinker.model import ThinkerConfig
from thinker.runtime.ranks import DistContext
from thinker.training.config.config import Config
from thinker.training.config.data_section import DataConfig
from thinker.training.data.training_batches import DatasetOptions
from thinker.training.objective import Objective
from thinker.training.settings.settings import Settings


def prepare_corpus(config: Config, tokenizer: str | Tokenizer) -> Corpus | None:
    """Prepare the sources in data.sources."""
    if config.data.sources is None:
        return None
    from thinker.features.mixtures.mixed_corpus import prepare_sources

    return prepare_sources(config, tokenizer)


def find_corpus(data: DataConfig, sha256: str, tokenizer_hash: str) -> Corpus | None:
    """Find the sources in data.sources in the cache."""
    if data.sources is None:
        return None
    from thinker.features.mixtures.mixed_corpus import find_mixture

    labels = [source.label for source in data.sources]
    return find_mixture(labels, sha256, tokenizer_hash, data.cache_dir)


def make_dataset(options: DatasetOptions) -> OrderedDataset | None:
    """The training windows of all sources."""
    if options.settings.data.sources is None:
        return None
    from thinker.features.mixtures.mixed_dataset import open_mixed_dataset

    check_fills_a_window(options.corpus.train, options.settings.data.seq_len)
    return open_mixed_dataset(options)


def make_evaluator(
    settings: Settings, corpus: Corpus, loader: BatchLoader, dist: DistContext
) -> Evaluator | None:
    """The evaluator of all validation splits."""
    if settings.data.sources is None:
        return None
    from thinker.features.mixtures.mixed_evaluator import open_mixed_evaluator

    return open_mixed_evaluator(settings, corpus, loader, dist)


def with_source_losses(
    config: Config, model: ThinkerConfig, corpus: Corpus, device: torch.device, objective: Objective
) -> Objective:
    """The objective, with the loss of each source among its parts."""
    if config.data.sources is None:
        return objective
    from thinker.features.mixtures.source_losses import SourceLosses

    return SourceLosses(objective, list(corpus.parts))


def describe_data(settings: Settings, corpus: Corpus, loader: BatchLoader) -> list[str]:
    """A line per source, and advice."""
    if settings.data.sources is None:
        return []
    from thinker.features.mixtures.mixture_reports import describe_mixture

    return describe_mixture(settings, corpus, loader)


def describe_evaluation(val: dict[str, Any]) -> list[str]:
    """The validation loss of each source."""
    if not any(key.startswith("val_loss/") for key in val):
        return []
    from thinker.features.mixtures.mixture_reports import describe_losses

    return describe_losses(val)


def comparable_losses(
    settings: Settings,
    corpus: Corpus,
    loader: BatchLoader,
    lines: list[dict[str, Any]],
    best_val_loss: float | None,
) -> list[dict[str, Any]] | None:
    """Lines of metrics.jsonl in which the losses are means over the same sources."""
    if settings.data.sources is None:
        return None
    from thinker.features.mixtures.mixture_reports import losses_of_equal_texts

    return losses_of_equal_texts(corpus, loader, lines, best_val_loss)
