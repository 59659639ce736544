"""The data types of GGUF files: quantize weights as llama.cpp does."""

import copy
import re

import numpy as np
import torch
from torch import Tensor

from thinker.checkpoint import model_tensors
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation import Generator
from thinker.interop.gguf.gguf_families import stored_with
from thinker.interop.gguf.k_quants import BLOCK as K_BLOCK
from thinker.interop.gguf.k_quants import K_BITS, quantize_k
from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_temperature import (
    fold_attention_temperature,
    override_attention_temperature,
)
from thinker.runtime.checks import check_weights
from thinker.runtime.errors import UserError, install_command

DTYPES = "f32", "f16", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_k_m", "q4_1", "q4_0"
BLOCK = 32  # weights of a row that share a scale, except in K-quants

# The mixtures of llama.cpp: most matrices have this type, the most sensitive ones have q6_k.
MIXTURES = {"q5_k_m": "q5_k", "q4_k_m": "q4_k"}
# What llama.cpp stores for rows that do not divide into blocks of 256.
FALLBACKS = {"q6_k": "q8_0", "q5_k": "q5_1", "q4_k": "q5_0"}
SENSITIVE = r"blocks\.(\d+)\.(attention\.v_proj|mlp\.down_proj)\.weight"


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


def stored_dtype(name: str, tensor: Tensor, dtype: str, config: ThinkerConfig) -> str:
    """The data type of a tensor in a file of this data type, as llama.cpp chooses it.

    name: ours. f32 for vectors, norms and positions. Matrices whose rows do not divide into blocks
    have another type: FALLBACKS, or f16.
    """
    if tensor.dim() != 2 or "norm" in name or name.startswith("positions"):
        return "f32"
    chosen = MIXTURES.get(dtype, dtype)
    if dtype in MIXTURES and _is_sensitive(name, config):
        chosen = "q6_k"
    if chosen in K_BITS and tensor.shape[1] % K_BLOCK != 0:
        chosen = FALLBACKS[chosen]
    if chosen.startswith("q") and tensor.shape[1] % BLOCK != 0:
        chosen = "f16"
    return chosen


def _is_sensitive(name: str, config: ThinkerConfig) -> bool:
    """Whether a mixture stores a matrix with more bits.

    Those are the LM head and, in half of the layers, the matrix for values and the last one of the
    MLP: in the first and the last eighth of the layers, and in every third one between.
    """
    if name == "lm_head.weight" or (name == "embedding.weight" and config.tie_embeddings):
        return True
    match = re.fullmatch(SENSITIVE, name)
    if match is None:
        return False
    layer = int(match[1])
    eighth = config.n_layers // 8
    is_between = eighth <= layer < 7 * config.n_layers // 8
    return not is_between or (layer - eighth) % 3 == 2


def describe_fallbacks(model: Thinker, dtype: str) -> str | None:
    """Say which matrices have another data type, because of the length of their rows."""
    counts: dict[str, int] = {}
    for name, tensor in model_tensors(model).items():
        stored = stored_dtype(name, tensor, dtype, model.config)
        divisible = torch.empty(1, K_BLOCK, device="meta")  # rows divide into blocks of any size
        usual = stored_dtype(name, divisible, dtype, model.config)
        if tensor.dim() == 2 and stored != usual:
            counts[stored] = counts.get(stored, 0) + 1
    if not counts:
        return None
    block = BLOCK
    if dtype in MIXTURES or dtype in K_BITS:
        block = K_BLOCK
    parts = [f"{count} in {stored}" for stored, count in sorted(counts.items())]
    return f"matrices whose rows do not divide into blocks of {block}: {', '.join(parts)}"


def quantize(name: str, tensor: Tensor, stored: str) -> np.ndarray:
    """A tensor as stored: numbers, or the bytes of each row if quantized.

    stored: its data type, of stored_dtype(). Raises RunError if it overflows. Each row is quantized
    separately, so the order of the rows does not matter.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[stored.upper()]
    values = tensor.detach().cpu().float().contiguous()
    with np.errstate(over="ignore", invalid="ignore"):  # found below
        if stored in K_BITS:
            data = quantize_k(values, stored)
        else:
            data = gguf.quants.quantize(values.numpy(), kind)
        restored = gguf.quants.dequantize(data, kind)
    # The maximum of f16, the type of the scales, is 65,504.
    check_weights([(f"{name} as {stored}", torch.from_numpy(restored))], "GGUF")
    return data


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
    deciding = stored_with(rounded.config, tensors)
    for name, tensor in tensors.items():
        stored = stored_dtype(deciding[name], tensor, dtype, rounded.config)
        kind = gguf.GGMLQuantizationType[stored.upper()]
        values = gguf.quants.dequantize(quantize(name, tensor, stored), kind)
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
