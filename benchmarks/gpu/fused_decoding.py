"""GPU stage: decoding of single texts with fused kernels, against the limit of the memory.

The model has random weights. Triton is imported where a kernel is launched, so only in the stage's
process; a rehearsal runs in Triton's interpreter.
"""

import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from thinker.benchmarks.contenders import stream
from thinker.benchmarks.environment import measure_bandwidth, measure_seconds
from thinker.benchmarks.gpu.gpu_training import Campaign, Results
from thinker.runtime.backend import device_name

EPS = 1e-6
MAX_ERROR = 0.05  # of the logits, relative; bf16 gives 0.012 to 0.018
NO_TRITON = "not run: Triton is not installed"
NO_TIME = "not run: too little time was left"
PRODUCTS = ("qkv", "out", "gate", "down")


class Shape(NamedTuple):
    """Sizes of a model, and of its cache: places, and those in use with the next token."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    vocab_size: int
    capacity: int
    length: int

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_heads


SHAPES = {
    "124m": Shape(12, 768, 12, 12, 2048, 50304, 256, 160),
    "1.1b": Shape(22, 2048, 32, 4, 5632, 32000, 256, 160),
    "tiny": Shape(1, 64, 4, 2, 96, 100, 32, 9),
}


class Case(NamedTuple):
    """A model to measure, the type of its weights, and the seconds that this takes with
    compiling."""

    shape: str
    weights: str
    seconds: float


CASES = (
    Case("124m", "bf16", 14.0),
    Case("1.1b", "bf16", 18.0),
    Case("1.1b", "int8", 14.0),
    Case("124m", "int8", 10.0),
)
REHEARSED_CASES = (Case("tiny", "fp32", 0.0), Case("tiny", "int8", 0.0))
ATTENTION_SECONDS = 3.0


class Tiles(NamedTuple):
    """How a kernel is cut. Attention: keys at once, and the programs that share a head."""

    rows: int  # outputs of a program, or pairs of them
    block: int  # columns at once
    n_warps: int


Choice = dict[str, Tiles]  # by kernel
TRIALS = {  # by the type of the weights
    "bf16": {
        "qkv": (Tiles(4, 1024, 4), Tiles(2, 1024, 4), Tiles(8, 1024, 8), Tiles(4, 256, 4)),
        "attention": (Tiles(64, 2, 4), Tiles(64, 1, 4), Tiles(32, 4, 2), Tiles(64, 4, 4)),
        "out": (Tiles(4, 1024, 4), Tiles(2, 1024, 4), Tiles(8, 1024, 8), Tiles(4, 256, 4)),
        "gate": (Tiles(8, 1024, 4), Tiles(4, 1024, 4), Tiles(8, 1024, 8), Tiles(8, 256, 4)),
        "down": (Tiles(4, 2048, 4), Tiles(2, 2048, 4), Tiles(4, 1024, 4), Tiles(4, 2048, 8)),
        "head": (Tiles(16, 1024, 4), Tiles(8, 1024, 4), Tiles(16, 256, 4)),
    },
    "int8": {  # a thread that reads 16 bytes has twice as many columns
        "qkv": (Tiles(4, 1024, 4), Tiles(8, 1024, 8)),
        "attention": (Tiles(64, 4, 4), Tiles(64, 1, 4)),
        "out": (Tiles(4, 1024, 4), Tiles(8, 1024, 8)),
        "gate": (Tiles(8, 1024, 4), Tiles(8, 512, 4)),
        "down": (Tiles(4, 2048, 4), Tiles(4, 1024, 4)),
        "head": (Tiles(16, 512, 4), Tiles(16, 1024, 4)),
    },
}
REHEARSED_TRIALS = {  # with rests, and with more shares than keys
    "qkv": (Tiles(4, 64, 4), Tiles(4, 32, 4)),
    "attention": (Tiles(4, 2, 4), Tiles(4, 1, 4), Tiles(4, 4, 4)),
    "out": (Tiles(4, 64, 4), Tiles(4, 16, 4)),
    "gate": (Tiles(8, 64, 4), Tiles(8, 32, 4)),
    "down": (Tiles(4, 128, 4), Tiles(4, 64, 4)),
    "head": (Tiles(16, 64, 4), Tiles(32, 32, 4)),
}


class Launch(NamedTuple):
    """A kernel with its arguments; Triton calls the number of programs a grid."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict[str, Any]

    def run(self) -> None:
        """Start the kernel."""
        self.kernel[self.grid](*self.arguments, **self.constants)


class FusedModel:
    """Random weights, the buffers of a step, and the step as launches of kernels.

    Weights have the type `dtype`, or are int8 with a scale per row. `dtype` is fp32 in the
    interpreter where heads share keys: its tl.dot multiplies the bits of bf16.
    """

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, is_int8: bool
    ) -> None:
        self.shape, self.device, self.dtype, self.is_int8 = shape, device, dtype, is_int8
        self.random = torch.Generator(device).manual_seed(0)
        self.temperature = 0.0
        width = shape.n_heads * shape.head_dim
        kv_width = shape.n_kv_heads * shape.head_dim
        cache_size = (shape.n_kv_heads, shape.capacity, shape.head_dim)
        sizes = {
            "qkv": (width + 2 * kv_width, shape.d_model),
            "out": (shape.d_model, width),
            "gate": (2 * shape.d_ff, shape.d_model),
            "down": (shape.d_model, shape.d_ff),
        }
        self.embedding = self.normal(shape.vocab_size, shape.d_model) * shape.d_model**0.5
        self.layers: list[dict[str, torch.Tensor]] = []
        for _ in range(shape.n_layers):
            layer = {}
            for name, size in sizes.items():
                layer[name], layer[f"{name} scales"] = self.stored(self.normal(*size))
            layer["attention norm"] = 1 + 0.1 * self.normal(shape.d_model)
            layer["mlp norm"] = 1 + 0.1 * self.normal(shape.d_model)
            layer["keys"] = self.normal(*cache_size) * 8
            layer["values"] = self.normal(*cache_size) * 8
            self.layers.append(layer)
        self.norm = 1 + 0.1 * self.normal(shape.d_model)
        self.head, self.head_scales = self.stored(self.normal(shape.vocab_size, shape.d_model))
        exponents = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
        angles = torch.arange(shape.capacity, device=device)[:, None] * 10000.0**-exponents
        self.cos, self.sin = angles.cos(), angles.sin()

        self.x = torch.empty(shape.d_model, device=device, dtype=dtype)
        self.q = torch.empty(width, device=device, dtype=dtype)
        self.attended = torch.empty(width, device=device, dtype=dtype)
        self.hidden = torch.empty(shape.d_ff, device=device, dtype=dtype)
        self.logits = torch.empty(shape.vocab_size, device=device)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(shape.capacity, dtype=torch.int32, device=device)
        self.best_values = torch.empty(shape.vocab_size, device=device)
        self.best_tokens = torch.empty(shape.vocab_size, dtype=torch.int32, device=device)
        self.scratch = attention_scratch(1, shape, device)
        self.reset()

    def normal(self, *size: int) -> torch.Tensor:
        """Random numbers, so that a product of width size[-1] keeps the scale of its input."""
        values = torch.randn(*size, device=self.device, generator=self.random)
        return (values * size[-1] ** -0.5).to(self.dtype)

    def stored(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A weight as it is stored, and its scales, which only int8 uses."""
        if not self.is_int8:
            return weight, torch.ones(1, device=self.device)
        scales = weight.float().abs().amax(1) / 127
        return (weight.float() / scales[:, None]).round().to(torch.int8), scales

    def reset(self) -> None:
        """Go to the last token of the text."""
        self.position.fill_(self.shape.length - 1)
        self.x.copy_(self.embedding[3])
        self.tokens.zero_()

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights and of the keys and values that a step reads."""
        shape = self.shape
        kv_width = shape.n_kv_heads * shape.head_dim
        total = self.head.nbytes
        for layer in self.layers:
            total += sum(layer[name].nbytes for name in PRODUCTS)
            total += 2 * kv_width * shape.length * self.dtype.itemsize
        return total

    def kernel_bytes(self, name: str) -> int:
        """Bytes that one launch of a kernel reads."""
        if name == "head":
            return self.head.nbytes
        if name == "attention":
            kv_width = self.shape.n_kv_heads * self.shape.head_dim
            return 2 * kv_width * self.shape.length * self.dtype.itemsize
        return self.layers[0][name].nbytes

    def step(self, choice: Choice, overlap: bool) -> None:
        """Decode one token."""
        for layer in self.layers:
            for name in ("qkv", "attention", "out", "gate", "down"):
                self.launch(name, layer, choice[name], overlap).run()
        self.launch("head", {}, choice["head"], overlap).run()
        self.sample_launch(choice["head"], overlap).run()

    def launch(
        self, name: str, layer: dict[str, torch.Tensor], tiles: Tiles, overlap: bool
    ) -> Launch:
        """The launch of a kernel with a layer's weights; the head needs none."""
        from thinker.benchmarks.gpu import decode_kernels as kernels

        shape = self.shape
        if name == "attention":
            cache = layer["keys"], layer["values"]
            return attention_launch(
                self.q, *cache, self.attended, self.scratch, self.position, shape, tiles, overlap
            )
        n_columns = {"out": shape.n_heads * shape.head_dim, "down": shape.d_ff}
        block = min(tiles.block, next_power_of_2(n_columns.get(name, shape.d_model)))
        constants = {"ROWS": tiles.rows, "BLOCK": block, "SCALED": self.is_int8}
        constants |= launch_options(tiles, overlap)
        if name in ("out", "down"):
            v = self.attended if name == "out" else self.hidden
            constants |= {"N_ROWS": shape.d_model, "N_COLUMNS": n_columns[name]}
            arguments = (v, layer[name], layer[f"{name} scales"], self.x)
            grid = (math.ceil(shape.d_model / tiles.rows),)
            return Launch(kernels.residual_kernel, grid, arguments, constants)
        constants |= {"C": shape.d_model, "EPS": EPS}
        if name == "qkv":
            n_pairs = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim // 2
            weight = layer["attention norm"], layer["qkv"], layer["qkv scales"]
            cache = layer["keys"], layer["values"], self.position, shape.capacity
            arguments = (self.x, *weight, self.cos, self.sin, self.q, *cache)
            constants |= {"D": shape.head_dim, "N_HEADS": shape.n_heads, "N_KV": shape.n_kv_heads}
            grid = (math.ceil(n_pairs / tiles.rows),)
            return Launch(kernels.qkv_kernel, grid, arguments, constants)
        if name == "gate":
            weight = layer["mlp norm"], layer["gate"], layer["gate scales"]
            constants |= {"F": shape.d_ff}
            grid = (math.ceil(shape.d_ff / tiles.rows),)
            return Launch(kernels.gate_kernel, grid, (self.x, *weight, self.hidden), constants)
        assert name == "head", name
        weight = self.norm, self.head, self.head_scales
        best = self.logits, self.best_values, self.best_tokens
        constants |= {"V": shape.vocab_size}
        grid = (math.ceil(shape.vocab_size / tiles.rows),)
        arguments = (self.x, *weight, *best, self.position, self.temperature)
        return Launch(kernels.head_kernel, grid, arguments, constants)

    def sample_launch(self, head_tiles: Tiles, overlap: bool) -> Launch:
        """The launch of the choice among what the head's programs have found."""
        from thinker.benchmarks.gpu import decode_kernels as kernels

        n_best = math.ceil(self.shape.vocab_size / head_tiles.rows)
        constants = {
            "N_BEST": n_best,
            "PADDED_BEST": next_power_of_2(n_best),
            "C": self.shape.d_model,
            "PADDED_C": next_power_of_2(self.shape.d_model),
            **launch_options(Tiles(1, 1, 8), overlap),
        }
        best = self.best_values, self.best_tokens
        arguments = (*best, self.tokens, self.embedding, self.x, self.position)
        return Launch(kernels.sample_kernel, (1,), arguments, constants)

    def reference(self) -> torch.Tensor:
        """Logits of the step in fp32, without the kernels; changes nothing."""
        shape, x, at = self.shape, self.x.float(), int(self.position)
        group = shape.n_heads // shape.n_kv_heads
        for layer in self.layers:
            normed = rms_norm(x, layer["attention norm"])
            y = full_weight(layer["qkv"], layer["qkv scales"]) @ normed
            heads = y.view(-1, shape.head_dim)
            q, k, v = heads.split([shape.n_heads, shape.n_kv_heads, shape.n_kv_heads])
            q, k = self.rotated(q, at), self.rotated(k, at)
            keys = torch.cat((layer["keys"][:, :at].float(), k[:, None]), 1)
            values = torch.cat((layer["values"][:, :at].float(), v[:, None]), 1)
            keys = keys.repeat_interleave(group, 0)  # (n_heads, length, head_dim)
            values = values.repeat_interleave(group, 0)
            scores = (keys @ q[:, :, None])[..., 0] * shape.head_dim**-0.5
            attended = (scores.softmax(-1)[:, None] @ values).flatten()
            x = x + full_weight(layer["out"], layer["out scales"]) @ attended
            normed = rms_norm(x, layer["mlp norm"])
            gate, up = (full_weight(layer["gate"], layer["gate scales"]) @ normed).chunk(2)
            x = x + full_weight(layer["down"], layer["down scales"]) @ (F.silu(gate) * up)
        return full_weight(self.head, self.head_scales) @ rms_norm(x, self.norm)

    def rotated(self, heads: torch.Tensor, at: int) -> torch.Tensor:
        """The rotary embedding of (heads, head_dim) at a position."""
        first, second = heads.chunk(2, -1)
        cos, sin = self.cos[at], self.sin[at]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def full_weight(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A stored weight in fp32."""
    return weight.float() * scales[:, None]


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMSNorm of a vector in fp32."""
    return x * torch.rsqrt(x.square().mean() + EPS) * gain.float()


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def launch_options(tiles: Tiles, overlap: bool) -> dict[str, Any]:
    """Constants of every kernel; the interpreter does not know the option of overlapping."""
    options = {"OVERLAP": overlap, "num_warps": tiles.n_warps}
    if overlap:
        options["launch_pdl"] = True
    return options


def attention_scratch(n_texts: int, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Room for the shares of up to four programs per head, and the number that has ended."""
    n_rows = n_texts * shape.n_kv_heads * 4 * 16
    return (
        torch.empty(n_rows, device=device),
        torch.empty(n_rows, device=device),
        torch.empty(n_rows, shape.head_dim, device=device),
        torch.zeros(n_texts * shape.n_kv_heads, dtype=torch.int32, device=device),
    )


def attention_launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    scratch: tuple[torch.Tensor, ...],
    positions: torch.Tensor,
    shape: Shape,
    tiles: Tiles,
    overlap: bool,
) -> Launch:
    """The launch of attention for as many texts as there are positions."""
    from thinker.benchmarks.gpu import decode_kernels as kernels

    group = shape.n_heads // shape.n_kv_heads
    constants = {
        "N_KV": shape.n_kv_heads,
        "D": shape.head_dim,
        "GROUP": group,
        "PADDED": 1 if group == 1 else 16,
        "KEYS": tiles.rows,
        "SPLITS": tiles.block,
        **launch_options(tiles, overlap),
    }
    scale = shape.head_dim**-0.5
    arguments = (q, keys, values, out, *scratch, positions, shape.capacity, scale)
    grid = (shape.n_kv_heads, tiles.block, len(positions))
    return Launch(kernels.attention_kernel, grid, arguments, constants)


def fused_decoding(campaign: Campaign, deadline: float) -> Results:
    """Each kernel with its best tiles, then whole steps without and with overlapping launches, with
    bf16 and int8 weights; and attention of a large batch."""
    return stream(
        measure_fused_decoding,
        campaign.device,
        campaign.is_rehearsal,
        deadline,
        deadline=deadline,
        is_fresh=campaign.is_rehearsal,  # the interpreter must be chosen before Triton is imported
        **campaign.options,
    )


def measure_fused_decoding(device: torch.device, is_rehearsal: bool, deadline: float) -> Results:
    """The results of fused_decoding(), in a process of its own."""
    cases, batches, dtype = CASES, (("124m", 256), ("1.1b", 256)), torch.bfloat16
    overlaps, n_steps = (False, True), 8
    if is_rehearsal:
        if importlib.util.find_spec("triton") is None:
            yield {"name": "kernels", "note": NO_TRITON}
            return
        os.environ["TRITON_INTERPRET"] = "1"
        cases, batches, dtype = REHEARSED_CASES, (("tiny", 3),), torch.float32
        overlaps, n_steps = (False,), 2  # the interpreter runs one kernel after the other
    bandwidth = measure_bandwidth(device)
    yield {"name": "copy bandwidth", "bytes_per_second": bandwidth, "card": device_name(device)}
    for case in cases:
        label = f"{case.shape}, {case.weights}"
        if time.monotonic() + case.seconds > deadline:
            yield {"name": label, "note": NO_TIME}
            continue
        is_int8 = case.weights == "int8"
        model = FusedModel(SHAPES[case.shape], device, dtype, is_int8)
        trials = REHEARSED_TRIALS if is_rehearsal else TRIALS[case.weights]
        choice = {}
        for result in tune(model, trials):
            choice[result["kernel"]] = Tiles(*result["tiles"])
            yield {"name": f"{label}: {result['kernel']}", **result}
        for overlap in overlaps:
            result = measure_step(model, choice, overlap, n_steps)
            result["share_of_bandwidth"] = result["bytes_per_second"] / bandwidth
            name = "step, overlapping" if overlap else "step"
            yield {"name": f"{label}: {name}", **result}
    for shape, n_texts in batches:
        label = f"{shape}: attention, batch {n_texts}"
        if time.monotonic() + ATTENTION_SECONDS > deadline:
            yield {"name": label, "note": NO_TIME}
            continue
        lengths = torch.full((n_texts,), SHAPES[shape].length, device=device)
        result = measure_attention(SHAPES[shape], lengths, dtype, Tiles(32, 1, 2))
        yield {"name": label, **result}


def tune(model: FusedModel, trials: dict[str, tuple[Tiles, ...]]) -> Results:
    """The best tiles of each kernel. A trial launches it with the weights of every layer in turn, as
    in a step; those of 124M fit into the L2 cache of an H100, so a step takes longer than the sum."""
    for name, candidates in trials.items():
        layers = [{}] if name == "head" else model.layers
        found = []
        for tiles in candidates:
            launches = [model.launch(name, layer, tiles, overlap=False) for layer in layers]
            calls = [launch.run for launch in launches]
            seconds = graph_seconds(calls, len(calls), model.device, repeats=15)
            found.append({"tiles": list(tiles), "seconds": seconds})
        best = min(found, key=lambda trial: trial["seconds"])
        rate = model.kernel_bytes(name) / best["seconds"]
        yield {"kernel": name, **best, "bytes_per_second": rate, "trials": found}


def measure_step(model: FusedModel, choice: Choice, overlap: bool, n_steps: int) -> dict[str, Any]:
    """Time of a step among `n_steps` in one graph, and its error; `error` where it is wrong."""
    relative_error, is_best = check_step(model, choice, overlap)
    model.reset()

    def steps() -> None:
        for _ in range(n_steps):
            model.step(choice, overlap)
        model.position.fill_(model.shape.length - 1)

    seconds = graph_seconds([steps], n_steps, model.device)
    result = {
        "step_s": seconds,
        "tokens_per_second": 1 / seconds,
        "bytes_per_second": model.step_bytes / seconds,
        "relative_error": relative_error,
        "choice": {name: list(tiles) for name, tiles in choice.items()},
    }
    if not (relative_error < MAX_ERROR and is_best):
        result["error"] = f"relative error {relative_error}, best token chosen: {is_best}"
    return result


def check_step(model: FusedModel, choice: Choice, overlap: bool) -> tuple[float, bool]:
    """Relative error of a step's logits, and whether it chose the largest and went on; leaves the
    cache as it was."""
    model.reset()
    known = model.reference()
    caches = [(layer["keys"].clone(), layer["values"].clone()) for layer in model.layers]
    for buffer in (model.q, model.attended, model.hidden, model.logits):
        buffer.fill_(float("nan"))
    model.step(choice, overlap)
    relative_error = float((model.logits - known).norm() / known.norm())
    token = int(model.tokens[model.shape.length - 1])
    is_best = token == int(model.logits.argmax())
    is_next = int(model.position) == model.shape.length
    is_next &= torch.equal(model.x, model.embedding[token])
    for layer, (keys, values) in zip(model.layers, caches):
        layer["keys"].copy_(keys)
        layer["values"].copy_(values)
    return relative_error, is_best and is_next


def measure_attention(
    shape: Shape, lengths: torch.Tensor, dtype: torch.dtype, tiles: Tiles
) -> dict[str, Any]:
    """Time and error of one layer's attention for texts of these lengths, (texts,)."""
    device, n_texts = lengths.device, len(lengths)
    size = (n_texts, shape.n_kv_heads, shape.capacity, shape.head_dim)
    q = torch.randn(n_texts, shape.n_heads, shape.head_dim, device=device).to(dtype)
    keys, values = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    is_key = torch.arange(shape.capacity, device=device) < lengths[:, None]
    group = shape.n_heads // shape.n_kv_heads
    known = F.scaled_dot_product_attention(
        q[:, :, None].float(),
        keys.float().repeat_interleave(group, 1),
        values.float().repeat_interleave(group, 1),
        attn_mask=is_key[:, None, None],
    )[:, :, 0]
    out = torch.full_like(q, float("nan"))
    scratch = attention_scratch(n_texts, shape, device)
    positions = (lengths - 1).int()
    launch = attention_launch(q, keys, values, out, scratch, positions, shape, tiles, overlap=False)
    seconds = graph_seconds([launch.run] * 4, 4, device)
    relative_error = float((out.float() - known).norm() / known.norm())
    n_bytes = 2 * int(lengths.sum()) * shape.n_kv_heads * shape.head_dim * dtype.itemsize
    result = {
        "seconds": seconds,
        "bytes_per_second": n_bytes / seconds,
        "relative_error": relative_error,
    }
    if not relative_error < MAX_ERROR:
        result["error"] = f"relative error {relative_error}"
    return result


def graph_seconds(
    calls: list[Callable[[], None]], n_units: int, device: torch.device, repeats: int = 30
) -> float:
    """Median seconds of all calls in one CUDA graph, per unit; on a CPU without one, and once."""

    def run() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return measure_seconds(run, device) / n_units
    cuda_stream = torch.cuda.Stream()
    cuda_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(cuda_stream):
        run()  # compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=cuda_stream):
            run()
        for _ in range(3):
            graph.replay()
        seconds = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1000 / n_units)
    return statistics.median(seconds)
