"""Keys of data.clean."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from thinker.training.config.source_section import TextSource
from thinker.training.config.types import MAX_COUNT, ConfigSection, Fraction, Positive


class CleanConfig(ConfigSection):
    """Which documents to drop before training. Rules that are null are off. Each source is cleaned
    on its own."""

    min_characters: Positive | None = None
    """Drop shorter documents."""
    max_characters: Positive | None = None
    """Drop longer documents."""
    max_repeated_lines: Fraction | None = None
    """Drop documents with a larger share of their characters in lines that have occurred before."""
    max_symbols: Fraction | None = None
    """Drop documents with a larger share of characters that are neither letters, digits nor white
    space."""
    duplicates: Literal["exact", "near"] | None = None
    """exact: of equal documents, keep one. near: of equal or similar documents, keep one, whatever
    their split. null: keep all."""

    @model_validator(mode="after")
    def _check_rules(self) -> CleanConfig:
        if all(value is None for value in self.model_dump().values()):
            raise ValueError(
                "min_characters and all other rules are null; set one, or remove data.clean"
            )
        least = self.min_characters or 0
        most = self.max_characters or MAX_COUNT
        if least > most:
            raise ValueError(f"min_characters ({least}) is above max_characters ({most})")
        return self


class CleanKeys(ConfigSection):
    """Keys of the section `data`."""

    clean: CleanConfig | None = None
    """Rules for dropping documents, such as `{min_characters: 50, duplicates: near}`
    (features/cleaning/guide.md)."""

    def corpus_options(self, source: TextSource) -> dict[str, Any]:
        """As of the section without this feature, and which documents to drop."""
        options = super().corpus_options(source)
        if self.clean is not None:
            from thinker.features.cleaning.cleaning import Cleaning, CleaningRules

            rules = CleaningRules(**self.clean.model_dump())
            options["document_filter"] = Cleaning(rules)
        return options
