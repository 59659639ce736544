"""python -m thinker: the program `thinker`."""

from thinker.commands.program import command

if __name__ == "__main__":
    command()
