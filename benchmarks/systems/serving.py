"""Throughput of the server with many clients, compared with the engine alone and with `transformers
serve`."""

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from thinker.benchmarks.speed.decode import BITS, SHAPES, make_random_model
from thinker.benchmarks.vocabulary import make_vocabulary
from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.interop.huggingface import save_pretrained
from thinker.model import Thinker
from thinker.runtime.device import DTYPES
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
LONG_PROMPT = 900  # tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--shape", default="110m", choices=SHAPES, help="size of the model")
    parser.add_argument(
        "--precision", default="fp32", choices=("fp32", "bf16", *BITS), help="of the weights"
    )
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[8, 32], metavar="N", help="clients at once"
    )
    parser.add_argument("--prompt", type=int, default=32, help="tokens in each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate for each prompt")
    parser.add_argument(
        "--repeats", type=int, default=3, help="rounds in which the sides take turns"
    )
    peer_help = "also measure `COMMAND serve`, the transformers command of an environment with its serving extra"
    parser.add_argument("--transformers", metavar="COMMAND", help=peer_help)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides in turns, and print tokens per second and ratios."""
    if min(arguments.prompt, arguments.new, arguments.repeats, *arguments.clients) < 1:
        raise UserError("--prompt, --new, --repeats and --clients need at least 1")
    max_len = max(1024, arguments.prompt + arguments.new)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name) / "model"
        model, tokenizer = save_random_model(arguments.shape, max_len, folder)
        port = stack.enter_context(
            start_thinker(folder, arguments.precision, max(arguments.clients))
        )
        peer = None
        if arguments.transformers is not None:
            peer = stack.enter_context(
                start_transformers(arguments.transformers, folder, arguments.precision)
            )
        generator = make_generator(model, tokenizer, arguments.precision)
        rows = [
            measure_clients(arguments, generator, tokenizer, port, peer, str(folder), n)
            for n in arguments.clients
        ]
        first_token = measure_first_token(tokenizer, port, 2 * arguments.repeats + 1)
    print(
        "first token of a short prompt: {alone_ms:.0f} ms alone, {beside_ms:.0f} ms while {long_prompt} tokens are "
        "read: {steps:.1f} steps of {step_ms:.0f} ms later".format(**first_token)
    )
    names = ("shape", "precision", "prompt", "new")
    return {
        **{name: getattr(arguments, name) for name in names},
        "rows": rows,
        "first_token": first_token,
    }


def save_random_model(shape: str, max_len: int, folder: Path) -> tuple[Thinker, Tokenizer]:
    """Save a random model of decode.SHAPES and its tokenizer as a new Hugging Face folder."""
    tokenizer = make_vocabulary(SHAPES[shape]["vocab_size"])
    model = make_random_model(shape, max_len, torch.device("cpu"))
    folder.mkdir()
    save_pretrained(model, tokenizer, folder)
    tokenizer_conversion.write(tokenizer, folder, max_len, model.config.vocab_size)
    return model, tokenizer


def make_generator(model: Thinker, tokenizer: Tokenizer, precision: str) -> Generator:
    """The engine, as the server makes it."""
    return Generator(
        model, tokenizer, dtype=DTYPES.get(precision, torch.float32), bits=BITS.get(precision)
    )


@contextlib.contextmanager
def start_thinker(
    folder: Path, precision: str, max_batch: int, more: Sequence[str] = ()
) -> Iterator[int]:
    """Start our server, with `more` flags; yields its port."""
    port = free_port()
    flags = ["--bits", str(BITS[precision])] if precision in BITS else ["--precision", precision]
    command = [sys.executable, "-m", "thinker.serving", str(folder), *flags, *more]
    with start(
        [*command, "--max-batch", str(max_batch), "--port", str(port)],
        f"http://127.0.0.1:{port}/health",
    ):
        yield port


@contextlib.contextmanager
def start_transformers(command: str, folder: Path, precision: str) -> Iterator[int]:
    """Start `transformers serve` with continuous batching; yields its port."""
    dtypes = {"fp32": "float32", "bf16": "bfloat16"}
    if precision not in dtypes:
        raise UserError(
            f"--transformers does not support --precision {precision}; use fp32 or bf16"
        )
    port = free_port()
    flags = [
        "--continuous-batching",
        "--device",
        "cpu",
        "--dtype",
        dtypes[precision],
        "--port",
        str(port),
    ]
    with start([command, "serve", str(folder), *flags], f"http://localhost:{port}/health"):
        yield port


@contextlib.contextmanager
def start(
    command: list[str],
    health: str,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[None]:
    """Run a server in a folder until the block ends; waits until it answers."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    )
    try:
        while True:
            if process.poll() is not None:
                raise UserError(
                    f"{command[0]} ended: {process.stderr.read().strip().splitlines()[-1:]}"
                )
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(health).read()
                break
            time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def measure_clients(
    arguments: argparse.Namespace, generator: Generator, tokenizer: Tokenizer, port: int, peer: int | None, path: str,
    n_clients: int,
) -> dict[str, Any]:  # fmt: skip
    """Tokens per second of every side with this many clients, each of which streams one answer."""
    prompts = [make_prompt(tokenizer, arguments.prompt, client) for client in range(n_clients)]

    def bodies(model_name: str) -> list[dict[str, Any]]:
        common = {"model": model_name, "max_tokens": arguments.new, "temperature": 1.0, **STREAM}
        return [
            common | {"prompt": prompt, "seed": number} for number, prompt in enumerate(prompts)
        ]

    def engine() -> float:
        params = SamplingParams(arguments.new, seed=1)
        start = time.perf_counter()
        tokens = [generator.encode(prompt) for prompt in prompts]
        completions = generator.generate(prompts, params, tokens)
        return sum(len(one.token_ids) for one in completions) / (time.perf_counter() - start)

    sides: dict[str, Callable[[], float]] = {
        "engine": engine,
        "server": lambda: asyncio.run(stream_all(port, bodies("model"))),
    }
    if peer is not None:
        sides["transformers"] = lambda: asyncio.run(stream_all(peer, bodies(path)))
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in Progress(range(arguments.repeats + 1), desc=f"{n_clients} clients", leave=False):
        for name, side in sides.items():
            rate = side()
            if turn:  # the first one is a warm-up
                rates[name].append(rate)
    row: dict[str, Any] = {"clients": n_clients, "rates": rates}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        row[f"{name}_tokens_per_second"] = rate
    shown = "  ".join(f"{name} {rate:.0f}" for name, rate in medians.items())
    print(
        f"{n_clients} clients, tokens/s: {shown}; server / engine {medians['server'] / medians['engine']:.2f}"
    )
    return row


def prompt_ids(tokenizer: Tokenizer, n_tokens: int, number: int) -> list[int]:
    """The ids of n tokens, different for every number."""
    return [
        (97 * number + 31 * i + 300) % (tokenizer.vocab_size - 400) + 300 for i in range(n_tokens)
    ]


def make_prompt(tokenizer: Tokenizer, n_tokens: int, number: int) -> str:
    """A text of n tokens, different for every number."""
    ids = prompt_ids(tokenizer, 2 * n_tokens, number)
    text, longest = "", 0
    for end in range(1, len(ids)):
        candidate = tokenizer.decode(ids[:end])
        length = len(tokenizer.encode(candidate))
        if longest < length <= n_tokens:
            text, longest = candidate, length
    return text


async def stream_all(port: int, bodies: list[dict[str, Any]]) -> float:
    """Tokens per second of streams that begin together."""
    start = time.perf_counter()
    answers = await asyncio.gather(*(stream(port, body) for body in bodies))
    return sum(n_tokens for n_tokens, _ in answers) / (time.perf_counter() - start)


async def stream(port: int, body: dict[str, Any]) -> tuple[int, float]:
    """Read a stream of events. Returns the number of sampled tokens, and the seconds until the
    first text."""
    content, start, first = json.dumps(body).encode(), time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    last = b""
    async for line in reader:
        if line.startswith(b"data: {"):
            first, last = first or time.perf_counter() - start, line
    writer.close()
    return json.loads(last[6:])["usage"]["completion_tokens"], first


def measure_first_token(tokenizer: Tokenizer, port: int, repeats: int) -> dict[str, Any]:
    """Time to the first token of a short prompt, alone and while a long prompt is being read;
    medians."""
    numbers = iter(range(1000, 2000))
    body = {"model": "model", "max_tokens": 1, **STREAM}

    def ask(n_tokens: int) -> dict[str, Any]:
        return body | {"prompt": prompt_ids(tokenizer, n_tokens, next(numbers))}

    async def beside(long: dict[str, Any], short: dict[str, Any], wait_s: float) -> float:
        reading = asyncio.ensure_future(stream(port, long))
        await asyncio.sleep(wait_s)  # until it is being read
        _, first = await stream(port, short)
        await reading
        return first

    alone, both, long_alone = [], [], []
    for _ in Progress(range(repeats), desc="first token", leave=False):
        alone.append(asyncio.run(stream(port, ask(16)))[1])
        long_alone.append(asyncio.run(stream(port, ask(LONG_PROMPT)))[1])
        both.append(asyncio.run(beside(ask(LONG_PROMPT), ask(16), long_alone[-1] / 4)))
    step = statistics.median(long_alone) / (LONG_PROMPT / 64)
    alone_s, both_s = statistics.median(alone), statistics.median(both)
    return {
        "alone_ms": 1000 * alone_s, "beside_ms": 1000 * both_s, "long_prompt": LONG_PROMPT, "step_ms": 1000 * step,
        "steps": (both_s - alone_s) / step,
    }  # fmt: skip
