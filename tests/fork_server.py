"""Commands of ours in processes of their own that a server forks: without the seconds that importing torch takes."""

import atexit
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "thinker.training.train",
    "thinker.training.plan",
    "thinker.generation.terminal",
    "thinker.evaluation.long_context",
    "thinker.evaluation.needle",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
]


def server():
    """The context whose processes are forked from one that has imported what our commands import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    multiprocessing.forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    return context


def together(size, target, *given, timeout=300):
    """Call target(dist, *given) in `size` processes, its ranks; returns what each gives back, JSON or None.

    Raises AssertionError with what they have written on standard error where one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended = outcomes(size, target, *given, timeout=timeout, folder=folder)
        assert all(code == 0 for code, _ in ended), ended
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def outcomes(size, target, *given, timeout=300, folder, hanging=()):
    """As together(), whatever becomes of them: (exit status, standard error) of each rank.

    Those that outlive `timeout`, or are `hanging` when the others have ended, are killed.
    """
    port = free_port()
    processes = [
        server().Process(target=_be_a_rank, args=(rank, size, port, str(folder), target, given)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout
    for rank, process in enumerate(processes):
        if rank not in hanging:
            process.join(max(0, end - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    said = [Path(folder, f"{rank}.err").read_text(errors="replace") for rank in range(size)]
    return [(process.exitcode, text) for process, text in zip(processes, said)]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def place(rank, size, port):
    """The environment of a rank, as torchrun makes it."""
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _be_a_rank(rank, size, port, folder, target, given):
    os.dup2(os.open(Path(folder, f"{rank}.err"), os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.update(place(rank, size, port) if size > 1 else {})
    import torch

    from thinker.runtime.errors import run_command
    from thinker.runtime.process_group import distributed_session

    torch.set_num_threads(1)

    def main():
        with distributed_session() as dist:
            found = target(dist, *given)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        return 0

    status = 1
    try:
        run_command(main)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def run(arguments, cwd, environment, timeout):
    """As subprocess.run of a script of ours, with its text captured; raises TimeoutExpired as that does."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = server().Process(target=_be, args=(arguments, str(cwd), environment, str(out), str(err)))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout, out.read_text(), err.read_text())
        text = [path.read_text(encoding="utf-8", errors="replace") for path in (out, err)]
        return subprocess.CompletedProcess(arguments, process.exitcode, *text)


def _be(arguments, cwd, environment, out, err):
    """Become that command."""
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = list(arguments), str(Path(arguments[0]).parent)
    status = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
