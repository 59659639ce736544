"""Baselines: transformers with the same weights, and a plain GPT in the style of nanoGPT."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from thinker.interop.hf_config import to_hf_config
from thinker.interop.huggingface import to_hf_name
from thinker.model import Thinker
from thinker.model.attention_temperature import fold_attention_temperature
from thinker.runtime.constants import IGNORE_INDEX


def to_transformers(model: Thinker) -> Any:
    """The transformers model that computes the same function, with the same weights in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**to_hf_config(model.config, None))
    ).eval()
    tensors = fold_attention_temperature(model.state_dict(), model.config)
    reference.load_state_dict({to_hf_name(name): tensor for name, tensor in tensors.items()})
    return reference


class PlainGPT(nn.Module):
    """GPT-2 as it is usually written for training: learned positions, LayerNorm, GELU, a tied head,
    no biases."""

    def __init__(
        self, n_layers: int, d_model: int, n_heads: int, vocab_size: int, seq_len: int
    ) -> None:
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(vocab_size, d_model),
            nn.Embedding(seq_len, d_model),
        )
        self.blocks = nn.ModuleList(PlainBlock(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.lm_head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.02
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * n_layers)  # of what is added to the residual stream
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens and targets (B, T) -> the mean loss in nats over the targets but IGNORE_INDEX."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)

    def flops_per_token(self) -> int:
        """FLOPs of a training step per token, counted as in training.metrics.flops_per_token()."""
        n_parameters = (
            sum(parameter.numel() for parameter in self.parameters())
            - self.positions.weight.numel()
        )
        return (
            6 * n_parameters + 12 * len(self.blocks) * self.positions.weight.numel()
        )  # T · d_model per layer


class PlainBlock(nn.Module):
    """Causal self-attention and an MLP of four times the width, each after a LayerNorm."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(d_model, bias=False) for _ in range(2))
        self.qkv_proj, self.o_proj = (nn.Linear(d_model, n * d_model, bias=False) for n in (3, 1))
        self.up_proj, self.down_proj = (
            nn.Linear(m * d_model, n * d_model, bias=False) for m, n in ((1, 4), (4, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        heads = (
            self.qkv_proj(self.attention_norm(x)).view(B, T, 3 * self.n_heads, -1).transpose(1, 2)
        )
        attention = F.scaled_dot_product_attention(
            *heads.chunk(3, dim=1), is_causal=True
        )  # (B, H, T, D)
        x = x + self.o_proj(attention.transpose(1, 2).reshape(B, T, C))
        return x + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x))))
