"""A config's corpus."""

from __future__ import annotations

from thinker.data.corpus import Corpus, prepare_corpus
from thinker.data.tokenizer import Tokenizer
from thinker.training.config import Config


def prepare_training_data(config: Config, tokenizer: Tokenizer | None = None) -> Corpus:
    """The config's corpus as tokens on disk; `tokenizer`: instead of the one that the config names."""
    data = config.data
    options = {name: getattr(data, name) for name in ("path", "config", "split", "column", "streaming")}
    return prepare_corpus(
        source=data.source,
        **{name: value for name, value in options.items() if value is not None},
        tokenizer=tokenizer or data.tokenizer,
        assistant_only_loss=data.assistant_only_loss,
        val_fraction=data.val_fraction,
        max_documents=data.max_documents,
        cache_dir=data.cache_dir,
        seed=config.run.seed,
    )
