"""Texts that have to match a JSON schema or a regular expression: which tokens may come next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
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


class TextConstraint(Constraint, Protocol):
    """A constraint that also reads a text that is not cut into tokens."""

    def append_bytes(self, data: bytes) -> bool:
        """Add bytes to the text, which need not be those of whole tokens.

        Returns whether the text can still match; if not, the constraint is of no more use. Raises
        UserError as append() does.
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
    ) -> TextConstraint:
        """A constraint at the beginning of a text. Raises UserError if no text can match it."""


def constraint_source() -> ConstraintSource:
    """What the installed feature offers. Raises UserError if none is installed."""
    return only_offer("constraint", "json_schema and regex")


def pack_tokens(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """A set of tokens in the form of Constraint.allowed."""
    is_member = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    is_member[list(tokens)] = True
    return np.packbits(is_member, bitorder="little").view(np.int32)
