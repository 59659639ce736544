"""Attention within documents on CUDA with torch's variable-length flash kernel."""

import inspect
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_DIM_MULTIPLE = 8  # required by the kernel


class VarlenAttention:
    """Causal attention within documents, in fp16 or bf16, by FlashAttention-2 (arXiv:2307.08691).

    document_ids: (B, T) int64, never decreasing within a row; max_distance: as in Pattern.
    """

    def __init__(self, document_ids: Tensor, max_distance: int | None) -> None:
        self.cu_seqlens = cu_seqlens(document_ids)
        # The number of documents varies between batches; unless marked dynamic, a block would
        # compile twice.
        torch._dynamo.maybe_mark_dynamic(self.cu_seqlens, 0)
        self.window = (
            -1 if max_distance is None else max_distance - 1,
            0,
        )  # keys before and after the query
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
        y = self.varlen_attn(
            q, k, v, self.cu_seqlens, self.cu_seqlens, T, T, **options
        )  # no document is longer than T
        return y[..., :D].unflatten(0, (B, T)).transpose(1, 2)


def cu_seqlens(document_ids: Tensor) -> Tensor:
    """Start index of each document in the concatenated rows of (B, T), and the end: (documents +
    1,) int32."""
    is_first = F.pad(
        document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True
    )  # (B, T), True at row starts
    starts = is_first.flatten().nonzero()[
        :, 0
    ]  # makes the host wait, but once per pass, not per layer
    return F.pad(starts, (0, 1), value=document_ids.numel()).int()


@cache
def _varlen_attn() -> tuple[Callable, bool]:
    """Import torch's function (late, it takes a second), and check for grouped heads (since torch
    2.12)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters
