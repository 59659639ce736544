"""The old tree and the new one, whose commands run side by side with the same inputs."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from thinker.benchmarks.checkout import check_out, environment, link_own_tree

LAUNCH = Path(__file__).with_name("launch_command.py")
TIMEOUT_S = 900  # only guards against a command that hangs


class Done(NamedTuple):
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str


class Tree:
    """A tree of the repository, and a process that runs its commands."""

    def __init__(self, name, folder, threads):
        self.name = name
        self.folder = folder
        self.environment = environment(folder, threads)
        self._process = None

    def run(self, *command, cwd, input="", stop_at=None):
        """Run a script of the tree in the folder `cwd`. `stop_at`: see launch_command.py."""
        with tempfile.TemporaryDirectory() as name:
            files = {key: Path(name, key) for key in ("stdin", "stdout", "stderr")}
            files["stdin"].write_text(input, encoding="utf-8")
            request = {key: str(path) for key, path in files.items()}
            request |= {"command": list(map(str, command)), "cwd": str(cwd), "stop_at": stop_at}
            status = self._answer(request)
            return Done(status, read(files["stdout"]), read(files["stderr"]))

    def run_ranks(self, n_ranks, *command, cwd):
        """Run a script under torchrun."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
        return self.run(*torchrun, LAUNCH, self.folder, *command, cwd=cwd)

    def close(self):
        """End the process, and what it runs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with a command that it still runs
            self._process.wait()
            self._process = None

    def _answer(self, request):
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(LAUNCH), str(self.folder)],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        process = self._process
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        is_readable = select.select([process.stdout], [], [], TIMEOUT_S)[0]
        assert is_readable, f"{self.name}: {request['command']} has not ended"
        answer = process.stdout.readline()
        assert answer, f"{self.name}: the process that runs commands has ended"
        return int(answer)


class TwoTrees:
    """A commit and the tree in use. Both run with the same number of threads."""

    def __init__(self, commit, folder, threads):
        self.old = Tree("old", check_out(commit, folder / "old"), threads)
        self.new = Tree("new", link_own_tree(folder / "new"), threads)

    def both(self, call):
        """Results of call(tree) for the old and the new tree, which run at the same time."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, (self.old, self.new)))

    def close(self):
        """End both processes."""
        self.old.close()
        self.new.close()


def read(path):
    """A file that a command has written, or may have."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
