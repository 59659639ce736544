"""How the user calls commands: `thinker eval`, or a script of a checkout."""

import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, or of the installed package
# Scripts of a checkout whose names are not scripts/NAME.py.
SCRIPTS = {
    "early-exit": "scripts/early_exit.py",
    "train": "train.py",
    "generate": "generate.py",
    "export hf": "scripts/export_hf.py",
    "export gguf": "scripts/export_gguf.py",
    "inspect": "scripts/inspect_model.py",
    "patterns": "scripts/plot_patterns.py",
}


def this_command() -> str:
    """The start of this process's command line: "thinker eval" or "python scripts/eval.py"."""
    if sys.argv[0].endswith(".py"):
        return f"python {sys.argv[0]}"
    return os.path.basename(sys.argv[0])


def other_command(name: str) -> str:
    """The start of the command line of another command, as the user of this one would write it."""
    script = Path(sys.argv[0])
    is_script = script.suffix == ".py" and script.resolve().is_relative_to(ROOT)
    if not is_script or script.name == "__main__.py":
        return f"thinker {name}"
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    folder = script.parent
    if folder.name == "scripts":
        folder = folder.parent
    return shlex.join([str(python), str(folder / script_path(name))])


def script_path(name: str) -> str:
    """The script of a checkout that is the same as a command of `thinker`, if it has one."""
    return SCRIPTS.get(name, f"scripts/{name}.py")
