"""Control characters: visible on a terminal, as they are in a file or a pipe."""

import io
import os
import subprocess
import sys

import pytest
from conftest import ROOT, run_script

from thinker.runtime.process.standard_streams import for_stream, visible

ATTACK = "a\x1b]0;title\x07\x1b[2J\x9b1m\x7f\r\b"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x9b1m\x7f\x0d\x08"


def test_controls_become_visible_and_everything_else_stays():
    assert visible(ATTACK) == SHOWN
    plain = "Straße 日本 🙂\tx\n\r\ny"
    assert visible(plain) == plain
    assert for_stream(ATTACK, io.StringIO()) == ATTACK
    assert for_stream(ATTACK, None) == ATTACK


def at_a_terminal(*arguments, keys=b""):
    """What a command shows on a terminal of its own."""
    pty = pytest.importorskip("pty")
    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=there,
        stdout=there,
        stderr=there,
        start_new_session=True,
    )
    os.close(there)
    os.write(here, keys)
    shown = b""
    while True:
        try:
            part = os.read(here, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    assert process.wait(timeout=600) in (0, 2)
    os.close(here)
    return shown.decode()


def test_prompts_texts_and_keys_reach_a_terminal_visibly(tiny_run):
    command = [
        ROOT / "generate.py",
        tiny_run,
        "--prompt",
        ATTACK[:9],
        "--max-new-tokens",
        "6",
        "--seed",
        "1",
    ]
    shown = at_a_terminal(*command)
    assert SHOWN[:12] in shown
    assert "\x1b" not in shown
    assert run_script(*command).stdout.startswith(ATTACK[:9])  # a pipe gets it as it is
    shown = at_a_terminal(ROOT / "train.py", ROOT / "configs" / "quickstart.yaml", "run.\x1b[2J=1")
    assert "error: " in shown
    assert r"\x1b[2J" in shown
    assert "\x1b" not in shown


def test_a_line_that_a_conversation_shows_again(tiny_run):
    """What the model writes in a conversation, and the errors about its commands; the terminal's
    own echo is ^[."""
    command = [
        ROOT / "generate.py",
        tiny_run,
        "--interactive",
        "--prompt",
        "\x1b[31mx",
        "--max-new-tokens",
        "4",
    ]
    shown = at_a_terminal(*command, keys=b"/quit\n")
    assert r"\x1b[31mx" in shown
    assert "\x1b[31m" not in shown
