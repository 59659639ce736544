"""Commands and ranks in processes that a server forks, which spares each of them the seconds to
import torch."""

import atexit
import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("checkpoint", "data", "evaluation", "generation", "interop", "model", "native", "training")


def modules_of(room):
    """The names of all modules of a room."""
    paths = sorted(ROOT.joinpath(room).rglob("[!_]*.py"))
    paths = [path for path in paths if "lm_eval" not in path.name]  # a large package
    return [".".join(("thinker", *path.relative_to(ROOT).with_suffix("").parts)) for path in paths]


# What commands import sooner or later.
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    *itertools.chain.from_iterable(map(modules_of, ROOMS)),
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "thinker.serving.app",
    "uvicorn.protocols.http.h11_impl",
    "llguidance",
    "tabulate",  # which torch imports at the end
]


def fork_context():
    """The multiprocessing context whose server has imported what our commands import."""
    context = multiprocessing.get_context("forkserver")
    if multiprocessing.forkserver._forkserver._forkserver_pid is None:
        missing = [name for name in PRELOADED if importlib.util.find_spec(name) is None]
        assert not missing, f"the fork server would skip {missing}"
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *([before] if before else [])]
    )
    multiprocessing.forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    return context


# ------------------------------------------------------------------ ranks


def run_ranks(n_ranks, target, *args, timeout=600):
    """Call target(dist, *args) in `n_ranks` processes, its ranks; returns what each of them
    returns, as JSON has it.

    Raises AssertionError with the ranks' standard error if one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        exits = run_ranks_to_exit(n_ranks, target, *args, timeout=timeout, folder=folder)
        assert all(status == 0 for status, _ in exits), exits
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(n_ranks)]


def run_ranks_to_exit(n_ranks, target, *args, timeout=600, folder, hanging=()):
    """As run_ranks(), for ranks that may fail: returns (exit status, standard error) of each rank.

    Ranks in `hanging` are killed when the others have ended; `timeout` (seconds) only guards
    against a hanging test.
    """
    port, context = free_port(), fork_context()
    processes = [
        context.Process(target=_run_rank, args=(rank, n_ranks, port, str(folder), target, args))
        for rank in range(n_ranks)
    ]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        if rank not in hanging:
            process.join(timeout)
    for process in processes:
        process.kill()
        process.join()
    errors = [Path(folder, f"{rank}.err").read_text(errors="replace") for rank in range(n_ranks)]
    return [(process.exitcode, text) for process, text in zip(processes, errors)]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def rank_environment(rank, n_ranks, port):
    """The environment variables that torchrun gives a rank."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": n_ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": n_ranks,
    }
    return {name: str(value) for name, value in variables.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _run_rank(rank, n_ranks, port, folder, target, args):
    _redirect(2, Path(folder, f"{rank}.err"))
    if n_ranks > 1:
        os.environ.update(rank_environment(rank, n_ranks, port))
    import torch

    from thinker.runtime.errors import run_command
    from thinker.training.distributed.session import distributed_session

    torch.set_num_threads(1)

    def main():
        with distributed_session() as dist:
            result = target(dist, *args)
        Path(folder, f"{rank}.json").write_text(json.dumps(result))
        return 0

    _exit_as(lambda: run_command(main))


# ------------------------------------------------------------------ commands


class ForkedCommand:
    """A script of ours in a process of its own, with the methods of subprocess.Popen that tests
    use.

    Its output goes to files, standard error to `stderr` if given ("closed": to nowhere). It ignores
    the signals in `ignored`, as under nohup. Its standard input is the text `input`.
    """

    def __init__(self, args, cwd=ROOT, environment=None, stderr=None, ignored=(), input=""):
        self.args = [str(argument) for argument in args]
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name, name) for name in ("out", "err"))
        stdin = Path(self._folder.name, "in")
        stdin.write_text(input, encoding="utf-8")
        stderr = str(stderr or self._err)
        environment = dict(os.environ if environment is None else environment)
        self._process = fork_context().Process(
            target=_run_script,
            args=(self.args, str(cwd), environment, str(stdin), str(self._out), stderr, ignored),
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=600):
        """The exit status; raises subprocess.TimeoutExpired, and kills the process, after `timeout`
        seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self.args, timeout, *self.output())
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def terminate(self):
        self._process.terminate()

    def kill(self):
        self._process.kill()

    def output(self):
        """What it has written so far to standard output and to standard error."""
        paths = (self._out, self._err)
        return tuple(
            path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            for path in paths
        )

    def communicate(self, timeout=600):
        """Wait for its end; returns its standard output and standard error."""
        self.wait(timeout)
        return self.output()


def run_script(args, cwd, environment, timeout, input=""):
    """As subprocess.run() of one of our scripts, with its output captured as text."""
    command = ForkedCommand(args, cwd, environment, input=input)
    stdout, stderr = command.communicate(timeout)
    return subprocess.CompletedProcess(args, command.returncode, stdout, stderr)


def _run_script(args, cwd, environment, stdin, stdout, stderr, ignored):
    file = os.open(stdin, os.O_RDONLY)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    _redirect(1, stdout)
    if stderr == "closed":
        os.close(2)
        sys.stderr = None
    else:
        _redirect(2, stderr)
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGTERM,
    ):  # whatever started the tests may ignore some
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = list(args), str(Path(args[0]).parent)
    _exit_as(lambda: runpy.run_path(args[0], run_name="__main__"))


def _redirect(descriptor, path):
    """Let the process write standard output (1) or standard error (2) to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, descriptor)
    os.close(file)
    is_error = descriptor == 2
    stream = open(  # noqa: SIM115
        descriptor,
        "w",
        encoding="utf-8",
        errors="backslashreplace" if is_error else "strict",
        buffering=1 if is_error else -1,
        closefd=False,
    )
    setattr(sys, "stderr" if is_error else "stdout", stream)


def _exit_as(function):
    """Call the function and end the process as Python would end it, with its exit status."""
    weakref.finalize._registry.clear()  # finalizers of what the server has imported: 0.05 s
    status = 0
    try:
        function()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(status)
