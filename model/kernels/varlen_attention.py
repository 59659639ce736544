"""Isolated documents on CUDA: flash attention over sequences of unequal length, one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

GRAIN = 8  # the width of a head must be a multiple of it


class Varlen:
    """Attention within each document, causal, by torch's variable-length flash kernel; fp16 and bf16 alone.

    FlashAttention-2 (Dao 2023, arXiv:2307.08691). What lies outside a document, or out of reach, is never computed.

    Args:
        document: (B, T) int64, a number for each document of a row, never decreasing.
        reach: keys that a query sees, its own included; None: all before it in its document.
    """

    def __init__(self, document: Tensor, reach: int | None) -> None:
        self.borders = borders(document)
        # Their number is another one in each batch: said beforehand, or a compiled block would be compiled twice.
        torch._dynamo.maybe_mark_dynamic(self.borders, 0)
        self.window = (-1 if reach is None else reach - 1, 0)  # keys before the query's own, and after it
        self.attend, self.grouped = _varlen_attn()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q (B, H, T, D), k, v (B, K, T, D) -> (B, H, T, D)."""
        B, H, T, D = q.shape
        options = {"scale": scale, "window_size": self.window}
        if self.grouped:
            options["enable_gqa"] = k.shape[1] != H
        elif k.shape[1] != H:
            k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))  # (B, H, T, D)
        if D % GRAIN:
            q, k, v = (F.pad(x, (0, -D % GRAIN)) for x in (q, k, v))
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B·T, heads, D)
        y = self.attend(q, k, v, self.borders, self.borders, T, T, **options)  # no document is longer than T
        return y[..., :D].unflatten(0, (B, T)).transpose(1, 2)


def borders(document: Tensor) -> Tensor:
    """Where each document begins, the rows (B, T) laid one behind the other, and the end: (documents + 1,) int32.

    The host waits for the device, which alone knows how many there are: once a pass, not once a layer.
    """
    begins = F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)  # (B, T): a row begins one, too
    starts = begins.flatten().nonzero()[:, 0]
    return F.pad(starts, (0, 1), value=document.numel()).int()


@cache
def _varlen_attn() -> tuple[Callable, bool]:
    """torch's function, and whether it takes grouped heads (from 2.12 on); its import takes a second or more."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters
