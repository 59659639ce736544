"""The command `thinker completion`: what makes a shell complete `thinker` and its arguments."""

from thinker.runtime.cli import ArgumentParser


def main() -> int:
    """Print the lines for a shell. Returns the exit status."""
    parser = ArgumentParser(
        description="Print what makes a shell complete commands, flags, config names and keys.",
        examples=("bash >> ~/.bashrc", "zsh >> ~/.zshrc"),
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    arguments = parser.parse_args()
    import argcomplete

    print(argcomplete.shellcode(["thinker"], shell=arguments.shell))
    return 0
