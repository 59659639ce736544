"""Choose the fastest form of a model for inference that computes what the model does as it is
written now."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from thinker.generation.decoders.inference_model import (
    KINDS,
    FusedAttention,
    FusedLinearAttention,
    FusedMLP,
    InferenceNorm,
    fuse_for_inference,
)
from thinker.generation.decoders.native_decoder import NativeDecoder
from thinker.generation.mixed_bits import Bits
from thinker.model import KVCache, Thinker, proof
from thinker.model.layers import Linear

# The largest difference, relative to the largest value of a tensor.
FP32_TOLERANCE = 1e-5  # of modules
STEP_TOLERANCE = 1e-4  # of the logits of a whole step in fp32
BF16_TOLERANCE = 0.03
BITS_TOLERANCE = {8: 0.05, 4: 0.5}  # activations are rounded, too
FEW_ROWS = 3  # for which matrices have kernels of their own
MAX_CACHED = 1 << 12  # positions of a cache to compare, for its memory
READ_POSITIONS = 256  # of a prompt, where kernels read it


def choose_inference_model(
    model: Thinker, dtype: torch.dtype, bits: Bits = None, native: bool = False
) -> tuple[Thinker, bool, str]:
    """A copy for sampling, whether the native decoder may run it, and a problem.

    The copy is as fuse_for_inference() makes it. Modules whose faster form computes something else
    stay as they are written, and the native decoder is not used then. The problem is one line that
    says so, or "".
    """
    n_bits = bits if isinstance(bits, int) else None
    key = ("inference", dtype, n_bits, native)
    prove = partial(_disproved, model, dtype, bits, native)
    wrong = frozenset()
    decodes = native
    if not proof.is_fake(model):
        wrong, decodes = proof.kept(key, model, prove)
    kinds = KINDS - wrong
    problem = ""
    if wrong:
        problem = proof.describe_difference(wrong, "inference")
    elif native and not decodes:
        problem = "the model computes something else than the kernels; inference runs it as written"
    copy = fuse_for_inference(model, dtype, bits, native, kinds)
    return copy, decodes, problem


def _disproved(
    model: Thinker, dtype: torch.dtype, bits: Bits, native: bool
) -> tuple[frozenset[type], bool]:
    """The types of modules whose faster form computes something else, and whether the native
    decoder does not."""
    with proof.own_random_numbers() as noise:
        twin = proof.narrow_twin(model, noise).to(model.device).eval()
        wrong = _different_kinds(twin, dtype, bits, native)
        return frozenset(wrong), native and not wrong and _decodes_alike(twin)


@torch.no_grad()
def _different_kinds(twin: Thinker, dtype: torch.dtype, bits: Bits, native: bool) -> set[type]:
    """The types of modules whose faster form computes something else, in fp32 or in the form that
    is wanted."""
    wrong: set[type] = set()
    noise = proof.Noise()
    forms: list[tuple[torch.dtype, int | None, float]] = [(torch.float32, None, FP32_TOLERANCE)]
    if dtype != torch.float32:
        forms.append((dtype, None, BF16_TOLERANCE))
    if isinstance(bits, int):
        forms.append((torch.float32, bits, BITS_TOLERANCE[bits]))
    positions = proof.positions_to_compare(twin.config.max_seq_len).to(twin.device)
    few = positions[-FEW_ROWS:]
    for form_dtype, form_bits, tolerance in forms:
        fused = fuse_for_inference(twin, form_dtype, form_bits, native)
        # Rounding differs between rows, so few of them show what a form in few bits computes.
        for chosen in (positions, few) if form_bits is None else (few,):
            for kind, plain, fast, width in _pairs(twin, fused, chosen, form_dtype):
                x = noise((1, len(chosen), width))
                x = x.to(twin.device, form_dtype)
                if kind not in wrong and not _agree(plain, fast, x, tolerance):
                    wrong.add(kind)
    return wrong


def _agree(
    plain: Callable[[Tensor], Tensor], fast: Callable[[Tensor], Tensor], x: Tensor, tolerance: float
) -> bool:
    with contextlib.suppress(Exception):  # of an edited module: inference as written shows it
        return proof.agree(plain, fast, x, None, tolerance)
    return False


def _pairs(
    twin: Thinker, fused: Thinker, positions: Tensor, dtype: torch.dtype
) -> Iterator[tuple[type, Callable, Callable, int]]:
    """Each module of a twin that has a faster form: its type, what both compute, and the width of
    their input."""
    rope = None
    if twin.rope is not None:
        rope = twin.rope(positions, twin.config.max_seq_len, dtype)
    counterparts = dict(fused.named_modules())
    for path, plain in twin.named_modules():
        fast = counterparts.get(path)
        if isinstance(fast, FusedAttention | FusedLinearAttention):
            project = partial(plain.project, rope=rope), partial(fast.project, rope=rope)
            yield type(plain), *project, plain.q_proj.in_features
        elif isinstance(fast, FusedMLP):
            yield type(plain), plain, fast, plain.gate_proj.in_features
        elif isinstance(fast, InferenceNorm):
            yield type(plain), plain, fast, len(plain.weight)
        elif isinstance(plain, Linear) and fast is not None:
            yield Linear, plain, fast, plain.in_features


@torch.no_grad()
def _decodes_alike(twin: Thinker) -> bool:
    """Whether the native decoder has the logits of the model, for prompts and for single tokens, up
    to the last."""
    native = NativeDecoder(fuse_for_inference(twin, native=True))
    if not native.is_supported:
        return True  # it calls the model
    T = min(twin.config.max_cached_len, MAX_CACHED)
    with contextlib.suppress(Exception):  # of an edited model: inference as written shows it
        # Rows at later positions read random keys, which need no pass over the tokens before them.
        early = [n for n in (1, 2, 63, 64, 65) if twin.config.prefix < n < T]
        cases = [([0], min(T, READ_POSITIONS)), ([T - 1], 1)]
        if early:
            cases.append((early, 1))
        return all(_pass_is_alike(twin, native, *case) for case in cases)
    return False


def _pass_is_alike(twin: Thinker, native: NativeDecoder, lengths: list[int], n_tokens: int) -> bool:
    """Compare the logits of the next tokens of rows whose caches have these lengths."""
    n_rows = len(lengths)
    tokens = torch.arange(n_rows * n_tokens).view(n_rows, n_tokens) % twin.config.vocab_size
    known = twin(tokens, cache=_random_cache(twin, lengths))
    found = native.step(tokens, _random_cache(twin, lengths))
    return proof.is_near(found, known, STEP_TOLERANCE)


def _random_cache(model: Thinker, lengths: list[int]) -> KVCache:
    """A cache of rows of these lengths, with random keys and values."""
    noise = proof.Noise()  # the same for both decoders
    cache = model.new_cache(len(lengths), max(lengths) + READ_POSITIONS)
    for layer in cache.layers if max(lengths) else ():
        for name in layer.tensors:
            tensor = getattr(layer, name)
            tensor.copy_(noise(tensor.shape))
    cache.lengths = list(lengths)
    cache.high_water = cache.high_water_before = list(lengths)
    return cache
