"""Decoding speed by precision, batch size and compilation, compared with transformers and
llama.cpp."""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinker.benchmarks.baselines import to_transformers
from thinker.benchmarks.environment import time_alternately
from thinker.benchmarks.speed import llama_cpp
from thinker.benchmarks.speed.decode_plot import plot
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.device import DTYPES, choose_device
from thinker.runtime.errors import UserError

SHAPES = {
    "2m": {
        "vocab_size": 3072,
        "d_model": 192,
        "n_layers": 2,
        "n_heads": 6,
    },  # that of configs/quickstart.yaml
    "tiny": {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 128},
    "110m": {"vocab_size": 32000, "d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 2048},
    "124m": {"vocab_size": 50304, "d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 2048},
    "1.1b": {
        "vocab_size": 32000,
        "d_model": 2048,
        "n_layers": 22,
        "n_heads": 32,
        "n_kv_heads": 4,
        "d_ff": 5632,
    },
}
BITS = {"int8": 8, "int4": 4}
CPU_VARIANTS = "transformers-fp32,fp32-eager,fp32,fp32@8,bf16,bf16@8,int8,int8@8,int4,int4@8"
CUDA_VARIANTS = "transformers-bf16,transformers-bf16-compiled,bf16,bf16-compiled,int8-compiled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--shape", default="110m", choices=SHAPES, help="size of the model")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--prompt", type=int, default=32, help="tokens in the prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timing rounds; medians are reported"
    )
    variants_help = "list of [transformers-]PRECISION[-eager|-compiled|-inductor][@BATCH], or llama.cpp-q8_0, -q4_0, "
    variants_help += "-f16, -f32 (default: by device); inductor: no kernels of ours"
    parser.add_argument("--variants", metavar="NAME,...", help=variants_help)
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot the decoding speeds")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every variant and print a table."""
    device = choose_device(arguments.device)
    if arguments.new < 2 or arguments.prompt < 2 or arguments.repeats < 1:
        raise UserError(
            "--new, --prompt or --repeats is too small; use at least --new 2 --prompt 2 --repeats 1"
        )
    names = arguments.variants or (CUDA_VARIANTS if device.type == "cuda" else CPU_VARIANTS)
    model = make_random_model(arguments.shape, arguments.prompt + arguments.new, device)
    variants = [
        make_variant(model, name, arguments.prompt, arguments.new) for name in names.split(",")
    ]
    data = torch.ones(1 << 26, device=device)
    calls = [data.sum]
    for variant in variants:
        calls += [partial(variant.generate, 1), partial(variant.generate, arguments.new)]
    data_s, *seconds = [
        statistics.median(s) for s in time_alternately(calls, arguments.repeats, device)
    ]
    bandwidth = data.nbytes / data_s
    rows = []
    for variant, prefill_s, total_s in zip(variants, seconds[::2], seconds[1::2]):
        step_s = (total_s - prefill_s) / (arguments.new - 1)
        rows.append(
            {"name": variant.name, "batch": variant.batch, "first_token_ms": 1000 * prefill_s,
             "prefill_tokens_per_second": variant.batch * arguments.prompt / prefill_s,
             "decode_tokens_per_second": variant.batch / step_s, "step_bytes": variant.step_bytes,
             "bandwidth_share": variant.step_bytes / step_s / bandwidth}
        )  # fmt: skip
    print(f"{'':26} batch  first ms  prefill/s  decode/s  MB per step    bandwidth")
    for row in rows:
        print(
            f"{row['name']:26} {row['batch']:5} {row['first_token_ms']:9.1f} "
            f"{row['prefill_tokens_per_second']:10.0f} {row['decode_tokens_per_second']:9.1f} "
            f"{row['step_bytes'] / 1e6:12.1f} {row['bandwidth_share']:13.2f}"
        )
    print(f"measured bandwidth: {bandwidth / 1e9:.1f} GB/s")
    if arguments.png is not None:
        plot(rows, arguments.shape, arguments.png)
    result = {"shape": arguments.shape, "prompt": arguments.prompt, "new": arguments.new}
    return result | {"bandwidth": bandwidth, "rows": rows}


class Variant(NamedTuple):
    """One way to decode: `generate(n)` generates n tokens for each of `batch` prompts."""

    name: str
    batch: int
    # read by a step: each matrix once, and the keys and values of each row halfway through the run
    step_bytes: int
    generate: Callable[[int], Any]
    report: Callable[[], str] = str  # what the decoder says of itself, once it has run


def make_random_model(shape: str, max_seq_len: int, device: torch.device) -> Thinker:
    """A model of one of SHAPES with random weights, as `llama` (without QK-norm)."""
    with device:
        model = Thinker(
            ThinkerConfig(**SHAPES[shape], max_seq_len=max_seq_len, qk_norm=False)
        ).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02, generator=generator)
        # The end is never the likeliest token, so no row ends early.
        model.lm_head.weight[make_tokenizer("byte", []).eos_id] = 0
    return model


def make_variant(model: Thinker, name: str, n_prompt: int, n_new: int) -> Variant:
    """The variant that a name like "transformers-fp32", "int8-compiled" or "bf16@8" describes."""
    label, _, batch_text = name.partition("@")
    words = label.split("-")
    is_transformers, is_llama_cpp = words[0] == "transformers", words[0] == "llama.cpp"
    form = words[-1]
    compile = {"compiled": True, "eager": False, "inductor": False}.get(form)
    precision = words[1] if (is_transformers or is_llama_cpp) and len(words) > 1 else words[0]
    supported = [*DTYPES, *BITS]
    if is_llama_cpp:
        supported = llama_cpp.TYPES
    elif is_transformers:
        supported = [*DTYPES]
    if precision not in supported or not (batch_text or "1").isdecimal():
        raise UserError(
            f"unknown variant {name} in --variants; use names such as transformers-fp32, llama.cpp-q8_0 or bf16-eager@8"
        )
    batch, dtype = int(batch_text or 1), DTYPES.get(precision)
    if dtype is None:  # 8 or 4 bits, whose activations have another precision
        dtype = torch.bfloat16 if model.device.type == "cuda" else torch.float32
    report: Callable[[], str] = str
    if is_transformers:
        generate, n_bytes = transformers_generate(model, batch, n_prompt, dtype, bool(compile))
    elif is_llama_cpp:
        peer = llama_cpp.LlamaCpp(model, precision, batch, n_prompt + n_new)
        generate, n_bytes = peer.generator(make_prompts(batch, n_prompt)), peer.n_bytes
    else:
        options = {"dtype": dtype, "bits": BITS.get(precision), "compile": compile}
        generator = Generator(model, make_tokenizer("byte", []), **options)
        if form == "inductor":
            from thinker.generation.decoders.compiled_decoder import CompiledDecoder

            generator.decoder = CompiledDecoder(generator.model)
        report = generator.decoder.report
        generate, n_bytes = (
            thinker_generate(generator, batch, n_prompt),
            matrix_bytes(generator.model),
        )
    kv_per_token = 2 * model.config.n_layers * model.config.n_kv_heads * model.config.head_dim
    cache_bytes = batch * (n_prompt + n_new // 2) * kv_per_token * dtype.itemsize
    return Variant(label, batch, n_bytes + cache_bytes, generate, report)


def make_prompts(batch: int, n_prompt: int) -> list[list[int]]:
    """Prompts of one length, with different first bytes, because equal prompts would share one
    prefill."""
    rest = [token % 256 for token in range(1, n_prompt)]
    return [[row % 256, *rest] for row in range(batch)]


def thinker_generate(generator: Generator, batch: int, n_prompt: int) -> Callable[[int], None]:
    """Greedy decoding through Generator.generate."""
    prompts = make_prompts(batch, n_prompt)

    def generate(count: int) -> None:
        params = SamplingParams(max_new_tokens=count, temperature=0)
        completions = generator.generate([""] * batch, params, prompts)
        assert all(len(completion.token_ids) == count for completion in completions)

    return generate


def transformers_generate(
    model: Thinker, batch: int, n_prompt: int, dtype: torch.dtype, is_compiled: bool
) -> tuple[Callable[[int], None], int]:
    """Greedy decoding through transformers' generate() with the same weights, and the bytes of its
    matrices."""
    reference = to_transformers(model).to(model.device, dtype)
    tokens = torch.randint(0, 256, (batch, n_prompt), device=model.device)
    # With a static cache generate() compiles the model by itself on a GPU.
    options = {"cache_implementation": "static"} if is_compiled else {}

    def generate(count: int) -> None:
        output = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=0, eos_token_id=None, **options,
        )  # fmt: skip
        assert output.shape[1] == n_prompt + count

    return generate, matrix_bytes(model) // 4 * dtype.itemsize


def matrix_bytes(model: Thinker) -> int:
    """Bytes of weights that one decode step reads: every matrix once, without the embedding."""
    return sum(
        weight.nbytes for name, weight in model.state_dict().items() if name != "embedding.weight"
    )
