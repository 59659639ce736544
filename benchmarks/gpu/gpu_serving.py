"""The GPU stage of the server: its throughput and its latency, beside the engine's own batches."""

import asyncio
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinker.benchmarks.contenders import stream as stream_results
from thinker.benchmarks.gpu.gpu_training import Campaign, Results
from thinker.benchmarks.systems.serving import (
    STREAM,
    make_generator,
    make_prompt,
    save_random_model,
    start_thinker,
    stream,
)
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.runtime.backend import configure_backend


class Load(NamedTuple):
    """What is asked of the server."""

    shape: str  # of speed.decode.SHAPES
    clients: tuple[int, ...]  # at once
    n_prompt: int  # tokens
    n_new: int
    rounds: int


FULL = Load("124m", (1, 8, 64), 32, 128, 3)
REHEARSED = Load("tiny", (1, 2), 8, 8, 1)


def serving(campaign: Campaign, deadline: float) -> Results:
    """Tokens per second and the time to the first token for each number of clients."""
    load = REHEARSED if campaign.is_rehearsal else FULL
    arguments = (campaign.device, campaign.precision, load)
    return stream_results(measure, *arguments, deadline=deadline, **campaign.options)


def measure(device: torch.device, precision: str, load: Load) -> Results:
    """The results of serving(), in a process of its own. Engine and server take turns."""
    configure_backend(device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        model, tokenizer = save_random_model(load.shape, 1024, folder)
        generator = make_generator(model.to(device), tokenizer, precision)
        start = time.monotonic()
        flags = ("--device", device.type)
        with start_thinker(folder, precision, max(load.clients), flags) as port:
            yield {"name": "start", "seconds": time.monotonic() - start}
            for n in load.clients:
                yield measure_clients(generator, tokenizer, port, load, n)


def measure_clients(
    generator: Generator, tokenizer: Tokenizer, port: int, load: Load, n_clients: int
) -> dict[str, Any]:
    """One row: medians of the rounds, and the first tokens of all clients in all rounds."""
    prompts = [make_prompt(tokenizer, load.n_prompt, client) for client in range(n_clients)]
    common = {"model": "model", "max_tokens": load.n_new, "temperature": 1.0, **STREAM}
    bodies = [common | {"prompt": text, "seed": number} for number, text in enumerate(prompts)]
    rates: dict[str, list[float]] = {"engine": [], "server": []}
    first_tokens: list[float] = []
    for number in range(load.rounds + 1):
        engine_rate = generate_all(generator, prompts, load.n_new)
        server_rate, firsts = asyncio.run(ask_all(port, bodies))
        if number:  # the first one is a warm-up
            rates["engine"].append(engine_rate)
            rates["server"].append(server_rate)
            first_tokens += firsts
    engine = statistics.median(rates["engine"])
    server = statistics.median(rates["server"])
    return {
        "name": f"{n_clients} clients",
        "clients": n_clients,
        "shape": load.shape,
        "rates": rates,
        "engine_tokens_per_second": engine,
        "server_tokens_per_second": server,
        "server_to_engine": server / engine,
        "first_token_median_s": statistics.median(first_tokens),
        "first_token_p95_s": percentile(first_tokens, 0.95),
        "decoder": generator.decoder.report() or type(generator.decoder).__name__,
    }


def generate_all(generator: Generator, prompts: list[str], n_new: int) -> float:
    """Tokens per second of one batch of the engine, with its prompts."""
    start = time.perf_counter()
    completions = generator.generate(prompts, SamplingParams(n_new, seed=1))
    seconds = time.perf_counter() - start
    return sum(len(completion.token_ids) for completion in completions) / seconds


async def ask_all(port: int, bodies: list[dict[str, Any]]) -> tuple[float, list[float]]:
    """Tokens per second of requests that come together, and the seconds to the first text of
    each."""
    start = time.perf_counter()
    answers = await asyncio.gather(*(stream(port, body) for body in bodies))
    seconds = time.perf_counter() - start
    n_tokens = sum(n for n, _ in answers)
    return n_tokens / seconds, [first for _, first in answers]


def percentile(values: list[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]
