"""The flags --json-schema and --regex."""

import argparse
from typing import ClassVar

from thinker.data.text.files.whole_text import read_text_or_stdin
from thinker.generation.command_flags import CommandFlags
from thinker.runtime.cli import ArgumentParser


class StructuredOutputFlags(CommandFlags):
    """Flags for the fields of SamplingParams with the same names."""

    without_effect: ClassVar = {"with --score": ("json_schema", "regex")}

    def __init__(self, parser: ArgumentParser) -> None:
        group = parser.group(
            "sampling (order: penalties, logit bias, temperature, top-k, top-p, min-p)"
        )
        exclusive = group.add_mutually_exclusive_group()
        schema_help = "generate JSON that is valid under the JSON schema in FILE (UTF-8)"
        exclusive.add_argument("--json-schema", metavar="FILE", help=schema_help)
        regex_help = "generate a text that matches PATTERN as a whole"
        exclusive.add_argument("--regex", metavar="PATTERN", help=regex_help)

    def read_files(self, arguments: argparse.Namespace) -> None:
        """Read the schema."""
        if arguments.json_schema is not None:
            arguments.json_schema = read_text_or_stdin(arguments.json_schema)
