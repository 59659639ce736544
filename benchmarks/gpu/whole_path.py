"""The first stage on a GPU: a user's whole path, from the wheel to a sample.

Install the wheel, train a model with grouped-query attention twice from one config, kill one of
the runs and resume it, evaluate it, and sample from it with and without the cache.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from thinker.benchmarks.gpu.gpu_commands import ROOT, Command, describe_failure, write_corpus
from thinker.benchmarks.gpu.gpu_training import Campaign, Results

PROMPT = "def main():"
RUNS = ("peace", "killed")  # one is left in peace, one is killed and resumed


def whole_path(campaign: Campaign, deadline: float) -> Results:
    """Results of the path, in order; the first failure ends it."""
    with tempfile.TemporaryDirectory() as folder:
        for result in WholePath(campaign, deadline, Path(folder)).results():
            yield result
            if "error" in result:
                return


class WholePath:
    """One walk along the path, in a folder outside the checkout, within a deadline."""

    def __init__(self, campaign: Campaign, deadline: float, folder: Path) -> None:
        self.campaign = campaign
        self.deadline = deadline
        self.folder = folder
        self.n_steps = 8 if campaign.is_rehearsal else 120
        self.environment = {**os.environ, "PYTHONPATH": self._python_path()}
        # Only then is a GPU's matrix product the same in every process.
        self.environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

    def _python_path(self) -> str:
        """Where the wheel is installed, and what the caller's packages need."""
        others = os.environ.get("PYTHONPATH")
        site = str(self.folder / "site")
        return f"{site}{os.pathsep}{others}" if others else site

    def results(self) -> Results:
        """Install, train, kill, resume, compare, evaluate, sample."""
        yield from self.install()
        n_bytes = 200_000 if self.campaign.is_rehearsal else 4_000_000
        write_corpus(self.folder / "corpus.txt", n_bytes)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config()))
        yield from self.train_twice()
        yield self.compare_runs()
        run = str(self.folder / "killed")
        evaluation = [str(ROOT / "scripts" / "eval.py"), run, "--json"]
        yield self.call("evaluation", evaluation, {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
        yield from self.sample(run)

    def install(self) -> Results:
        """Build the wheel and install it, alone, into a folder."""
        source = self.folder / "source"  # building leaves files there
        ignored = shutil.ignore_patterns(".*", "build", "runs", "wandb", "site")
        shutil.copytree(ROOT, source, ignore=ignored)
        pip = ["-m", "pip", "--disable-pip-version-check"]
        wheels = str(self.folder / "wheels")
        alone = ["--no-deps", "--no-index"]
        yield self.call(
            "wheel",
            [*pip, "wheel", *alone, "--no-build-isolation", "--wheel-dir", wheels, str(source)],
        )
        wheel = next(Path(wheels).glob("*.whl"))
        target = ["--target", str(self.folder / "site")]
        yield self.call("installed", [*pip, "install", *alone, *target, str(wheel)])

    def config(self) -> dict[str, Any]:
        """Four queries per key, and all that has to survive a kill."""
        toy = self.campaign.is_rehearsal
        width = 64 if toy else 512
        return {
            "model": {"d_model": width, "n_layers": 2 if toy else 6, "n_heads": 8, "n_kv_heads": 2},
            "data": {
                "source": "text",
                "path": str(self.folder / "corpus.txt"),
                "tokenizer": "byte",
                "seq_len": 64 if toy else 512,
                "val_fraction": 0.02,
                "cache_dir": str(self.folder / "cache"),
            },
            "train": {
                "max_steps": self.n_steps,
                "batch_size": 8 if toy else 64,
                "micro_batch_size": 4 if toy else 32,
                "precision": self.campaign.precision,
                "compile": not toy,
                "device": self.campaign.device.type,
                "deterministic": True,
                "log_every": 1,
                "save_every": self.n_steps // 4,
                "eval_every": self.n_steps // 2,
                "eval_sequences": 8,
            },
            "tracking": {"wandb": "offline"},
        }

    def train_twice(self) -> Results:
        """One run in peace; one killed after its first checkpoint, and started again."""
        start = time.monotonic()
        with self.start("peace", self.train_line("run.dir=peace")) as peace:
            with self.start("killed", self.train_line("run.dir=killed")) as killed:
                while killed.wait(time.monotonic() + 0.05) is None:
                    if self.n_logged("killed") > self.n_steps // 2:
                        os.killpg(killed.process.pid, signal.SIGKILL)
                        break
                status = killed.wait(self.deadline)
            result = {"name": "killed", "exit_status": status, "logged": self.n_logged("killed")}
            if status != -signal.SIGKILL:
                result["error"] = describe_failure(status, killed.output())
            yield result
            yield self.train("resumed", "run.dir=killed")
            yield peace.result("peace", self.deadline) | {"wall_s": time.monotonic() - start}

    def train(self, name: str, *overrides: str) -> dict[str, Any]:
        """Run the training command to its end."""
        return self.call(name, self.train_line(*overrides))

    def train_line(self, *overrides: str) -> list[str]:
        """Return the training command of the installed package."""
        return [str(self.folder / "site" / "bin" / "thinker-train"), "config.yaml", *overrides]

    def n_logged(self, run: str) -> int:
        """Steps with a training loss in the log of a run."""
        path = self.folder / run / "metrics.jsonl"
        return path.read_text().count('"train_loss"') if path.exists() else 0

    def compare_runs(self) -> dict[str, Any]:
        """Tensors and losses of the two runs: equal in every bit, or an error."""
        checkpoint = f"checkpoints/step-{self.n_steps:08}"
        differing = []
        n_tensors = 0
        for name in ("model.safetensors", "training.safetensors"):
            peace, killed = (load_file(self.folder / run / checkpoint / name) for run in RUNS)
            n_tensors += len(peace)
            differing += [key for key in peace if not peace[key].equal(killed[key])]
        losses = [self.losses(run) for run in RUNS]
        result = {"name": "bits", "tensors": n_tensors, "differing": len(differing)}
        result["losses"] = len(losses[0])
        if differing or losses[0] != losses[1]:
            result["error"] = f"the resumed run differs: {differing[:5]}, losses {losses}"
        return result

    def losses(self, run: str) -> list[float]:
        """Training losses of a run by step."""
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        values = map(json.loads, lines)
        by_step = {line["step"]: line["train_loss"] for line in values if "train_loss" in line}
        return [by_step[step] for step in sorted(by_step)]

    def sample(self, run: str) -> Results:
        """Sample greedily with the cache and without it; the tokens must be equal."""
        count = "8" if self.campaign.is_rehearsal else "128"
        command = str(self.folder / "site" / "bin" / "thinker-generate")
        line = [command, run, "--json", "--greedy", "--prompt", PROMPT]
        line += ["--max-new-tokens", count, "--precision", "fp32"]
        tokens = []
        for name, flags in (("cached", []), ("uncached", ["--no-cache"])):
            result = self.call(name, [*line, *flags])
            if "error" not in result:
                tokens.append(token_ids(result["output"]))
            yield result
        is_equal = len(tokens) == 2 and tokens[0] == tokens[1]
        result = {"name": "tokens", "equal": is_equal}
        yield result if is_equal else result | {"error": f"cached and uncached tokens: {tokens}"}

    def start(
        self, name: str, line: list[str], environment: dict[str, str] | None = None
    ) -> Command:
        """Start Python with these arguments, its output in a file of that name."""
        variables = {**self.environment, **(environment or {})}
        log = self.folder / f"{name}.txt"
        return Command([sys.executable, *line], log, cwd=self.folder, environment=variables)

    def call(
        self, name: str, line: list[str], environment: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Run it to its end; the result has its time, exit status and output."""
        start = time.monotonic()
        with self.start(f"{name}-call", line, environment) as command:
            result = command.result(name, self.deadline)
        return result | {"wall_s": time.monotonic() - start}


def token_ids(output: str) -> list[int]:
    """The tokens in the output of a sampling command, whose other lines are messages."""
    line = next(line for line in output.splitlines() if line.startswith("{"))
    return json.loads(line)["token_ids"]
