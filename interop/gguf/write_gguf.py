"""Export to GGUF, the single-file format of llama.cpp and related tools."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from thinker.checkpoint import model_tensors
from thinker.data.tokenizers.hf_tokenizer import TO_CHAR, HFTokenizer
from thinker.data.tokenizers.new_tokenizers import WORDS
from thinker.data.tokenizers.tokenizer import ONE_CHARACTER, Tokenizer
from thinker.data.tokenizers.tokenizer_conversion import GPT2, merges_of
from thinker.interop.families.tensors import group_tensors, to_their_tensors
from thinker.interop.gguf.gguf_families import Architecture, family_of, find_by_config, to_header
from thinker.interop.gguf.gguf_quantization import check_dtype, quantize, stored_dtype
from thinker.interop.gguf.gguf_tokenizer import (
    ALL_ENDS,
    CONTROL,
    END_KEYS,
    KEY,
    LLAMA3,
    NORMAL,
    QWEN2,
    UNUSED,
    USER_DEFINED,
)
from thinker.interop.gguf.sentencepiece_header import named_for_spaces, sentencepiece_header
from thinker.model import Thinker
from thinker.model.attention_temperature import fold_attention_temperature
from thinker.model.positions import Rope
from thinker.model.rope_scaling import RopeScaling
from thinker.runtime.errors import RunError, UserError

# Split patterns and their names in llama.cpp. It splits as LLAMA3 for WORDS, which is equivalent.
# TIKTOKEN_GPT2 splits as GPT2 does.
TIKTOKEN_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
SPLITS = {
    WORDS: "llama-bpe",
    LLAMA3: "llama-bpe",
    GPT2: "gpt-2",
    TIKTOKEN_GPT2: "gpt-2",
    QWEN2: "qwen2",
}


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

    row = find_by_config(model.config)
    name = named_for_spaces(tokenizer, name)
    header = {"name": name, "file_type": _file_type(dtype)}
    header |= _tokenizer_header(tokenizer, model.config.vocab_size, name)
    writer = gguf.GGUFWriter(path, row.name)
    for key, value in header.items():
        add = getattr(writer, f"add_{key}")
        add(value)
    for key, value in to_header(row, model.config).items():
        _add_value(writer, f"{row.name}.{key}", value)
    ends = _end_ids(tokenizer)
    if len(ends) > 1:
        writer.add_array(KEY + ALL_ENDS, ends)
    arrays = {}
    kinds = {}
    for key, (our_name, tensor) in _tensors(model, row).items():
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
        field = reader.get_field(KEY + key)
        if field is not None:
            ends.add(int(field.contents()))
    return ends


def _file_type(dtype: str) -> Any:
    import gguf

    if dtype == "f32":
        return gguf.LlamaFileType.ALL_F32
    return gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"]


def _add_value(writer: Any, key: str, value: Any) -> None:
    """Write a value as llama.cpp reads its kind."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tokenizer_header(tokenizer: Tokenizer, vocab_size: int, name: str) -> dict[str, Any]:
    """Fields of the header that describe the tokenizer. Raises UserError if it is not supported."""
    if isinstance(tokenizer, HFTokenizer) and tokenizer.content["model"].get("byte_fallback"):
        header = sentencepiece_header(tokenizer, vocab_size, name)
    else:
        header = _byte_level_header(tokenizer, vocab_size)
    header["bos_token_id"] = tokenizer.bos_id
    header["add_bos_token"] = bool(tokenizer.bos_prefix)
    header |= dict(zip(END_KEYS, _end_ids(tokenizer)))
    if tokenizer.chat_template is not None:
        header["chat_template"] = tokenizer.chat_template
    return header


def _byte_level_header(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    tokens = _tokens(tokenizer, vocab_size)
    merges = merges_of(tokenizer)
    if not merges:
        # llama.cpp needs at least one merge. These characters represent no bytes, so it never
        # applies.
        merges = [("▁", "▁")]
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": SPLITS.get(tokenizer.pattern, "gpt-2"),
        "token_list": [text for text, _ in tokens],
        "token_types": [kind for _, kind in tokens],
        "token_merges": [" ".join(pair) for pair in merges],
    }


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
            "GGUF export needs a byte-level tokenizer without a normalizer, or a BPE of "
            "SentencePiece with tokens for bytes; use bpe or byte"
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


def _tensors(model: Thinker, row: Architecture) -> dict[str, tuple[str, Tensor]]:
    """All tensors by their names in llama.cpp, with the name of ours that decides the data type."""
    config = model.config
    family = family_of(row)
    ours = fold_attention_temperature(model_tensors(model), config)
    deciding = {}
    for group in group_tensors(family, config, ours):
        for name in group.theirs:
            deciding[name] = group.ours[-1]
    tensors = {}
    for name, tensor in to_their_tensors(family, config, ours).items():
        tensors[name] = (deciding[name], tensor)
    if config.rope_scaling and config.rope_scaling["type"] == "llama3":
        scaling = RopeScaling.from_dict(config.rope_scaling)
        n_rotated = config.head_dim
        if config.rope_dim is not None:
            n_rotated = config.rope_dim
        plain = Rope(n_rotated, config.rope_theta).frequencies()
        scaled = Rope(n_rotated, config.rope_theta, scaling).frequencies()
        tensors["rope_freqs.weight"] = ("rope_freqs", plain / scaled)  # divisor of each angle
    return tensors
