"""Reports of scripts/inspect_model.py: a table, values for JSON and panels to plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from thinker.data.tokenizers.token_label import token_label
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.model import Thinker
from thinker.runtime.errors import UserError

ATTENTION_AXES = "key", "query"


@dataclass(frozen=True)
class Panel:
    """A matrix to plot, nan for empty cells.

    If there are fewer labels than cells, they are spread evenly.
    """

    title: str
    values: Tensor
    rows: list[str]
    columns: list[str]
    signed: bool = False  # diverging colors around zero
    vmax: float | None = None  # end of the color scale (default: largest value)
    # text: a row of colored tokens; table: cells with text from `cells`; lines: one per column
    style: Literal["heatmap", "text", "table", "lines"] = "heatmap"
    cells: list[list[str]] | None = None
    highlighted_row: int | None = None
    axis_labels: tuple[str, str] = ("", "")  # of columns and of rows


@dataclass(frozen=True)
class Report:
    """A table of `rows` under `columns`, with header and footer; `data`: all values, unrounded."""

    header: dict[str, Any]
    columns: list[str]
    rows: list[list[str]]
    data: dict[str, Any]
    panels: list[Panel] = field(default_factory=list)
    footer: str = ""
    panels_per_row: int = 1

    def table(self) -> str:
        """Format the report as text, with words left-aligned and numbers right-aligned."""
        lines = [f"{name:>12}  {value}" for name, value in self.header.items()]
        lines.append("")
        columns = map(_aligned, zip(self.columns, *self.rows))
        for row in zip(*columns):
            lines.append("  ".join(row).rstrip())
        if self.footer:
            lines += ["", self.footer]
        return "\n".join(lines)


def _aligned(column: tuple[str, ...]) -> list[str]:
    """The cells of a column, padded to the same width. The first is its name."""
    has_words = any(cell[:1].strip("+-.0123456789") for cell in column[1:])
    # Digits of numbers are easier to compare from the right.
    align = str.ljust if has_words else str.rjust
    width = max(map(len, column))
    return [align(cell, width) for cell in column]


@dataclass(frozen=True)
class Prompt:
    """Token ids (T,) of a text, with a readable label per token."""

    tokens: Tensor
    labels: list[str]

    @classmethod
    def from_text(cls, model: Thinker, tokenizer: Tokenizer, text: str) -> Prompt:
        """Encode a text, with BOS if the tokenizer adds it.

        Raises UserError unless it has 2 to max_seq_len tokens.
        """
        ids = [*tokenizer.bos_prefix, *tokenizer.encode(text)]
        limit = model.config.max_seq_len
        if not 2 <= len(ids) <= limit:
            # The attention of a single token says nothing.
            with_bos = " including BOS" if tokenizer.bos_prefix else ""
            raise UserError(f"the prompt has {len(ids)} token(s){with_bos}; use 2 to {limit}")
        labels = [token_label(tokenizer, token) for token in ids]
        return cls(torch.tensor(ids, device=model.device), labels)

    def numbered(self) -> list[str]:
        """Return labels with positions, to distinguish equal tokens."""
        return numbered(self.labels)


def numbered(labels: list[str]) -> list[str]:
    """Write the position before each label."""
    return [f"{position} {text}" for position, text in enumerate(labels)]


def decimal(value: float, digits: int, sign: str = "") -> str:
    """Format a number without negative zero. `sign` "+": with a plus for positive numbers."""
    rounded = round(float(value), digits) + 0.0  # −0.0 + 0.0 is 0.0
    return f"{rounded:{sign}.{digits}f}"


def head_labels(values: Tensor, kind: str = "head") -> tuple[list[str], list[str]]:
    """Return row and column labels of a (layers, H) matrix."""
    layers, heads = values.shape
    return _count("layer", layers), _count(kind, heads)


def layer_labels(n_layers: int) -> list[str]:
    """Return a label per layer."""
    return _count("layer", n_layers)


def _count(name: str, n: int) -> list[str]:
    return [f"{name} {number}" for number in range(n)]


def existing_heads(values: Tensor) -> list[tuple[int, int]]:
    """List the (layer, head) pairs of a (layers, H) matrix that are not nan."""
    pairs = (~values.isnan()).nonzero().tolist()
    return [(layer, head) for layer, head in pairs]


def head_names(pairs: list[tuple[int, int]]) -> list[str]:
    """Names of (layer, head) pairs, such as 0.3."""
    return [f"{layer}.{head}" for layer, head in pairs]


def to_json(values: Tensor) -> Any:
    """Convert a tensor to nested lists, with None for nan."""
    if values.dim() > 0:
        return [to_json(value) for value in values]
    if values.isnan():  # which JSON does not have
        return None
    return values.item()
