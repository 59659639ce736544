"""Command-line parsing shared by all commands."""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.process.invocation import this_command
from thinker.runtime.reading import read_json

METAVARS = {int: "N", float: "X", Path: "PATH"}  # what help texts show for a value of this type
SURROGATES = re.compile("[\ud800-\udfff]")


class HelpFormatter(argparse.HelpFormatter):
    """Appends "(default: X)" to help texts without a default, and keeps the lines of an epilog."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        if default is None or default is False or default in ("", [], argparse.SUPPRESS):
            return text
        if "default" in text:
            return text
        shown = _shown_default(default).replace("%", "%%")  # argparse formats the text with %
        return f"{text} (default: {shown})".lstrip()

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        # argparse would repeat the name of the flag in capitals.
        if action.type in METAVARS:
            return METAVARS[action.type]
        return super()._get_default_metavar_for_optional(action)


def _shown_default(default: Any) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, (list, tuple)):
        return " ".join(_shown_default(value) for value in default)
    return str(default)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser with the help format above. Its errors are UserErrors."""

    def __init__(self, *, examples: Iterable[str] = (), **options: Any) -> None:
        """Create a parser. The help ends with `examples`: the arguments of command lines."""
        program = os.path.basename(sys.argv[0])  # such as "thinker eval" or "train.py"
        options.setdefault("prog", program)
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(**options)
        subcommands = self.prog.removeprefix(program).split()
        lines = ["examples:"]
        for example in examples:
            line = " ".join([this_command(), *subcommands, example])
            lines.append(line.rstrip())
        if len(lines) > 1:
            self.epilog = "\n  ".join(lines)

    def add_model(self, name: str, metavar: str, hint: str = "") -> None:
        """Add the positional argument for a model, and --checkpoint."""
        path_help = f"run directory, checkpoint or Hugging Face folder{hint}"
        self.add_argument(name, metavar=metavar, help=path_help)
        checkpoint_help = "checkpoint to load from a run directory: latest, best, a step or a name"
        checkpoint = self.add_argument(
            "--checkpoint", default="latest", metavar="NAME", help=checkpoint_help
        )
        checkpoint.completer = partial(_complete_checkpoint, name)

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse arguments, or complete them if a shell asks for that."""
        complete_if_asked(self)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise UserError, with the flag that a misspelled one may stand for."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        hint = ""
        if unknown:
            hint = did_you_mean(unknown[1], self._all_flags())
        commands = self._commands()
        if message.endswith("required: COMMAND") and commands:
            hint = f"; use one of {', '.join(commands)}"
        raise UserError(f"{message}{hint} (--help lists all flags)")

    def _commands(self) -> list[str]:
        """The names of the subparsers."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return list(action.choices)
        return []

    def _all_flags(self) -> list[str]:
        """The long flags of this parser and of its subparsers."""
        flags = []
        for action in self._actions:
            flags += [name for name in action.option_strings if name.startswith("--")]
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    flags += parser._all_flags()
        return flags

    def check_utf8(self, arguments: argparse.Namespace, *names: str) -> None:
        """Raise UserError if the value of a flag is not UTF-8.

        Python decodes bytes of the command line that are not UTF-8 as surrogates.
        """
        for name in names:
            text = getattr(arguments, name, None)
            if text and SURROGATES.search(text):
                raise UserError(
                    f"{_flag(name)} is not valid UTF-8; convert it, for example with iconv"
                )

    def check_unused(self, arguments: argparse.Namespace, when: str, names: Iterable[str]) -> None:
        """Raise UserError if one of these flags, which have no effect `when`, has a value."""
        for name in names:
            if getattr(arguments, name) != self.get_default(name):
                raise UserError(f"{_flag(name)} has no effect {when}; remove it")

    def group(self, title: str) -> argparse._ArgumentGroup:
        """The group of flags with this title; a new one if there is none."""
        for group in self._action_groups:
            if group.title == title:
                return group
        return self.add_argument_group(title)


def complete_if_asked(parser: argparse.ArgumentParser) -> None:
    """If a shell asks what may stand at the cursor, answer and end the process."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def _complete_checkpoint(model: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """What --checkpoint may be, for a shell: latest, best, and the steps of the run that is the
    argument `model`."""
    folder = Path(getattr(parsed_args, model, None) or ".") / "checkpoints"
    names = ["latest"]
    if list(folder.glob("best-*")):
        names.append("best")
    for path in sorted(folder.glob("step-*")):
        number = path.name.removeprefix("step-")
        if number.isdigit():
            names.append(str(int(number)))
    return names


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def unescape(text: str) -> str:
    r"""Replace \n by a line break and \\ by a backslash, as plain shell quotes cannot."""
    characters = {"n": "\n", "\\": "\\"}
    return re.sub(r"\\([\\n])", lambda match: characters[match[1]], text)


def parse_bits(text: str) -> int | dict[str, int]:
    """Parse --bits: "8", "4", or "mixed:FILE" for the bits of each matrix. Raises UserError."""
    if text in ("8", "4"):
        return int(text)
    kind, _, name = text.partition(":")
    if kind != "mixed" or not name:
        raise UserError(f"--bits is {text}; use 8, 4 or mixed:FILE")
    bits = read_json(Path(name)).get("bits")
    if not isinstance(bits, dict):
        raise UserError(
            f"{name} does not contain bits; use a file that thinker sensitivity has written"
        )
    return bits
