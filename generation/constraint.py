"""Texts that have to match a JSON schema or a regular expression: which tokens may come next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.device import to_device
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
        """Add an allowed token, other than the end of text, to the text."""


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


def allowed_tokens(constraints: list[Constraint | None]) -> Tensor | None:
    """What may follow in each text, (N, V / 32) int32; None if no text has a constraint.

    In a text without a constraint, every token may follow.
    """
    masks = [constraint.allowed for constraint in constraints if constraint is not None]
    if not masks:
        return None
    everything = torch.full_like(masks[0], -1)
    rows = []
    for constraint in constraints:
        rows.append(everything if constraint is None else constraint.allowed)
    return torch.stack(rows)


def banned_tokens(allowed: Tensor, vocab_size: int, device: torch.device) -> Tensor:
    """The tokens that are not in `allowed` (N, V / 32), as (N, V) boolean on the device."""
    octets = to_device(allowed, device).view(torch.uint8)  # (N, V / 8)
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    is_banned = (octets[:, :, None] & bits) == 0  # (N, V / 8, 8)
    return is_banned.flatten(1)[:, :vocab_size]


def describe_unmet(are_met: Iterable[bool | None]) -> list[str]:
    """A line or none: how many texts were cut before they matched (Completion.constraint_met)."""
    are_met = list(are_met)
    n_unmet = sum(is_met is False for is_met in are_met)
    if n_unmet == 0:
        return []
    cut = "the text was" if len(are_met) == 1 else f"{n_unmet} of {len(are_met)} texts were"
    hint = "use a higher --max-new-tokens, or a schema or regex with shorter texts"
    return [f"{cut} cut before the JSON schema or regex was complete; {hint}"]
