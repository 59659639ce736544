"""The program `thinker`: finds the command that its first words name, and runs it."""

import os
import sys

import thinker
from thinker.commands.table import GROUPS, all_commands
from thinker.runtime.errors import UserError, did_you_mean, run_command
from thinker.runtime.registry import Command, import_offer

DESCRIPTION = "Train, sample and understand small language models."
EXAMPLES = """\
examples:
  thinker train quickstart
  thinker generate runs/quickstart --prompt "Once upon a time"
  thinker COMMAND --help"""


def main() -> int:
    """Run the command that sys.argv names. Returns its exit status.

    The command finds its own name and arguments in sys.argv.
    """
    program = called_as(sys.argv[0])
    if "_ARGCOMPLETE" in os.environ:
        from thinker.commands.completion import complete_program

        return complete_program(program)
    words = sys.argv[1:]
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text(program))
        return 0
    if words[0] in ("-V", "--version"):
        print(f"thinker {thinker.__version__}")
        return 0
    commands = all_commands()
    if len(words) > 1 and words[1] in ("-h", "--help"):
        longer = commands_after(words[0], commands)
        if longer:
            print(help_of_word(program, words[0], longer))
            return 0
    name = find_command(words, commands)
    return run(program, name, words[len(name.split()) :], commands[name])


def called_as(path: str) -> str:
    """How the user called the program: "thinker" or "python -m thinker"."""
    name = os.path.basename(path)
    if name == "__main__.py":
        return "python -m thinker"
    return name.removesuffix(".exe")


def run(program: str, name: str, arguments: list[str], command: Command) -> int:
    """Run a command with these arguments. Returns its exit status."""
    sys.argv = [f"{program} {name}", *arguments]
    return import_offer(command.main)()


def find_command(words: list[str], commands: dict[str, Command]) -> str:
    """The name of the command that the first words name. Raises UserError if there is none."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in commands:
            return name
    word = words[0]
    longer = commands_after(word, commands)
    if longer:
        raise UserError(f"thinker {word} needs one more word; use {' or '.join(longer)}")
    if word.startswith("-"):
        raise UserError(f"thinker has no flag {word}; flags follow the name of a command")
    from thinker.commands.inspect_command import OPTIONS  # no other command needs it

    hint = did_you_mean(word, commands)
    if word in OPTIONS:
        hint = f"; did you mean inspect {word}?"
    if not hint:
        hint = "; thinker --help lists them"
    raise UserError(f"there is no command {word}{hint}")


def commands_after(word: str, commands: dict[str, Command]) -> dict[str, Command]:
    """The commands of two words whose first is this word, such as "export hf" for "export"."""
    return {name: command for name, command in commands.items() if name.startswith(f"{word} ")}


def help_of_word(program: str, word: str, commands: dict[str, Command]) -> str:
    """The list of the commands that begin with this word."""
    width = max(len(name) for name in commands)
    lines = [f"usage: {program} {word} COMMAND [arguments]", ""]
    for name, command in commands.items():
        lines.append(f"  {name:{width}}  {command.summary}")
    lines += ["", "examples:"]
    lines += [f"  {program} {name} --help" for name in commands]
    return "\n".join(lines)


def help_text(program: str) -> str:
    """The list of all commands, by group."""
    commands = all_commands()
    width = max(len(name) for name in commands)
    lines = [f"usage: {program} COMMAND [arguments]", "", DESCRIPTION]
    for group in GROUPS:
        lines += ["", f"{group}:"]
        for name, command in commands.items():
            if command.group == group:
                lines.append(f"  {name:{width}}  {command.summary}")
    lines += ["", EXAMPLES.replace("thinker ", f"{program} ")]
    return "\n".join(lines)


def command() -> None:
    """Entry point of the installed program: run main() and exit with its status."""
    run_command(main)
