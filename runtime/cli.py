"""What the commands share in reading their flags."""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from thinker.runtime.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, with its errors as UserErrors: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message}; --help lists all flags")

    def check_utf8(self, arguments: argparse.Namespace, *names: str) -> None:
        """Raise UserError if one of these flags holds bytes that are not UTF-8 (Python makes them surrogates)."""
        for name in names:
            if any("\ud800" <= char <= "\udfff" for char in getattr(arguments, name, None) or ""):
                raise UserError(f"--{name.replace('_', '-')} is not UTF-8; convert it")

    def check_unused(self, arguments: argparse.Namespace, mode: str, names: Iterable[str]) -> None:
        """Raise UserError if one of the flags `names`, which `mode` does not read, is not at its default."""
        for name in names:
            if getattr(arguments, name) != self.get_default(name):
                raise UserError(f"--{name.replace('_', '-')} does not go with {mode}; leave it out")


def output_file(name: str | Path) -> Path:
    """A file to write. Raises UserError, before long work begins, if that is not possible."""
    path, folder = Path(name), Path(name).absolute().parent
    if path.is_dir():
        raise UserError(f"cannot write {name}: it is a folder")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"cannot write {name}: its folder does not exist or is not writable")
    return path


def png_file(name: str | Path) -> Path:
    """A file to plot into, as output_file(): the `type` of a flag."""
    if Path(name).suffix.lower() not in (".png", ""):
        raise UserError(f"cannot plot into {name}: plots are PNG files; give a name that ends in .png")
    return output_file(name)
