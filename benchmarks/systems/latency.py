"""Latency of the server for one client on one connection, compared with the engine alone."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinker.benchmarks.speed.decode import BITS, SHAPES
from thinker.benchmarks.systems.serving import (
    make_generator,
    make_prompt,
    save_random_model,
    start_thinker,
)
from thinker.generation import SamplingParams
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

MAX_LEN = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--shape", default="2m", choices=SHAPES, help="size of the model")
    parser.add_argument(
        "--precision", default="fp32", choices=("fp32", "bf16", *BITS), help="of the weights"
    )
    parser.add_argument("--prompt", type=int, default=32, help="tokens in the prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate per request")
    parser.add_argument(
        "--repeats", type=int, default=9, help="rounds in which the sides take turns"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the engine and the server in turns, with OpenAI's client."""
    try:
        from openai import OpenAI
    except ModuleNotFoundError:
        raise UserError("this benchmark needs openai; install it: pip install openai") from None
    if min(arguments.prompt, arguments.new, arguments.repeats) < 1:
        raise UserError("--prompt, --new and --repeats need at least 1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        model, tokenizer = save_random_model(arguments.shape, MAX_LEN, folder)
        generator = make_generator(model, tokenizer, arguments.precision)
        prompt = make_prompt(tokenizer, arguments.prompt, 0)
        params = SamplingParams(arguments.new, seed=1)
        # All sides make the same text, which may end early.
        (completion,) = generator.generate([prompt], params)
        n_new = len(completion.token_ids)
        with (
            start_thinker(folder, arguments.precision, 16) as port,
            OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
        ):

            def engine(n_new: int) -> None:
                generator.generate([prompt], SamplingParams(n_new, seed=1))

            def request(n_new: int, stream: bool) -> None:
                answer = client.completions.create(
                    model="model", prompt=prompt, max_tokens=n_new, seed=1, stream=stream
                )
                if stream:
                    n_chunks = sum(1 for _ in answer)
                    assert n_chunks <= n_new

            sides: dict[str, Callable[[int], None]] = {
                "engine": engine,
                "whole": lambda n_new: request(n_new, False),
                "stream": lambda n_new: request(n_new, True),
            }
            seconds = measure(sides, (1, n_new), arguments.repeats)
    result = {name: getattr(arguments, name) for name in ("shape", "precision", "prompt", "new")}
    return result | {"rows": summarize(seconds, n_new)}


def measure(
    sides: dict[str, Callable[[int], None]], lengths: tuple[int, ...], repeats: int
) -> dict[tuple[str, int], float]:
    """The median seconds of each side for each number of new tokens."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in Progress(range(repeats + 1), leave=False):
        for name, side in sides.items():
            for n_new in lengths:
                start = time.perf_counter()
                side(n_new)
                if turn:  # the first one is a warm-up
                    seconds.setdefault((name, n_new), []).append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in seconds.items()}


def summarize(seconds: dict[tuple[str, int], float], n_new: int) -> list[dict[str, Any]]:
    """Print and return the milliseconds of a request for one token, and of each token of a long one."""
    rows = []
    for name in ("engine", "whole", "stream"):
        per_token = seconds[name, n_new] / n_new
        row = {
            "side": name,
            "one_token_ms": 1000 * seconds[name, 1],
            "per_token_ms": 1000 * per_token,
            "ratio": per_token / (seconds["engine", n_new] / n_new),
        }
        print(
            "{side}: a token alone {one_token_ms:.2f} ms; of a longer text, {per_token_ms:.3f} ms per token, "
            "{ratio:.2f} times the engine's".format(**row)
        )
        rows.append(row)
    return rows
