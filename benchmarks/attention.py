"""Time and memory of every form of attention against the length: forward, training, decoding, and their exponents."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from thinker.benchmarks.environment import finish
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.model.attend import KERNELS, attend, look
from thinker.model.kernels.linear_attention import linear_attention, random_features
from thinker.model.patterns import CAUSAL, Linear, Pattern, TokenInfo, parse
from thinker.runtime.device import DTYPES, configure_backend
from thinker.runtime.errors import UserError
from thinker.runtime.plotting import new_figure
from thinker.training.memory_estimate import LiveTensorMeter

FORMS = ("full", "window(128)", "dilated(512, 4)", "window(128) | global(16)", "block(128, 2)", "strided(64)",
         "longformer(64, 4, 16)", "bigbird(64, 16, 64, 2)", "topk(64)", "linear(64)")  # fmt: skip
MEASURED = {"forward": "forward_s", "train": "train_s", "memory": "memory_bytes", "decode": "decode_s"}
TOO_LONG = 20.0  # seconds of a pass beyond which longer ones are left out
LEAST = 0.1  # seconds that a call is repeated for in each round, however short it is
TOKENS = 20  # decoded in a round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--forms", nargs="*", default=list(FORMS), help="patterns as a config spells them")
    parser.add_argument("--kernels", nargs="*", default=["auto", "sdpa"], choices=KERNELS, help="auto, and against it")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=5, help="rounds, in which every length has its turn")
    parser.add_argument("--png", type=Path, help="draw it on log axes")
    parser.add_argument("--out", type=Path, help="append the line of JSON there")


def run(arguments: argparse.Namespace) -> None:
    """Measure each form by each kernel at each length, the lengths in turn; print tables and a line of JSON."""
    lengths = [int(text) for text in arguments.lengths.split(",") if text.isdecimal()]
    if not lengths or sorted(lengths) != lengths:
        raise UserError(f"--lengths {arguments.lengths} must be whole numbers that grow, such as 512,1024")
    device, dtype = torch.device(arguments.device), DTYPES[arguments.precision]
    configure_backend(device)
    rows: list[dict[str, Any]] = []
    cases = [(text, kernel) for text in arguments.forms for kernel in arguments.kernels]
    for text, kernel in tqdm(cases, desc="forms"):
        pattern = parse(text)
        if isinstance(pattern, Linear) and kernel != arguments.kernels[0]:
            continue
        subjects = []
        for length in lengths:
            try:
                subjects.append(
                    Subject(pattern, kernel, (1, arguments.heads, length, arguments.head_dim), device, dtype)
                )
            except UserError:
                break  # this kernel does not compute this form
            if 4 * in_turn([subjects[-1].train], 1, device)[0] > TOO_LONG:
                break  # the next length would take that, at worst
        calls = [call for subject in subjects for call in (subject.forward, subject.train)]
        taken = in_turn(calls, arguments.repeats, device, LEAST)
        mine = [
            {"form": text, "kernel": kernel, **subject.facts, "forward_s": forward_s, "train_s": train_s}
            for subject, forward_s, train_s in zip(subjects, taken[::2], taken[1::2])
        ]
        if kernel == arguments.kernels[0]:
            decoding = decode_seconds(text, [row["length"] for row in mine], arguments, dtype, device)
            mine = [{**row, "decode_s": seconds} for row, seconds in zip(mine, decoding)]
        rows += mine
    fits = [summarise(rows, text, kernel) for text, kernel in cases]
    fits = [fit for fit in fits if fit]
    print(f"{'':<33} exponents of T in {'at the longest:':>38} {'GFLOP':>7} {'ms':>9} {'ms':>9} {'MB':>8} {'µs':>9}")
    print(
        f"{'form':<26} {'kernel':<6} {'forward':>9} {'training':>9} {'memory':>9} {'decoding':>9} {'T':>6} "
        f"{'forward':>9} {'forward':>9} {'training':>9} {'memory':>8} {'a token':>9}"
    )
    for fit in fits:
        shown = " ".join(
            f"{fit[name + '_exponent']:9.2f}" if name + "_exponent" in fit else " " * 9 for name in MEASURED
        )
        last = [row for row in rows if (row["form"], row["kernel"]) == (fit["form"], fit["kernel"])][-1]
        took = f"{1e3 * last['forward_s']:9.1f} {1e3 * last['train_s']:9.1f} {last['memory_bytes'] / 1e6:8.1f}"
        took += f" {1e6 * last['decode_s']:9.0f}" if "decode_s" in last else ""
        flops = last["forward_flops"] / 1e9
        print(f"{fit['form']:<26} {fit['kernel']:<6} {shown} {last['length']:>6} {flops:9.2f} {took}")
    if arguments.png:
        draw(rows, fits, arguments.png)
    finish({"benchmark": "attention", "rows": rows, "fits": fits}, arguments.out)


class Subject:
    """One form by one kernel at one length; `facts`: bytes of its tensors at most, FLOPs that are needed.

    Raises UserError where the kernel does not compute it.
    """

    def __init__(
        self, pattern: Pattern | Linear, kernel: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> None:
        (B, H, T, D), self.pattern = shape, pattern
        self.qkv = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        self.grad = torch.randn(shape, device=device, dtype=dtype)
        if isinstance(pattern, Linear):
            self.features = random_features(pattern.features, D, 0).to(device)
            seen = 2.0 * pattern.features  # a key adds to the sums, a query reads them: what 2m keys would cost
        else:
            places = TokenInfo(torch.arange(T, device=device))
            self.sight = look(pattern, places, places, H, dtype, aligned=True, kernel=kernel)
            seen = mean_keys(CAUSAL if pattern.by_score else pattern, T)  # all scores are needed to choose
        with LiveTensorMeter(device) as alive:
            self.train()
        self.facts = {"length": T, "memory_bytes": alive.peak, "forward_flops": 4 * B * H * D * T * seen}

    def attend(self) -> Tensor:
        """The output (B, H, T, D)."""
        q, k, v = self.qkv
        if isinstance(self.pattern, Linear):
            return linear_attention(q * 0.3, k * 0.3, v, self.features)[0]
        return attend(q, k, v, self.sight)

    @torch.no_grad()
    def forward(self) -> None:
        """The forward pass alone."""
        self.attend()

    def train(self) -> None:
        """Forward and backward."""
        torch.autograd.grad(self.attend(), self.qkv, self.grad)


def mean_keys(pattern: Pattern, length: int) -> float:
    """How many keys a query sees, on the mean over all queries (and heads, of the first two)."""
    at, count = torch.arange(length), 0.0
    for rows in at.split(512):
        for head in range(2):
            seen = pattern(torch.tensor(head), TokenInfo(rows[:, None], token=rows[:, None]), TokenInfo(at, token=at))
            count += float(seen.sum())
    return count / 2 / length


def decode_seconds(
    text: str, lengths: list[int], arguments: argparse.Namespace, dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Median seconds of one more token after each length, through one layer of that form, the lengths in turn."""
    width = arguments.heads * arguments.head_dim
    config = ThinkerConfig(
        vocab_size=64,
        d_model=width,
        n_layers=1,
        n_heads=arguments.heads,
        attention=text,
        max_seq_len=max(lengths) + 256,
    )
    model = Thinker(config).to(device, dtype).eval()
    token = torch.zeros(1, 1, dtype=torch.long, device=device)

    def decode(cache: KVCache) -> None:
        for _ in range(TOKENS):
            model(token, cache=cache)

    with torch.no_grad():
        caches = [model.new_cache(1, length + 256) for length in lengths]
        for cache, length in zip(caches, lengths):
            for chunk in torch.zeros(1, length, dtype=torch.long, device=device).split(512, dim=1):
                model(chunk, cache=cache, last_logits_only=True)
        return [seconds / TOKENS for seconds in in_turn([partial(decode, cache) for cache in caches], 10, device)]


def in_turn(calls: list[Callable[[], Any]], rounds: int, device: torch.device, least: float = 0.0) -> list[float]:
    """Seconds of each call: medians over rounds, in which each has its turn for `least` seconds, after one more round.

    So a slow moment of the machine strikes all lengths, and does not bend the exponent.
    """
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, mine in zip(calls, taken):
            once: list[float] = []
            while not once or sum(once) < least:
                start = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                once.append(time.perf_counter() - start)
            if number:  # the first round warms up
                mine.append(statistics.median(once))
    return [statistics.median(mine) for mine in taken]


def summarise(rows: list[dict[str, Any]], form: str, kernel: str) -> dict[str, Any] | None:
    """The exponent of T in each quantity, by least squares on log axes."""
    mine = [row for row in rows if (row["form"], row["kernel"]) == (form, kernel)]
    if len(mine) < 2:
        return None
    fit: dict[str, Any] = {"form": form, "kernel": kernel}
    for name, key in (
        ("forward", "forward_s"),
        ("train", "train_s"),
        ("memory", "memory_bytes"),
        ("decode", "decode_s"),
    ):
        points = [(math.log(row["length"]), math.log(row[key])) for row in mine if key in row]
        if points:
            fit[f"{name}_exponent"] = statistics.linear_regression(*zip(*points)).slope
    return fit


def draw(rows: list[dict[str, Any]], fits: list[dict[str, Any]], path: Path) -> None:
    """Training and decoding time against the length: a color for each form, dashed where a kernel was forced."""
    figure, panels = new_figure(13, 6, columns=2, share=False)
    forms = list(dict.fromkeys(fit["form"] for fit in fits))
    lengths = sorted({row["length"] for row in rows})
    for axes, name, scale, unit in zip(
        panels, ("train", "decode"), (1e3, 1e6), ("ms forward and backward", "µs a token")
    ):
        lines = []
        for fit in fits:
            mine = [row for row in rows if (row["form"], row["kernel"]) == (fit["form"], fit["kernel"])]
            points = [(row["length"], scale * row[MEASURED[name]]) for row in mine if MEASURED[name] in row]
            if not points:
                continue
            forced = fit["kernel"] != "auto"
            (line,) = axes.plot(*zip(*points), marker="o", markersize=3, color=f"C{forms.index(fit['form'])}",
                                linestyle="--" if forced else "-", alpha=0.5 if forced else 1)  # fmt: skip
            if not forced:
                lines.append((points[-1][1], line, f"{fit['form']}: T^{fit[f'{name}_exponent']:.2f}"))
        lines.sort(key=lambda one: -one[0])  # as they lie above each other at the right
        axes.set(xscale="log", yscale="log", xlabel="T, tokens", ylabel=unit)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        lowest, highest = axes.get_ylim()
        ticks = [one * 10**power for power in range(-3, 7) for one in (1, 2, 5)]
        axes.set_yticks([tick for tick in ticks if lowest < tick < highest])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.legend([line for _, line, _ in lines], [label for _, _, label in lines], frameon=False, fontsize=8)
    others = sorted({fit["kernel"] for fit in fits} - {"auto"})
    panels[0].set_title(f"training{': dashed by ' + ', '.join(others) if others else ''}", loc="left")
    panels[1].set_title("decoding, one layer", loc="left")
    figure.savefig(path)
