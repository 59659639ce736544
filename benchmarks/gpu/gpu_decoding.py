"""GPU stages without training: decoding and attention."""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from thinker.benchmarks.contenders import Calls, Contender, race
from thinker.benchmarks.gpu.gpu_training import Campaign, Results
from thinker.benchmarks.speed.attention import PATTERNS, AttentionPass
from thinker.benchmarks.speed.decode import make_random_model, make_variant
from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.runtime.device import DTYPES

DECODING = {  # by model; names as in benchmarks.speed.decode
    "124m": (
        "bf16-compiled", "bf16-compiled@32", "bf16-compiled@256", "int8-compiled",
        "transformers-bf16-compiled", "transformers-bf16-compiled@32", "transformers-bf16-compiled@256",
        "bf16-inductor", "bf16-inductor@32", "bf16-inductor@256", "int8-inductor",
    ),
    "1.1b": ("bf16-compiled", "int8-compiled", "transformers-bf16-compiled", "bf16-inductor", "int8-inductor"),
}  # fmt: skip
REHEARSED_DECODING = (
    "fp32-compiled",
    "fp32-inductor",
    "bf16@2",
    "int8-compiled",
    "transformers-fp32",
)
CONTENDER_GB = {"124m": 6.0, "1.1b": 12.0}
COPIED_BYTES = 2**30
REHEARSED_BYTES = 2**20
MAX_SCORES_LENGTH = 4096  # for patterns whose reference holds all scores


def decode(shape: str, campaign: Campaign, deadline: float) -> Results:
    """Decoding with our kernels, with Inductor's, and by transformers with a static cache, in turns.

    The limit of a step is its bytes at the rate of a copy, which takes its turns, too.
    """
    names, (n_prompt, n_new) = DECODING[shape], (32, 128)
    gigabytes = CONTENDER_GB[shape]
    if campaign.is_rehearsal:
        names, (n_prompt, n_new) = REHEARSED_DECODING, (8, 4)
        if shape != "124m":  # importing transformers once is enough
            names = names[:-1]
        shape = "tiny"
    n_bytes = REHEARSED_BYTES if campaign.is_rehearsal else COPIED_BYTES
    contenders = [Contender("copy", copy_calls, (n_bytes, campaign.device), 3.0)]
    for name in names:
        arguments = (shape, name, n_prompt, n_new, campaign.device)
        contenders.append(Contender(name, decoding_calls, arguments, gigabytes))
    options = {"n_at_once": campaign.n_at_once, "memory_gb": campaign.memory_gb}
    copy_rate = None
    for result in race(contenders, campaign.device, 5, deadline, **options, **campaign.options):
        if "error" not in result:
            medians = [statistics.median(seconds) for seconds in result["seconds"].values()]
            if result["name"] == "copy":  # the first result
                copy_rate = result["copied_bytes"] / medians[0]
                result["bytes_per_second"] = copy_rate
            else:
                result |= rates(result, *medians, n_new, copy_rate)
        yield result


def rates(
    result: dict[str, Any], first_s: float, total_s: float, n_new: int, copy_rate: float | None
) -> dict[str, Any]:
    """Speeds of a step, from the seconds of one token and of `n_new` tokens."""
    step_s = max(1e-9, total_s - first_s) / (n_new - 1)  # noise may exceed a few tokens
    bytes_per_second = result["step_bytes"] / step_s
    found = {
        "first_token_s": first_s,
        "step_s": step_s,
        "tokens_per_second": result["batch"] / step_s,
        "bytes_per_second": bytes_per_second,
    }
    if copy_rate is not None:
        found["share_of_limit"] = bytes_per_second / copy_rate
    return found


def copy_calls(n_bytes: int, device: torch.device) -> Calls:
    """Copy so many bytes of memory; what is read and what is written counts."""
    source = torch.randint(2**31 - 1, (n_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return Calls({"copy": partial(target.copy_, source)}, {"copied_bytes": 2 * source.nbytes})


def decoding_calls(shape: str, name: str, n_prompt: int, n_new: int, device: torch.device) -> Calls:
    """Generate one token, and `n_new` of them."""
    model = make_random_model(shape, n_prompt + n_new, device)
    variant = make_variant(model, name, n_prompt, n_new)
    calls = {
        "first token": partial(variant.generate, 1),
        "all tokens": partial(variant.generate, n_new),
    }
    facts = {"shape": shape, "batch": variant.batch, "step_bytes": variant.step_bytes}
    return Calls(calls, facts, lambda: {"report": variant.report()})


def attention(campaign: Campaign, deadline: float) -> Results:
    """Time and memory of each pattern, and of each backend of SDPA for full attention, by
    length."""
    lengths = (64, 128) if campaign.is_rehearsal else (1024, 4096, 16384)
    is_cuda = campaign.device.type == "cuda"
    backends = (
        ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
        if is_cuda
        else ("FLASH_ATTENTION", "MATH")
    )
    patterns = ("full", "window(16)", "linear(8)") if campaign.is_rehearsal else PATTERNS
    cases = [("full", "sdpa", name) for name in backends] + [
        (pattern, "auto", None) for pattern in patterns
    ]
    cases += [("window(16)" if campaign.is_rehearsal else "window(128)", "sdpa", None)]
    dtype = DTYPES[campaign.precision]
    contenders = [
        Contender(
            " ".join(filter(None, case)),
            attention_calls,
            (*case, lengths, campaign.device, dtype),
            14.0,
        )
        for case in cases
    ]
    options = {
        "n_at_once": campaign.n_at_once,
        "memory_gb": campaign.memory_gb,
        "min_seconds": 0.0 if campaign.is_rehearsal else 0.02,
    }
    for result in race(contenders, campaign.device, 3, deadline, **options, **campaign.options):
        if "error" not in result:
            result["median_s"] = {
                name: statistics.median(seconds) for name, seconds in result["seconds"].items()
            }
        yield result


def attention_calls(
    text: str,
    kernel: str,
    backend: str | None,
    lengths: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> Calls:
    """Forward passes, and forward and backward passes, by length: 16 heads of width 64."""
    pattern, facts = parse_pattern(text), []
    calls: dict[str, Callable[[], None]] = {}
    for length in lengths:
        if pattern.by_score and length > MAX_SCORES_LENGTH:
            continue
        with backend_context(backend):
            one_pass = AttentionPass(pattern, kernel, (1, 16, length, 64), device, dtype)
        facts.append(one_pass.facts)
        for name, function in (("forward", one_pass.forward), ("train", one_pass.train)):
            calls[f"{name} {length}"] = partial(call_with_backend, backend, function)
    return Calls(calls, {"lengths": facts})


def backend_context(backend: str | None) -> AbstractContextManager[None]:
    """Restrict SDPA to one backend; None: let it choose."""
    return sdpa_kernel(SDPBackend.__members__[backend]) if backend else nullcontext()


def call_with_backend(backend: str | None, function: Callable[[], None]) -> None:
    """Call the function with SDPA's backend."""
    with backend_context(backend):
        function()
