"""Training, resuming and sampling without what only POSIX has."""

import subprocess
import sys

from conftest import ROOT
from training_runs import checkpoint_steps, last_step

WITHOUT_POSIX = """
import ctypes, os, runpy, signal, sys

for name in ("fcntl", "resource", "termios", "tty", "pwd", "grp", "readline"):
    sys.modules[name] = None  # importing it raises ImportError
for module, names in (
    (signal, ("SIGHUP", "SIGKILL", "SIGUSR1", "pthread_sigmask")),
    (os, ("fork", "forkpty", "O_NOFOLLOW", "sysconf", "getuid", "geteuid", "killpg", "fchmod", "getpgid", "setsid")),
):
    for name in names:
        delattr(module, name)


class CDLL(ctypes.CDLL):
    def __init__(self, name, *arguments, **options):
        if name is None or os.path.basename(name).startswith("libc."):
            raise OSError("no such library")
        super().__init__(name, *arguments, **options)


ctypes.CDLL = CDLL
%s
del sys.argv[0]
runpy.run_path(sys.argv[0], None, "__main__")
"""
STOP_AFTER_A_CHECKPOINT = """
from thinker.checkpoint import CheckpointManager
save = CheckpointManager.save


def save_and_stop(*arguments):
    save(*arguments)
    signal.raise_signal(signal.SIGINT)


CheckpointManager.save = save_and_stop
"""


def run_without_posix(*arguments, extra=""):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX % extra, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_a_run_is_stopped_resumed_and_sampled_without_posix(train_args, tmp_path):
    run = tmp_path / "run"
    command = [*train_args, f"run.dir={run}", "train.max_steps=6", "train.save_every=3", "train.eval_every=null"]
    stopped = run_without_posix(*command, extra=STOP_AFTER_A_CHECKPOINT)
    assert stopped.returncode == 130, stopped.stderr
    assert checkpoint_steps(run)[-1] < 6
    resumed = run_without_posix(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert last_step(run) == 6
    sampled = run_without_posix("generate.py", run, "--prompt", "a", "--max-new-tokens", "4", "--seed", "1")
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("a")
