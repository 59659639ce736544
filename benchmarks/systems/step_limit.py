"""The time of a training step and of its matrix products alone, each with torch.mm."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinker.benchmarks.contenders import Calls, Contender, race
from thinker.benchmarks.speed.train import MAX_SECONDS, SHAPES, Shape, contender
from thinker.runtime.device import DTYPES, choose_device, choose_precision
from thinker.runtime.errors import RunError
from thinker.runtime.process.progress import Progress

PASSES = ("forward", "input gradient", "weight gradient")
PRODUCTS = "products"  # name of the contender
BASELINE = "transformers compiled, adamw"
MIN_SECONDS = 0.05  # a product is repeated for so long in each turn


class Product(NamedTuple):
    """A product of two matrices, (m, k) and (k, n), and how often a step computes it."""

    name: str  # of its pass and its matrices
    m: int
    k: int
    n: int
    count: int

    @property
    def flops(self) -> int:
        """FLOPs of all of them in a step."""
        return 2 * self.m * self.k * self.n * self.count


def matrices(shape: Shape) -> dict[str, tuple[int, int, int]]:
    """Width of the input, width of the output and number of the matrices of a model, by name."""
    config = shape.model_config()
    C, L = config.d_model, config.n_layers
    q_width = config.n_heads * config.head_dim
    kv_width = config.n_kv_heads * config.head_dim
    return {
        "q": (C, q_width, L),
        "k": (C, kv_width, L),
        "v": (C, kv_width, L),
        "o": (q_width, C, L),
        "gate": (C, config.d_ff, L),
        "up": (C, config.d_ff, L),
        "down": (config.d_ff, C, L),
        "head": (C, config.vocab_size, 1),
    }


def products(shape: Shape) -> list[Product]:
    """All products of activations and matrices in the forward and backward pass of a step, those of
    one shape together.

    Those inside attention, of queries, keys and values, are left out, as are those of Muon.
    """
    n_tokens = shape.micro_batch_size * shape.seq_len
    found: dict[tuple[str, int, int, int], tuple[str, int]] = {}
    for matrix, (n_in, n_out, n_matrices) in matrices(shape).items():
        sizes = {
            "forward": (n_tokens, n_in, n_out),
            "input gradient": (n_tokens, n_out, n_in),
            "weight gradient": (n_out, n_tokens, n_in),
        }
        for name in PASSES:
            key = (name, *sizes[name])
            names, count = found.get(key, ("", 0))
            names = f"{names}, {matrix}" if names else matrix
            found[key] = (names, count + n_matrices * shape.n_micro_batches)
    listed = []
    for (name, m, k, n), (names, count) in found.items():
        listed.append(Product(f"{name} of {names}", m, k, n, count))
    return listed


def make_products(shape: Shape, device: torch.device, precision: str) -> Calls:
    """A call of torch.mm for each product, with its operands laid out as in a step."""
    calls = {}
    for product in products(shape):
        calls[product.name] = new_call(product, DTYPES[precision], device)
    return Calls(calls, {})


def new_call(product: Product, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """torch.mm of random matrices. Weights are stored as (out, in), activations as (tokens,
    width)."""
    m, k, n = product[1:4]
    left, right = torch.randn(m, k), torch.randn(k, n)
    if product.name.startswith("forward"):
        right = torch.randn(n, k).T  # the transposed weight
    if product.name.startswith("weight gradient"):
        left = torch.randn(k, m).T  # the transposed gradient of the output
    left, right = left.to(device, dtype), right.to(device, dtype)
    return lambda: torch.mm(left, right)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--shape", choices=SHAPES, default="12m", help="size of the model")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="device to time"
    )
    parser.add_argument(
        "--precision", choices=["auto", "fp32", "bf16"], default="auto", help="precision"
    )
    parser.add_argument("--repeats", type=int, default=9, help="turns; medians are reported")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=["eager", "compiled"],
        default=["eager", "compiled"],
        help="how Thinker runs",
    )
    parser.add_argument("--no-baseline", action="store_true", help="skip transformers")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the products and whole steps in turns, and print their sums and ratios."""
    device = choose_device(arguments.device)
    precision = choose_precision(arguments.precision, device)
    shape = SHAPES[arguments.shape]
    names = []
    for mode in arguments.modes:
        names += [f"thinker {mode}, {optimizer}" for optimizer in ("muon", "adamw")]
    if not arguments.no_baseline:
        names.append(BASELINE)
    contenders = [Contender(PRODUCTS, make_products, (shape, device, precision))]
    contenders += [contender(name, shape, device, precision) for name in names]
    seconds = {}
    deadline = time.monotonic() + MAX_SECONDS
    results = race(contenders, device, arguments.repeats, deadline, min_seconds=MIN_SECONDS)
    for result in Progress(results, desc="contenders", total=len(contenders)):
        if "error" in result:
            raise RunError(f"{result['name']}: {result['error'].strip().splitlines()[-1]}")
        medians = {call: statistics.median(each) for call, each in result["seconds"].items()}
        seconds[result["name"]] = medians

    n_tokens = shape.batch_size * shape.seq_len
    print(f"{arguments.shape}, {precision}, {device}: {n_tokens:,} tokens per step")
    rows = product_rows(shape, seconds.pop(PRODUCTS))
    passes = {name: sum_of_pass(rows, name) for name in PASSES}
    total = sum(each["seconds"] for each in passes.values())
    for name, each in passes.items():
        print(
            f"{name:32} {each['seconds'] * 1e3:8.1f} ms {each['flops_per_second'] / 1e9:8,.0f} GFLOP/s"
        )
    print(f"{'all products':32} {total * 1e3:8.1f} ms")
    steps = {}
    for name in names:
        step_s = seconds[name]["step"]
        steps[name] = {"step_s": step_s, "to_products": step_s / total}
        steps[name]["tokens_per_second"] = n_tokens / step_s
        line = f"{name:32} {step_s * 1e3:8.1f} ms, {step_s / total:.2f} times the products"
        if not arguments.no_baseline:
            speed = seconds[BASELINE]["step"] / step_s
            steps[name]["speed_to_baseline"] = speed
            line += f", {speed:.2f} times the speed of transformers compiled"
        print(line)
    return {
        "shape": arguments.shape,
        "precision": precision,
        "tokens": n_tokens,
        "products": rows,
        "passes": passes,
        "products_s": total,
        "steps": steps,
    }


def product_rows(shape: Shape, medians: dict[str, float]) -> list[dict[str, Any]]:
    """Shape, count and time of each product. medians: seconds of one, by its name."""
    rows = []
    for product in products(shape):
        one_s = medians[product.name]
        rates = {"one_s": one_s, "all_s": one_s * product.count}
        rates["flops_per_second"] = product.flops / rates["all_s"]
        rows.append(product._asdict() | {"flops": product.flops} | rates)
        print(
            f"{product.name:40} {product.count:4} x {one_s * 1e3:7.2f} ms "
            f"{rates['flops_per_second'] / 1e9:8,.0f} GFLOP/s"
        )
    return rows


def sum_of_pass(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Seconds of all products of a pass in a step, and their rate."""
    of_pass = [row for row in rows if row["name"].startswith(name)]
    seconds = sum(row["all_s"] for row in of_pass)
    return {"seconds": seconds, "flops_per_second": sum(row["flops"] for row in of_pass) / seconds}
