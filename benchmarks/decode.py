"""Decoding beside transformers on the same weights, and what a longer cache costs."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from thinker.benchmarks.baselines import as_transformers
from thinker.benchmarks.environment import finish, read_bandwidth
from thinker.data.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.inference_model import matrix_bytes, prepare_for_inference
from thinker.generation.sink_cache import SinkCache
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.device import DTYPES, choose_device
from thinker.runtime.errors import UserError
from thinker.runtime.plotting import BLUE, GREY, ORANGE, new_figure

SHAPES = {
    "tiny": {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 128},
    "110m": {"vocab_size": 32000, "d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 2048},
    "124m": {"vocab_size": 50304, "d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 2048},
    "1.1b": {"vocab_size": 32000, "d_model": 2048, "n_layers": 22, "n_heads": 32, "n_kv_heads": 4, "d_ff": 5632},
}
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass
class Subject:
    """One way to decode: run(n) makes n tokens a row from the prompt."""

    name: str
    batch: int
    step_bytes: int  # read by a step: matrices once, keys and values of each row at the middle of the run
    run: Callable[[int], Any]
    first: list[float] = field(default_factory=list)  # seconds to the first token
    rest: list[float] = field(default_factory=list)  # seconds for the others

    def row(self, new: int, prompt: int, bandwidth: float) -> dict[str, Any]:
        """Medians of what was measured."""
        first, rest = statistics.median(self.first), statistics.median(self.rest)
        step = rest / (new - 1)
        return {
            "name": self.name,
            "batch": self.batch,
            "first_token_ms": 1000 * first,
            "prefill_tokens_per_second": self.batch * prompt / first,
            "decode_tokens_per_second": self.batch / step,
            "step_bytes": self.step_bytes,
            "share_of_bandwidth": self.step_bytes / step / bandwidth,
        }


def make_thinker(shape: str, max_seq_len: int, device: torch.device) -> Thinker:
    """Random weights of one of SHAPES, in the LLaMA form (without QK-norm)."""
    with device:
        model = Thinker(ThinkerConfig(**SHAPES[shape], max_seq_len=max_seq_len, qk_norm=False)).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02, generator=generator)
        model.lm_head.weight[make_tokenizer("byte", []).eos_id] = 0  # never the likeliest: no row ends early
    return model


def ours(model: Thinker, name: str, batch: int, prompt: int, new: int, **how: Any) -> Subject:
    """Our Generator as a person calls it, greedy."""
    tokenizer = make_tokenizer("byte", [])
    generator = Generator(model, tokenizer, **how)
    text = ("The quick brown fox. " * prompt)[: prompt - 1]  # and the BOS token

    def run(count: int) -> None:
        params = SamplingParams(max_new_tokens=count, temperature=0)
        # Different first letters: equal prompts would share one prefill.
        done = generator.generate([chr(65 + row) + text[1:] for row in range(batch)], params)
        assert all(len(completion.token_ids) == count for completion in done)

    kv = 2 * model.config.n_layers * model.config.n_kv_heads * model.config.head_dim
    element = torch.empty((), dtype=how.get("dtype", torch.float32)).element_size()
    return Subject(name, batch, matrix_bytes(generator.model) + batch * (prompt + new // 2) * kv * element, run)


def theirs(model: Thinker, name: str, batch: int, prompt: int, new: int, dtype: torch.dtype, static: bool) -> Subject:
    """transformers' generate() on the same weights, greedy."""
    reference = as_transformers(model).to(model.device, dtype)
    tokens = torch.randint(0, 256, (batch, prompt), device=model.device)
    how = {"cache_implementation": "static"} if static else {}  # which generate() then compiles by itself on a GPU

    def run(count: int) -> None:
        out = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=0, eos_token_id=None, **how,
        )  # fmt: skip
        assert out.shape[1] == prompt + count

    kv = 2 * model.config.n_layers * model.config.n_kv_heads * model.config.head_dim
    element = torch.empty((), dtype=dtype).element_size()
    matrices = matrix_bytes(model) // 4 * element
    return Subject(name, batch, matrices + batch * (prompt + new // 2) * kv * element, run)


def subjects(model: Thinker, prompt: int, new: int, names: list[str]) -> list[Subject]:
    """All that are to be measured; a name is [transformers-]PRECISION[-compiled][@BATCH]."""
    made = []
    for name in names:
        how, _, batch = name.partition("@")
        words = how.split("-")
        is_peer, compiled = words[0] == "transformers", words[-1] == "compiled"
        precision = words[1 if is_peer else 0]
        rows = int(batch or 1)
        if precision not in [*DTYPES, "int8"] or (is_peer and precision == "int8"):
            raise UserError(f"{name} is nothing to measure; such as transformers-fp32, fp32-compiled, int8 or bf16@8")
        if is_peer:
            made.append(theirs(model, how, rows, prompt, new, DTYPES[precision], compiled))
        elif precision == "int8":
            dtype = torch.bfloat16 if model.device.type == "cuda" else torch.float32
            made.append(ours(model, how, rows, prompt, new, int8=True, compile=compiled, dtype=dtype))
        else:
            made.append(ours(model, how, rows, prompt, new, dtype=DTYPES[precision], compile=compiled))
    return made


def measure(things: list[Subject], new: int, repeats: int, device: torch.device) -> float:
    """Time everything in turns, so that all see the same hours of the machine; returns the median bandwidth."""
    bandwidths = []

    def seconds(run: Callable[[int], None], count: int) -> float:
        synchronise(device)
        start = time.perf_counter()
        run(count)
        synchronise(device)
        return time.perf_counter() - start

    for subject in tqdm(things, desc="warming up", leave=False):
        subject.run(min(8, new))
    for _ in tqdm(range(repeats), desc="measuring", leave=False):
        bandwidths.append(read_bandwidth(device))
        for subject in things:
            first = seconds(subject.run, 1)
            subject.first.append(first)
            subject.rest.append(seconds(subject.run, new) - first)
    return statistics.median(bandwidths)


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def lengths(model: Thinker, window: int, repeats: int) -> dict[str, Any]:
    """Milliseconds for one more token at each cached length, with a full and with a rolling cache."""
    snapshot = prepare_for_inference(model)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    caches = {}
    for length in LENGTHS:
        full = snapshot.new_cache(1, max(LENGTHS) + 1)
        rolling = SinkCache(snapshot, 1, window, 4)
        for cache in (full, rolling):
            for layer in cache.layers:
                layer.keys.normal_()
                layer.values.normal_()
        caches[length] = (full, rolling)
    times: dict[tuple[int, int], list[float]] = {(length, kind): [] for length in LENGTHS for kind in (0, 1)}
    bandwidths = []
    for _ in tqdm(range(repeats), desc="lengths", leave=False):
        bandwidths.append(read_bandwidth(model.device))
        for length, kind in times:
            cache = caches[length][kind]
            for turn in range(4):  # as in decoding, one step after the other on one cache; the first finds it cold
                cache.lengths = [length - 1]
                synchronise(model.device)
                start = time.perf_counter()
                snapshot(token, cache=cache)
                synchronise(model.device)
                if turn:
                    times[length, kind].append(time.perf_counter() - start)
    bandwidth = statistics.median(bandwidths)
    a_position = caches[64][0].nbytes / (max(LENGTHS) + 1)
    rows = []
    for length in LENGTHS:
        full, rolling = (statistics.median(times[length, kind]) for kind in (0, 1))
        rows.append(
            {
                "length": length,
                "full_ms": 1000 * full,
                "window_ms": 1000 * rolling,
                "bytes_ms": 1000 * (length - 64) * a_position / bandwidth,
                "full_cache_bytes": int(length * a_position),
                "window_cache_bytes": caches[length][1].nbytes,
            }
        )
    for row in rows[1:]:
        row["ratio"] = (row["full_ms"] - rows[0]["full_ms"]) / row["bytes_ms"]
    return {"window": window, "bandwidth": bandwidth, "lengths": rows}


def draw_lengths(measured: dict[str, Any], path: Path) -> None:
    """The time of a token by what is cached, beside what the bytes cost."""
    rows = measured["lengths"]
    at = [row["length"] for row in rows]
    figure, (axes,) = new_figure(8, 4.5)
    axes.plot(at, [row["full_ms"] for row in rows], color=BLUE, marker="o", label="every key")
    axes.plot(
        at,
        [row["window_ms"] for row in rows],
        color=ORANGE,
        marker="o",
        label=f"window {measured['window']}, 4 sinks",
    )
    base = rows[0]["full_ms"]
    axes.plot(at, [base + row["bytes_ms"] for row in rows], color=GREY, linestyle="--", label="what the bytes cost")
    axes.plot(at, [base + 1.3 * row["bytes_ms"] for row in rows], color=GREY, linestyle=":", label="1.3 times that")
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(length) for length in at])
    axes.set_ylim(0)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("milliseconds for one more")
    axes.legend(frameon=False)
    figure.savefig(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `scripts/benchmark.py decode`."""
    parser.add_argument("--shape", default="110m", choices=SHAPES)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt (default 32)")
    parser.add_argument("--new", type=int, default=128, help="tokens to make (default 128)")
    parser.add_argument("--repeats", type=int, default=5, help="the medians are of so many (default 5)")
    parser.add_argument(
        "--subjects", help="such as transformers-fp32,fp32,fp32-compiled,int8,bf16@8 (default: what suits the device)"
    )
    parser.add_argument("--lengths", action="store_true", help="instead: the time of a token at 64 to 4096 cached ones")
    parser.add_argument("--window", type=int, default=256, help="with --lengths: of the rolling cache beside it")
    parser.add_argument("--png", type=Path, help="with --lengths: draw it")
    parser.add_argument("--out", type=Path, help="append the line of JSON there")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print a table, end with one line of JSON."""
    device = choose_device(arguments.device)
    if arguments.new < 2 or arguments.prompt < 2 or arguments.repeats < 1:
        raise UserError("--new and --prompt must be at least 2, --repeats at least 1")
    result: dict[str, Any] = {"benchmark": "decode", "shape": arguments.shape}
    if arguments.lengths:
        model = make_thinker(arguments.shape, max(LENGTHS) + 1, device)
        result |= lengths(model, arguments.window, arguments.repeats)
        print("cached   full ms  window ms  bytes ms   ratio")
        for row in result["lengths"]:
            print(
                f"{row['length']:6} {row['full_ms']:9.2f} {row['window_ms']:10.2f} {row['bytes_ms']:9.2f} "
                f"{row.get('ratio', float('nan')):7.2f}"
            )
        if arguments.png:
            draw_lengths(result, arguments.png)
    else:
        default = "transformers-fp32,fp32,fp32-compiled,fp32@8,bf16,bf16@8,int8,int8-compiled,int8@8"
        if device.type == "cuda":
            default = "transformers-bf16,transformers-bf16-compiled,bf16,bf16-compiled,int8-compiled"
        model = make_thinker(arguments.shape, arguments.prompt + arguments.new, device)
        names = (arguments.subjects or default).split(",")
        things = subjects(model, arguments.prompt, arguments.new, names)
        bandwidth = measure(things, arguments.new, arguments.repeats, device)
        rows = [subject.row(arguments.new, arguments.prompt, bandwidth) for subject in things]
        print(f"{'':26} batch  first ms  prefill/s  decode/s  MB a step  of bandwidth")
        for row in rows:
            print(
                f"{row['name']:26} {row['batch']:5} {row['first_token_ms']:9.1f} "
                f"{row['prefill_tokens_per_second']:10.0f} {row['decode_tokens_per_second']:9.1f} "
                f"{row['step_bytes'] / 1e6:10.1f} {row['share_of_bandwidth']:13.2f}"
            )
        print(f"measured bandwidth: {bandwidth / 1e9:.1f} GB/s")
        result |= {"prompt": arguments.prompt, "new": arguments.new, "bandwidth": bandwidth, "rows": rows}
    finish(result, arguments.out)
