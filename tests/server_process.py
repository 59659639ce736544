"""Real servers in processes of their own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from conftest import ROOT, run_script
from prometheus_client.parser import text_string_to_metric_families


class ServerProcess:
    """python -m thinker.serving with these arguments, on a free port."""

    def __init__(self, *arguments, cwd=ROOT):
        command = [sys.executable, "-m", "thinker.serving", *map(str, arguments), "--port", "0"]
        environment = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd)
        self.lines, self._ready = [], threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait()
        addresses = [match[1] for line in self.lines if (match := re.search(r"playground: (\S+)", line))]
        assert addresses, self.log
        (self.url,) = addresses

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("playground: "):
                self._ready.set()
        self._ready.set()

    @property
    def log(self):
        return "".join(self.lines)

    def metric(self, name, **labels):
        """The sum of the samples with this name and these labels in /metrics."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self):
        """The exit status."""
        status = self.process.wait(timeout=120)
        self._reader.join()
        return status

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
    done = run_script(*train_args, f"run.dir={folder}", "train.max_steps=10", "data.seq_len=160")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def chat_run(served_run, tmp_path_factory):
    """A run that was fine-tuned on chats for a few steps, called "chat"."""
    folder = tmp_path_factory.mktemp("runs") / "chat"
    talks = folder.parent / "talks.jsonl"
    row = '{"messages": [{"role": "user", "content": "Hi %d"}, {"role": "assistant", "content": "cat number %d"}]}\n'
    talks.write_text("".join(row % (i, i % 7) for i in range(40)))
    given = [f"run.init_from={served_run}", f"run.dir={folder}", f"data.path={talks}", "data.seq_len=160"]
    given += ["train.batch_size=4", "train.max_steps=4", "train.eval_every=4", "train.save_every=4"]
    given += ["train.max_minutes=null", "train.precision=fp32", f"data.cache_dir={folder.parent / 'cache'}"]
    config = ROOT / "configs" / "finetune.yaml"
    done = run_script(ROOT / "train.py", config, *given, "data.chat_template=configs/chat.jinja")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def server(served_run, chat_run):
    """A server with two models, "served" and "chat"."""
    with ServerProcess(served_run, chat_run) as server:
        yield server
        server.stop()


@pytest.fixture
def start_server():
    """Start a server of the test's own."""
    started = []

    def start(*arguments, cwd=ROOT):
        started.append(ServerProcess(*arguments, cwd=cwd))
        return started[-1]

    yield start
    for server in started:
        server.__exit__()
