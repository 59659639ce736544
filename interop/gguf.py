"""Export to GGUF, the single-file format of llama.cpp and related tools."""

import re
from pathlib import Path

import numpy as np
from torch import Tensor

from thinker.checkpoint import model_tensors
from thinker.data.tokenizers.hf_tokenizer import TO_CHAR, HFTokenizer
from thinker.data.tokenizers.tokenizer import ONE_CHARACTER, Tokenizer
from thinker.data.tokenizers.tokenizer_conversion import GPT2, merges_of
from thinker.data.tokenizers.tokenizer_factory import WORDS
from thinker.interop.gguf_quantization import check_dtype, quantize, stored_dtype
from thinker.interop.hf_config import hf_model_type
from thinker.interop.huggingface import to_hf_name
from thinker.model import Thinker
from thinker.model.attention_temperature import fold_attention_temperature
from thinker.model.positions import Rope, RopeScaling
from thinker.runtime.errors import RunError, UserError

# Split patterns and their names in llama.cpp; LLAMA3 and WORDS are equivalent.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TIKTOKEN_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"  # splits as GPT2 does
QWEN2 = LLAMA3.replace("{1,3}", "")
SPLITS = {
    WORDS: "llama-bpe",
    LLAMA3: "llama-bpe",
    GPT2: "gpt-2",
    TIKTOKEN_GPT2: "gpt-2",
    QWEN2: "qwen2",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types


def write_gguf(
    model: Thinker, tokenizer: Tokenizer, path: Path, dtype: str = "f16", name: str = "thinker"
) -> None:
    """Write a GGUF file with matrices in `dtype` and f32 vectors, then read it back and compare tensors and tokens.

    dtype: f32, f16, q8_0, q5_1, q5_0, q4_1 or q4_0; a quantized file keeps matrices in f16 whose row length is not a
    multiple of 32. Raises UserError if llama.cpp does not support the model or tokenizer, or gguf is not installed;
    RunError if a weight overflows, or the file differs from what was written.
    """
    check_dtype(dtype)
    import gguf

    config = model.config
    architecture, scaling = hf_model_type(config), config.rope_scaling or {"type": None}
    reasons = {
        f"model.attention={config.attention}": any(
            pattern.text != "full" for pattern in config.patterns
        ),
        "model.no_rope_layers": bool(config.no_rope_layers),
        f"model.rope_scaling of type {scaling['type']}": scaling["type"] in ("dynamic", "yarn"),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(
                f"cannot export a model with {reason} to GGUF; llama.cpp does not support it"
            )
    texts, types = zip(*_tokens(tokenizer, config.vocab_size))
    writer = gguf.GGUFWriter(path, architecture)
    fields = {  # of the header; the writer has an add_... method for each
        "name": name, "file_type": gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"],
        "vocab_size": config.vocab_size, "context_length": config.max_seq_len, "embedding_length": config.d_model,
        "block_count": config.n_layers, "feed_forward_length": config.d_ff, "head_count": config.n_heads,
        "head_count_kv": config.n_kv_heads, "key_length": config.head_dim, "value_length": config.head_dim,
        "rope_dimension_count": config.head_dim, "rope_freq_base": config.rope_theta,
        "layer_norm_rms_eps": config.norm_eps,
    }  # fmt: skip
    if scaling["type"] == "linear":
        fields |= {
            "rope_scaling_type": gguf.RopeScalingType.LINEAR,
            "rope_scaling_factor": scaling["factor"],
        }
    # llama.cpp needs at least one merge; these characters represent no bytes, so it never applies.
    merges = [" ".join(pair) for pair in merges_of(tokenizer) or [("▁", "▁")]]
    fields |= {"tokenizer_model": "gpt2", "tokenizer_pre": SPLITS.get(tokenizer.pattern, "gpt-2")}
    fields |= {
        "token_list": texts,
        "token_types": types,
        "token_merges": merges,
        "bos_token_id": tokenizer.bos_id,
    }
    fields |= {"eos_token_id": tokenizer.eos_id, "add_bos_token": bool(tokenizer.bos_prefix)}
    if tokenizer.chat_template is not None:
        fields["chat_template"] = tokenizer.chat_template
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(value)
    arrays, kinds = {}, {}
    for key, (ours, tensor) in _tensors(model, architecture).items():
        arrays[key], kinds[key] = quantize(ours, tensor, dtype), stored_dtype(tensor, dtype).upper()
        writer.add_tensor(key, arrays[key], raw_dtype=gguf.GGMLQuantizationType[kinds[key]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = gguf.GGUFReader(path)
    found = {
        tensor.name: tensor.data.reshape(arrays[tensor.name].shape) for tensor in reader.tensors
    }
    same = found.keys() == arrays.keys() and all(
        np.array_equal(found[name], arrays[name]) for name in arrays
    )
    same = same and {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == kinds
    if not same or tuple(reader.get_field("tokenizer.ggml.tokens").contents()) != texts:
        raise RunError(f"{path} differs from what was written; export it again")


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> list[tuple[str, int]]:
    """Text of each id in GPT-2's printable characters, and its type. Raises UserError for unsupported tokenizers."""
    if isinstance(tokenizer, HFTokenizer) or tokenizer.normalizer is not None:
        raise UserError(
            "GGUF export needs a byte-level tokenizer without a normalizer; use bpe or byte"
        )
    only_bytes = (
        tokenizer.pattern == ONE_CHARACTER and not merges_of(tokenizer) and tokenizer.kind != "char"
    )
    if tokenizer.pattern not in SPLITS and not only_bytes:
        raise UserError(
            f"llama.cpp does not support the split pattern of {tokenizer.kind}; use bpe or byte"
        )
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    tokens = []
    for number in range(vocab_size):
        if number in names:
            added = names[number] in tokenizer.non_special_added_tokens
            tokens.append((names[number], USER_DEFINED if added else CONTROL))
        elif number < tokenizer.vocab_size and tokenizer.token_bytes(number):
            tokens.append(
                ("".join(TO_CHAR[byte] for byte in tokenizer.token_bytes(number)), NORMAL)
            )
        else:
            tokens.append((f"[unused {number}]", UNUSED))
    return tokens


def _tensors(model: Thinker, architecture: str) -> dict[str, tuple[str, Tensor]]:
    """All tensors by their names in llama.cpp, with our names."""
    import gguf

    config, tensors = model.config, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.n_layers)
    for ours, tensor in fold_attention_temperature(model_tensors(model), config).items():
        key = names.get_name(to_hf_name(ours), try_suffixes=(".weight", ".bias"))
        found = re.fullmatch(r"blocks\.\d+\.attention\.[qk]_proj\.(?:weight|bias)", ours)
        if (
            architecture == "llama" and found
        ):  # llama.cpp rotates neighbors, (0, 1), (2, 3), ..., not halves
            halves = tensor.view(-1, 2, config.head_dim // 2, *tensor.shape[1:])  # (H, 2, D/2, ...)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        tensors[key] = ours, tensor
    if (config.rope_scaling or {}).get("type") == "llama3":
        plain = Rope(config.head_dim, config.rope_theta).frequencies()
        scaled = Rope(
            config.head_dim, config.rope_theta, RopeScaling.from_dict(config.rope_scaling)
        ).frequencies()
        tensors["rope_freqs.weight"] = "rope_freqs", plain / scaled  # divisor of each pair's angle
    return tensors
