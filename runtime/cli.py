"""Command-line parsing shared by all commands."""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json


class HelpFormatter(argparse.HelpFormatter):
    """Appends "(default: X)" to help texts that do not mention a default, and keeps the lines of an epilog."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if (
            default is None
            or default is False
            or default in ("", [], argparse.SUPPRESS)
            or "default" in text
        ):
            return text
        values = default if isinstance(default, (list, tuple)) else [default]
        shown = " ".join(
            f"{value:g}" if isinstance(value, float) else str(value) for value in values
        )
        return f"{text} (default: {shown.replace('%', '%%')})".lstrip()

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        names = {int: "N", float: "X", Path: "PATH"}
        return names.get(action.type) or super()._get_default_metavar_for_optional(action)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser with the help format above; its errors are UserErrors (one line, exit status 2)."""

    def __init__(self, *, examples: Iterable[str] = (), **options: Any) -> None:
        """Create a parser. `examples`: the arguments of command lines to print at the end of the help."""
        super().__init__(**{"formatter_class": HelpFormatter} | options)
        command = (
            f"python {sys.argv[0]}"
            if sys.argv[0].endswith(".py")
            else os.path.basename(sys.argv[0])
        )
        lines = [
            " ".join((command, *self.prog.split()[1:], example)).rstrip() for example in examples
        ]
        self.epilog = "\n  ".join(("examples:", *lines)) if lines else self.epilog

    def add_model(self, name: str, metavar: str, hint: str = "") -> None:
        """Add the positional argument for a model, and --checkpoint."""
        self.add_argument(
            name, metavar=metavar, help=f"run directory, checkpoint or Hugging Face folder{hint}"
        )
        checkpoint_help = "checkpoint to load from a run directory: latest, best, a step or a name"
        self.add_argument("--checkpoint", default="latest", metavar="NAME", help=checkpoint_help)

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message} (--help lists all flags)")

    def check_utf8(self, arguments: argparse.Namespace, *names: str) -> None:
        """Raise UserError if the value of a flag is not UTF-8; Python decodes such bytes as surrogates."""
        for name in names:
            if any("\ud800" <= char <= "\udfff" for char in getattr(arguments, name, None) or ""):
                raise UserError(
                    f"--{name.replace('_', '-')} is not valid UTF-8; convert it, for example with iconv"
                )

    def check_unused(self, arguments: argparse.Namespace, when: str, names: Iterable[str]) -> None:
        """Raise UserError if one of these flags, which have no effect `when`, is not at its default."""
        for name in names:
            if getattr(arguments, name) != self.get_default(name):
                raise UserError(f"--{name.replace('_', '-')} has no effect {when}; remove it")


def output_file(name: str | Path) -> Path:
    """Check that a file can be written before long work begins. Raises UserError if not."""
    path, folder = Path(name), Path(name).absolute().parent
    if path.is_dir():
        raise UserError(f"cannot write {name}: it is a folder; give a file name")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"cannot write {name}: its folder does not exist or is not writable")
    return path


def png_file(name: str | Path) -> Path:
    """Check a PNG file to write, as output_file() does; used as the `type` of a flag."""
    if Path(name).suffix.lower() not in (".png", ""):
        raise UserError(
            f"cannot write plot {name}: plots are PNG files; give a name that ends in .png"
        )
    return output_file(name)


def parse_bits(text: str) -> int | dict[str, int]:
    """Parse "8" or "4", or "mixed:FILE" as the bits of each matrix in FILE. Raises UserError for anything else."""
    kind, _, name = text.partition(":")
    if text in ("8", "4"):
        return int(text)
    if kind != "mixed" or not name:
        raise UserError(f"--bits is {text}; use 8, 4 or mixed:FILE")
    bits = read_json(Path(name)).get("bits")
    if not isinstance(bits, dict):
        raise UserError(
            f"{name} does not contain bits; use a file that scripts/sensitivity.py has written"
        )
    return bits
