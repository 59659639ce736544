"""What a feature adds to `thinker eval`."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.registry import offers_by_name

if TYPE_CHECKING:
    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.model import Thinker


class Report(NamedTuple):
    """What was measured."""

    values: dict[str, Any]  # for JSON
    text: str
    draw: Callable[[], None] | None  # writes the plot


class EvalFlags(ABC):
    """Flags that ask for another measurement than the loss on a text."""

    @abstractmethod
    def __init__(self, parser: ArgumentParser) -> None:
        """Add the flags."""

    @abstractmethod
    def check(self, arguments: argparse.Namespace, parser: ArgumentParser) -> bool:
        """Whether the flags ask for the measurement. Raises UserError for flags without effect."""

    @abstractmethod
    def evaluate(
        self, arguments: argparse.Namespace, model: Thinker, tokenizer: Tokenizer
    ) -> Report:
        """Measure the model. `arguments.run` names it. Raises UserError."""


def add_eval_flags(parser: ArgumentParser) -> list[EvalFlags]:
    """Let all features add their flags to `thinker eval`."""
    return [add_flags(parser) for add_flags in offers_by_name("arguments", "eval")]
