"""Attention within documents on CUDA, by torch's variable-length flash kernel."""

import inspect
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_DIM_MULTIPLE = 8  # of the kernel


class VarlenAttention:
    """Causal attention in each document by torch's variable-length flash kernel, in fp16 or bf16 (arXiv:2307.08691).

    document_ids: (B, T) int64, never decreasing within a row; max_distance: as in Pattern.
    """

    def __init__(self, document_ids: Tensor, max_distance: int | None) -> None:
        self.cu_seqlens = cu_seqlens(document_ids)
        # Their number differs between batches: unless marked as dynamic, a block would be compiled twice.
        torch._dynamo.maybe_mark_dynamic(self.cu_seqlens, 0)
        self.window = (-1 if max_distance is None else max_distance - 1, 0)  # keys before and after the query
        self.varlen_attn, self.has_gqa = _varlen_attn()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, *unused: None) -> Tensor:
        """q (B, H, T, D), k, v (B, K, T, D) -> (B, H, T, D)."""
        B, H, T, D = q.shape
        options = {"scale": scale, "window_size": self.window}
        if self.has_gqa:
            options["enable_gqa"] = k.shape[1] != H
        elif k.shape[1] != H:
            k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))  # (B, H, T, D)
        if D % HEAD_DIM_MULTIPLE:
            q, k, v = (F.pad(x, (0, -D % HEAD_DIM_MULTIPLE)) for x in (q, k, v))
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B·T, heads, D)
        y = self.varlen_attn(q, k, v, self.cu_seqlens, self.cu_seqlens, T, T, **options)  # no document is longer than T
        return y[..., :D].unflatten(0, (B, T)).transpose(1, 2)


def cu_seqlens(document_ids: Tensor) -> Tensor:
    """Start indices of the documents in the concatenated rows of (B, T), and the end: (documents + 1,) int32."""
    is_first = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)  # (B, T), True at row starts
    starts = is_first.flatten().nonzero()[:, 0]  # the host waits for the device: once per pass, not once per layer
    return F.pad(starts, (0, 1), value=document_ids.numel()).int()


@cache
def _varlen_attn() -> tuple[Callable, bool]:
    """torch's function, imported late (it takes a second), and whether it supports grouped heads (since 2.12)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters
