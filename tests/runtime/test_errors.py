"""How a command ends: one line on standard error and a status, or a stack trace for a bug."""

import errno

import pytest

from thinker.runtime.errors import RunError, UserError, run_command


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("two\n lines"), 2, "two lines"),
        (RunError("it broke"), 1, "it broke"),
        (OSError(errno.EIO, "Input/output error", "a/b"), 1, "cannot read or write a/b: Input/output error"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), 1, "cannot read or write a: Permission denied"),
        (OSError("the hub cannot be reached"), 1, "the hub cannot be reached"),
        (OSError(errno.ENOSPC, "No space", "a"), 1,
         "the disk is full (writing a); make space and run the same command again"),
        (MemoryError(), 1, "there is not enough memory"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_command_says_and_its_status(error, status, line, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == status
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_bug_keeps_its_stack_trace():
    def main():
        raise KeyError("bug")

    with pytest.raises(KeyError):
        run_command(main)
