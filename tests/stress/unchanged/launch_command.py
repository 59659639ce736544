"""Run commands of one tree of the repository, each in a process of its own.

    python launch_command.py TREE SCRIPT [ARGUMENT ...]   one command
    python launch_command.py TREE                         those that are requested on standard input

TREE is a folder named thinker. SCRIPT is a path in it, or -m MODULE. A process fails if any module
of thinker that it has imported comes from another folder.

A request is a line of JSON; the answer is a line with the exit status. Requests are forked from
this process, which has imported the large libraries already: that spares each of them seconds.
"""

import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

IMPORTED_FIRST = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "matplotlib.backends.backend_agg",
    "pydantic",
    "yaml",
)


def main():
    tree, *command = sys.argv[1:]
    if command:
        run(Path(tree), command)
    else:
        serve(Path(tree))


def run(tree, command):
    """Run a script of the tree, or a module, as `python SCRIPT` and `python -m MODULE` would."""
    check_imports(tree)
    name, *arguments = command
    try:
        if name == "-m":
            sys.argv = arguments
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            script = tree / name
            sys.argv = [str(script), *arguments]
            sys.path[0] = str(script.parent)
            runpy.run_path(str(script), run_name="__main__")
    finally:
        check_imports(tree)


def check_imports(tree):
    """Check that thinker, and all of its modules that are imported, come from the tree."""
    import thinker  # noqa: F401

    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.split(".")[0] == "thinker" and file is not None:
            assert Path(file).is_relative_to(tree), f"{name} is {file}, not of {tree}"


def serve(tree):
    """Fork a process for each request, and answer with its exit status."""
    for name in IMPORTED_FIRST:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            redirect(request)
            os.chdir(request["cwd"])
            if request["stop_at"] is not None:
                stop_at(request["stop_at"])
            run(tree, request["command"])
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)


def redirect(request):
    """Let this process read and write the files that a request names."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for name, descriptor in {"stdin": 0, "stdout": 1, "stderr": 2}.items():
        file = os.open(request[name], os.O_RDONLY if descriptor == 0 else flags, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the old one has read ahead


def stop_at(name):
    """Send SIGTERM to this process when it first makes a folder with `name` in its path."""
    is_sent = False

    def watch(event, arguments):
        nonlocal is_sent
        if event == "os.mkdir" and not is_sent and name in str(arguments[0]):
            is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    sys.addaudithook(watch)


if __name__ == "__main__":
    main()
