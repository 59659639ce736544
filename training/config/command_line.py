"""Command line of commands that take a config: CONFIG section.key=value ..., and the list of keys."""

import argparse
import json
import re
import shlex
import sys
from typing import Any

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError, did_you_mean


class ConfigArgumentParser(ArgumentParser):
    """Parses a config's path, overrides and flags in any order. Suggests the key if a key is written as a flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        group = self.add_argument_group("config")
        group.add_argument(
            "config", metavar="CONFIG", help="YAML file, such as configs/quickstart.yaml"
        )
        overrides_help = "override a key of the config, such as train.max_steps=100 (default: none)"
        group.add_argument(
            "overrides", nargs="*", default=[], metavar="section.key=value", help=overrides_help
        )
        keys_help = (
            "list the config keys of SECTION with their defaults and exit (default: all sections)"
        )
        group.add_argument("--keys", nargs="?", action=_ListKeys, metavar="SECTION", help=keys_help)

    def parse_command_line(self) -> argparse.Namespace:
        """Parse this process's arguments. Raises UserError for an unknown flag, with the key that it may stand for."""
        if flag := next((word for word in sys.argv[1:] if self._is_unknown(word)), None):
            raise UserError(f"unknown flag {flag}{_suggest_key(flag)}")
        return self.parse_intermixed_args()

    def _is_unknown(self, word: str) -> bool:
        return (
            word.startswith("-")
            and word != "--"
            and word.partition("=")[0] not in self._option_string_actions
        )


class _ListKeys(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Any,
        values: Any,
        option: str | None = None,
    ) -> None:
        print(list_keys(values))
        parser.exit()


def list_keys(section: str | None = None) -> str:
    """One line per key of a section, or of all sections: name, default and meaning. Raises UserError."""
    nested = (
        _nested_keys()
        if section in ("data.sources", "data.clean", "train.distill", "train.prune")
        else {}
    )
    keys = {
        name: texts
        for name, texts in (_keys() | nested).items()
        if section is None or name.startswith(f"{section}.")
    }
    if not keys:
        sections = list(dict.fromkeys(name.partition(".")[0] for name in _keys()))
        raise UserError(f"unknown config section {section}; use one of {', '.join(sections)}")
    lines = [(f"{name}={default}", meaning) for name, (default, meaning) in keys.items()]
    width = max(len(key) for key, _ in lines)
    return "\n".join(f"{key:{width}}  {meaning}" for key, meaning in lines)


def _keys() -> dict[str, tuple[str, str]]:
    """Map the name of each key to its default and meaning."""
    from thinker.training.config.config import Config  # imported here because it imports torch

    return {
        f"{section}.{key}": (
            json.dumps(field.default, ensure_ascii=False),
            " ".join(field.description.split()),
        )
        for section, part in Config.model_fields.items()
        for key, field in part.annotation.model_fields.items()
    }


def _nested_keys() -> dict[str, tuple[str, str]]:
    """The keys of data.clean, train.distill and train.prune, and of the first source in data.sources."""
    from thinker.features.distillation.keys import DistillConfig
    from thinker.features.pruning.keys import PruneConfig
    from thinker.training.config.source_section import CleanConfig, MixedSource

    nested = {
        "data.sources.0": MixedSource,
        "data.clean": CleanConfig,
        "train.distill": DistillConfig,
        "train.prune": PruneConfig,
    }
    return {
        f"{name}.{key}": (
            "" if field.is_required() else json.dumps(field.default),
            " ".join(field.description.split()),
        )
        for name, model in nested.items()
        for key, field in model.model_fields.items()
    }


def _suggest_key(flag: str) -> str:
    """End of the message about an unknown flag: the key that it stands for, with its value."""
    word, equals, value = flag.lstrip("-").partition("=")
    following = sys.argv[sys.argv.index(flag) + 1 :][:1]
    if not equals and following and not re.match(r"-\D|[^=]+=", following[0]):
        value = following[0]
    word, names = word.replace("-", "_"), list(_keys())
    meant = [name for name in names if word in (name, name.partition(".")[2])]
    if not meant:
        likely = did_you_mean(word, names) or did_you_mean(
            word, [name.partition(".")[2] for name in names]
        )
        return f"{likely or '; write config keys as section.key=value'} (--keys lists them)"
    value = shlex.quote(value) if value else "..."
    return "; write " + " or ".join(f"{name}={value}" for name in meant)
