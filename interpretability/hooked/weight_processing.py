"""Equal models whose weights are easier to read: TransformerLens's processing of weights.

Each step keeps the log-probabilities. See docs/guides/inspecting.md.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor, nn

from thinker.interpretability.hooked.hook_names import is_plain_norm, norms_of
from thinker.model import Thinker
from thinker.model.layers import LayerNorm, Linear, OnePlusRMSNorm
from thinker.model.transformer import ParallelBlock
from thinker.runtime.errors import UserError


def copy_to_process(model: Thinker) -> Thinker:
    """A copy of a model with an LM head of its own."""
    model = copy.deepcopy(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.config = dataclasses.replace(model.config, tie_embeddings=False)
    return model


@torch.no_grad()
def fold_norms(model: Thinker) -> None:
    """Multiply the weight and bias of each norm into the matrices that read its output.

    For LayerNorm, also center the rows of these matrices: its output has mean 0 anyway.
    """
    for block in model.blocks:
        attention = block.attention
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        readers = [getattr(block.mlp, name, None) for name in ("gate_proj", "up_proj")]
        readers = [reader for reader in readers if reader is not None]
        if isinstance(block, ParallelBlock):
            _fold_norm(block.block_norm, projections + readers)
        _fold_norm(block.attention_norm, projections)
        _fold_norm(block.mlp_norm, readers)
    _fold_norm(model.norm, [model.lm_head])


def _fold_norm(norm: nn.Module, readers: list[nn.Module]) -> None:
    if not is_plain_norm(norm) or not readers:
        return
    for linear in readers:
        if type(linear).effective_weight is not Linear.effective_weight:
            raise UserError(f"cannot fold a norm into {type(linear).__name__}; use fold_ln=False")
        bias = getattr(norm, "bias", None)
        if bias is not None:
            _add_to_bias(linear, linear.weight @ bias)
        if isinstance(norm, OnePlusRMSNorm):
            linear.weight *= 1 + norm.weight
        elif norm.weight is not None:
            linear.weight *= norm.weight
        if isinstance(norm, LayerNorm):
            linear.weight -= linear.weight.mean(dim=1, keepdim=True)
    if isinstance(norm, OnePlusRMSNorm):
        norm.weight.zero_()
    elif norm.weight is not None:
        norm.weight.fill_(1)
    if getattr(norm, "bias", None) is not None:
        norm.bias.zero_()


@torch.no_grad()
def center_writing_weights(model: Thinker) -> None:
    """Subtract its mean over the width from whatever is added to the residual stream. Each
    LayerNorm subtracts it from its input anyway."""
    norms = [model.norm]
    for block in model.blocks:
        norms += norms_of(block).values()
    has_norms_of_outputs = model.config.block in ("post_norm", "both_norms")
    if has_norms_of_outputs or not all(isinstance(norm, LayerNorm) for norm in norms):
        return
    tables = [model.embedding.weight]
    if model.positions is not None:
        tables.append(model.positions.weight)
    for table in tables:
        table -= table.mean(dim=1, keepdim=True)
    for block in model.blocks:
        for linear in (block.attention.o_proj, block.mlp.down_proj):
            linear.weight -= linear.weight.mean(dim=0)
            if linear.bias is not None:
                linear.bias -= linear.bias.mean()


@torch.no_grad()
def center_unembed(model: Thinker) -> None:
    """Subtract the mean over the vocabulary from the logits, which does not change the softmax,
    unless they have a soft cap."""
    transform = model.logit_transform
    if transform is not None and transform.softcap is not None:
        return
    head = model.lm_head
    head.weight -= head.weight.mean(dim=0)
    if head.bias is not None:
        head.bias -= head.bias.mean()


@torch.no_grad()
def fold_value_biases(model: Thinker) -> None:
    """Move the biases of the values into that of the output: attention weights sum to 1."""
    for block, pattern in zip(model.blocks, model.config.patterns):
        attention = block.attention
        sums_to_one = attention.sinks is None and pattern.includes_self
        if attention.v_proj.bias is None or not sums_to_one:
            continue
        biases = attention.v_proj.bias.unflatten(0, (attention.n_kv_heads, -1))  # (K, D)
        by_head = biases.repeat_interleave(attention.n_heads // attention.n_kv_heads, dim=0)
        _add_to_bias(attention.o_proj, attention.o_proj.weight @ by_head.flatten())
        attention.v_proj.bias.zero_()


def _add_to_bias(linear: nn.Linear, bias: Tensor) -> None:
    if linear.bias is None:
        linear.bias = nn.Parameter(torch.zeros_like(bias))
    linear.bias += bias
