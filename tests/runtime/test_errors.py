"""How a command ends: one line on standard error and a status, or a stack trace for a bug."""

import errno
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch

from thinker.runtime.errors import RunError, UserError, run_command


@pytest.fixture(autouse=True)
def restore_handler():
    """run_command() handles signals until the process ends, and here it does not end."""
    previous = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("two\n lines"), 2, "two lines"),
        (RunError("it broke"), 1, "it broke"),
        (UserError("key \x1b[31m\x07\x9b \ud800é"), 2, r"key \x1b[31m\x07\x9b \ud800é"),
        (UserError("x" * 5000), 2, "x" * 1000 + " ..."),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a\n" * 3000), 2,
         ("cannot read or write" + " a" * 3000)[:1000] + " ..."),
        (OSError(errno.EIO, "Input/output error", "a/b"), 1, "cannot read or write a/b: Input/output error"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), 2, "cannot read or write a: Permission denied"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a"), 2, "cannot read or write a: No such file"),
        (OSError(errno.EROFS, "Read-only file system", "a"), 2, "cannot read or write a: Read-only file system"),
        (PermissionError(errno.EACCES, "Permission denied"), 1, "Permission denied"),
        (OSError("the hub cannot be reached"), 1, "the hub cannot be reached"),
        (OSError(errno.EFBIG, "File too large"), 1, "File too large"),
        (OSError(errno.ENOSPC, "No space", "a"), 1,
         "the disk is full (writing a); free some space and run the same command again"),
        (MemoryError(), 1, "not enough memory"),
        (MemoryError("Unable to allocate 7 GiB"), 1, "not enough memory: Unable to allocate 7 GiB"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), 1,
         "not enough memory: CUDA out of memory. Tried"),
        (RuntimeError("can't start new thread"), 1, "not enough memory: can't start new thread"),
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


@pytest.fixture
def shell(tmp_path):
    """Runs a line of a POSIX shell in which $RUN starts Python with our package; returns its status
    and its errors."""

    def run(line, main):
        (tmp_path / "main.py").write_text(f"from thinker.runtime.errors import run_command; {main}")
        command = f"RUN={shlex.quote(sys.executable)}; cd {shlex.quote(str(tmp_path))}; {line}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        return done.returncode, done.stderr

    return run


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a folder in which a process works")
def test_a_working_directory_that_is_gone(shell, tmp_path):
    line = f"mkdir gone; cd gone; rmdir ../gone; $RUN {shlex.quote(str(tmp_path))}/main.py"
    status, errors = shell(line, "run_command(lambda: 0)")
    assert (status, errors) == (
        2,
        "error: the working directory was removed; cd to one that exists\n",
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows does not bound the size of files")
@pytest.mark.parametrize(
    ("main", "name"),
    [
        ("from thinker.runtime.files import atomic_write; from pathlib import Path\n"
         "run_command(lambda: atomic_write(Path('a.txt'), bytes(100_000)))", "a.txt"),
        ("from thinker.checkpoint.write_files import write_checkpoint; from pathlib import Path; import torch\n"
         "files = {'model.safetensors': {'a': torch.zeros(100_000)}}\n"
         "run_command(lambda: write_checkpoint(Path('step-1'), files))", "step-1"),
    ],
)  # fmt: skip
def test_a_file_that_may_not_grow_is_named(shell, main, name):
    status, errors = shell("ulimit -f 8; $RUN main.py", main)
    assert (status, errors) == (1, f"error: cannot read or write {name}: File too large\n")


@pytest.mark.parametrize("error", [KeyError("bug"), RuntimeError("shapes do not match")], ids=repr)
def test_a_bug_keeps_its_stack_trace(error):
    def main():
        raise error

    with pytest.raises(type(error)):
        run_command(main)


def test_a_tensor_that_no_memory_holds_ends_as_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: torch.empty(2**50).numel())
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: not enough memory: ")


INTERRUPTED = """
import atexit, signal, sys
from thinker.runtime.errors import run_command

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may ignore it


def prepare_data():
{body}
    print("went on")
    return 0


run_command(prepare_data)
"""
BODIES = {
    "once": "    signal.raise_signal(signal.SIGINT)",
    # As some of torch's modules do.
    "in_an_import_that_catches_it": "    import catching",
    # While the interpreter ends.
    "twice": "    atexit.register(signal.raise_signal, signal.SIGINT)\n    signal.raise_signal(signal.SIGINT)",
    "after_a_caught_one": (
        "    try:\n        signal.raise_signal(signal.SIGINT)\n    except KeyboardInterrupt:\n"
        "        print('caught', file=sys.stderr, flush=True)\n        signal.raise_signal(signal.SIGINT)"
    ),
}


@pytest.mark.parametrize("case", BODIES)
def test_ctrl_c_ends_a_command_whenever_it_comes(case, tmp_path):
    (tmp_path / "catching.py").write_text(
        "try:\n    import interrupted\nexcept BaseException:\n    pass\n"
    )
    (tmp_path / "interrupted.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    script = tmp_path / "command.py"
    script.write_text(INTERRUPTED.format(body=BODIES[case]))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    where = "during an import" if "import" in case else r"in prepare_data \(.*command.py:\d+\)"
    line = "caught\n" if "after" in case else rf"\ninterrupted by SIGINT \(Ctrl-C\) {where}\n"
    assert re.fullmatch(line, done.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_runs_finally_clauses_once_and_a_second_one_does_not_wait_for_them(
    number, tmp_path
):
    script = tmp_path / "command.py"
    script.write_text(f"""
import signal
from thinker.runtime.errors import run_command

signal.signal({int(number)}, signal.SIG_DFL)  # the tests themselves may run under nohup


def main():
    try:
        signal.raise_signal({int(number)})
    finally:
        print("cleaned up", flush=True)
        signal.raise_signal({int(number)})
        print("went on")


run_command(main)
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "cleaned up\n", "")


@pytest.mark.skipif(os.name != "posix", reason="needs another locale")
def test_what_a_terminal_cannot_show_becomes_a_question_mark():
    code = "from thinker.runtime.errors import run_command; run_command(lambda: print('caf\\u00e9 \\udce9') or 0)"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf? ?\n", "")


CLOSED = ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"]
PROBE = """
import os, sys
from thinker.runtime.errors import run_command


def main():
    print("text")
    print("message", file=sys.stderr)
    sys.stdout.reconfigure(errors="replace")
    assert sys.stdin.buffer.read() == b""
    file = os.open(sys.argv[0], os.O_RDONLY)
    return 0 if file > 2 else 7  # not taken for a standard stream by whatever prints there


run_command(main)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", CLOSED)
def test_standard_streams_may_be_closed(tmp_path, closed):
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    opened = "" if "<&-" in closed else "</dev/null"
    command = f"exec {shlex.quote(sys.executable)} {shlex.quote(str(script))} {opened} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout + done.stderr) == (
        0,
        ("" if " >&-" in f" {closed}" else "text\n") + ("" if "2>&-" in closed else "message\n"),
    )


TWICE = """
import signal, sys, threading
from thinker.runtime.process import interrupts
from thinker.runtime.errors import run_command

interrupts.TWICE_SECONDS = 1.0
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the tests themselves may ignore it


def send_again():
    while signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        pass
    signal.raise_signal(signal.SIGTERM)
    print("again", flush=True)


def main():
    threading.Thread(target=send_again, daemon=True).start()
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        print("cleaned up", flush=True)


run_command(main)
"""


def test_a_signal_that_comes_twice_at_once_does_not_cut_off_the_cleanup():
    """As from timeout(1), which signals the process and then its group."""
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (143, "again\ncleaned up\n"), done.stderr
