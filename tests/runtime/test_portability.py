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
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may ignore it


class CDLL(ctypes.CDLL):
    def __init__(self, name, *arguments, **options):
        if name is None or os.path.basename(name).startswith("libc."):
            raise OSError("no such library")
        super().__init__(name, *arguments, **options)


ctypes.CDLL = CDLL


def run(*arguments):
    sys.argv = list(arguments)
    try:
        runpy.run_path(sys.argv[0], None, "__main__")
    except SystemExit as end:
        return end.code or 0
    return 0


from thinker.checkpoint import CheckpointManager
train, generate = (part.split("\\n") for part in sys.argv[1:])
save = CheckpointManager.save


def save_and_stop(*arguments):
    save(*arguments)
    signal.raise_signal(signal.SIGINT)


CheckpointManager.save = save_and_stop
print("stopped", run(*train), file=sys.stderr)
CheckpointManager.save = save
print("resumed", run(*train), file=sys.stderr)
print("sampled", run(*generate), file=sys.stderr)
"""


def test_a_run_is_stopped_resumed_and_sampled_without_posix(train_args, tmp_path):
    run = tmp_path / "run"
    train = [
        *train_args,
        f"run.dir={run}",
        "train.max_steps=6",
        "train.save_every=3",
        "train.eval_every=null",
    ]
    generate = [ROOT / "generate.py", run, "--prompt", "a", "--max-new-tokens", "4", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, *("\n".join(map(str, part)) for part in (train, generate))],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert [line for line in said if line.startswith(("stopped ", "resumed ", "sampled "))] == [
        "stopped 130", "resumed 0", "sampled 0"
    ], done.stderr  # fmt: skip
    assert "resuming from step 3" in done.stderr
    assert checkpoint_steps(run)[-1] == last_step(run) == 6
    assert done.stdout.splitlines()[-1].startswith("a")
