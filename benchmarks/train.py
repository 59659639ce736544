"""Training steps beside `transformers`: the same shape, optimizer, precision and batch, in one run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.machine import describe
from benchmarks.peers import as_transformers
from data.ahead import Batch
from device import DTYPES, choose_device, choose_precision, tune
from model import Thinker, ThinkerConfig
from training.meter import flops_per_token, peak_flops
from training.recipe import check_recipe
from training.step import TrainingStep, draw

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


def run(arguments: argparse.Namespace) -> None:
    """Time whole steps in turn, so that all contenders meet the same noise; print a table and a line of JSON."""
    device = choose_device(arguments.device)
    precision = choose_precision(arguments.precision, device)
    tune(device)
    layers, width, heads, vocab, T, size = SHAPES[arguments.shape]
    config = ThinkerConfig(
        vocab_size=vocab, d_model=width, n_layers=layers, n_heads=heads, max_seq_len=T, qk_norm=False
    )
    tokens = torch.randint(vocab, (size, T + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), size * T)

    contenders: dict[str, Callable[[], Tensor]] = {}
    for compiled in (False,) if arguments.no_compile else (False, True):
        word = "compiled" if compiled else "eager"
        for optimizer in ("adamw", "muon"):
            contenders[f"thinker {word}, {optimizer}"] = ours(
                config, device, precision, size, compiled, optimizer, batch
            )
        if not arguments.no_peers:
            contenders[f"transformers {word}, adamw"] = theirs(config, device, precision, compiled, batch)

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
        flops = flops_per_token(Thinker(config), T)
    peak = peak_flops(device, precision)
    print(f"{arguments.shape}: {layers} layers, width {width}, T {T}, {size} sequences a step, {precision}, {device}")
    for name, rate in rates.items():
        mfu = "" if peak is None else f"  MFU {rate * flops / peak:.2f}"
        print(f"{name:<30} {medians[name] * 1e3:8.0f} ms a step {rate:10,.0f} tokens/s, first {first[name]:.0f} s{mfu}")
    ratios = {}
    for word in ("eager", "compiled"):
        peer = rates.get(f"transformers {word}, adamw")
        for mine in ("eager", "compiled"):
            if peer and f"thinker {mine}, adamw" in rates:
                ratios[f"thinker {mine} to transformers {word}"] = rates[f"thinker {mine}, adamw"] / peer
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    result = {"benchmark": "train", "shape": arguments.shape, "precision": precision, "step_s": medians,
              "tokens_per_second": rates, "first_step_s": first, "ratios": ratios}  # fmt: skip
    if peak is not None:
        result["mfu"] = {name: rate * flops / peak for name, rate in rates.items()}
    print(json.dumps({**result, "machine": describe()}))
    sys.stdout.flush()


def ours(
    config: ThinkerConfig, device: torch.device, precision: str, size: int, compiled: bool, optimizer: str, batch: Batch
) -> Callable[[], Tensor]:
    """A whole step of ours, as train.py makes it."""
    recipe = check_recipe(
        {
            "optimizer": {"name": optimizer},
            "train": {"max_steps": 1, "batch_size": size, "micro_batch_size": size, "precision": precision,
                      "compile": compiled},
        }
    )  # fmt: skip
    step = TrainingStep(draw(config, 0, device), recipe)
    return lambda: step(batch, 0.1)[0]


def theirs(
    config: ThinkerConfig, device: torch.device, precision: str, compiled: bool, batch: Batch
) -> Callable[[], Tensor]:
    """A whole step of transformers' model: autocast, their own loss, clipping and fused AdamW."""
    model: Any = as_transformers(draw(config, 0, torch.device("cpu"))).to(device).train()
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
