"""A source of a config that is tokenized while it is trained on (the key buffer_tokens)."""

import sys
from functools import partial

from thinker.data.batches.dataset import ShuffledDataset
from thinker.data.corpus.corpus import Corpus
from thinker.data.text.sources import open_source
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.streams.stream_index import HEAD_BYTES
from thinker.features.streams.stream_writer import BLOCKS, StreamText
from thinker.features.streams.token_stream import TokenStream
from thinker.runtime.errors import UserError
from thinker.training.config.config import Config
from thinker.training.config.data_section import DataConfig
from thinker.training.config.source_section import TextSource
from thinker.training.data.training_batches import DatasetOptions
from thinker.training.settings.settings import Settings


class StartOfStream(ShuffledDataset):
    """Windows at the start of a stream, which stand for it in plans."""

    is_endless = True


def open_stream(
    options: DatasetOptions, source: TextSource, name: str, number: int
) -> TokenStream | StartOfStream:
    """The stream of a source. Nothing is read before start().

    Without a folder, the windows at its start, which the corpus has.

    Raises UserError if the buffer is too small.
    """
    settings = options.settings
    seed = settings.run.seed
    if options.folder is None:
        return StartOfStream(options.pack(options.corpus.train), seed, source=number)
    _check_buffer(settings, source.buffer_tokens, name)
    if options.progress:
        _advise(options.corpus, source.buffer_tokens, name)
    tokenizer = options.corpus.tokenizer
    return TokenStream(
        options.folder / name,
        partial(_open_text, settings.data, source, tokenizer, seed),
        tokenizer,
        source.buffer_tokens,
        options.pack,
        seed,
        number,
        options.progress,
    )


def _check_buffer(settings: Config | Settings, buffer_tokens: int, name: str) -> None:
    """Raise UserError if a buffer is too small.

    Ranks prepare batches ahead of time. None may need a block that the first rank has already left
    behind.
    """
    data = settings.data
    batch_size = settings.train.batch_size
    least = BLOCKS * (data.num_workers + 2) * batch_size * data.seq_len
    if buffer_tokens < least:
        raise UserError(
            f"buffer_tokens={buffer_tokens} of {name} is too small for "
            f"train.batch_size={batch_size}, "
            f"data.seq_len={data.seq_len} and data.num_workers={data.num_workers}; use at "
            f"least {least}, or lower "
            "data.num_workers"
        )


def _advise(head: Corpus, buffer_tokens: int, name: str) -> None:
    """Say so if the whole source fits into its buffer."""
    n_bytes = head.train.n_bytes + head.val.n_bytes
    n_tokens = head.train.n_tokens + head.val.n_tokens
    if n_bytes < HEAD_BYTES and n_tokens < buffer_tokens:
        remedy = "without buffer_tokens, it is tokenized once, and each epoch has a new order"
        line = f"advice: all {n_tokens:,} tokens of {name} fit into its buffer; {remedy}"
        print(line, file=sys.stderr)


def _open_text(data: DataConfig, source: TextSource, tokenizer: Tokenizer, seed: int) -> StreamText:
    options = data.corpus_options(source)
    opened = open_source(seed=seed, **source.source_options())
    return StreamText(
        opened,
        tokenizer,
        options["val_fraction"],
        options.get("val_tokens"),
        options["assistant_only_loss"],
    )
