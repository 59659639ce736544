"""The flags --speculate and --draft."""

import argparse
from typing import Any, ClassVar

from thinker.generation.command_flags import CommandFlags, ModelSource
from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError


class SpeculationFlags(CommandFlags):
    """Flags for drafts; see features/speculation/speculation.py."""

    without_effect: ClassVar = {"with --score": ("speculate",)}

    def __init__(self, parser: ArgumentParser) -> None:
        group = parser.group("performance and context")
        drafts_help = "draft N tokens per step by prompt lookup"
        group.add_argument("--speculate", type=int, default=0, help=drafts_help)
        model_help = "with --speculate: draft with this smaller model"
        group.add_argument("--draft", metavar="PATH", help=model_help)

    def generator_options(
        self, arguments: argparse.Namespace, source: ModelSource
    ) -> dict[str, Any]:
        """Load the draft. Raises UserError if it has another tokenizer."""
        options: dict[str, Any] = {}
        if arguments.speculate:
            options["speculate"] = arguments.speculate
        if arguments.draft is not None:
            from thinker.interop.load import load

            options["draft"], tokenizer = load(arguments.draft, source.device)
            if tokenizer is None or tokenizer.content_hash != source.tokenizer.content_hash:
                remedy = "use a draft with the model's tokenizer"
                raise UserError(f"--draft {arguments.draft} has a different tokenizer; {remedy}")
        return options
