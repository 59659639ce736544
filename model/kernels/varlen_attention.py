"""Attention within documents, and of pieces of texts, on CUDA with torch's variable-length flash
kernel."""

import inspect
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_DIM_MULTIPLE = 8  # required by the kernel


class VarlenRows:
    """Causal attention in rows that are packed one after another, in fp16 or bf16, by
    FlashAttention-2 (arXiv:2307.08691).

    A row may have more keys than queries: its last query is at the position of its last key.
    max_distance: as in Pattern.
    """

    def __init__(self, max_distance: int | None) -> None:
        n_before = -1  # all
        if max_distance is not None:
            n_before = max_distance - 1
        self.window = (n_before, 0)  # keys before and after the query
        self.varlen_attn, self.has_gqa = _varlen_attn()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        scale: float,
    ) -> Tensor:
        """q (N, H, D), k, v (M, K, D) -> (N, H, D). `starts`: of the queries and of the keys of
        each row, as cu_seqlens() returns them; `longest`: at least the most queries and keys of a
        row."""
        H, D = q.shape[1:]
        n_shared = H // k.shape[1]  # query heads per KV head
        options = {"scale": scale, "window_size": self.window}
        if self.has_gqa:
            options["enable_gqa"] = n_shared > 1
        elif n_shared > 1:
            k = k.repeat_interleave(n_shared, dim=1)  # (M, H, D)
            v = v.repeat_interleave(n_shared, dim=1)
        padding = -D % HEAD_DIM_MULTIPLE
        if padding:
            q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
        return self.varlen_attn(q, k, v, *starts, *longest, **options)[..., :D]


class VarlenAttention(VarlenRows):
    """Causal attention within documents.

    document_ids: (B, T) int64, never decreasing within a row; max_distance: as in Pattern.
    """

    def __init__(self, document_ids: Tensor, max_distance: int | None) -> None:
        super().__init__(max_distance)
        self.cu_seqlens = cu_seqlens(document_ids)
        # The number of documents varies between batches; unless marked dynamic, a block would
        # compile twice.
        torch._dynamo.maybe_mark_dynamic(self.cu_seqlens, 0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, *unused: None) -> Tensor:
        """q (B, H, T, D), k, v (B, K, T, D) -> (B, H, T, D)."""
        B, _, T, _ = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B·T, heads, D)
        starts = (self.cu_seqlens, self.cu_seqlens)
        y = self.attend(q, k, v, starts, (T, T), scale)  # no document is longer than T
        return y.unflatten(0, (B, T)).transpose(1, 2)


def cu_seqlens(document_ids: Tensor) -> Tensor:
    """Start index of each document in the concatenated rows of (B, T), and the end: (documents +
    1,) int32."""
    is_new = document_ids[:, 1:] != document_ids[:, :-1]
    is_first = F.pad(is_new, (1, 0), value=True)  # (B, T), True at row starts
    # Makes the host wait, but once per pass, not per layer.
    starts = is_first.flatten().nonzero()[:, 0]
    return F.pad(starts, (0, 1), value=document_ids.numel()).int()


@cache
def _varlen_attn() -> tuple[Callable, bool]:
    """Import torch's function (late, it takes a second), and check for grouped heads (since torch
    2.12)."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters
