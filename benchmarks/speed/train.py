"""Speed and memory of a training step, compared with transformers."""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinker.benchmarks.baselines import PlainGPT, to_transformers
from thinker.benchmarks.contenders import Calls, Contender, race
from thinker.data.batches.prefetch import Batch
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.device import DTYPES, choose_device, choose_precision
from thinker.runtime.errors import RunError
from thinker.runtime.plot_style import BLUE, GREY, new_figure
from thinker.runtime.process.progress import Progress
from thinker.training.config.load import validate_config
from thinker.training.metrics import flops_per_token, peak_flops
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep, build_model


class Shape(NamedTuple):
    """A model and the batch of a step."""

    n_layers: int
    d_model: int
    n_heads: int
    vocab_size: int
    seq_len: int
    micro_batch_size: int
    # Several on a GPU, as in a real run: the optimizer's share of a step counts.
    n_micro_batches: int = 1

    def model_config(self) -> ThinkerConfig:
        """The model, as `llama`."""
        return ThinkerConfig(
            vocab_size=self.vocab_size, d_model=self.d_model, n_layers=self.n_layers, n_heads=self.n_heads,
            max_seq_len=self.seq_len, qk_norm=False,
        )  # fmt: skip

    @property
    def batch_size(self) -> int:
        """Sequences per step."""
        return self.micro_batch_size * self.n_micro_batches


SHAPES = {
    "tiny": Shape(2, 64, 2, 256, 32, 4),
    "12m": Shape(6, 384, 6, 4096, 256, 16),
    "124m": Shape(12, 768, 12, 50304, 1024, 32, 8),
    "350m": Shape(24, 1024, 16, 50304, 1024, 16, 8),
}


# of this size, measured in turns with the steps where the device's peak is unknown
MATRIX_PRODUCT = "matrix product"
MATRIX_SIZE = 2048
MAX_SECONDS = 24 * 3600.0  # of all variants together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--shape", choices=SHAPES, default="12m", help="size of the model")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="device to time"
    )
    parser.add_argument(
        "--precision", choices=["auto", "fp32", "bf16"], default="auto", help="precision"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed steps per variant; medians are reported"
    )
    parser.add_argument("--no-baseline", action="store_true", help="skip transformers")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot speeds")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time whole steps of all variants alternately, so that noise affects them alike, and print a
    table."""
    device = choose_device(arguments.device)
    precision = choose_precision(arguments.precision, device)
    shape = SHAPES[arguments.shape]
    modes = ("eager",) if arguments.no_compile else ("eager", "compiled")
    names = [f"thinker {mode}, {optimizer}" for mode in modes for optimizer in ("adamw", "muon")]
    if not arguments.no_baseline:
        names += [f"transformers {mode}, adamw" for mode in modes]
    contenders = [contender(name, shape, device, precision) for name in names]
    if peak_flops(device, precision) is None:
        contenders.append(Contender(MATRIX_PRODUCT, make_product, (device, precision)))
    results = {}
    race_results = race(contenders, device, arguments.repeats, time.monotonic() + MAX_SECONDS)
    for result in Progress(race_results, desc="variants", total=len(contenders)):
        if "error" in result:
            raise RunError(f"{result['name']}: {result['error'].strip().splitlines()[-1]}")
        results[result["name"]] = result
    peak = {}
    if MATRIX_PRODUCT in results:
        product = results.pop(MATRIX_PRODUCT)
        peak = {"peak_flops": product["flops"] / statistics.median(product["seconds"]["step"])}
        print(
            f"a large matrix product: {peak['peak_flops'] / 1e9:,.0f} GFLOP/s; MFU is relative to this rate"
        )
    rows = {name: add_rates(results[name] | peak) for name in names}
    title = f"{arguments.shape}, {precision}, {device}"
    print(
        f"{title}: {shape.n_layers} layers, width {shape.d_model}, sequence length {shape.seq_len}, "
        f"{shape.batch_size} sequences per step"
    )
    column = {}
    for key in ("step_s", "tokens_per_second", "first_step_s", "peak_memory_bytes"):
        column[key] = {name: rows[name][key] for name in names}
    rates, memory = column["tokens_per_second"], column["peak_memory_bytes"]
    for name, rate in rates.items():
        line = (
            f"{name:<30} {column['step_s'][name] * 1e3:8.0f} ms per step {rate:10,.0f} tokens/s, first step "
            f"{column['first_step_s'][name]:.0f} s, {memory[name] / 1e9:.2f} GB"
        )
        print(f"{line}, MFU {rows[name]['mfu']:.2f}")
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
    mfu = {name: row["mfu"] for name, row in rows.items()}
    result = {
        "shape": arguments.shape,
        "precision": precision,
        **column,
        "ratios": ratios,
        "mfu": mfu,
    }
    return result | ({"matrix_product_flops": peak["peak_flops"]} if peak else {})


def contender(
    name: str, shape: Shape, device: torch.device, precision: str, gigabytes: float = 0.0
) -> Contender:
    """A training step by its name, as for make_step(), in a process of its own."""
    return Contender(name, make_calls, (name, shape, device, precision), gigabytes)


def make_calls(name: str, shape: Shape, device: torch.device, precision: str) -> Calls:
    """The step of a contender, its tokens and FLOPs per step, and the device's peak in FLOP/s if it
    is known."""
    if name.startswith("plain"):
        with torch.device("meta"):
            flops = PlainGPT(
                shape.n_layers, shape.d_model, shape.n_heads, shape.vocab_size, shape.seq_len
            ).flops_per_token()
    else:
        with torch.device("meta"):
            flops = flops_per_token(Thinker(shape.model_config()), shape.seq_len)
    n_tokens, peak = shape.batch_size * shape.seq_len, peak_flops(device, precision)
    facts = {"tokens": n_tokens, "flops": flops * n_tokens} | (
        {} if peak is None else {"peak_flops": peak}
    )
    return Calls({"step": make_step(name, shape, device, precision)}, facts)


def make_product(device: torch.device, precision: str) -> Calls:
    """The product of two square matrices, whose rate is the most that a step can reach."""
    a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE, dtype=DTYPES[precision], device=device)
    return Calls({"step": lambda: a @ b}, {"flops": 2 * MATRIX_SIZE**3})


def add_rates(result: dict[str, Any]) -> dict[str, Any]:
    """A contender's result with the median step, tokens per second and, where the peak is known,
    MFU."""
    step_s = statistics.median(result["seconds"]["step"])
    rates = {
        "step_s": step_s,
        "tokens_per_second": result["tokens"] / step_s,
        "first_step_s": result["first_s"]["step"],
    }
    if "peak_flops" in result:
        rates["mfu"] = result["flops"] / step_s / result["peak_flops"]
    return result | rates


def make_step(
    name: str, shape: Shape, device: torch.device, precision: str
) -> Callable[[], Tensor]:
    """A whole training step by its name, such as "thinker compiled, muon"; calling it returns the
    loss.

    The first word is thinker, transformers or plain (a plain GPT); the last two know AdamW alone.
    """
    library, mode, optimizer = name.replace(",", "").split()[:3]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        shape.vocab_size, (shape.batch_size, shape.seq_len + 1), generator=generator
    )
    batch = make_batch(tokens, device)
    if library != "thinker":
        return make_baseline_step(library, shape, device, precision, mode == "compiled", batch)
    step = make_training_step(shape, device, precision, mode == "compiled", optimizer)
    return lambda: step(batch, 0.1)[0]


def make_batch(tokens: Tensor, device: torch.device) -> Batch:
    """The batch of tokens (B, T + 1), as the data loader gives it: in pinned memory if the device
    is a GPU."""
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if device.type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return Batch(inputs, targets, inputs.numel())


def make_training_step(
    shape: Shape, device: torch.device, precision: str, is_compiled: bool, optimizer: str = "muon"
) -> TrainingStep:
    """The step of Thinker, with the settings that a config would resolve to."""
    train = {"max_steps": 1, "batch_size": shape.batch_size, "micro_batch_size": shape.micro_batch_size,
             "precision": precision, "compile": is_compiled}  # fmt: skip
    config = validate_config({"optimizer": {"name": optimizer}, "train": train})
    model_config = shape.model_config()
    return TrainingStep(
        build_model(model_config, 0, device), resolve_settings(config, model_config, device)
    )


def make_baseline_step(
    library: str,
    shape: Shape,
    device: torch.device,
    precision: str,
    is_compiled: bool,
    batch: Batch,
) -> Callable[[], Tensor]:
    """A whole step of another model: autocast, its own loss, gradient clipping and fused AdamW."""
    if library == "plain":
        torch.manual_seed(0)
        model: Any = PlainGPT(
            shape.n_layers, shape.d_model, shape.n_heads, shape.vocab_size, shape.seq_len
        ).to(device)
    else:
        model = (
            to_transformers(build_model(shape.model_config(), 0, torch.device("cpu")))
            .to(device)
            .train()
        )
        model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if is_compiled else model

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for part in zip(
            batch.inputs.split(shape.micro_batch_size), batch.targets.split(shape.micro_batch_size)
        ):
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in part)
            with torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32"):
                if library == "plain":
                    loss = forward(inputs, targets)
                else:
                    loss = forward(input_ids=inputs, labels=targets, shift_labels=targets).loss
            (loss / shape.n_micro_batches).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total / shape.n_micro_batches

    return step


def plot(rates: dict[str, float], memory: dict[str, int], title: str, path: Path) -> None:
    """Tokens per second as bars, labelled with speed and memory."""
    figure, (axes,) = new_figure(8, 0.6 + 0.5 * len(rates))
    names = sorted(rates, key=lambda name: rates[name])
    colors = [BLUE if name.startswith("thinker") else GREY for name in names]
    bars = axes.barh(names, [rates[name] for name in names], color=colors)
    axes.bar_label(
        bars,
        labels=[f"{rates[name]:,.0f}, {memory[name] / 1e9:.2f} GB" for name in names],
        padding=4,
    )
    axes.set(xlabel="tokens/s", title=title, xlim=(0, 1.35 * max(rates.values())))
    figure.savefig(path)
