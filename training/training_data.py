"""The corpus of a config: prepared, or found in the cache."""

from thinker.data.corpus.corpus import Corpus, find_corpus, prepare_corpus
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.mixtures.mixed_corpus import find_mixture, prepare_mixture
from thinker.training.config.config import Config
from thinker.training.config.data_section import DataConfig


def prepare_training_data(config: Config, tokenizer: Tokenizer | None = None) -> Corpus:
    """Tokenize the corpus of a config. `tokenizer` replaces the one that the config names."""
    data, seed = config.data, config.run.seed
    tokenizer = tokenizer or data.tokenizer
    if data.sources is not None:
        sources = {
            source.label: data.corpus_options(source) | {"seed": seed} for source in data.sources
        }
        return prepare_mixture(sources, tokenizer, data.cache_dir)
    return prepare_corpus(
        tokenizer=tokenizer, seed=seed, cache_dir=data.cache_dir, **data.corpus_options(data)
    )


def find_training_data(data: DataConfig, sha256: str, tokenizer_hash: str) -> Corpus | None:
    """Find the undamaged corpus of a run in the cache by its identity; None if it is not there."""
    if data.sources is not None:
        return find_mixture(
            [source.label for source in data.sources], sha256, tokenizer_hash, data.cache_dir
        )
    return find_corpus(sha256, tokenizer_hash, data.cache_dir)
