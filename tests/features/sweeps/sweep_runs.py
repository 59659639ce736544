"""What the tests of sweeps share: the tiny config as a file, and the commands in this process or in
one of their own."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from thinker.training.config.load import load_config

COMMAND = """
import sys

from thinker.features.sweeps.{module} import main
from thinker.runtime.errors import run_command

sys.argv[0] = "{name}"
run_command(main)
"""


@pytest.fixture
def tiny_config(train_args, tmp_path):
    """The config of the tiny run as a file of its own."""
    tree = load_config(train_args[1], [*train_args[2:], "model.n_kv_heads=null"])
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree.model_dump(mode="json", exclude={"run": {"dir"}})))
    return path


@pytest.fixture
def run_here(monkeypatch, capsys, tmp_path):
    """Runs the main() of "sweep" or "compare" in this process; returns its exit status and standard
    output."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        from importlib import import_module

        module = import_module(f"thinker.features.sweeps.{name}_command")
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        status = module.main()
        return status, capsys.readouterr().out

    return run


def start_command(folder, name, *arguments):
    """Start "sweep" or "compare" as a process of its own in a folder, in its own session."""
    script = folder / f"{name}_command.py"
    script.write_text(COMMAND.format(module=f"{name}_command", name=name))
    return subprocess.Popen(
        [sys.executable, script, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def events(shown):
    """The lines of JSON that a command has printed."""
    return [json.loads(line) for line in shown.splitlines()]
