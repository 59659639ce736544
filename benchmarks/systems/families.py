"""Published shapes with random weights: loading, its memory and decoding, compared with
transformers."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from thinker.benchmarks.contenders import Worker
from thinker.benchmarks.systems.published_shapes import PUBLISHED, Published, small_config
from thinker.runtime.errors import UserError

SIDES = ("thinker", "transformers")
LOAD_LIMIT = 1.2  # times transformers' seconds
MEMORY_LIMIT = 1.1  # times the file
SPEED_LIMIT = 2.0  # times transformers' tokens/s, where kernels compute the block
TIMEOUT = 1800.0  # seconds that a process may take
N_PROMPT = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--only", nargs="+", choices=PUBLISHED, metavar="NAME", help="only these models"
    )
    parser.add_argument("--new", type=int, default=48, help="tokens to generate")
    parser.add_argument(
        "--rounds", type=int, default=3, help="processes per side; medians are reported"
    )
    parser.add_argument("--folder", type=Path, help="for the weights, one model at a time")
    parser.add_argument(
        "--small", action="store_true", help="one layer and 300 tokens, to try the benchmark"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every model in fresh processes that take turns, and print a table."""
    if arguments.new < 2 or arguments.rounds < 1:
        raise UserError("--new or --rounds is too small; use at least --new 2 --rounds 1")
    rows = []
    print(f"{'':16} {'GB':>6}  load, s (ratio)     memory / file    tokens/s (ratio)     decoder")
    names = list(PUBLISHED)
    if arguments.only is not None:
        names = arguments.only
    for name in names:
        published = PUBLISHED[name]
        if arguments.small:
            published = published._replace(config=small_config(published), note="small")
        row = {"name": name, "model_type": published.model_type, "note": published.note}
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            row |= _measure(published, Path(folder), arguments.rounds, arguments.new)
        rows.append(row)
        print(_line(row), flush=True)
    settings = {"new": arguments.new, "prompt": N_PROMPT, "rounds": arguments.rounds}
    return settings | {"transformers": version("transformers"), "rows": rows}


def _line(row: dict[str, Any]) -> str:
    ours, theirs = (row[side] for side in SIDES)
    decoder = "plain"
    if row["native"]:
        decoder = "native kernels"
    elif row["notice"]:
        decoder = row["notice"]
    return (
        f"{row['name']:16} {row['file_bytes'] / 1e9:6.2f}  "
        f"{ours['load_s']:5.2f} {theirs['load_s']:5.2f} ({row['load_ratio']:.2f})  "
        f"{row['memory_ratio']:5.2f} {theirs['memory_bytes'] / row['file_bytes']:5.2f}     "
        f"{ours['tokens_per_second']:6.1f} {theirs['tokens_per_second']:6.1f} "
        f"({row['speed_ratio']:.2f})  {decoder}"
    )


def _measure(published: Published, folder: Path, rounds: int, n_new: int) -> dict[str, Any]:
    """Medians of a model, which is written twice: as it is, and with one layer for a warm-up."""
    model = folder / "model"
    small = folder / "small"
    _call(_write, published.model_type, published.config, model)
    _call(_write, published.model_type, small_config(published), small)
    file_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    measured: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            measured[side].append(_one_process(side, model, small, n_new))
    row: dict[str, Any] = {"file_bytes": file_bytes}
    for side in SIDES:
        row[side] = {}
        for key in ("load_s", "memory_bytes", "tokens_per_second"):
            row[side][key] = statistics.median(each[key] for each in measured[side])
    ours, theirs = (row[side] for side in SIDES)
    row["native"] = measured["thinker"][0]["native"]
    row["notice"] = measured["thinker"][0]["notice"]
    row["load_ratio"] = ours["load_s"] / theirs["load_s"]
    row["memory_ratio"] = ours["memory_bytes"] / file_bytes
    row["speed_ratio"] = ours["tokens_per_second"] / theirs["tokens_per_second"]
    row["missed"] = _missed(row)
    return row


def _missed(row: dict[str, Any]) -> list[str]:
    """The limits that a model misses."""
    missed = []
    if row["load_ratio"] > LOAD_LIMIT:
        missed.append("loading")
    if row["memory_ratio"] > MEMORY_LIMIT:
        missed.append("memory")
    if row["native"] and row["speed_ratio"] < SPEED_LIMIT:
        missed.append("decoding")
    return missed


def _call(function: Callable[..., None], *args: Any) -> Any:
    """What a function sends from a process of its own."""
    worker = Worker(function, *args, is_fresh=True)
    try:
        return worker.receive(time.monotonic() + TIMEOUT)
    finally:
        worker.kill()


def _write(connection: Connection, model_type: str, config: dict[str, Any], folder: Path) -> None:
    """Write a model with the random weights of transformers in fp32."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    no_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    settings = transformers.AutoConfig.for_model(model_type, **config, **no_ids)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.save_pretrained(folder)
    connection.send((None, "written"))


def _one_process(side: str, model: Path, small: Path, n_new: int) -> dict[str, Any]:
    """Load and decode once in a fresh process, and watch its memory while it loads."""
    worker = Worker(_work, side, model, small, n_new, is_fresh=True)
    deadline = time.monotonic() + TIMEOUT
    try:
        worker.receive(deadline)  # the imports are done
        before = anonymous_bytes(worker.process.pid)
        peak = before
        worker.connection.send(None)
        while not worker.connection.poll(0.002):
            peak = max(peak, anonymous_bytes(worker.process.pid))
        result = worker.receive(deadline)
        peak = max(peak, anonymous_bytes(worker.process.pid))
        worker.connection.send(None)
        result |= worker.receive(deadline)
    finally:
        worker.kill()
    return result | {"memory_bytes": peak - before}


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs. Raises UserError except on Linux."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError as error:
        raise UserError("this benchmark reads /proc of Linux") from error
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0  # the process has ended


def _work(connection: Connection, side: str, model: Path, small: Path, n_new: int) -> None:
    """One side in its process: import, load and decode a small model; load; decode."""
    sides = {"thinker": (_load, _generate), "transformers": (_load_there, _generate_there)}
    load, generate = sides[side]
    generate(load(small), 2)  # for modules that are imported on first use
    connection.send((None, "ready"))
    connection.recv()
    start = time.perf_counter()
    loaded = load(model)
    connection.send((None, {"load_s": time.perf_counter() - start}))
    connection.recv()
    connection.send((None, generate(loaded, n_new)))
    connection.recv()  # until it is killed


def _load(folder: Path) -> Any:
    from thinker.interop import load

    return load(folder)[0]


def _load_there(folder: Path) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _generate(model: Any, n_new: int) -> dict[str, Any]:
    """Tokens per second after the first token, and which decoder computes them."""
    from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
    from thinker.generation import Generator, SamplingParams
    from thinker.generation.decoders.native_decoder import NativeDecoder

    tokenizer = make_tokenizer("byte", [])
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_id] = 0  # never the likeliest, so no text ends early
    generator = Generator(model, tokenizer)
    prompt = list(range(1, N_PROMPT + 1))

    def generate(count: int) -> None:
        params = SamplingParams(max_new_tokens=count, temperature=0)
        [completion] = generator.generate([""], params, [prompt])
        assert len(completion.token_ids) == count

    rate = _tokens_per_second(generate, n_new)
    decoder = generator.decoder
    # It calls the model if it does not know a part of it.
    is_native = isinstance(decoder, NativeDecoder) and decoder.is_supported
    return {"tokens_per_second": rate, "native": is_native, "notice": decoder.kernel_problem}


def _generate_there(model: Any, n_new: int) -> dict[str, Any]:
    """The same with generate() of transformers."""
    tokens = torch.arange(1, N_PROMPT + 1)[None]

    def generate(count: int) -> None:
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert output.shape[1] == N_PROMPT + count

    return {"tokens_per_second": _tokens_per_second(generate, n_new)}


def _tokens_per_second(generate: Callable[[int], None], n_new: int) -> float:
    """The rate of the tokens after the first, measured after a warm-up."""
    generate(2)
    start = time.perf_counter()
    generate(1)
    first = time.perf_counter() - start
    start = time.perf_counter()
    generate(n_new)
    return (n_new - 1) / (time.perf_counter() - start - first)
