"""Verify with llama.cpp that a GGUF file computes what the model does."""

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from thinker.checkpoint import model_tensors
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interop.gguf.gguf_families import stored_with
from thinker.interop.gguf.gguf_quantization import BLOCK, rounded_model, stored_dtype
from thinker.interop.gguf.k_quants import BLOCK as K_BLOCK
from thinker.interop.gguf.k_quants import K_BITS
from thinker.interop.gguf.sentencepiece_header import has_equal_ids
from thinker.interop.verify_export import MAX_GREEDY_TOKENS, adversarial_texts, check_greedy
from thinker.model import Thinker
from thinker.runtime.errors import RunError

# Largest difference of llama.cpp's logits, as multiples of what rounding the inputs of layers
# changes: (RMS, maximum). Measured on x86 with 75 models: at most 1.15 and 1.58. Other processors
# add f16 products in f16, which changes more.
F16_LIMITS = (10, 10)
QUANTIZED_LIMITS = (1.5, 3)

F32_LIMIT = 1e-4  # relative; measured: at most 4.7e-6
GELU_LIMIT = 2e-3  # llama.cpp looks GELU up in a table of f16; measured: at most 5e-4


@torch.no_grad()
def verify_gguf(
    model: Thinker, tokenizer: Tokenizer, path: Path, dtype: str, n_texts: int = 1000
) -> str:
    """Compare a GGUF file, opened with llama.cpp, with the original model and tokenizer.

    Compares logits with those of the model with the file's weights (matrices in `dtype`), the
    tokens that end a text, tokenization and, for f32, greedy tokens. Returns a summary of the
    checks. Raises RunError if results differ.
    """
    try:
        import llama_cpp
    except ImportError:
        return "not compared with llama.cpp, which is not installed (pip install llama-cpp-python)"
    prompt = torch.tensor([[tokenizer.bos_id, 0, 1, 2]])
    steps = min(MAX_GREEDY_TOKENS, model.config.max_seq_len - 4)
    llama = llama_cpp.Llama(
        str(path),
        n_ctx=steps + 4,
        logits_all=True,
        type_k=0,  # a cache in fp32
        type_v=0,
        n_threads=1,
        verbose=False,
    )

    def new_logits(tokens: Tensor) -> Tensor:
        llama.eval(tokens[0].tolist())
        logits = llama.scores[llama.n_tokens - tokens.shape[1] : llama.n_tokens]
        return torch.from_numpy(logits)[None]  # (1, T, V)

    try:
        compared = check_logits(model, dtype, steps + 4, new_logits)
        if dtype == "f32" and _smallest_limit(model) == F32_LIMIT:
            llama.reset()
            check_greedy(model, prompt, steps, new_logits, "llama.cpp")
            compared += f", {steps} equal greedy tokens"
        vocab = llama_cpp.llama_model_get_vocab(llama.model)
        compared += ", " + check_ends(
            tokenizer, lambda number: llama_cpp.llama_vocab_is_eog(vocab, number)
        )
        texts = adversarial_texts(list(tokenizer.special_tokens))
        comparable = (text for text in texts if has_equal_ids(tokenizer, text))
        for text in islice(comparable, n_texts):
            tokens = llama.tokenize(text.encode(), add_bos=False, special=True)
            if tokens != tokenizer.encode(text, allow_special=True):
                raise RunError(f"llama.cpp tokenizes {text!r} differently; nothing was written")
    finally:
        llama.close()
    return f"compared with llama.cpp: {compared}, {n_texts:,} texts tokenized identically"


def check_ends(tokenizer: Tokenizer, ends_text: Callable[[int], bool]) -> str:
    """Compare the ids at which llama.cpp ends a text with our EOS ids.

    It also ends at some names, such as <|endoftext|>, whatever the file says. Returns a summary
    that names these. Raises RunError if an EOS id does not end a text there.
    """
    for number in tokenizer.eos_ids:
        if not ends_text(number):
            raise RunError(
                f"llama.cpp does not end a text at EOS token {number}; nothing was written"
            )
    others = []
    for name, number in tokenizer.special_tokens.items():
        if number not in tokenizer.eos_ids and ends_text(number):
            others.append(name)
    if others:
        return f"it ends texts at the same tokens and at {', '.join(others)}"
    return "it ends texts at the same tokens"


def round_inputs(model: Thinker, dtype: str) -> Thinker:
    """Make all linear layers round their inputs as llama.cpp does for weights of this data type.

    llama.cpp computes the products of an f16 matrix in f16, and those of a quantized one with
    inputs of 8 bits. Returns the model.
    """

    def round_with(stored: str) -> Callable[[nn.Linear, tuple[Tensor]], tuple[Tensor]]:
        def rounded(layer: nn.Linear, inputs: tuple[Tensor]) -> tuple[Tensor]:
            if stored == "f16":
                return (inputs[0].half().float(),)
            return (_round_to_8_bits(inputs[0], stored).float(),)

        return rounded

    deciding = stored_with(model.config, model_tensors(model))
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            weight_name = f"{name}.weight"
            if model.config.tie_embeddings and name == "lm_head":
                weight_name = "embedding.weight"
            stored = stored_dtype(deciding[weight_name], layer.weight, dtype, model.config)
            if stored != "f32":
                layer.register_forward_pre_hook(round_with(stored))
    return model


def _round_to_8_bits(inputs: Tensor, stored: str) -> Tensor:
    """Round to multiples of a scale: f16 per 32 inputs, or fp32 per 256 for K-quants."""
    is_k_quant = stored in K_BITS
    block = BLOCK
    if is_k_quant:
        block = K_BLOCK
    blocks = inputs.unflatten(-1, (-1, block))  # (..., D / block, block)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    levels = (blocks / scales).nan_to_num().round()  # NaN: a block of zeros
    if not is_k_quant:
        scales = scales.half()
    return (levels * scales).flatten(-2)


@torch.no_grad()
def check_logits(
    model: Thinker, dtype: str, length: int, llama_logits: Callable[[Tensor], Tensor]
) -> str:
    """Compare llama.cpp's logits at `length` random tokens with those of the same weights.

    llama.cpp rounds the inputs of layers, too. How much that changes the logits depends on the
    model, so the limits are multiples of the change in the model itself. Returns a summary. Raises
    RunError beyond the limits.
    """
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, length), generator=rng)
    rounded = rounded_model(model, dtype)
    logits = rounded(tokens)
    rms, largest = _difference(llama_logits(tokens), logits)
    expected_rms, expected_largest = _difference(round_inputs(rounded, dtype)(tokens), logits)
    rms_factor, largest_factor = F16_LIMITS if dtype == "f16" else QUANTIZED_LIMITS
    smallest = _smallest_limit(model)
    is_close = rms <= max(smallest, rms_factor * expected_rms)
    is_close &= largest <= max(smallest, largest_factor * expected_largest)
    if not is_close:  # also if it is NaN
        raise RunError(
            f"the logits from llama.cpp differ from those of the same weights by {largest:.2%}; "
            f"rounding explains about {expected_largest:.2%}; nothing was written"
        )
    percent = math.ceil(1000 * largest) / 10
    return f"logits within {percent:g}% of those of the same weights"


def _smallest_limit(model: Thinker) -> float:
    """How much logits may differ without any rounding of inputs, relative to the largest."""
    if model.config.activation.startswith("gelu"):
        return GELU_LIMIT
    return F32_LIMIT


def _difference(logits: Tensor, others: Tensor) -> tuple[float, float]:
    """The difference of logits (1, T, V), as RMS and as maximum, each relative to `others`."""
    difference = logits - others
    tiny = torch.finfo(torch.float32).tiny  # avoids 0 / 0
    rms = difference.square().mean().sqrt() / others.square().mean().sqrt().clamp(tiny)
    largest = difference.abs().max() / others.abs().max().clamp(tiny)
    return rms.item(), largest.item()
