"""The data types of GGUF files: quantize weights as llama.cpp does, and a model with the weights of a file."""

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from thinker.checkpoint import model_tensors
from thinker.data.tokenizer import Tokenizer
from thinker.generation import Generator
from thinker.model import Thinker
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.finite import check_weights

DTYPES = "f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"
BLOCK = 32  # weights of a row that share a scale
# Largest difference of llama.cpp's logits, as multiples of what rounding the inputs of layers changes: (RMS, maximum).
# Measured on x86 with 75 models: at most 1.15 and 1.58. Other processors add f16 products in f16, which changes more.
LIMITS = {"f16": (10, 10), "q": (1.5, 3)}
F32_LIMIT = 1e-4  # relative; measured: at most 4.7e-6


def check_dtype(dtype: str) -> None:
    """Raise UserError for an unknown data type, or if the gguf package is not installed."""
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; use {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError("GGUF export needs the gguf package; run pip install gguf") from error


def stored_dtype(tensor: Tensor, dtype: str) -> str:
    """The data type of a tensor in a file: f32 for vectors, f16 for matrices whose rows do not divide into blocks."""
    if tensor.dim() != 2:
        return "f32"
    return "f16" if dtype.startswith("q") and tensor.shape[1] % BLOCK else dtype


def quantize(name: str, tensor: Tensor, dtype: str) -> np.ndarray:
    """A tensor as stored: numbers, or the bytes of each row if quantized. Raises RunError if it overflows.

    Each row is quantized separately, so the order of the rows does not matter.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[stored_dtype(tensor, dtype).upper()]
    values = tensor.detach().cpu().float().contiguous().numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # found below
        stored = gguf.quants.quantize(values, kind)
        restored = gguf.quants.dequantize(stored, kind)
    # The maximum of f16, the type of the scales, is 65,504.
    check_weights([(f"{name} as {kind.name.lower()}", torch.from_numpy(restored))], "GGUF")
    return stored


def rounded_model(model: Thinker, dtype: str) -> Thinker:
    """Return a copy of the model, in fp32 on the CPU, with the weights that a GGUF file of this data type has.

    Raises UserError for an unknown data type or without gguf, RunError if a weight overflows.
    """
    check_dtype(dtype)
    import gguf

    rounded = copy.deepcopy(model).to("cpu", torch.float32).eval()
    weights = rounded.state_dict()  # shares the memory of the parameters
    for name, tensor in model_tensors(rounded).items():
        kind = gguf.GGMLQuantizationType[stored_dtype(tensor, dtype).upper()]
        values = gguf.quants.dequantize(quantize(name, tensor, dtype), kind)
        weights[name].copy_(torch.from_numpy(values))
    return rounded


def round_inputs(model: Thinker, dtype: str) -> Thinker:
    """Make all linear layers round their inputs as llama.cpp does for weights of this data type; returns the model.

    llama.cpp computes the products of an f16 matrix in f16, and those of a quantized one with inputs of 8 bits.
    """

    def rounded(layer: nn.Linear, inputs: tuple[Tensor]) -> tuple[Tensor]:
        stored = stored_dtype(layer.weight, dtype)
        if stored == "f32":
            return inputs
        return ((inputs[0].half() if stored == "f16" else _round_to_8_bits(inputs[0])).float(),)

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(rounded)
    return model


def _round_to_8_bits(inputs: Tensor) -> Tensor:
    blocks = inputs.unflatten(-1, (-1, BLOCK))  # (..., D / 32, 32)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scales).nan_to_num().round() * scales.half()).flatten(-2)


@torch.no_grad()
def check_logits(model: Thinker, dtype: str, length: int, llama_logits: Callable[[Tensor], Tensor]) -> str:
    """Compare llama.cpp's logits at `length` random tokens with those of the same weights. Returns a summary.

    llama.cpp rounds the inputs of layers, too. How much that changes the logits depends on the model, so the limits
    are multiples of the change in the model itself. Raises RunError beyond them.
    """
    tokens = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    rounded = rounded_model(model, dtype)
    logits = rounded(tokens)
    difference = _difference(llama_logits(tokens), logits)
    expected = _difference(round_inputs(rounded, dtype)(tokens), logits)
    limits = [max(F32_LIMIT, n * each) for n, each in zip(LIMITS.get(dtype, LIMITS["q"]), expected)]
    if not all(each <= limit for each, limit in zip(difference, limits)):
        shown = f"by {difference[1]:.2%}; rounding explains about {expected[1]:.2%}"
        raise RunError(f"the logits from llama.cpp differ from those of the same weights {shown}; nothing was written")
    return f"logits within {math.ceil(1000 * difference[1]) / 10:g}% of those of the same weights"


def _difference(logits: Tensor, others: Tensor) -> tuple[float, float]:
    """The difference of logits (1, T, V): its RMS relative to the RMS of `others`, its maximum to their largest."""
    difference, tiny = logits - others, torch.finfo(torch.float32).tiny
    rms = difference.square().mean().sqrt() / others.square().mean().sqrt().clamp(tiny)
    return rms.item(), (difference.abs().max() / others.abs().max().clamp(tiny)).item()


def compare_scores(model: Thinker, tokenizer: Tokenizer, dtype: str, text: str) -> str:
    """Score a text with the full weights and with those of a GGUF file of this data type; returns a summary."""
    scores = [
        Generator(each, tokenizer, compile=False).score(text, progress=True)
        for each in (model, rounded_model(model, dtype))
    ]
    full, rounded = (score.bits_per_byte for score in scores)
    percent = round(100 * (rounded / full - 1), 2) + 0.0 if full else 0.0  # + 0.0: not -0.00
    return f"{dtype}: {rounded:.4f} bits per byte, {percent:+.2f}% (full weights: {full:.4f})"
