"""A Thinker laid out for decoding: the same forward pass over fewer, or smaller, matrices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinker.generation.int8 import Int8Linear
from thinker.model import Thinker
from thinker.model.activations import has_open_hooks
from thinker.model.attention import Attention
from thinker.model.linear import Linear
from thinker.model.norm import RMSNorm
from thinker.runtime.errors import UserError


@torch.no_grad()
def prepare_for_inference(model: Thinker, dtype: torch.dtype = torch.float32, int8: bool = False) -> Thinker:
    """A snapshot of a Thinker to sample from; the one it is taken of stays as it is.

    Matrices with the same input (q, k and v; gate and up) lie in one piece, so that each is one product. Decoding
    is bound by reading the weights: `int8` reads a quarter of fp32's bytes. Only the embedding's look-up keeps its
    precision then; the head is quantized, tied or not.

    Args:
        dtype: of weights, activations and cache (with int8: of activations and cache).
    """

    def matrix(*linears: Linear) -> nn.Module:
        weight = torch.cat([linear.effective_weight() for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases).to(dtype) if biases else None
        return Int8Linear(weight, bias) if int8 else _linear(weight.to(dtype), bias)

    if has_open_hooks(model):
        raise UserError("open hooks are not copied; record or patch generator.model instead")
    device = model.device
    with torch.device("meta"):
        snapshot = Thinker(model.config)  # its shape alone
    for new, old in zip(snapshot.blocks, model.blocks):
        attention, mlp = new.attention, new.mlp
        attention.qkv_proj = matrix(old.attention.q_proj, old.attention.k_proj, old.attention.v_proj)
        attention.o_proj = matrix(old.attention.o_proj)
        mlp.gate_up_proj = matrix(old.mlp.gate_proj, old.mlp.up_proj)
        mlp.down_proj = matrix(old.mlp.down_proj)
        attention.qk_norm = _joined_norm(attention.q_norm, old.attention, dtype)
        del attention.q_proj, attention.k_proj, attention.v_proj, attention.q_norm, attention.k_norm
        del mlp.gate_proj, mlp.up_proj
    snapshot.embedding.weight = _frozen(model.embedding.weight.to(dtype))
    if model.config.tie_embeddings and not int8:
        snapshot.lm_head.weight = snapshot.embedding.weight
    else:
        snapshot.lm_head = matrix(model.lm_head)
    gains = dict(model.named_parameters())
    for name, parameter in snapshot.named_parameters():
        if parameter.is_meta:
            module, _, leaf = name.rpartition(".")
            setattr(snapshot.get_submodule(module), leaf, _frozen(gains[name].to(dtype)))
    return snapshot.to(device).eval()


def matrix_bytes(model: Thinker) -> int:
    """Bytes that one decoding step reads of the weights: every matrix once, the embedding's look-up left out."""
    weights = [w for name, w in model.state_dict().items() if name != "embedding.weight"]
    return sum(w.nbytes for w in weights)


def _linear(weight: Tensor, bias: Tensor | None) -> Linear:
    with torch.device("meta"):
        linear = Linear(weight.shape[1], weight.shape[0])
    linear.weight = _frozen(weight)
    linear.bias = None if bias is None else _frozen(bias)
    return linear


def _joined_norm(norm: nn.Module, old: Attention, dtype: torch.dtype) -> nn.Module:
    if isinstance(norm, RMSNorm):
        gains = old.q_norm.weight.expand(old.n_heads, -1), old.k_norm.weight.expand(old.n_kv_heads, -1)
        norm.weight = _frozen(torch.cat(gains)[:, None].to(dtype))  # (H + K, 1, D): a gain for each head
    return norm


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)
