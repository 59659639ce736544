"""GPU stages without training: decoding and attention."""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from thinker.benchmarks.contenders import Calls, Contender, race
from thinker.benchmarks.gpu.gpu_training import Campaign, Results
from thinker.benchmarks.speed.attention import PATTERNS, AttentionPass
from thinker.benchmarks.speed.decode import make_random_model, make_variant
from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.runtime.device import DTYPES

DECODING = (  # those that compile longest first
    "transformers-bf16-compiled", "transformers-bf16-compiled@32", "transformers-bf16-compiled@256", "bf16-compiled",
    "bf16-compiled@32", "bf16-compiled@256", "int8-compiled", "int8-compiled@32", "bf16", "bf16@32", "bf16@256",
    "int8", "transformers-bf16",
)  # fmt: skip
REHEARSED_DECODING = ("fp32-compiled", "bf16@2", "int8-compiled", "transformers-fp32")
MAX_SCORES_LENGTH = 4096  # for patterns whose reference holds all scores


def decode(shape: str, campaign: Campaign, deadline: float) -> Results:
    """Decoding by precision and batch, beside transformers with a static cache; names as in
    benchmarks.decode."""
    names, (n_prompt, n_new) = DECODING, (32, 128)
    if campaign.is_rehearsal:  # importing transformers once is enough
        names, (n_prompt, n_new) = (
            REHEARSED_DECODING if shape == "124m" else REHEARSED_DECODING[:-1],
            (8, 4),
        )
        shape = "tiny"
    contenders = [
        Contender(name, decoding_calls, (shape, name, n_prompt, n_new, campaign.device), 8.0)
        for name in names
    ]
    for result in race(
        contenders, campaign.device, 3, deadline, campaign.n_at_once, **campaign.options
    ):
        if "error" not in result:
            prefill_s, total_s = (
                statistics.median(seconds) for seconds in result["seconds"].values()
            )
            step_s = max(1e-9, total_s - prefill_s) / (n_new - 1)  # noise may exceed a few tokens
            result |= {"first_token_s": prefill_s, "step_s": step_s, "tokens_per_second": result["batch"] / step_s,
                       "bytes_per_second": result["step_bytes"] / step_s}  # fmt: skip
        yield result


def decoding_calls(shape: str, name: str, n_prompt: int, n_new: int, device: torch.device) -> Calls:
    """Generate one token, and `n_new` of them."""
    variant = make_variant(
        make_random_model(shape, n_prompt + n_new, device), name, n_prompt, n_new
    )
    calls = {
        "first token": partial(variant.generate, 1),
        "all tokens": partial(variant.generate, n_new),
    }
    return Calls(calls, {"shape": shape, "batch": variant.batch, "step_bytes": variant.step_bytes})


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
