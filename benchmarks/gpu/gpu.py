"""All GPU measurements, in parts of eight minutes each."""

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinker.benchmarks import contenders
from thinker.benchmarks.contenders import stream
from thinker.benchmarks.gpu import (
    first_text,
    gpu_commands,
    gpu_decoding,
    gpu_memory,
    gpu_serving,
    gpu_training,
    tile_search,
    whole_path,
)
from thinker.benchmarks.gpu.gpu_commands import CUDA_TESTS, FUSED_TESTS
from thinker.benchmarks.gpu.gpu_plots import PLOTS
from thinker.benchmarks.gpu.gpu_training import Campaign, Results
from thinker.runtime.errors import RunError, UserError

REPORT_SECONDS = 8.0  # for the plots
USABLE_MEMORY = 0.9  # of a device, for contenders that warm up side by side
ENVIRONMENT = {  # of all processes
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not open it: workers are forked
    "TORCHINDUCTOR_COMPILE_THREADS": "4",  # per contender
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
}
ENTRY_MODULES = (
    "thinker.benchmarks.gpu.gpu", "thinker.training.run", "thinker.generation.command.terminal", "thinker.evaluation.perplexity",
    "matplotlib.backends.backend_agg", "scipy.stats", "transformers.models.llama.modeling_llama", "pytest",
)  # fmt: skip


class Stage(NamedTuple):
    """One kind of measurement. `weight`: its share of the time, relative to that of the stages
    after it."""

    name: str
    weight: float
    run: Callable[[Campaign, float], Results]


DECODING = (
    Stage("decoding, 124m", 1.8, partial(gpu_decoding.decode, "124m")),
    Stage("decoding, 1.1b", 1.4, partial(gpu_decoding.decode, "1.1b")),
)
SERVING = Stage("serving", 1.2, gpu_serving.serving)
PROFILE = Stage("profile", 1.0, gpu_training.profile)
MEMORY = Stage("memory", 2.0, gpu_memory.memory)
PARTS = {
    # What is least known comes first.
    "first": (
        Stage("fused decoder", 1.4, partial(gpu_commands.cuda_tests, FUSED_TESTS)),
        Stage("first text", 1.0, first_text.first_text),
        *DECODING,
        Stage("whole path", 3.6, whole_path.whole_path),
        SERVING,
        Stage("training rate", 1.4, gpu_training.training_rate),
        MEMORY,
        PROFILE,
    ),
    # Training
    "A": (
        Stage("facts", 0.5, gpu_training.facts),
        Stage("training, 124m", 2.6, partial(gpu_training.train_beside, "124m")),
        PROFILE,
        Stage("training, 350m", 2.8, partial(gpu_training.train_beside, "350m")),
        MEMORY,
        Stage("precisions", 0.9, gpu_training.precisions),
        Stage("real training", 4.5, gpu_commands.real_training),
    ),
    # Decoding, serving, kernels, and every test that needs a GPU
    "B": (
        Stage("cuda tests", 2.4, partial(gpu_commands.cuda_tests, CUDA_TESTS)),
        *DECODING,
        SERVING,
        Stage("tiles", 1.2, tile_search.tile_search),
        Stage("attention", 1.0, gpu_decoding.attention),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--part", choices=PARTS, help="part to run")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="time limit of the part in minutes"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for results.jsonl, log.txt and plots"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="run every stage on the CPU at toy size"
    )
    parser.add_argument(
        "--imports", action="store_true", help="only list the packages that the benchmark imports"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the stages of a part in order, even if some fail."""
    if arguments.imports:
        return {"packages": import_closure()}
    if arguments.part is None or arguments.out is None:
        raise UserError("gpu needs --part first, A or B with --out DIR, or --imports")
    os.environ.update(ENVIRONMENT)
    if not arguments.rehearse and not torch.cuda.is_available():
        raise UserError("no CUDA GPU is available; --rehearse runs every stage on the CPU")
    end = time.monotonic() + 60 * arguments.minutes - REPORT_SECONDS
    arguments.out.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(arguments.out / "results.jsonl", arguments.part)
    options = {"log": (arguments.out / "log.txt").absolute(), "eager": arguments.rehearse}
    device, precision = (
        (torch.device("cpu"), "fp32") if arguments.rehearse else (torch.device("cuda"), "bf16")
    )
    worker = first_worker(device, recorder, options)
    recorder.card = worker.get("card")
    memory_gb = USABLE_MEMORY * worker.get("memory_bytes", math.inf) / 1e9
    campaign = Campaign(device, precision, arguments.rehearse, options, memory_gb)
    stages = PARTS[arguments.part]
    for index, stage in enumerate(stages):
        share = stage.weight / sum(each.weight for each in stages[index:])
        run_stage(stage, campaign, time.monotonic() + share * (end - time.monotonic()), recorder)
    for name, plot in PLOTS[arguments.part].items():
        try:
            plot(recorder.results, arguments.out / name)
        except Exception:
            recorder.write("pictures", {"name": name, "error": traceback.format_exc()})
    failures = [f"{line['stage']}: {line['name']}" for line in recorder.results if "error" in line]
    return {"part": arguments.part, "results": len(recorder.results), "failures": failures}


class Recorder:
    """Writes each result to a file as soon as it is available, and prints a summary."""

    def __init__(self, path: Path, part: str) -> None:
        self.path = path
        self.part = part
        self.card: str | None = None
        self.results: list[dict[str, Any]] = []

    def write(self, stage: str, result: dict[str, Any]) -> None:
        """Append a result, with its part, stage and card, as a line of JSON."""
        line = {"part": self.part, "stage": stage, **result}
        if self.card is not None:
            line["card"] = self.card
        self.results.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = {key: value for key, value in result.items() if isinstance(value, (int, float))}
        text = ", ".join(f"{key} {value:.4g}" for key, value in shown.items())
        error = (
            f"FAILED: {result['error'].strip().splitlines()[-1][:200]}" if "error" in result else ""
        )
        print(f"{stage}: {result['name']} {error or text}", flush=True)


def run_stage(stage: Stage, campaign: Campaign, deadline: float, recorder: Recorder) -> None:
    """Record a stage's results, its error if it fails or outlasts its deadline, and how long it
    took."""
    start = time.monotonic()
    try:
        for result in stage.run(campaign, deadline):
            recorder.write(stage.name, result)
    except Exception:  # later stages still run
        recorder.write(stage.name, {"name": "stage", "error": traceback.format_exc()})
    recorder.write(
        stage.name,
        {"name": "end", "wall_s": time.monotonic() - start, "allowed_s": deadline - start},
    )


def first_worker(
    device: torch.device, recorder: Recorder, options: dict[str, Any]
) -> dict[str, Any]:
    """What a first worker knows of the device; all are spawned where a forked one fails, because
    an import has touched the GPU."""
    for method in dict.fromkeys((contenders.start_method, "spawn")):
        contenders.start_method = method
        try:
            found = next(stream(try_device, device, deadline=time.monotonic() + 60, **options))
        except (RunError, TimeoutError) as error:
            recorder.write("start", {"name": method, "note": f"not used: {error}"})
            continue
        recorder.write("start", found)
        return found
    return {}


def try_device(device: torch.device) -> Results:
    """The name and the memory of the device, as a worker sees it."""
    result: dict[str, Any] = {"name": "worker", "sum": float(torch.ones(2, device=device).sum())}
    if device.type == "cuda":
        result["card"] = torch.cuda.get_device_name()
        result["memory_bytes"] = torch.cuda.mem_get_info()[1]
    yield result


def import_closure() -> dict[str, list[str]]:
    """Top-level modules outside the standard library that the campaign imports, and optional ones
    that it can use."""
    code = (
        f"import sys, json\nfor name in {ENTRY_MODULES}: __import__(name)\n"
        "names = {name.split('.')[0] for name, module in sys.modules.items() if getattr(module, '__file__', None)}\n"
        "names = {name for name in names if not name.startswith('_')}\n"
        "print(json.dumps(sorted(names - set(sys.stdlib_module_names) - {'thinker'})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    optional = ["rustbpe", "xdist", "triton", "hypothesis"]
    return {"imported": json.loads(done.stdout.splitlines()[-1]), "used where present": optional}
