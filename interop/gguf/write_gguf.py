"""Export to GGUF, the single-file format of llama.cpp and related tools."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from thinker.checkpoint import model_tensors
from thinker.data.tokenizers.hf_tokenizer import TO_CHAR, HFTokenizer
from thinker.data.tokenizers.new_tokenizers import WORDS
from thinker.data.tokenizers.tokenizer import ONE_CHARACTER, Tokenizer
from thinker.data.tokenizers.tokenizer_conversion import GPT2, merges_of
from thinker.interop.gguf.gguf_quantization import check_dtype, quantize, stored_dtype
from thinker.interop.hf_config import hf_model_type
from thinker.interop.huggingface import to_hf_name
from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_temperature import fold_attention_temperature
from thinker.model.positions import Rope
from thinker.model.rope_scaling import RopeScaling
from thinker.runtime.errors import RunError, UserError

# Split patterns and their names in llama.cpp. It splits as LLAMA3 for WORDS, which is equivalent.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
# Splits as GPT2 does.
TIKTOKEN_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
SPLITS = {
    WORDS: "llama-bpe",
    LLAMA3: "llama-bpe",
    GPT2: "gpt-2",
    TIKTOKEN_GPT2: "gpt-2",
    QWEN2: "qwen2",
}

# Keys of the ids at which llama.cpp ends a text. It reads one id from each.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ALL_ENDS = "tokenizer.ggml.eos_token_ids"  # which Ollama's own engine reads

# Types of tokens.
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5


def write_gguf(
    model: Thinker, tokenizer: Tokenizer, path: Path, dtype: str = "f16", name: str = "thinker"
) -> None:
    """Write a GGUF file, then read it back and compare tensors, tokens and the ends of texts.

    Stores every EOS token, so that llama.cpp stops where our Generator does.

    dtype: of the matrices (vectors are f32), one of DTYPES; see stored_dtype(). Raises UserError if
    llama.cpp does not support the model or tokenizer, or gguf is not installed; RunError if a
    weight overflows, or the file differs from what was written.
    """
    check_dtype(dtype)
    import gguf

    architecture = hf_model_type(model.config)
    _check_supported(model.config)
    header = {"name": name, "file_type": _file_type(dtype)}
    header |= _model_header(model.config) | _tokenizer_header(tokenizer, model.config.vocab_size)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in header.items():
        add = getattr(writer, f"add_{key}")
        add(value)
    ends = _end_ids(tokenizer)
    if len(ends) > 1:
        writer.add_array(ALL_ENDS, ends)
    arrays = {}
    kinds = {}
    for key, (our_name, tensor) in _tensors(model, architecture).items():
        stored = stored_dtype(our_name, tensor, dtype, model.config)
        arrays[key] = quantize(our_name, tensor, stored)
        kinds[key] = gguf.GGMLQuantizationType[stored.upper()]
        writer.add_tensor(key, arrays[key], raw_dtype=kinds[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    is_same = _contains(path, arrays, kinds, header["token_list"])
    if not is_same or _read_ends(path) != set(ends):
        raise RunError(f"{path} differs from what was written; export it again")


def _contains(
    path: Path, arrays: dict[str, np.ndarray], kinds: dict[str, Any], tokens: list[str]
) -> bool:
    """Whether a file has these tensors, of these data types, and these tokens."""
    import gguf

    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    if found.keys() != arrays.keys():
        return False
    for name, array in arrays.items():
        same_type = found[name].tensor_type == kinds[name]
        if not same_type or not np.array_equal(found[name].data.reshape(array.shape), array):
            return False
    return list(reader.get_field("tokenizer.ggml.tokens").contents()) == tokens


def _read_ends(path: Path) -> set[int]:
    """The ids at which llama.cpp ends a text by the file's keys."""
    import gguf

    reader = gguf.GGUFReader(path)
    ends = set()
    for key in END_KEYS:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        if field is not None:
            ends.add(int(field.contents()))
    return ends


def _check_supported(config: ThinkerConfig) -> None:
    """Raise UserError if llama.cpp cannot compute what the model does."""
    reason = None
    if any(pattern.text != "full" for pattern in config.patterns):
        reason = f"model.attention={config.attention}"
    elif config.no_rope_layers:
        reason = "model.no_rope_layers"
    elif config.rope_scaling and config.rope_scaling["type"] in ("dynamic", "yarn"):
        reason = f"model.rope_scaling of type {config.rope_scaling['type']}"
    if reason is not None:
        raise UserError(
            f"cannot export a model with {reason} to GGUF; llama.cpp does not support it"
        )


def _file_type(dtype: str) -> Any:
    import gguf

    if dtype == "f32":
        return gguf.LlamaFileType.ALL_F32
    return gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"]


def _model_header(config: ThinkerConfig) -> dict[str, Any]:
    """Fields of the header that describe the model. The writer has an add_... method for each."""
    import gguf

    header = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_seq_len,
        "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": config.d_ff,
        "head_count": config.n_heads,
        "head_count_kv": config.n_kv_heads,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_theta,
        "layer_norm_rms_eps": config.norm_eps,
    }
    if config.rope_scaling and config.rope_scaling["type"] == "linear":
        header["rope_scaling_type"] = gguf.RopeScalingType.LINEAR
        header["rope_scaling_factor"] = config.rope_scaling["factor"]
    return header


def _tokenizer_header(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Fields of the header that describe the tokenizer. Raises UserError if it is not supported."""
    tokens = _tokens(tokenizer, vocab_size)
    merges = merges_of(tokenizer)
    if not merges:
        # llama.cpp needs at least one merge. These characters represent no bytes, so it never
        # applies.
        merges = [("▁", "▁")]
    header = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": SPLITS.get(tokenizer.pattern, "gpt-2"),
        "token_list": [text for text, _ in tokens],
        "token_types": [kind for _, kind in tokens],
        "token_merges": [" ".join(pair) for pair in merges],
        "bos_token_id": tokenizer.bos_id,
        "add_bos_token": bool(tokenizer.bos_prefix),
    }
    header |= dict(zip(END_KEYS, _end_ids(tokenizer)))
    if tokenizer.chat_template is not None:
        header["chat_template"] = tokenizer.chat_template
    return header


def _end_ids(tokenizer: Tokenizer) -> list[int]:
    """The different EOS ids. Raises UserError if there are more than llama.cpp can read."""
    ids = list(dict.fromkeys(tokenizer.eos_ids))
    if len(ids) > len(END_KEYS):
        raise UserError(
            f"the tokenizer has {len(ids)} EOS tokens {ids}, but llama.cpp reads at most "
            f"{len(END_KEYS)} from a GGUF file; remove some from eos_token_id in "
            "generation_config.json"
        )
    return ids


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> list[tuple[str, int]]:
    """Text of each id in GPT-2's printable characters, and its type.

    Raises UserError for unsupported tokenizers.
    """
    if isinstance(tokenizer, HFTokenizer) or tokenizer.normalizer is not None:
        raise UserError(
            "GGUF export needs a byte-level tokenizer without a normalizer; use bpe or byte"
        )
    # Without merges, tokens are bytes, however text is split.
    only_bytes = tokenizer.pattern == ONE_CHARACTER and not merges_of(tokenizer)
    only_bytes = only_bytes and tokenizer.kind != "char"
    if tokenizer.pattern not in SPLITS and not only_bytes:
        raise UserError(
            f"llama.cpp does not support the split pattern of {tokenizer.kind}; use bpe or byte"
        )
    special_names = {number: name for name, number in tokenizer.special_tokens.items()}
    tokens = []
    for number in range(vocab_size):
        content = b""
        if number < tokenizer.vocab_size:
            content = tokenizer.token_bytes(number)
        if number in special_names:
            name = special_names[number]
            kind = CONTROL
            if name in tokenizer.non_special_added_tokens:
                kind = USER_DEFINED
            tokens.append((name, kind))
        elif content:
            text = "".join(TO_CHAR[byte] for byte in content)
            tokens.append((text, NORMAL))
        else:
            tokens.append((f"[unused {number}]", UNUSED))
    return tokens


def _tensors(model: Thinker, architecture: str) -> dict[str, tuple[str, Tensor]]:
    """All tensors by their names in llama.cpp, with our names."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.n_layers)
    tensors = {}
    for our_name, tensor in fold_attention_temperature(model_tensors(model), config).items():
        key = names.get_name(to_hf_name(our_name), try_suffixes=(".weight", ".bias"))
        is_rotated = re.fullmatch(r"blocks\.\d+\.attention\.[qk]_proj\.(weight|bias)", our_name)
        if architecture == "llama" and is_rotated:
            tensor = _pair_neighbors(tensor, config.head_dim)
        tensors[key] = (our_name, tensor)
    if config.rope_scaling and config.rope_scaling["type"] == "llama3":
        scaling = RopeScaling.from_dict(config.rope_scaling)
        plain = Rope(config.head_dim, config.rope_theta).frequencies()
        scaled = Rope(config.head_dim, config.rope_theta, scaling).frequencies()
        tensors["rope_freqs.weight"] = ("rope_freqs", plain / scaled)  # divisor of each angle
    return tensors


def _pair_neighbors(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head.

    For the architecture llama, llama.cpp rotates neighbors, (0, 1), (2, 3), ..., not halves.
    """
    halves = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])  # (H, 2, D/2, ...)
    return halves.transpose(1, 2).reshape(tensor.shape)
