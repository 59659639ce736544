"""Trainings in which one file operation or one large allocation fails, by a library that is loaded
before all others.

As a program it is the process that forks these trainings: it has loaded the library, and imported
torch.
"""

import atexit
import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("faults.c")


@dataclass
class Outcome:
    """How a command ended, and how many operations it came to that could have failed."""

    status: int
    stderr: str
    n_calls: int

    @property
    def is_clean(self):
        """Success, or one line that names an error; never a stack trace, nor a signal."""
        errors = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        expected = [0] if self.status == 0 else [1]
        return (
            self.status in (0, 1, 2) and len(errors) in expected and "Traceback" not in self.stderr
        )


@dataclass
class Faults:
    """Starts commands in processes of their own in which a call fails. `build` is a folder for the
    library."""

    build: Path
    process: subprocess.Popen = field(init=False)

    def __post_init__(self):
        library = self.build / "faults.so"
        subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"],
            check=True,
        )
        paths = [str(SOURCE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "LD_PRELOAD": str(library),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, command, folder, number=0, error=0, min_bytes=0, log=""):
        """Run a command; the call `number` (from 1, 0: none) of those that count fails with the
        errno `error`.

        Those that count: operations on files below `folder`, or with `min_bytes` allocations of at
        least this size. log: a file in which all writes below `folder` are recorded.
        """
        job = {
            "command": [str(part) for part in command],
            "folder": str(folder),
            "number": number,
            "error": error,
        }
        self.process.stdin.write(json.dumps(job | {"min_bytes": min_bytes, "log": str(log)}) + "\n")
        self.process.stdin.flush()
        return Outcome(**json.loads(self.process.stdout.readline()))

    def close(self):
        self.process.communicate()


def serve():
    import fork_server

    for module in fork_server.PRELOADED:
        __import__(module)
    import torch

    torch.set_num_threads(1)
    library = ctypes.CDLL(None)
    for line in sys.stdin:
        job = json.loads(line)
        folder = Path(job["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        stderr, counted = (
            folder.with_name(f"{folder.name}.{name}") for name in ("stderr", "calls")
        )
        counted.write_text("0")
        pid = os.fork()
        if pid == 0:
            atexit._clear()
            atexit.register(lambda path=counted: path.write_text(str(library.fault_disarm())))
            log = job["log"].encode()
            library.fault_arm(
                str(folder).encode(),
                job["number"],
                job["error"],
                ctypes.c_size_t(job["min_bytes"]),
                log,
            )
            fork_server._run_script(
                job["command"], os.getcwd(), dict(os.environ), os.devnull, os.devnull, stderr, ()
            )
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = stderr.read_text(errors="replace")
        print(
            json.dumps({"status": status, "stderr": said, "n_calls": int(counted.read_text())}),
            flush=True,
        )


if __name__ == "__main__":
    serve()
