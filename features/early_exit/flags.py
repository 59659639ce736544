"""The flag --early-exit."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, ClassVar

from thinker.generation.command_flags import CommandFlags, ModelSource
from thinker.runtime.cli import ArgumentParser

if TYPE_CHECKING:
    from thinker.generation.engine import Generator


class EarlyExitFlags(CommandFlags):
    """The flag for skipping layers; see features/early_exit/decoder.py."""

    without_effect: ClassVar = {"with --score": ("early_exit",)}

    def __init__(self, parser: ArgumentParser) -> None:
        parser.group("performance and context").add_argument(
            "--early-exit",
            type=float,
            metavar="P",
            help="skip later layers if a token has probability P",
        )

    def generator_options(
        self, arguments: argparse.Namespace, source: ModelSource
    ) -> dict[str, Any]:
        """As CommandFlags.generator_options()."""
        if arguments.early_exit is None:
            return {}
        return {"early_exit": arguments.early_exit}

    def facts(self, generator: Generator) -> dict[str, Any]:
        """As CommandFlags.facts(): the layers used per token; None: all."""
        return {"mean_layers": getattr(generator.decoder, "mean_layers", None)}
