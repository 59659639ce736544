"""thinker-serve as a file, so that tests can fork it."""

from thinker.serving.__main__ import command

if __name__ == "__main__":
    command()
