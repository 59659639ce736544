"""The training batches of a rank, and the evaluator of the validation split."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import AnyDataset, OrderedDataset, ShuffledDataset
from thinker.data.batches.prefetch import Prefetcher
from thinker.data.batches.windows import PackedDataset, check_fills_a_window
from thinker.data.corpus.corpus import Corpus
from thinker.data.corpus.shards import TokenShards
from thinker.data.tokenizers.text_bytes import scaled_byte_lengths
from thinker.evaluation.loss import Evaluator
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import DistContext
from thinker.runtime.registry import offers
from thinker.training.config.config import Config
from thinker.training.config.source_section import TextSource
from thinker.training.settings.settings import Settings


def build_batches(
    settings: Settings,
    corpus: Corpus,
    device: torch.device,
    dist: DistContext,
    dataset: AnyDataset | None = None,
) -> tuple[Prefetcher, Evaluator]:
    """The training batches of this rank, and the evaluator of the validation split.

    dataset: the training windows. None: those of the corpus.
    """
    if dataset is None:
        folder = RunDirectory(settings.run.dir).dataset_files
        loader = open_loader(settings, corpus, settings.model.prefix, folder, dist.is_main)
    else:
        from thinker.training.data.custom_batches import load_custom_dataset

        loader = load_custom_dataset(dataset, settings, corpus)
    n_rows = settings.train.batch_size // dist.world_size
    rows = slice(dist.rank * n_rows, (dist.rank + 1) * n_rows)
    is_pinned = device.type == "cuda"
    batches = Prefetcher(loader, is_pinned, rows, settings.data.num_workers)
    return batches, open_evaluator(settings, corpus, loader, dist)


@dataclass(frozen=True)
class DatasetOptions:
    """What the training windows of a corpus, or of one of its parts, are made from."""

    settings: Config | Settings
    corpus: Corpus
    pack: Callable[[TokenShards], PackedDataset]  # makes windows from tokens
    folder: Path | None  # for the files of datasets; None: make do with what the corpus has
    progress: bool


def open_loader(
    settings: Config | Settings,
    corpus: Corpus,
    prefix_len: int,
    folder: Path | None = None,
    progress: bool = True,
) -> BatchLoader:
    """The training batches of a corpus.

    Args:
        prefix_len: of the model, see PackedDataset.
        folder: for files of datasets that need some. None: no training follows, so make do with the
            corpus.
        progress: show bars while training waits for data.

    Raises UserError if the text is shorter than a sequence.
    """
    data = settings.data
    pack = partial(
        PackedDataset,
        seq_len=data.seq_len,
        packing=data.packing,
        document_masking=data.document_masking,
        prefix_len=prefix_len,
    )
    options = DatasetOptions(settings, corpus, pack, folder, progress)
    dataset = None
    for make_dataset in offers("dataset"):
        dataset = dataset or make_dataset(options)
    if dataset is None:
        check_fills_a_window(corpus.train, data.seq_len)
        dataset = open_source_dataset(options, data, data.source)
    bos_id = corpus.tokenizer.bos_id if data.document_masking else None
    return BatchLoader(dataset, settings.train.batch_size, bos_id)


def open_source_dataset(
    options: DatasetOptions, source: TextSource, name: str, number: int = 0
) -> OrderedDataset:
    """The training windows of one source. name: in messages; number: among several sources."""
    for make_dataset in offers("source_dataset"):
        dataset = make_dataset(options, source, name, number)
        if dataset is not None:
            return dataset
    settings = options.settings
    windows = options.pack(options.corpus.train)
    if settings.data.shift_windows and options.corpus.train.has_conversations:
        reason = "conversations are packed as whole documents"
        raise UserError(f"data.shift_windows=true: {reason}; set it to false")
    return ShuffledDataset(windows, settings.run.seed, settings.data.shift_windows, number)


def open_evaluator(
    settings: Settings, corpus: Corpus, loader: BatchLoader, dist: DistContext
) -> Evaluator:
    """The evaluator of the validation split."""
    for make_evaluator in offers("evaluator"):
        evaluator = make_evaluator(settings, corpus, loader, dist)
        if evaluator is not None:
            return evaluator
    windows = pack_validation(settings, corpus)
    return build_evaluator(settings, corpus, windows, settings.train.eval_sequences, dist)


def pack_validation(settings: Settings, corpus: Corpus) -> PackedDataset:
    """The windows of the validation split of a corpus."""
    data = settings.data
    return PackedDataset(
        corpus.val,
        data.seq_len,
        data.val_packing,
        document_masking=data.document_masking,
        prefix_len=settings.model.prefix,
    )


def build_evaluator(
    settings: Settings, corpus: Corpus, windows: PackedDataset, limit: int | None, dist: DistContext
) -> Evaluator:
    """An evaluator of the first `limit` windows of the validation split of a corpus."""
    byte_lengths = scaled_byte_lengths(corpus.val, corpus.tokenizer)
    batch_size = settings.train.micro_batch_size
    return Evaluator(windows, batch_size, byte_lengths, limit, dist, progress=True)
