"""Speed and memory of a training step, compared with transformers on the same model."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from thinker.benchmarks.baselines import to_transformers
from thinker.benchmarks.environment import measure_seconds, time_alternately
from thinker.data.prefetch import Batch
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.device import DTYPES, choose_device, choose_precision, configure_backend
from thinker.runtime.plot_style import BLUE, GREY, new_figure
from thinker.training.config import validate_config
from thinker.training.metrics import MemoryMeter, flops_per_token, peak_flops
from thinker.training.resolve_settings import resolve_settings
from thinker.training.step import TrainingStep, build_model


class Shape(NamedTuple):
    """A model and the batch of a step."""

    n_layers: int
    d_model: int
    n_heads: int
    vocab_size: int
    seq_len: int
    batch_size: int

    def model_config(self) -> ThinkerConfig:
        """The model, as `llama`."""
        return ThinkerConfig(
            vocab_size=self.vocab_size, d_model=self.d_model, n_layers=self.n_layers, n_heads=self.n_heads,
            max_seq_len=self.seq_len, qk_norm=False,
        )  # fmt: skip


SHAPES = {
    "tiny": Shape(2, 64, 2, 256, 32, 4),
    "12m": Shape(6, 384, 6, 4096, 256, 16),
    "124m": Shape(12, 768, 12, 50304, 1024, 32),
    "350m": Shape(24, 1024, 16, 50304, 1024, 16),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--shape", choices=SHAPES, default="12m")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each variant")
    parser.add_argument("--no-baseline", action="store_true", help="leave out transformers")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--png", type=Path, help="plot the speeds")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time whole steps of all variants alternately, so that noise affects them alike, and print a table."""
    device = choose_device(arguments.device)
    precision = choose_precision(arguments.precision, device)
    shape = SHAPES[arguments.shape]
    modes = ("eager",) if arguments.no_compile else ("eager", "compiled")
    names = [f"thinker {mode}, {optimizer}" for mode in modes for optimizer in ("adamw", "muon")]
    if not arguments.no_baseline:
        names += [f"transformers {mode}, adamw" for mode in modes]
    # Each in a process of its own: memory that one variant leaves in the allocator would count for the next.
    memory = {}
    for name in tqdm(names, desc="memory"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            memory[name] = pool.apply(measure_memory, (name, shape, str(device), precision))
    configure_backend(device)
    steps = {name: make_step(name, shape, device, precision) for name in names}
    first_seconds = {name: measure_seconds(step, device) for name, step in tqdm(steps.items(), desc="first steps")}
    seconds = time_alternately(list(steps.values()), arguments.repeats, device)
    medians = {name: statistics.median(values) for name, values in zip(names, seconds)}
    rates = {name: shape.batch_size * shape.seq_len / median for name, median in medians.items()}
    with torch.device("meta"):
        flops = flops_per_token(Thinker(shape.model_config()), shape.seq_len)
    peak = peak_flops(device, precision)
    mfu = {} if peak is None else {name: rate * flops / peak for name, rate in rates.items()}
    title = f"{arguments.shape}, {precision}, {device}"
    print(
        f"{title}: {shape.n_layers} layers, width {shape.d_model}, sequence length {shape.seq_len}, "
        f"{shape.batch_size} sequences per step"
    )
    for name, rate in rates.items():
        line = (
            f"{name:<30} {medians[name] * 1e3:8.0f} ms per step {rate:10,.0f} tokens/s, first step "
            f"{first_seconds[name]:.0f} s, {memory[name] / 1e9:.2f} GB"
        )
        print(f"{line}, MFU {mfu[name]:.2f}" if mfu else line)
    ratios = {}
    if not arguments.no_baseline:
        for baseline in modes:
            for mode in modes:
                ratio = rates[f"thinker {mode}, adamw"] / rates[f"transformers {baseline}, adamw"]
                ratios[f"thinker {mode} to transformers {baseline}"] = ratio
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    if arguments.png:
        plot(rates, memory, title, arguments.png)
    result = {"shape": arguments.shape, "precision": precision, "step_s": medians, "tokens_per_second": rates}
    result |= {"first_step_s": first_seconds, "peak_memory_bytes": memory, "ratios": ratios}
    return result | ({"mfu": mfu} if mfu else {})


def make_step(name: str, shape: Shape, device: torch.device, precision: str) -> Callable[[], Tensor]:
    """A whole training step by its name, such as "thinker compiled, muon"; calling it returns the loss."""
    library, mode, optimizer = name.replace(",", "").split()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (shape.batch_size, shape.seq_len + 1), generator=generator)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), shape.batch_size * shape.seq_len)
    if library == "transformers":
        return make_transformers_step(shape, device, precision, mode == "compiled", batch)
    train = {"max_steps": 1, "batch_size": shape.batch_size, "micro_batch_size": shape.batch_size,
             "precision": precision, "compile": mode == "compiled"}  # fmt: skip
    config = validate_config({"optimizer": {"name": optimizer}, "train": train})
    model_config = shape.model_config()
    step = TrainingStep(build_model(model_config, 0, device), resolve_settings(config, model_config, device))
    return lambda: step(batch, 0.1)[0]


def make_transformers_step(
    shape: Shape, device: torch.device, precision: str, is_compiled: bool, batch: Batch
) -> Callable[[], Tensor]:
    """A whole step of the transformers model: autocast, its own loss, gradient clipping and fused AdamW."""
    model: Any = to_transformers(build_model(shape.model_config(), 0, torch.device("cpu"))).to(device).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if is_compiled else model
    inputs, targets = batch.inputs.to(device), batch.targets.to(device)

    def step() -> Tensor:
        with torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32"):
            loss = forward(input_ids=inputs, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure_memory(name: str, shape: Shape, device_name: str, precision: str) -> int:
    """Peak memory in bytes of two steps, with model and optimizer; must run in a fresh process."""
    device = torch.device(device_name)
    configure_backend(device)
    meter = MemoryMeter(device)
    step = make_step(name, shape, device, precision)
    for _ in range(2):
        step().item()
    return meter.peak()


def plot(rates: dict[str, float], memory: dict[str, int], title: str, path: Path) -> None:
    """Tokens per second as bars, labelled with speed and memory."""
    figure, (axes,) = new_figure(8, 0.6 + 0.5 * len(rates))
    names = sorted(rates, key=lambda name: rates[name])
    colors = [BLUE if name.startswith("thinker") else GREY for name in names]
    bars = axes.barh(names, [rates[name] for name in names], color=colors)
    axes.bar_label(bars, labels=[f"{rates[name]:,.0f}, {memory[name] / 1e9:.2f} GB" for name in names], padding=4)
    axes.set(xlabel="tokens/s", title=title, xlim=(0, 1.35 * max(rates.values())))
    figure.savefig(path)
