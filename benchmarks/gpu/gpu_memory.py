"""The GPU stage of memory: predictions beside the allocator's peaks, and steps under a limit."""

from typing import Any, NamedTuple

import torch

from thinker.benchmarks.contenders import Calls, Contender, race
from thinker.benchmarks.gpu.gpu_commands import ROOT
from thinker.benchmarks.gpu.gpu_training import Campaign, Results
from thinker.benchmarks.speed.train import make_batch
from thinker.training.config.load import load_config
from thinker.training.settings.memory_estimate import estimate_memory
from thinker.training.settings.resolve import resolve_settings
from thinker.training.settings.settings import Settings
from thinker.training.step import TrainingStep, build_model

TOLERANCE = 0.1  # of the measured peak
GB = 10**9


class Case(NamedTuple):
    """Two steps with a config of configs/. `limit_gb`: what the process may take of the GPU."""

    name: str
    config: str
    changes: tuple[str, ...]
    gigabytes: float  # that it may need beside others
    limit_gb: float | None = None


RECOMPUTED = "train.checkpoint_every_n_blocks=1"
TWO_OF_16 = ("train.micro_batch_size=16", "train.batch_size=32")
TWO_OF_32 = ("train.micro_batch_size=32", "train.batch_size=64")
CASES = (
    # These take longest: `auto` traces several sizes.
    Case("124M, limit of 16 GB", "gpu-16gb", ("train.batch_size=32",), 16, 16),
    Case("124M, recomputed, limit of 8 GB", "gpu-16gb", ("train.batch_size=64", RECOMPUTED), 8, 8),
    Case("124M, micro-batch 16", "gpu-124m", TWO_OF_16, 14),
    Case("124M, micro-batch 16, recomputed", "gpu-124m", (*TWO_OF_16, RECOMPUTED), 8),
    Case(
        "TinyStories 34M, micro-batch 32",
        "gpu-tinystories",
        (*TWO_OF_32, "model.vocab_size=8192"),
        5,
    ),
)
# Neither a data set nor a tokenizer is read.
WITHOUT_TEXT = ("data.source=pysource", "data.tokenizer=byte")
TOY = (
    "model.vocab_size=256",
    "model.d_model=64",
    "model.n_layers=2",
    "model.n_heads=2",
    "data.seq_len=32",
    "train.batch_size=8",
    "train.precision=fp32",
    "train.compile=false",
)


def memory(campaign: Campaign, deadline: float) -> Results:
    """The predicted and the measured peak of each case, and the micro-batch that `auto` chose."""
    contenders = [
        Contender(
            case.name, make_steps, (case, campaign.device, campaign.is_rehearsal), case.gigabytes
        )
        for case in CASES
    ]
    options = {"n_at_once": campaign.n_at_once, "memory_gb": campaign.memory_gb}
    # Every contender runs two steps before the first round.
    for result in race(contenders, campaign.device, 0, deadline, **options, **campaign.options):
        result.pop("seconds", None)
        yield result if "error" in result else compare(result, campaign.device)


def make_steps(case: Case, device: torch.device, is_toy: bool) -> Calls:
    """A step of a case, with its prediction, in a process of its own."""
    facts: dict[str, Any] = {}
    if case.limit_gb is not None and device.type == "cuda":
        facts["limit_bytes"] = limit_memory(case.limit_gb * GB)
    settings = resolve_case(case, device, is_toy)
    size = settings.train.micro_batch_size
    facts["micro_batch_size"] = size
    facts["predicted_bytes"] = estimate_memory(settings, size, device).peak
    step = TrainingStep(build_model(settings.model, 0, device), settings)
    shape = (settings.train.batch_size, settings.data.seq_len + 1)
    batch = make_batch(torch.randint(settings.model.vocab_size, shape), device)
    return Calls({"step": lambda: step(batch, 0.1)[0]}, facts)


def resolve_case(case: Case, device: torch.device, is_toy: bool = False) -> Settings:
    """The settings of a case; `auto` chooses the micro-batch for the memory that is free."""
    changes = [*WITHOUT_TEXT, *case.changes]
    if is_toy:
        changes += TOY
        if case.limit_gb is None:
            changes.append("train.micro_batch_size=4")
    config = load_config(ROOT / "configs" / f"{case.config}.yaml", changes)
    return resolve_settings(config, config.thinker_config(config.model.vocab_size), device)


def limit_memory(n_bytes: float) -> int:
    """Let this process take at most so much of the GPU. Returns the limit, at most all of it."""
    total = torch.cuda.mem_get_info()[1]
    fraction = min(1.0, n_bytes / total)
    torch.cuda.set_per_process_memory_fraction(fraction)
    return int(fraction * total)


def compare(result: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The result with predicted / measured, and an error if that is far from 1.

    The memory of a process on a CPU is another quantity, so it is left out.
    """
    if device.type != "cuda":
        del result["peak_memory_bytes"]
        return result
    ratio = result["predicted_bytes"] / result["peak_memory_bytes"]
    result["predicted_to_measured"] = ratio
    if abs(ratio - 1) > TOLERANCE:
        result["error"] = f"the prediction is {ratio:.2f} times the measured peak"
    return result
