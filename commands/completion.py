"""Complete a command line of `thinker` when a shell asks for it.

argcomplete asks with the environment variables of bash: COMP_LINE is the line, COMP_POINT the
position of the cursor, _ARGCOMPLETE the number of words that start the program. Only the parser of
the command on the line is built, so an answer takes as long as the command's --help.
"""

import argparse
import os
import sys

from thinker.commands.table import all_commands
from thinker.runtime.registry import Command, import_offer


def complete_program(program: str) -> int:
    """Answer the shell, which ends the process. Returns the exit status if it does not."""
    import argcomplete

    line = os.environ["COMP_LINE"]
    *_, words, _ = argcomplete.split_line(line, int(os.environ["COMP_POINT"]))
    words = words[int(os.environ["_ARGCOMPLETE"]) :]  # those between the program and the cursor
    commands = all_commands()
    for length in (2, 1):
        name = " ".join(words[:length])
        if len(words) >= length and name in commands:
            _skip_words(length)
            sys.argv = [f"{program} {name}", *words[length:]]
            return import_offer(commands[name].main)()  # completes itself when it parses sys.argv
    _skip_words(len(words))
    argcomplete.autocomplete(_parser_of_next_word(words, commands))
    return 0


def _skip_words(n: int) -> None:
    """Let argcomplete take n more words for the program."""
    os.environ["_ARGCOMPLETE"] = str(int(os.environ["_ARGCOMPLETE"]) + n)


def _parser_of_next_word(words: list[str], commands: dict[str, Command]) -> argparse.ArgumentParser:
    """A parser whose subcommands are what may follow these words in the name of a command."""
    parser = argparse.ArgumentParser()
    if not words:
        parser.add_argument("--version", action="store_true", help="show the version and exit")
    following = parser.add_subparsers()
    seen = set()
    for name, command in commands.items():
        parts = name.split()
        if parts[: len(words)] == words and len(parts) > len(words):
            word = parts[len(words)]
            if word not in seen:
                following.add_parser(word, help=command.summary)
            seen.add(word)
    return parser
