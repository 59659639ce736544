"""Fixtures for commands that start processes: the command runs in this process, and what it starts
is forked."""

import multiprocessing
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import fork_server
import pytest
from conftest import run_script

from thinker.training.processes import child_process


@pytest.fixture
def fork_processes(monkeypatch, stress):
    """Processes that benchmarks start in this one are forked, which spares each the seconds to
    import torch."""
    if stress:
        return
    context, starting = fork_server.fork_context(), threading.Lock()

    def start(command, env, **options):
        assert command[0] == sys.executable
        with starting:  # a fork server does not expect several threads
            return fork_server.ForkedCommand(command[1:], cwd=Path.cwd(), environment=env)

    forking = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    monkeypatch.setattr(child_process, "subprocess", forking)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


@pytest.fixture
def run_in_process(monkeypatch, capsys, stress, tmp_path):
    """Runs a script's main() in this process, or as a user does under --stress; returns its
    standard output."""
    monkeypatch.chdir(tmp_path)

    def run(script, *arguments):
        if stress:
            done = run_script(script, *arguments, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            return done.stdout
        monkeypatch.setattr(sys, "argv", [script.name, *map(str, arguments)])
        capsys.readouterr()
        assert runpy.run_path(str(script))["main"]() == 0
        return capsys.readouterr().out

    return run
