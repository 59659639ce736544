"""A config's corpus."""

from __future__ import annotations

from thinker.data.corpus import Corpus, prepare
from thinker.data.tokenizer import Tokenizer
from thinker.training.config import Config


def prepare_corpus(config: Config, tokenizer: Tokenizer | None = None) -> Corpus:
    """The config's corpus as tokens on disk; `tokenizer`: instead of the one that the config names."""
    data = config.data
    options = {name: getattr(data, name) for name in ("path", "config", "split", "column", "streaming")}
    return prepare(
        source=data.source,
        **{name: value for name, value in options.items() if value is not None},
        tokenizer=tokenizer or data.tokenizer,
        loss_on=data.loss_on,
        val_fraction=data.val_fraction,
        max_documents=data.max_documents,
        cache_dir=data.cache_dir,
        seed=config.run.seed,
    )
