"""What this feature offers for SamplingParams.json_schema and SamplingParams.regex."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinker.features.structured_output.json_schema import canonical_schema

if TYPE_CHECKING:
    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.features.structured_output.constraints import GrammarConstraint


class StructuredOutput:
    """Checks schemas, and makes constraints (see ConstraintSource)."""

    def canonical_schema(self, schema: Any) -> str:
        """As ConstraintSource.canonical_schema()."""
        return canonical_schema(schema)

    def new_constraint(
        self,
        tokenizer: Tokenizer,
        json_schema: str | None,
        regex: str | None,
        logit_bias: tuple[tuple[int, float], ...] = (),
    ) -> GrammarConstraint:
        """As ConstraintSource.new_constraint()."""
        # Imported here, so that a schema is checked before a model is loaded.
        from thinker.features.structured_output.constraints import GrammarConstraint

        return GrammarConstraint(tokenizer, json_schema, regex, logit_bias)

    def import_library(self) -> None:
        """Import what constraints need, so that it cannot fail later. Raises
        ModuleNotFoundError."""
        import llguidance  # noqa: F401


SOURCE = StructuredOutput()
