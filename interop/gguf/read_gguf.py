"""Read the model and the tokenizer in a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interop.gguf import gguf_families
from thinker.interop.gguf.gguf_file import GgufFile
from thinker.interop.gguf.gguf_tokenizer import read_tokenizer
from thinker.interop.hf_config import from_hf_config
from thinker.interop.huggingface import load_from_files
from thinker.model import Thinker, ThinkerConfig
from thinker.model.positions import Rope
from thinker.model.rope_scaling import RopeScaling
from thinker.runtime.errors import UserError

ROPE_DIVISORS = "rope_freqs.weight"  # of the angles, as in Llama 3
# What Llama 3 and all that followed it use. A file has only the divisors.
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0


def load_gguf(path: Path) -> tuple[Thinker, Tokenizer]:
    """Load the model of a file in fp32, ready to sample from, and its tokenizer.

    Raises UserError for unsupported models, types and tokenizers, CorruptCheckpoint if the file is
    damaged.
    """
    file = GgufFile(path)
    try:
        row = gguf_families.find_by_header(file.fields)
        config = from_hf_config(_config(row, file))
        tokenizer = read_tokenizer(file.fields, config.vocab_size)
    except UserError as error:
        reason = str(error).replace("config.json", "its header")
        raise UserError(f"{path}: {reason}") from error
    family = gguf_families.family_of(row)
    return load_from_files(path, config, family, file), tokenizer


def _config(row: gguf_families.Architecture, file: GgufFile) -> dict[str, Any]:
    """The config.json of the model."""
    values = gguf_families.to_config(row, file.fields, file.shapes())
    if ROPE_DIVISORS in file.names():
        if values.get("rope_scaling") is not None:
            raise UserError("it scales RoPE in two ways")
        plain = from_hf_config(values)
        scaling = _find_llama3_scaling(plain, file.read(ROPE_DIVISORS).flatten())
        if scaling is not None:
            values["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": LOW_FREQ_FACTOR,
                "high_freq_factor": HIGH_FREQ_FACTOR,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
    return values


def _find_llama3_scaling(config: ThinkerConfig, divisors: torch.Tensor) -> RopeScaling | None:
    """The scaling with these divisors; None if all are 1. Raises UserError if there is none.

    A file does not have the length of pretraining, so all powers of 2 are tried.
    """
    factor = divisors.max().item()
    if factor == 1 and divisors.min() == 1:
        return None
    n_rotated = config.head_dim
    if config.rope_dim is not None:
        n_rotated = config.rope_dim
    plain = Rope(n_rotated, config.rope_theta).frequencies()
    unknown = UserError(f"its tensor {ROPE_DIVISORS} scales RoPE in another way than Llama 3")
    if divisors.shape != plain.shape or not 1 <= factor < float("inf"):
        raise unknown
    for exponent in range(1, 25):
        values = {
            "type": "llama3",
            "factor": factor,
            "low_freq_factor": LOW_FREQ_FACTOR,
            "high_freq_factor": HIGH_FREQ_FACTOR,
            "original_max_seq_len": 2**exponent,
        }
        scaling = RopeScaling.from_dict(values)
        scaled = Rope(n_rotated, config.rope_theta, scaling).frequencies()
        if torch.allclose(plain / scaled, divisors.double(), rtol=1e-5, atol=0):
            return scaling
    raise unknown
