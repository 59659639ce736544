"""The flags --retrieve and --retrieve-block."""

import argparse
from typing import Any

from thinker.generation.command_flags import CommandFlags, ModelSource
from thinker.runtime.cli import ArgumentParser

DEFAULT_BLOCK = 32  # tokens


class RetrievalFlags(CommandFlags):
    """Flags for retrieval; see features/retrieval/retrieval_caches.py."""

    def __init__(self, parser: ArgumentParser) -> None:
        group = parser.group("performance and context")
        blocks_help = "with --window: also attend to N older blocks per query"
        group.add_argument("--retrieve", type=int, default=0, help=blocks_help)
        size_help = "with --retrieve: tokens per block"
        group.add_argument("--retrieve-block", type=int, default=DEFAULT_BLOCK, help=size_help)

    def generator_options(
        self, arguments: argparse.Namespace, source: ModelSource
    ) -> dict[str, Any]:
        """As CommandFlags.generator_options()."""
        options = {}
        if arguments.retrieve:
            options["retrieve"] = arguments.retrieve
        if arguments.retrieve_block != DEFAULT_BLOCK:
            options["retrieve_block"] = arguments.retrieve_block
        return options
