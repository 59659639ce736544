"""Time and memory of attention patterns by sequence length."""

import argparse
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker.benchmarks.environment import measure_seconds, time_alternately
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.model.attention_dispatch import KERNELS, attend
from thinker.model.kernels.linear_attention import linear_attention, random_features
from thinker.model.masks import MaskBuilder
from thinker.model.patterns.pattern import CAUSAL, Pattern, TokenInfo
from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.runtime.backend import configure_backend
from thinker.runtime.device import DTYPES
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import new_figure
from thinker.runtime.process.progress import Progress
from thinker.training.settings.tensor_meter import LiveTensorMeter

PATTERNS = ("full", "window(128)", "dilated(512, 4)", "window(128) | global(16)", "block(128, 2)", "strided(64)",
            "longformer(64, 4, 16)", "bigbird(64, 16, 64, 2)", "topk(64)", "retrieve(64, 2)", "linear(64)")  # fmt: skip
QUANTITIES = {
    "forward": "forward_s",
    "train": "train_s",
    "memory": "memory_bytes",
    "decode": "decode_s",
}
MAX_SECONDS = 20.0  # lengths whose passes could take longer are left out
MIN_SECONDS = 0.1  # each call is repeated for at least this long in each round
N_DECODED = 20  # tokens per timed call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    patterns_help = "patterns, as in model.attention (default: one of each kind)"
    parser.add_argument("--patterns", nargs="*", default=list(PATTERNS), help=patterns_help)
    parser.add_argument(
        "--kernels", nargs="*", default=["auto", "sdpa"], choices=KERNELS, help="attention kernels"
    )
    parser.add_argument(
        "--lengths", default="512,1024,2048,4096,8192", metavar="N,...", help="increasing lengths"
    )
    parser.add_argument("--heads", type=int, default=4, help="number of heads")
    parser.add_argument("--head-dim", type=int, default=64, help="dimension of a head")
    parser.add_argument(
        "--precision",
        default="fp32",
        choices=("fp32", "bf16", "fp16"),
        help="data type of q, k and v",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device to time")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timing rounds; medians are reported"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot times on log axes")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each pattern with each kernel at each length and print a table."""
    lengths = [int(text) for text in arguments.lengths.split(",") if text.isdecimal()]
    if not lengths or sorted(lengths) != lengths:
        raise UserError(
            f"--lengths is {arguments.lengths}; use increasing integers, such as 512,1024"
        )
    configure_backend(torch.device(arguments.device))
    cases = [(pattern, kernel) for pattern in arguments.patterns for kernel in arguments.kernels]
    rows: list[dict[str, Any]] = []
    for pattern, kernel in Progress(cases, desc="patterns"):
        rows += measure(pattern, kernel, lengths, arguments)
    fits = []
    for pattern, kernel in cases:
        case_rows = select(rows, pattern, kernel)
        if len(case_rows) >= 2:
            fits.append({"pattern": pattern, "kernel": kernel, **fit_exponents(case_rows)})
    print_table(rows, fits)
    if arguments.png:
        plot(rows, fits, arguments.png)
    return {"rows": rows, "fits": fits}


def measure(
    text: str, kernel: str, lengths: list[int], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row of measurements per length, for a pattern and a kernel; no rows if the kernel does
    not support it."""
    device, dtype, pattern = (
        torch.device(arguments.device),
        DTYPES[arguments.precision],
        parse_pattern(text),
    )
    if pattern.n_features and kernel != arguments.kernels[0]:
        return []
    passes = []
    for length in lengths:
        shape = (1, arguments.heads, length, arguments.head_dim)
        try:
            passes.append(AttentionPass(pattern, kernel, shape, device, dtype))
        except UserError:
            break  # the kernel does not support the pattern
        if 4 * measure_seconds(passes[-1].train, device) > MAX_SECONDS:
            break  # at twice the length a pass takes up to four times as long
    calls = [call for one_pass in passes for call in (one_pass.forward, one_pass.train)]
    seconds = [
        statistics.median(s)
        for s in time_alternately(calls, arguments.repeats, device, MIN_SECONDS)
    ]
    rows = [
        {
            "pattern": text,
            "kernel": kernel,
            **one_pass.facts,
            "forward_s": forward_s,
            "train_s": train_s,
        }
        for one_pass, forward_s, train_s in zip(passes, seconds[::2], seconds[1::2])
    ]
    if rows and kernel == arguments.kernels[0]:
        for row, decode_s in zip(
            rows, time_decoding(text, [row["length"] for row in rows], arguments)
        ):
            row["decode_s"] = decode_s
    return rows


class AttentionPass:
    """One pattern computed by one kernel at one length.

    `facts` holds the length, the peak memory of its tensors in bytes and the FLOPs of a forward
    pass. Raises UserError if the kernel does not support the pattern.
    """

    def __init__(
        self,
        pattern: Pattern,
        kernel: str,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        B, H, T, D = shape
        self.pattern = pattern
        self.qkv = [
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        ]
        self.grad = torch.randn(shape, device=device, dtype=dtype)
        if pattern.n_features:
            self.features = random_features(pattern.n_features, D, 0).to(device)
            n_keys = (
                2.0 * pattern.n_features
            )  # adding a key and reading the sums costs as much as this many keys
        else:
            tokens = TokenInfo(torch.arange(T, device=device))
            self.mask = MaskBuilder(H, dtype, kernel=kernel).build(
                pattern, tokens, tokens, aligned=True
            )
            # By content, all scores are computed.
            computed = CAUSAL if pattern.by_content else pattern
            n_keys = mean_visible_keys(computed, T)
        self.facts = {
            "length": T, "memory_bytes": self.measure_memory(device), "forward_flops": 4 * B * H * D * T * n_keys
        }  # fmt: skip

    def measure_memory(self, device: torch.device) -> int:
        """Peak bytes of the tensors that a training pass makes."""
        if device.type != "cuda":
            with LiveTensorMeter(device) as meter:
                self.train()
            return meter.peak
        # compiles, and takes workspaces that stay; LiveTensorMeter does not go with Flex on CUDA
        self.train()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        self.train()
        return torch.cuda.max_memory_allocated(device) - before

    def attend(self) -> Tensor:
        """The output, (B, H, T, D)."""
        q, k, v = self.qkv
        if self.pattern.n_features:
            return linear_attention(q * 0.3, k * 0.3, v, self.features)[0]
        return attend(q, k, v, self.mask)

    @torch.no_grad()
    def forward(self) -> None:
        """The forward pass alone."""
        self.attend()

    def train(self) -> None:
        """The forward and the backward pass."""
        torch.autograd.grad(self.attend(), self.qkv, self.grad)


def mean_visible_keys(pattern: Pattern, length: int) -> float:
    """How many keys a query attends to, averaged over all queries of the first two heads."""
    positions, n_visible = torch.arange(length), 0.0
    for rows in positions.split(512):
        for head in range(2):
            queries, keys = (
                TokenInfo(rows[:, None], token_id=rows[:, None]),
                TokenInfo(positions, token_id=positions),
            )
            n_visible += float(pattern(torch.tensor(head), queries, keys).sum())
    return n_visible / 2 / length


def time_decoding(pattern: str, lengths: list[int], arguments: argparse.Namespace) -> list[float]:
    """Median seconds per decoded token after each length, through a model of one layer."""
    device, longest = torch.device(arguments.device), max(lengths)
    config = ThinkerConfig(
        vocab_size=64, d_model=arguments.heads * arguments.head_dim, n_layers=1, n_heads=arguments.heads,
        attention=pattern, max_seq_len=longest + 256,
    )  # fmt: skip
    model = Thinker(config).to(device, DTYPES[arguments.precision]).eval()
    token = torch.zeros(1, 1, dtype=torch.long, device=device)

    def decode(cache: KVCache) -> None:
        for _ in range(N_DECODED):
            model(token, cache=cache)

    with torch.no_grad():
        caches = [model.new_cache(1, length + 256) for length in lengths]
        for cache, length in zip(caches, lengths):
            for chunk in torch.zeros(1, length, dtype=torch.long, device=device).split(512, dim=1):
                model(chunk, cache=cache, last_logits_only=True)
        calls = [partial(decode, cache) for cache in caches]
        return [
            statistics.median(seconds) / N_DECODED
            for seconds in time_alternately(calls, 10, device)
        ]


def select(rows: list[dict[str, Any]], pattern: str, kernel: str) -> list[dict[str, Any]]:
    """The rows of one pattern and kernel, by increasing length."""
    return [row for row in rows if (row["pattern"], row["kernel"]) == (pattern, kernel)]


def fit_exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The exponent of T in each quantity, by least squares on log axes."""
    exponents = {}
    for name, key in QUANTITIES.items():
        points = [(math.log(row["length"]), math.log(row[key])) for row in rows if key in row]
        if points:
            exponents[f"{name}_exponent"] = statistics.linear_regression(*zip(*points)).slope
    return exponents


def print_table(rows: list[dict[str, Any]], fits: list[dict[str, Any]]) -> None:
    """Print the exponents of each pattern and kernel, and the measurements at the greatest
    length."""
    print(
        f"{'':<33} exponents of T in {'at the longest:':>38} {'GFLOP':>7} {'ms':>9} {'ms':>9} {'MB':>8} {'µs':>9}"
    )
    print(
        f"{'pattern':<26} {'kernel':<6} {'forward':>9} {'training':>9} {'memory':>9} {'decoding':>9} {'T':>6} "
        f"{'forward':>9} {'forward':>9} {'training':>9} {'memory':>8} {'per token':>9}"
    )
    for fit in fits:
        cells = [
            f"{fit[key]:9.2f}" if (key := f"{name}_exponent") in fit else " " * 9
            for name in QUANTITIES
        ]
        longest = select(rows, fit["pattern"], fit["kernel"])[-1]
        cells += [f"{longest['length']:>6}", f"{longest['forward_flops'] / 1e9:9.2f}"]
        cells += [f"{1e3 * longest[key]:9.1f}" for key in ("forward_s", "train_s")]
        cells.append(f"{longest['memory_bytes'] / 1e6:8.1f}")
        if "decode_s" in longest:
            cells.append(f"{1e6 * longest['decode_s']:9.0f}")
        print(f"{fit['pattern']:<26} {fit['kernel']:<6} {' '.join(cells)}")


def plot(rows: list[dict[str, Any]], fits: list[dict[str, Any]], path: Path) -> None:
    """Training and decoding time by length: one color per pattern, dashed for a kernel other than
    auto."""
    figure, panels = new_figure(13, 6, columns=2, share=False)
    patterns = list(dict.fromkeys(fit["pattern"] for fit in fits))
    lengths = sorted({row["length"] for row in rows})
    units = [("train", 1e3, "ms forward and backward"), ("decode", 1e6, "µs per token")]
    for axes, (name, scale, unit) in zip(panels, units):
        lines = []
        for fit in fits:
            case_rows = [
                row
                for row in select(rows, fit["pattern"], fit["kernel"])
                if QUANTITIES[name] in row
            ]
            if not case_rows:
                continue
            points = [(row["length"], scale * row[QUANTITIES[name]]) for row in case_rows]
            is_auto = fit["kernel"] == "auto"
            style = {"linestyle": "-" if is_auto else "--", "alpha": 1 if is_auto else 0.5}
            style["color"] = f"C{patterns.index(fit['pattern'])}"
            (line,) = axes.plot(*zip(*points), marker="o", markersize=3, **style)
            if is_auto:
                lines.append(
                    (points[-1][1], line, f"{fit['pattern']}: T^{fit[f'{name}_exponent']:.2f}")
                )
        lines.sort(key=lambda entry: -entry[0])  # from top to bottom, as at the right edge
        axes.set(xscale="log", yscale="log", xlabel="T, tokens", ylabel=unit)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        lowest, highest = axes.get_ylim()
        ticks = [digit * 10**power for power in range(-3, 7) for digit in (1, 2, 5)]
        axes.set_yticks([tick for tick in ticks if lowest < tick < highest])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.legend(
            [line for _, line, _ in lines],
            [label for _, _, label in lines],
            frameon=False,
            fontsize=8,
        )
    others = ", ".join(sorted({fit["kernel"] for fit in fits} - {"auto"}))
    title = f"training (dashed: {others})" if others else "training"
    panels[0].set_title(title, loc="left")
    panels[1].set_title("decoding, one layer", loc="left")
    figure.savefig(path)
