"""What a monitor costs: tokens per second with and without one, in turns."""

import argparse
import statistics
from functools import partial
from typing import Any

import torch

from thinker.benchmarks.environment import time_alternately
from thinker.benchmarks.speed.decode import BITS, SHAPES, make_random_model, thinker_generate
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.monitoring.monitor import Monitor
from thinker.generation import Generator
from thinker.runtime.device import DTYPES, choose_device
from thinker.runtime.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--shape", default="110m", choices=SHAPES, help="size of the model")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--precisions", default="fp32,bf16,int8", metavar="NAME,...", help="fp32, bf16, int8, int4"
    )
    parser.add_argument("--batches", default="1,8", metavar="N,...", help="numbers of texts")
    parser.add_argument("--new", type=int, default=256, help="tokens to generate per text")
    parser.add_argument(
        "--repeats", type=int, default=9, help="timing rounds; medians are reported"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every precision and batch, and print a table."""
    device, precisions = choose_device(arguments.device), arguments.precisions.split(",")
    batches = [int(text) for text in arguments.batches.split(",") if text.isdecimal()]
    if (
        not {*precisions} <= {"fp32", "bf16", *BITS}
        or min(batches, default=0) < 1
        or arguments.new < 2
    ):
        raise UserError(
            "--precisions, --batches or --new is not valid; use, for example, fp32,int8 and 1,8 and 256"
        )
    model = make_random_model(arguments.shape, arguments.new + 8, device)
    default, rows = torch.bfloat16 if device.type == "cuda" else torch.float32, []
    print("precision  batch  tokens/s  with a monitor  cost    measured positions per text")
    for precision in precisions:
        options = {"dtype": DTYPES.get(precision, default), "bits": BITS.get(precision)}
        for batch in batches:
            monitor = Monitor()
            calls = [
                partial(thinker_generate(Generator(model, make_tokenizer("byte", []), **options, **each), batch, 8),
                        arguments.new)
                for each in ({}, {"monitor": monitor})
            ]  # fmt: skip
            plain, watched = map(
                statistics.median, time_alternately(calls, arguments.repeats, device)
            )
            row = {
                "precision": precision, "batch": batch, "tokens_per_second": batch * arguments.new / plain,
                "watched_tokens_per_second": batch * arguments.new / watched, "cost": watched / plain - 1,
                "positions_per_text": monitor.n_measured / (arguments.repeats + 1) / batch,
            }  # fmt: skip
            print("{precision:9}  {batch:5}  {tokens_per_second:8.0f}  {watched_tokens_per_second:14.0f}  "
                  "{cost:+6.2%}  {positions_per_text:.2f}".format(**row))  # fmt: skip
            rows.append(row)
    return {"shape": arguments.shape, "device": device.type, "new": arguments.new, "rows": rows}
