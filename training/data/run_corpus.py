"""The corpus of a config: prepared, or found in the cache."""

from thinker.data.corpus.corpus import Corpus, find_corpus, prepare_corpus
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.registry import offers
from thinker.training.config.config import Config
from thinker.training.config.data_section import DataConfig


def prepare_training_data(config: Config, tokenizer: Tokenizer | None = None) -> Corpus:
    """Tokenize the corpus of a config. `tokenizer` replaces the one that the config names."""
    data = config.data
    tokenizer = tokenizer or data.tokenizer
    for prepare in offers("corpus"):
        corpus = prepare(config, tokenizer)
        if corpus is not None:
            return corpus
    options = data.corpus_options(data)
    seed = config.run.seed
    return prepare_corpus(tokenizer=tokenizer, seed=seed, cache_dir=data.cache_dir, **options)


def find_training_data(data: DataConfig, sha256: str, tokenizer_hash: str) -> Corpus | None:
    """Find the undamaged corpus of a run in the cache by its identity; None if it is not there."""
    for find in offers("find_corpus"):
        corpus = find(data, sha256, tokenizer_hash)
        if corpus is not None:
            return corpus
    return find_corpus(sha256, tokenizer_hash, data.cache_dir)
