"""Completion of `thinker` in bash and zsh, as `thinker completion` sets it up."""

import os
import pty
import shutil
import subprocess
import sys

import pytest

from thinker.commands.table import all_commands
from thinker.scripts.make_reference import parser_of

SHELLS = [
    pytest.param(
        shell, marks=pytest.mark.skipif(shutil.which(shell) is None, reason=f"needs {shell}")
    )
    for shell in ("bash", "zsh")
]
# Calls the completion function as the shell does, and prints its answers instead of showing them.
ASK = {
    "bash": """
ask() {
    COMP_LINE="$1"; COMP_POINT=${#1}; COMP_TYPE=9
    COMPREPLY=(); _python_argcomplete thinker
    printf '%s\\n' "${COMPREPLY[@]}"; echo "$END"
}
""",
    "zsh": """
ask() {
    BUFFER="$1"; CURSOR=${#1}; words=(thinker)
    _python_argcomplete; echo "$END"
}
_describe() { print -rl -- $completions }
""",
}
START = {"bash": [], "zsh": ["autoload -Uz compinit && compinit -u", "autoload -Uz is-at-least"]}
INTERACTIVE = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
END = "(end of the answer)"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Where shells find `thinker`: this Python's, even before it was installed as a program."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "thinker"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'thinker'\n"
        "from thinker.commands.program import command\ncommand()\n"
    )
    program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "END": END, "HOME": str(folder), "PS1": "$ "}


def answers(shell, lines, environment, folder):
    """What the shell would offer at the end of each line."""
    script = [*START[shell], f'eval "$(thinker completion {shell})"', ASK[shell]]
    script += [f'ask "{line}"' for line in lines]
    done = subprocess.run(
        [shell, "-c", "\n".join(script)],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == ""
    replies = done.stdout.split(f"{END}\n")[:-1]
    assert len(replies) == len(lines)
    found = []
    for reply in replies:
        offered = set()
        for line in reply.splitlines():
            # zsh gets "word:description", in which colons of the word are escaped.
            word = line.partition(":")[0] if shell == "zsh" else line
            offered.add(word.strip().replace("\\", ""))
        found.append(offered - {""})
    return found


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_configs_keys_and_values(shell, environment, tmp_path):
    (tmp_path / "mine.yaml").touch()
    for checkpoint in ("best-00000020", "step-00000020", "step-00000030"):
        (tmp_path / "runs" / "x" / "checkpoints" / checkpoint).mkdir(parents=True)
    expected = {
        "thinker ": {name.split()[0] for name in all_commands()} | {"-h", "--help", "--version"},
        "thinker ex": {"export"},
        "thinker export ": {"hf", "gguf", "-h", "--help"},
        "thinker train sma": {"small-text"},
        "thinker train mi": {"mine.yaml", "mixture"},
        "thinker train small-text optimizer.n": {"optimizer.name=", "optimizer.norm_lr="},
        "thinker train small-text train.log_e": {"train.log_every="},
        "thinker configs copy ind": {"induction"},
        "thinker inspect ma": {"map"},
        "thinker inspect map runs/x --he": {"--help", "--head"},
        "thinker generate runs/x --precision b": {"bf16"},
        "thinker generate runs/x --checkpoint ": {"latest", "best", "20", "30"},
        "thinker eval runs/y --checkpoint ": {"latest"},
    }
    found = answers(shell, list(expected), environment, tmp_path)
    assert dict(zip(expected, found)) == expected


@pytest.mark.more
@pytest.mark.parametrize("shell", SHELLS)
def test_all_flags_of_all_commands(shell, environment, tmp_path):
    expected = {}
    for name in all_commands():
        parser = parser_of(name)
        flags = set()
        for action in parser._actions:
            flags |= {flag for flag in action.option_strings if flag.startswith("--")}
        expected[f"thinker {name} --"] = flags
    found = answers(shell, list(expected), environment, tmp_path)
    assert dict(zip(expected, found)) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_the_tab_key(shell, environment, tmp_path):
    """In a terminal: the line after Tab is printed by putting `echo` before it."""
    lines = [*START[shell], f'eval "$(thinker completion {shell})"']
    typed = "thinker train small-text train.max_st\t4 --ke\t\x01echo \n"
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        INTERACTIVE[shell], cwd=tmp_path, env=environment | {"TERM": "dumb"},
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    written = b""
    try:
        for line in [*lines, "echo read''y", typed, "echo finishe''d"]:
            os.write(leader, line.encode() + b"\n")
            wanted = b"ready" if line == "echo read''y" else None
            while wanted is not None and wanted not in written:
                written += os.read(leader, 4096)
        while b"finished" not in written:
            written += os.read(leader, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    shown = written.decode(errors="replace").replace("\r", "")
    assert "\nthinker train small-text train.max_steps=4 --keys\n" in shown, shown


@pytest.mark.parametrize("name", [*all_commands(), ""])
def test_completing_imports_no_library_but_argcomplete(name, tmp_path):
    line = f"thinker {name} --".replace("  ", " ")
    out = tmp_path / "answers"
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "sys.argv = ['thinker']\n"
        "from thinker.commands.program import main\n"
        "import argcomplete, os\n"
        "leave = argcomplete.autocomplete\n"
        "argcomplete.autocomplete = lambda parser: leave(parser, exit_method=sys.exit)\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(names - sys.stdlib_module_names))\n"
    )
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(out)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert "--help" in out.read_text()
    assert set(done.stdout.split()) <= {"thinker", "argcomplete"}
