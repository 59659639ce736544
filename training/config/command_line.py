"""Command line of commands that take a config: CONFIG section.key=value ..."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from thinker.runtime.cli import ArgumentParser, complete_if_asked
from thinker.runtime.errors import UserError
from thinker.training.config.key_completion import complete_config, complete_override


class ConfigArgumentParser(ArgumentParser):
    """Parses a config's path, overrides and flags in any order. Suggests the key if a key is
    written as a flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        group = self.add_argument_group("config")
        config_help = (
            "YAML file, run directory, or the name of a config that comes with Thinker, such as "
            "quickstart (thinker configs lists them)"
        )
        config = group.add_argument("config", metavar="CONFIG", help=config_help)
        config.completer = complete_config
        overrides_help = "override a key of the config, such as train.max_steps=100 (default: none)"
        overrides = group.add_argument(
            "overrides", nargs="*", default=[], metavar="section.key=value", help=overrides_help
        )
        overrides.completer = complete_override
        keys_help = (
            "list the config keys of SECTION with their defaults and exit (default: all sections)"
        )
        group.add_argument("--keys", nargs="?", action=_ListKeys, metavar="SECTION", help=keys_help)

    def parse_command_line(self) -> argparse.Namespace:
        """Parse this process's arguments. Raises UserError for an unknown flag, with the key that
        it may stand for."""
        complete_if_asked(self)
        for word in sys.argv[1:]:
            if self._is_unknown(word):
                from thinker.training.config.key_list import suggest_key

                raise UserError(f"unknown flag {word}{suggest_key(word)}")
        return self.parse_intermixed_args()

    def _is_unknown(self, word: str) -> bool:
        if not word.startswith("-") or word == "--":
            return False
        return word.partition("=")[0] not in self._option_string_actions


class _ListKeys(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Any,
        values: Any,
        option: str | None = None,
    ) -> None:
        from thinker.training.config.key_list import list_keys  # which imports torch

        print(list_keys(values))
        parser.exit()
