"""GPU stages that run commands: the CUDA tests and a whole training run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from thinker.benchmarks.contenders import kill_group
from thinker.benchmarks.gpu.gpu_training import Campaign, Results

ROOT = Path(__file__).resolve().parents[2]
LONG_TEST = "test_bf16_compiled_follows_fp32_resumes_and_samples"
CUDA_TESTS = tuple(sorted(map(str, ROOT.glob("tests/**/test_cuda*.py"))))
FUSED_TESTS = (str(ROOT / "tests" / "generation" / "test_cuda_fused_decoder.py"),)
OUTCOME = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] |tests/.* )(PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE
)
MAX_CORPUS_BYTES = 100_000_000


def cuda_tests(files: tuple[str, ...], campaign: Campaign, deadline: float) -> Results:
    """Tests that need a GPU, in parallel if pytest-xdist is there, and the long training test
    beside all others."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [
            sys.executable,
            "-m",
            "pytest",
            *files,
            "-m",
            "cuda",
            "-vv",
            "-p",
            "no:cacheprovider",
        ]
        n_workers = min(12, (os.cpu_count() or 1) * 3 // 4)
        parallel = (
            ["-n", str(n_workers)] if importlib.util.find_spec("xdist") and n_workers > 1 else []
        )
        commands = {"tests": [*command, *parallel, "-k", f"not {LONG_TEST}"]}
        has_long_test = files == CUDA_TESTS and not campaign.is_rehearsal
        if has_long_test and importlib.util.find_spec("rustbpe"):
            commands["long training test"] = [*command, "-k", LONG_TEST]
        running = {
            name: stack.enter_context(Command(line, folder / f"{index}.txt"))
            for index, (name, line) in enumerate(commands.items())
        }
        for name, process in running.items():
            status = process.wait(deadline)
            text = process.output()
            outcomes = Counter(OUTCOME.findall(text))
            failures = text[text.find("= FAILURES =") :] if "= FAILURES =" in text else ""
            result = {"name": name, "exit_status": status, "outcomes": dict(outcomes)}
            yield (
                result
                if status == 0
                else result | {"error": describe_failure(status, failures or text)}
            )


class Command:
    """A command whose output goes to a file; it is killed, with what it has started, at the end of
    the block."""

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        cwd: Path = ROOT,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        with log.open("a") as file:
            new_group = getattr(os, "setpgrp", None)
            self.process = subprocess.Popen(
                arguments,
                cwd=cwd,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=new_group,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exception: object) -> None:
        kill_group(self.process.pid)
        self.process.kill()
        self.process.wait()

    def wait(self, deadline: float) -> int | None:
        """Wait for the exit status; None if the command is still running at `deadline`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        return None

    def result(self, name: str, deadline: float) -> dict[str, Any]:
        """Its output as a result, or as an error if it fails or is still running at `deadline`."""
        status = self.wait(deadline)
        result = {"name": name, "exit_status": status, "output": self.output()[-4000:]}
        return (
            result
            if status == 0
            else result | {"error": describe_failure(status, result["output"])}
        )

    def output(self) -> str:
        """Return the output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def describe_failure(status: int | None, output: str) -> str:
    """Describe a failed command: the end of its output and its exit status."""
    end = "still running at the deadline" if status is None else f"exit status {status}"
    return f"{output[-8000:]}\n{end}"


def real_training(campaign: Campaign, deadline: float) -> Results:
    """Train through the commands: interrupt after a third of the time, resume, evaluate, sample."""
    with tempfile.TemporaryDirectory() as folder:
        yield from RealRun(campaign, deadline, Path(folder)).results()


class RealRun:
    """One training through the commands, within a deadline."""

    def __init__(self, campaign: Campaign, deadline: float, folder: Path) -> None:
        self.campaign, self.deadline, self.folder = campaign, deadline, folder
        self.run, self.log = folder / "run", folder / "log.txt"
        self.metrics = self.run / "metrics.jsonl"

    def results(self) -> Results:
        """Write corpus and config, then run the commands."""
        toy = self.campaign.is_rehearsal
        max_bytes = 200_000 if toy else MAX_CORPUS_BYTES
        n_bytes = write_corpus(self.folder / "corpus.txt", max_bytes)
        tokenizer = "bpe:32768" if importlib.util.find_spec("rustbpe") and not toy else "byte"
        yield {"name": "corpus", "bytes": n_bytes, "tokenizer": tokenizer}
        self.write_config(tokenizer)
        # Afterwards: a second start with compiling, the last evaluation, and the two commands
        # below.
        train_s = max(30.0, self.deadline - time.monotonic() - 120)
        interrupt_after = train_s / 3
        if toy:
            train_s, interrupt_after = 1.5, 0.1
        yield self.train_until(train_s, interrupt_after)
        lines = self.read_metrics()
        if not toy:
            train_s = (lines[-1]["elapsed_s"] if lines else 0) + max(
                20.0, self.deadline - time.monotonic() - 75
            )
        yield self.train_until(train_s)
        curve = [line for line in self.read_metrics() if {"train_loss", "val_loss"} & line.keys()]
        yield {"name": "metrics", "lines": curve}
        compiling = [] if toy else ["--compile"]
        commands = {
            "evaluation": ["scripts/eval.py", str(self.run), "--json"],
            "samples": ["generate.py", str(self.run), "--prompt", "def ", "--num-samples", "2", "--max-new-tokens",
                        "8" if toy else "64", "--seed", "1", *compiling],
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            running = {
                name: stack.enter_context(
                    Command([sys.executable, *command], self.folder / f"{name}.txt")
                )
                for name, command in commands.items()
            }
            for name, process in running.items():
                yield process.result(name, self.deadline)

    def write_config(self, tokenizer: str) -> None:
        """config.yaml: 124M parameters, or a toy."""
        shape, toy = self.campaign.shape("124m"), self.campaign.is_rehearsal
        config = {
            "run": {"dir": str(self.run)},
            "model": {"d_model": shape.d_model, "n_layers": shape.n_layers, "n_heads": shape.n_heads},
            "data": {"source": "text", "path": str(self.folder / "corpus.txt"), "tokenizer": tokenizer,
                     "seq_len": shape.seq_len, "val_fraction": 0.02, "cache_dir": str(self.folder / "cache")},
            "train": {"batch_size": shape.batch_size, "micro_batch_size": shape.micro_batch_size,
                      "precision": self.campaign.precision, "compile": not toy, "device": self.campaign.device.type,
                      "log_every": 1 if toy else 5, "eval_every": 100, "eval_sequences": 16 if toy else 512,
                      "save_every": None},
        }  # fmt: skip
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))

    def train_until(self, seconds: float, interrupt_after: float | None = None) -> dict[str, Any]:
        """Train until `seconds` of training in all; with SIGTERM after `interrupt_after` of
        them."""
        start = time.monotonic()
        line = [
            sys.executable,
            "train.py",
            str(self.folder / "config.yaml"),
            f"train.max_minutes={seconds / 60}",
        ]
        with Command(line, self.log) as command:
            while interrupt_after is not None and command.wait(time.monotonic() + 0.1) is None:
                lines = self.read_metrics()
                if time.monotonic() > self.deadline or (
                    lines and lines[-1]["elapsed_s"] > interrupt_after
                ):
                    command.process.terminate()
                    break
            status = command.wait(self.deadline)
        name, expected = ("resumed", 0) if interrupt_after is None else ("interrupted", 143)
        result = {"name": name, "wall_s": time.monotonic() - start, "exit_status": status}
        return (
            result
            if status == expected
            else result | {"error": describe_failure(status, command.output())}
        )

    def read_metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl so far."""
        text = self.metrics.read_text() if self.metrics.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def write_corpus(path: Path, max_bytes: int) -> int:
    """Write the UTF-8 Python files of site-packages and the standard library into one; returns its
    size in bytes."""
    n_bytes = 0
    folders = dict.fromkeys(
        sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")
    )
    files: list[Path] = []
    for folder in folders:
        files += sorted(Path(folder).rglob("*.py"))
    with path.open("wb") as corpus:
        for file in files:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                data = file.read_bytes()
                data.decode()
                n_bytes += corpus.write(data + b"\n")
            if n_bytes > max_bytes:
                break
    return n_bytes
