"""The data types of GGUF files: quantize weights as llama.cpp does."""

import copy

import numpy as np
import torch
from torch import Tensor

from thinker.checkpoint import model_tensors
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation import Generator
from thinker.model import Thinker
from thinker.model.attention_temperature import (
    fold_attention_temperature,
    override_attention_temperature,
)
from thinker.runtime.checks import check_weights
from thinker.runtime.errors import UserError, install_command

DTYPES = "f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"
BLOCK = 32  # weights of a row that share a scale


def check_dtype(dtype: str) -> None:
    """Raise UserError for an unknown data type, or if the gguf package is not installed."""
    if dtype not in DTYPES:
        *others, last = DTYPES
        raise UserError(f"dtype is {dtype!r}; use {', '.join(others)} or {last}")
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        remedy = f"run {install_command('gguf')}"
        raise UserError(f"GGUF export needs the gguf package; {remedy}") from error


def stored_dtype(tensor: Tensor, dtype: str) -> str:
    """The data type of a tensor in a file: f32 for vectors, `dtype` for matrices.

    f16 for matrices that cannot be quantized, because their rows do not divide into blocks.
    """
    if tensor.dim() != 2:
        return "f32"
    if dtype.startswith("q") and tensor.shape[1] % BLOCK != 0:
        return "f16"
    return dtype


def quantize(name: str, tensor: Tensor, dtype: str) -> np.ndarray:
    """A tensor as stored: numbers, or the bytes of each row if quantized.

    Raises RunError if it overflows. Each row is quantized separately, so the order of the rows does
    not matter.
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
    """A copy of the model with the weights that a GGUF file of this data type has.

    It is in fp32 on the CPU. Raises UserError for an unknown data type or without gguf, RunError if
    a weight overflows.
    """
    check_dtype(dtype)
    import gguf

    rounded = copy.deepcopy(model).to("cpu", torch.float32).eval()
    weights = rounded.state_dict()  # shares the memory of the parameters
    tensors = fold_attention_temperature(model_tensors(rounded), rounded.config)
    override_attention_temperature(rounded, 1.0)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[stored_dtype(tensor, dtype).upper()]
        values = gguf.quants.dequantize(quantize(name, tensor, dtype), kind)
        weights[name].copy_(torch.from_numpy(values))
    return rounded


def compare_scores(model: Thinker, tokenizer: Tokenizer, dtype: str, text: str) -> str:
    """Score a text with the full weights and with those of a GGUF file of this data type.

    Returns a summary.
    """
    full = _bits_per_byte(model, tokenizer, text)
    rounded = _bits_per_byte(rounded_model(model, dtype), tokenizer, text)
    percent = 0.0
    if full > 0:
        percent = round(100 * (rounded / full - 1), 2) + 0.0  # + 0.0: not -0.00
    return f"{dtype}: {rounded:.4f} bits per byte, {percent:+.2f}% (full weights: {full:.4f})"


def _bits_per_byte(model: Thinker, tokenizer: Tokenizer, text: str) -> float:
    return Generator(model, tokenizer, compile=False).score(text, progress=True).bits_per_byte
