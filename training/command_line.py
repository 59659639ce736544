"""The command line of a config: CONFIG.yaml, section.key=value, and what is said about keys."""

import argparse
import json
import re
import shlex
import sys
from typing import Any

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError, did_you_mean


class ConfigArgumentParser(ArgumentParser):
    """Reads a config's path and its overrides, in any order with flags; explains keys that are written as flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_argument("config", help="a YAML file, such as configs/quickstart.yaml")
        self.add_argument(
            "overrides", nargs="*", default=[], metavar="section.key=value", help="replace keys of the config"
        )
        keys_help = "list the keys of all sections, or of one, with their defaults"
        self.add_argument("--keys", nargs="?", action=_ListKeys, metavar="SECTION", help=keys_help)

    def parse_command_line(self) -> argparse.Namespace:
        """The arguments of this process. Raises UserError that says how a key is written instead of a flag."""
        if flag := next((word for word in sys.argv[1:] if self._is_unknown(word)), None):
            raise UserError(f"{flag} is not a flag{_suggest_key(flag)}")
        return self.parse_intermixed_args()

    def _is_unknown(self, word: str) -> bool:
        return word.startswith("-") and word != "--" and word.partition("=")[0] not in self._option_string_actions


class _ListKeys(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        print(list_keys(values))
        parser.exit()


def list_keys(section: str | None = None) -> str:
    """A line per key of a section, or of all: its name, its default and what it means. Raises UserError."""
    keys = {name: texts for name, texts in _keys().items() if section is None or name.startswith(f"{section}.")}
    if not keys:
        sections = list(dict.fromkeys(name.partition(".")[0] for name in _keys()))
        raise UserError(f"the config has no section {section}; sections: {', '.join(sections)}")
    lines = [(f"{name}={default}", meaning) for name, (default, meaning) in keys.items()]
    width = max(len(key) for key, _ in lines)
    return "\n".join(f"{key:{width}}  {meaning}" for key, meaning in lines)


def _keys() -> dict[str, tuple[str, str]]:
    """By name, the default and the meaning of every key."""
    from thinker.training.config import Config  # not before it is needed: it imports torch

    return {
        f"{section}.{key}": (json.dumps(field.default, ensure_ascii=False), field.description)
        for section, part in Config.model_fields.items()
        for key, field in part.annotation.model_fields.items()
    }


def _suggest_key(flag: str) -> str:
    """The end of a message about a flag that does not exist: the key that was meant, with its value."""
    word, equals, value = flag.lstrip("-").partition("=")
    following = sys.argv[sys.argv.index(flag) + 1 :][:1]
    if not equals and following and not re.match(r"-\D|[^=]+=", following[0]):
        value = following[0]
    word, names = word.replace("-", "_"), list(_keys())
    meant = [name for name in names if word in (name, name.partition(".")[2])]
    if not meant:
        likely = did_you_mean(word, names) or did_you_mean(word, [name.partition(".")[2] for name in names])
        return f"{likely or '; keys of the config are written section.key=value'} (--keys lists them)"
    value = shlex.quote(value) if value else "..."
    return "; write " + " or ".join(f"{name}={value}" for name in meant)
