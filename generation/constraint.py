"""Texts that have to match a JSON schema or a regular expression: which tokens may come next."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.registry import only_offer


class Constraint(Protocol):
    """What may follow in one text.

    Attributes:
        allowed: (V / 32, rounded up) int32; bit i of number j is set if token 32 j + i may come
            next.
        can_continue: whether any token may come next, the end of text included.
    """

    allowed: Tensor
    can_continue: bool

    @property
    def is_complete(self) -> bool:
        """Whether the text so far matches as a whole."""

    def append(self, token: int) -> None:
        """Add an allowed token, other than the end of text, to the text.

        Raises UserError if the text becomes too complex to be checked.
        """


class ConstraintSource(Protocol):
    """What a feature offers for SamplingParams.json_schema and SamplingParams.regex."""

    def canonical_schema(self, schema: Any) -> str:
        """A schema as compact JSON text. Raises UserError if it is not valid or not supported."""

    def new_constraint(
        self,
        tokenizer: Tokenizer,
        json_schema: str | None,
        regex: str | None,
        logit_bias: tuple[tuple[int, float], ...],
    ) -> Constraint:
        """A constraint at the beginning of a text. Raises UserError if no text can match it."""


def constraint_source() -> ConstraintSource:
    """What the installed feature offers. Raises UserError if none is installed."""
    return only_offer("constraint", "json_schema and regex")
