"""What tests of flags of generate.py share."""

import os
import re
import sys

import pytest

import generate
from thinker.runtime.errors import UserError


def check_refused(run, monkeypatch, capsys, arguments, message):
    """generate.py refuses these arguments with a UserError, and has printed nothing.

    In this process, for speed.
    """
    decoded = [
        argument if isinstance(argument, str) else os.fsdecode(argument) for argument in arguments
    ]
    monkeypatch.setattr(sys, "argv", ["generate.py", str(run), *decoded])
    with pytest.raises(UserError, match=re.escape(message)):
        generate.main()
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "")
