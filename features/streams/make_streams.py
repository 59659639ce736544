"""Sources of a config that are tokenized while they are trained on."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from thinker.data.batches.batches import PackedDataset
from thinker.data.corpus.corpus import Corpus
from thinker.data.corpus.shards import TokenShards
from thinker.data.text.sources import open_source
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.streams.stream_index import HEAD_BYTES
from thinker.features.streams.stream_writer import BLOCKS, StreamText
from thinker.features.streams.token_stream import TokenStream
from thinker.runtime.errors import UserError
from thinker.training.config.config import Config
from thinker.training.config.source_section import TextSource
from thinker.training.settings.settings import Settings


def make_streams(
    settings: Config | Settings, corpus: Corpus, pack: Callable[[TokenShards], PackedDataset], folder: Path,
    progress: bool = True,
) -> dict[int, TokenStream]:  # fmt: skip
    """The sources with buffer_tokens as streams, by number. Nothing is read before write_streams().

    Args:
        corpus: the start of each source, with the tokenizer.
        pack: makes training windows from tokens.
        folder: for the tokens; each stream has a folder in it.
        progress: show a bar while training waits for the first tokens.

    Raises UserError if a buffer is too small.
    """
    data, train, seed = settings.data, settings.train, settings.run.seed
    # Ranks prepare batches ahead of time. None may need a block that the first rank has already left behind.
    least = BLOCKS * (data.num_workers + 2) * train.batch_size * data.seq_len
    streams = {}
    for number, source in enumerate(data.text_sources()):
        if source.buffer_tokens is None:
            continue
        name = list(corpus.parts)[number] if corpus.parts else source.source
        if source.buffer_tokens < least:
            raise UserError(
                f"buffer_tokens={source.buffer_tokens} of {name} is too small for train.batch_size={train.batch_size}, "
                f"data.seq_len={data.seq_len} and data.num_workers={data.num_workers}; use at least {least}, or lower "
                "data.num_workers"
            )
        options = data.corpus_options(source)
        head = list(corpus.parts.values())[number] if corpus.parts else corpus
        n_tokens = head.train.n_tokens + head.val.n_tokens
        if (
            head.train.n_bytes + head.val.n_bytes < HEAD_BYTES
            and n_tokens < source.buffer_tokens
            and progress
        ):
            remedy = "without buffer_tokens, it is tokenized once, and each epoch has a new order"
            print(
                f"advice: all {n_tokens:,} tokens of {name} fit into its buffer; {remedy}",
                file=sys.stderr,
            )
        open_text = partial(_open_text, options, source, corpus.tokenizer, seed)
        streams[number] = TokenStream(
            folder / name, open_text, corpus.tokenizer, source.buffer_tokens, pack, progress
        )
    return streams


def _open_text(
    options: dict[str, Any], source: TextSource, tokenizer: Tokenizer, seed: int
) -> StreamText:
    opened = open_source(seed=seed, **source.source_options())
    return StreamText(
        opened,
        tokenizer,
        options["val_fraction"],
        options.get("val_tokens"),
        options["assistant_only_loss"],
    )
