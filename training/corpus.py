"""A recipe's corpus."""

from __future__ import annotations

from thinker.data.corpus import Corpus, prepare
from thinker.data.tokenizer import Tokenizer
from thinker.training.config import Recipe


def prepare_data(recipe: Recipe, tokenizer: Tokenizer | None = None) -> Corpus:
    """The recipe's corpus as tokens on disk; `tokenizer`: instead of the one that the recipe names."""
    data = recipe.data
    options = {name: getattr(data, name) for name in ("path", "config", "split", "column", "streaming")}
    return prepare(
        source=data.source,
        **{name: value for name, value in options.items() if value is not None},
        tokenizer=tokenizer or data.tokenizer,
        loss_on=data.loss_on,
        val_fraction=data.val_fraction,
        max_documents=data.max_documents,
        cache_dir=data.cache_dir,
        seed=recipe.run.seed,
    )
