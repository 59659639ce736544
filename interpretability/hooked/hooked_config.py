"""The shape of a model by its names in TransformerLens."""

from dataclasses import dataclass

import torch

from thinker.model import Thinker
from thinker.model.layers import LayerNorm, RMSNorm

POSITIONS = {"rope": "rotary", "learned": "standard"}
ACTIVATIONS = {"gelu_tanh": "gelu_new"}


@dataclass
class HookedConfig:
    """The shape of a model by its names in TransformerLens."""

    n_layers: int
    n_heads: int
    n_key_value_heads: int | None  # None: as many as heads
    d_model: int
    d_head: int
    d_mlp: int
    d_vocab: int
    d_vocab_out: int
    n_ctx: int
    eps: float
    act_fn: str
    gated_mlp: bool
    normalization_type: str  # RMS or LN; RMSPre or LNPre when folded
    positional_embedding_type: str
    use_qk_norm: bool
    device: torch.device
    dtype: torch.dtype
    default_prepend_bos: bool
    use_attn_result: bool = False  # cache hook_result, which is large
    use_hook_mlp_in: bool = False  # cache hook_mlp_in, which equals hook_resid_mid
    attn_only: bool = False
    parallel_attn_mlp: bool = False  # attention and MLP read the same input: no hook_resid_mid


def config_of(model: Thinker, default_prepend_bos: bool) -> HookedConfig:
    """The shape of a Thinker."""
    config = model.config
    n_key_value_heads = config.n_kv_heads
    if n_key_value_heads == config.n_heads:
        n_key_value_heads = None
    normalization = config.norm
    if isinstance(model.norm, RMSNorm):
        normalization = "RMS"
    elif isinstance(model.norm, LayerNorm):
        normalization = "LN"
    return HookedConfig(
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_key_value_heads=n_key_value_heads,
        d_model=config.d_model,
        d_head=config.head_dim,
        d_mlp=config.d_ff,
        d_vocab=config.vocab_size,
        d_vocab_out=config.vocab_size,
        n_ctx=config.max_seq_len,
        eps=config.norm_eps,
        act_fn=ACTIVATIONS.get(config.activation, config.activation),
        gated_mlp=hasattr(model.blocks[0].mlp, "gate_proj"),
        normalization_type=normalization,
        positional_embedding_type=POSITIONS.get(config.positions, config.positions),
        use_qk_norm=config.qk_norm,
        device=model.device,
        dtype=model.dtype,
        default_prepend_bos=default_prepend_bos,
        parallel_attn_mlp=config.block.startswith("parallel"),
    )
