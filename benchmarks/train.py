"""Training: steps beside `transformers`, or how soon one config overtakes another (--configs)."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from thinker.benchmarks import time_to_loss
from thinker.benchmarks.baselines import as_transformers
from thinker.benchmarks.environment import finish
from thinker.data.prefetch import Batch
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.device import DTYPES, choose_device, choose_precision, configure_backend
from thinker.runtime.plotting import BLUE, GREY, new_figure
from thinker.training.config import validate_config
from thinker.training.metrics import MemoryMeter, flops_per_token, peak_flops
from thinker.training.step import TrainingStep, build_model

# layers, width, heads, vocabulary, T, sequences a step
SHAPES = {
    "tiny": (2, 64, 2, 256, 32, 4),
    "12m": (6, 384, 6, 4096, 256, 16),
    "124m": (12, 768, 12, 50304, 1024, 32),
    "350m": (24, 1024, 16, 50304, 1024, 16),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--shape", choices=SHAPES, default="12m")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each that are timed, in turn")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--no-compile", action="store_true", help="leave out what torch.compile makes")
    parser.add_argument("--png", type=Path, help="draw it")
    parser.add_argument("--out", type=Path, help="append the line of JSON there")
    time_to_loss.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Time whole steps in turn, so that all contenders meet the same noise; print a table and a line of JSON."""
    if arguments.configs:
        time_to_loss.run(arguments)
        return
    device = choose_device(arguments.device)
    precision = choose_precision(arguments.precision, device)
    layers, width, _, _, T, size = SHAPES[arguments.shape]
    words = ("eager",) if arguments.no_compile else ("eager", "compiled")
    names = [f"thinker {word}, {optimizer}" for word in words for optimizer in ("adamw", "muon")]
    names += [] if arguments.no_peers else [f"transformers {word}, adamw" for word in words]
    # Each in a process of its own: what one leaves in the allocator would count for the next.
    memory = {}
    for name in tqdm(names, desc="memory"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            memory[name] = pool.apply(peak_memory, (name, arguments.shape, str(device), precision))
    configure_backend(device)
    contenders = {name: contender(name, arguments.shape, device, precision) for name in names}
    first = {name: _seconds(step, device) for name, step in tqdm(contenders.items(), desc="first steps")}
    for step in contenders.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in tqdm(range(arguments.repeats), desc="rounds"):
        for name, step in contenders.items():
            times[name].append(_seconds(step, device))
    medians = {name: statistics.median(found) for name, found in times.items()}
    rates = {name: size * T / seconds for name, seconds in medians.items()}
    with torch.device("meta"):
        flops = flops_per_token(Thinker(shape_config(arguments.shape)), T)
    peak = peak_flops(device, precision)
    print(f"{arguments.shape}: {layers} layers, width {width}, T {T}, {size} sequences a step, {precision}, {device}")
    for name, rate in rates.items():
        mfu = "" if peak is None else f"  MFU {rate * flops / peak:.2f}"
        print(
            f"{name:<30} {medians[name] * 1e3:8.0f} ms a step {rate:10,.0f} tokens/s, first {first[name]:.0f} s, "
            f"{memory[name] / 1e9:.2f} GB{mfu}"
        )
    ratios = {
        f"thinker {mine} to transformers {word}": rates[f"thinker {mine}, adamw"] / rates[f"transformers {word}, adamw"]
        for word in words
        for mine in words
        if not arguments.no_peers
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    result = {"benchmark": "train", "shape": arguments.shape, "precision": precision, "step_s": medians}
    result |= {"tokens_per_second": rates, "first_step_s": first, "peak_memory_bytes": memory, "ratios": ratios}
    if peak is not None:
        result["mfu"] = {name: rate * flops / peak for name, rate in rates.items()}
    if arguments.png:
        draw_rates(rates, memory, f"{arguments.shape}, {precision}, {device}", arguments.png)
    finish(result, arguments.out)


def shape_config(shape: str) -> ThinkerConfig:
    """The model of a shape, as `llama`."""
    layers, width, heads, vocab, T, _ = SHAPES[shape]
    return ThinkerConfig(vocab_size=vocab, d_model=width, n_layers=layers, n_heads=heads, max_seq_len=T, qk_norm=False)


def contender(name: str, shape: str, device: torch.device, precision: str) -> Callable[[], Tensor]:
    """A whole step by its name: "thinker compiled, muon"."""
    config = shape_config(shape)
    T, size = SHAPES[shape][4:]
    tokens = torch.randint(config.vocab_size, (size, T + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), size * T)
    compiled = " compiled," in name
    if name.startswith("transformers"):
        return theirs(config, device, precision, compiled, batch)
    return ours(config, device, precision, size, compiled, name.split()[-1], batch)


def peak_memory(name: str, shape: str, device_name: str, precision: str) -> int:
    """Bytes that two steps take, model and optimizer included; of a process of its own."""
    device = torch.device(device_name)
    configure_backend(device)
    meter = MemoryMeter(device)
    step = contender(name, shape, device, precision)
    for _ in range(2):
        step().item()
    return meter.peak()


def draw_rates(rates: dict[str, float], memory: dict[str, int], title: str, path: Path) -> None:
    """Tokens a second as bars, the memory beside each."""
    figure, (axes,) = new_figure(8, 0.6 + 0.5 * len(rates))
    names = sorted(rates, key=lambda name: rates[name])
    colours = [BLUE if name.startswith("thinker") else GREY for name in names]
    bars = axes.barh(names, [rates[name] for name in names], color=colours)
    labels = [f"{rates[name]:,.0f}, {memory[name] / 1e9:.2f} GB" for name in names]
    axes.bar_label(bars, labels=labels, padding=4)
    axes.set(xlabel="tokens a second", title=title, xlim=(0, 1.35 * max(rates.values())))
    figure.savefig(path)


def ours(
    model_config: ThinkerConfig,
    device: torch.device,
    precision: str,
    size: int,
    compiled: bool,
    optimizer: str,
    batch: Batch,
) -> Callable[[], Tensor]:
    """A whole step of ours, as train.py makes it."""
    config = validate_config(
        {
            "optimizer": {"name": optimizer},
            "train": {"max_steps": 1, "batch_size": size, "micro_batch_size": size, "precision": precision,
                      "compile": compiled},
        }
    )  # fmt: skip
    step = TrainingStep(build_model(model_config, 0, device), config)
    return lambda: step(batch, 0.1)[0]


def theirs(
    config: ThinkerConfig, device: torch.device, precision: str, compiled: bool, batch: Batch
) -> Callable[[], Tensor]:
    """A whole step of transformers' model: autocast, their own loss, clipping and fused AdamW."""
    model: Any = as_transformers(build_model(config, 0, torch.device("cpu"))).to(device).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if compiled else model
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


def _seconds(step: Callable[[], Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    step().item()
    return time.perf_counter() - start
