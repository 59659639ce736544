"""What the commands share in reading their flags."""

import argparse
from collections.abc import Iterable
from typing import NoReturn

from thinker.runtime.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, with its errors as UserErrors: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message}; --help lists all flags")

    def check_unused(self, arguments: argparse.Namespace, mode: str, names: Iterable[str]) -> None:
        """Raise UserError if one of the flags `names`, which `mode` does not read, is not at its default."""
        for name in names:
            if getattr(arguments, name) != self.get_default(name):
                raise UserError(f"--{name.replace('_', '-')} does not go with {mode}; leave it out")
