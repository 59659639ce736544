"""Real servers in processes of their own."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from fork_server import ROOT, ForkedCommand, run_script


class ServerProcess:
    """thinker-serve with these arguments, on a free port.

    A forked one (tests/fork_server.py) starts in a second less than one that is started as a user
    does.
    """

    def __init__(self, *arguments, cwd=ROOT, forked=True):
        arguments = [*map(str, arguments), "--port", "0"]
        environment = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        if forked:
            script = Path(__file__).parent / "serve.py"
            self.process = ForkedCommand([script, *arguments], cwd, environment, stderr=self._log)
        else:
            command = [sys.executable, "-m", "thinker.serving", *arguments]
            with self._log.open("w") as log:
                self.process = subprocess.Popen(command, stderr=log, env=environment, cwd=cwd)
        while not (address := re.search(r"playground: (\S+)", self.log)):
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        self.url = address[1]

    @property
    def log(self):
        return self._log.read_text(encoding="utf-8") if self._log.exists() else ""

    def metric(self, name, **labels):
        """The sum of the samples with this name and these labels in /metrics."""
        import httpx  # here, because conftest.py imports this file, also where nothing is served
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=60).text)
        samples = [
            sample for family in families for sample in family.samples if sample.name == name
        ]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self):
        """The exit status."""
        return self.process.wait(timeout=120)

    def stop(self):
        """Stop it as a user does; nothing went wrong in it."""
        self.signal()
        assert self.wait() == 0, self.log
        assert "Traceback" not in self.log

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def wait_until(condition):
    """Call a function until it returns something true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline


@pytest.fixture(scope="session")
def served_run(train_args, tmp_path_factory):
    """A run with a context of 160 tokens, called "served"."""
    folder = tmp_path_factory.mktemp("runs") / "served"
    options = [f"run.dir={folder}", "train.max_steps=10", "data.seq_len=160"]
    done = run_script([*train_args, *options], ROOT, os.environ, 600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def chat_run(served_run, tmp_path_factory):
    """A run that was fine-tuned on chats for a few steps, called "chat"."""
    folder = tmp_path_factory.mktemp("runs") / "chat"
    talks = folder.parent / "talks.jsonl"
    row = '{"messages": [{"role": "user", "content": "Hi %d"}, {"role": "assistant", "content": "cat number %d"}]}\n'
    talks.write_text("".join(row % (i, i % 7) for i in range(40)))
    given = [
        f"run.init_from={served_run}",
        f"run.dir={folder}",
        f"data.path={talks}",
        "data.seq_len=160",
    ]
    given += ["train.batch_size=4", "train.max_steps=4", "train.eval_every=4", "train.save_every=4"]
    given += [
        "train.max_minutes=null",
        "train.precision=fp32",
        f"data.cache_dir={folder.parent / 'cache'}",
    ]
    config = ROOT / "configs" / "finetune.yaml"
    options = [config, *given, "data.chat_template=configs/chat.jinja"]
    done = run_script([ROOT / "train.py", *options], ROOT, os.environ, 600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def server(served_run, chat_run):
    """A server with two models, "served" and "chat"."""
    with ServerProcess(
        served_run, chat_run, forked=False
    ) as server:  # forked processes end with their test
        yield server
        server.stop()


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory):
    """A server with the models of tests/tool_models.py, "knows" and "plain"."""
    from tool_models import write_models

    paths = write_models(tmp_path_factory.mktemp("tools"))
    with ServerProcess(*paths, forked=False) as server:
        yield server
        server.stop()


@pytest.fixture
def start_server():
    """Start a server of the test's own."""
    started = []

    def start(*arguments, **options):
        started.append(ServerProcess(*arguments, **options))
        return started[-1]

    yield start
    for server in started:
        server.__exit__()
