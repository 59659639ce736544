"""A model laid out for inference: the same forward pass with fused, and perhaps quantized, matrices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinker.generation.int8 import Int8Linear
from thinker.model import Thinker
from thinker.model.activation_hooks import has_open_hooks
from thinker.model.attention import Attention
from thinker.model.linear import Linear
from thinker.model.norm import RMSNorm
from thinker.runtime.errors import UserError


@torch.no_grad()
def prepare_for_inference(model: Thinker, dtype: torch.dtype = torch.float32, int8: bool = False) -> Thinker:
    """Copy a Thinker for sampling; the original does not change.

    Matrices with the same input (q, k and v; gate and up) are fused into one. Decoding is bound by reading the weights,
    and int8 weights have a quarter of fp32's bytes.

    Args:
        dtype: of weights, activations and cache.
        int8: quantize all matrices, including the head, tied or not; only the embedding keeps `dtype`.
    """

    def fuse(*linears: Linear) -> nn.Module:
        weight = torch.cat([linear.effective_weight() for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases).to(dtype) if biases else None
        return Int8Linear(weight, bias) if int8 else _linear(weight.to(dtype), bias)

    if has_open_hooks(model):
        raise UserError("open hooks are not copied; record or patch generator.model instead")
    device = model.device
    with torch.device("meta"):
        copy = Thinker(model.config)  # without memory for its weights
    for new, old in zip(copy.blocks, model.blocks):
        attention, mlp = new.attention, new.mlp
        attention.qkv_proj = fuse(old.attention.q_proj, old.attention.k_proj, old.attention.v_proj)
        attention.o_proj = fuse(old.attention.o_proj)
        mlp.gate_up_proj = fuse(old.mlp.gate_proj, old.mlp.up_proj)
        mlp.down_proj = fuse(old.mlp.down_proj)
        attention.qk_norm = _fuse_qk_norm(attention.q_norm, old.attention, dtype)
        del attention.q_proj, attention.k_proj, attention.v_proj, attention.q_norm, attention.k_norm
        del mlp.gate_proj, mlp.up_proj
    copy.embedding.weight = _frozen(model.embedding.weight.to(dtype))
    if model.config.tie_embeddings and not int8:
        copy.lm_head.weight = copy.embedding.weight
    else:
        copy.lm_head = fuse(model.lm_head)
    parameters = dict(model.named_parameters())
    for name, parameter in copy.named_parameters():
        if parameter.is_meta:
            module, _, leaf = name.rpartition(".")
            setattr(copy.get_submodule(module), leaf, _frozen(parameters[name].to(dtype)))
    return copy.to(device).eval()


def matrix_bytes(model: Thinker) -> int:
    """Bytes of weights that one decode step reads: every matrix once, without the embedding."""
    return sum(weight.nbytes for name, weight in model.state_dict().items() if name != "embedding.weight")


def _linear(weight: Tensor, bias: Tensor | None) -> Linear:
    with torch.device("meta"):
        linear = Linear(weight.shape[1], weight.shape[0])
    linear.weight = _frozen(weight)
    linear.bias = None if bias is None else _frozen(bias)
    return linear


def _fuse_qk_norm(norm: nn.Module, old: Attention, dtype: torch.dtype) -> nn.Module:
    if isinstance(norm, RMSNorm):
        weights = old.q_norm.weight.expand(old.n_heads, -1), old.k_norm.weight.expand(old.n_kv_heads, -1)
        norm.weight = _frozen(torch.cat(weights)[:, None].to(dtype))  # (H + K, 1, D): a weight vector per head
    return norm


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)
