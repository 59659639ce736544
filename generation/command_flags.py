"""Flags that a feature adds to commands that sample: generate.py and the server."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.registry import offers_by_name

if TYPE_CHECKING:
    import torch

    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.generation.engine import Generator


@dataclass(frozen=True)
class ModelSource:
    """A model that a command has loaded."""

    path: str | Path  # of a run directory, a checkpoint or a Hugging Face folder
    checkpoint: str  # of a run directory: latest, best, a step or a name
    tokenizer: Tokenizer
    device: torch.device
    name: str = ""  # in a server


class CommandFlags:
    """What a feature adds to a command. A feature overrides what it needs.

    Attributes:
        without_effect: names of flags by the mode in which they have no effect, such as
            "with --score".
    """

    without_effect: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, parser: ArgumentParser) -> None:
        """Add the flags."""

    def read_files(self, arguments: argparse.Namespace) -> None:
        """Replace the names of files by what is in them. Raises UserError."""

    def generator_options(
        self, arguments: argparse.Namespace, source: ModelSource
    ) -> dict[str, Any]:
        """Options of Generator() that differ from their defaults. Raises UserError."""
        return {}

    def facts(self, generator: Generator) -> dict[str, Any]:
        """What --json adds to each text."""
        return {}

    def lines(self) -> list[str]:
        """What is printed after the texts."""
        return []

    def collectors(self) -> list[Any]:
        """What the server adds to its metrics: collectors for prometheus_client."""
        return []


def add_feature_flags(parser: ArgumentParser, command: str) -> list[CommandFlags]:
    """Let all features add their flags to a command."""
    return [add_flags(parser) for add_flags in offers_by_name("arguments", command)]
