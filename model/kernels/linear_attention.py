"""Causal attention in linear time with positive random features (FAVOR+ of the Performer).

Choromanski et al. 2021, arXiv:2009.14794. With φ(x) = exp(ω·x − ‖x‖²/2)/√m for each of m rows ω
from N(0, I), and q, k scaled by D^(−1/4), the mean of φ(q)·φ(k) over ω is exp(q·k/√D), the
unnormalized weight of softmax attention. So y_i = φ(q_i) Σ_{j≤i} φ(k_j)ᵀ v_j / φ(q_i)·Σ_{j≤i}
φ(k_j), and the state consists of the two sums. The quotient of two unbiased estimates is biased.
Its error falls as 1/√m and grows quickly with ‖q + k‖.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64  # positions that attend to each other directly, not through the sums
SPAN = 64  # chunks whose sums one matrix product adds up; unlike a loop, this compiles
# smallest feature of a query relative to its largest; keeps the weights from all underflowing
FLOOR = 1e-20
LIFT = 2.0**30  # between the log features of two documents; exp(−LIFT) is 0


def random_features(n_features: int, head_dim: int, seed: int) -> Tensor:
    """Sample ω, (m, D) in fp32: rows from N(0, I), orthogonal in blocks of D to reduce variance
    (section 2.3)."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU in fp64, so that all devices agree
    n_blocks = -(-n_features // head_dim)
    shape = (n_blocks, head_dim, head_dim)
    gaussians = torch.randn(shape, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussians)
    # Uniform among the rotations (Mezzadri 2007).
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    lengths = torch.randn(n_features, head_dim, generator=generator, dtype=torch.float64)
    lengths = lengths.norm(dim=-1, keepdim=True)  # (m, 1)
    directions = q.mT.flatten(0, 1)[:n_features]  # (n_blocks, D, D) -> (m, D)
    return (directions * lengths).float()


@dataclass
class LinearState:
    """State of each KV head after any number of keys, in place of a cache of keys and values."""

    sums: Tensor  # (B, K, m, D_v + 1): Σ exp(log feature − shift) · (v, 1) over the keys
    # (B, K, 1, 1): the largest log feature so far, rounded up; fp64 with document ids.
    shift: Tensor

    # As of kv_cache.LayerCache.
    tensors = ("sums", "shift")
    size = 0
    slack = 0
    no_truncate_reason = "linear attention cannot forget keys; create a new cache"

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> LinearState:
        """State before the first key; `shape`: (B, K, m, D_v)."""
        B, K, m, D_v = shape
        sums = torch.zeros(B, K, m, D_v + 1, device=device, dtype=dtype)
        lowest = torch.finfo(dtype).min
        shift = torch.full((B, K, 1, 1), lowest, device=device, dtype=dtype)
        return cls(sums, shift)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Tensor,
    state: LinearState | None = None,
    document_ids: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, LinearState]:
    """Causal attention in time and memory linear in T: direct within each chunk, by sums for
    earlier chunks.

    Args:
        q, k, v: (B, H, T, D), (B, K, T, D) and (B, K, T, D_v), not scaled; each KV head serves H /
            K query heads.
        features: ω, (m, D), from random_features().
        state: the state after the previous positions, if any.
        document_ids: (B, T), never decreasing; hides keys of other documents. Pass it in all calls
            or in none.
        chunk: positions per chunk; affects only the speed.

    Returns: (B, H, T, D_v) in q's dtype, and the state after the last position. Computes in fp32 or
    wider.
    """
    B, K, T, _ = k.shape
    C = min(chunk, T)
    if state is None:
        wide = torch.promote_types(q.dtype, torch.float32)
        state = LinearState.empty((B, K, len(features), v.shape[-1]), q.device, wide)
    sizes = _part_sizes(T, C)
    if len(sizes) == 1:
        return _attend_in_chunks(q, k, v, features, state, document_ids, C)
    qs = q.split(sizes, dim=2)
    ks = k.split(sizes, dim=2)
    vs = v.split(sizes, dim=2)
    ids = [None] * len(sizes)
    if document_ids is not None:
        ids = document_ids.split(sizes, dim=1)
    ys = []
    for part_q, part_k, part_v, part_ids in zip(qs, ks, vs, ids):
        y, state = linear_attention(part_q, part_k, part_v, features, state, part_ids, chunk)
        ys.append(y)
    return torch.cat(ys, dim=2), state


def _part_sizes(T: int, C: int) -> list[int]:
    """Lengths of the parts of a sequence that _attend_in_chunks() can process: SPAN chunks at a
    time, then the other full chunks, then the rest."""
    span = SPAN * C
    n_rest = T % C
    n_full = T - n_rest  # positions in full chunks
    sizes = [span] * (n_full // span)
    if n_full % span:
        sizes.append(n_full % span)
    if n_rest:
        sizes.append(n_rest)
    return sizes


def _attend_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Tensor,
    state: LinearState,
    document_ids: Tensor | None,
    C: int,
) -> tuple[Tensor, LinearState]:
    """linear_attention() for n chunks of C positions: T = n · C."""
    K, D = k.shape[1], k.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    omega = features.to(wide) * D**-0.25  # scales q and k
    by_chunk = q.to(wide).unflatten(1, (K, -1)).unflatten(3, (-1, C))  # (B, K, H/K, n, C, D)
    log_q = by_chunk.transpose(2, 3) @ omega.T  # (B, K, n, H/K, C, m)
    k = k.to(wide).unflatten(2, (-1, C))  # (B, K, n, C, D)
    log_k = k @ omega.T - k.square().sum(-1, keepdim=True) / (2 * D**0.5)  # (B, K, n, C, m)
    v = v.to(wide).unflatten(2, (-1, C))  # (B, K, n, C, D_v)
    # The last column sums the weights.
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # (B, K, n, C, D_v + 1)

    # exp(log φ) would overflow. A query's scale (and ‖q‖²) cancels in the quotient. A key's scale
    # is `top`, applied later as top − peak ≤ 0. Gradients treat both as constants; `top` is an
    # integer, so sums of it are exact.
    top = log_k.detach().amax(-1).ceil()  # (B, K, n, C)
    phi_q = (log_q - log_q.detach().amax(-1, keepdim=True)).exp()
    phi_q = phi_q.flatten(3, 4) + FLOOR  # (B, K, n, H/K·C, m)
    phi_k = (log_k - top[..., None]).exp()  # (B, K, n, C, m)
    if document_ids is not None:
        # Lift each document above the earlier ones, so that their weights become 0.
        top = top.double() + LIFT * document_ids.unflatten(1, (-1, C))[:, None]
    before = state.shift[..., 0]  # (B, K, 1)
    peak = torch.cat([before, top.flatten(2)], dim=-1).cummax(-1).values  # (B, K, 1 + T)
    border = peak[..., ::C]  # (B, K, n + 1)
    peak = peak[..., 1:].unflatten(2, (-1, C))  # (B, K, n, C)
    # Factors for the keys in a chunk and the sums before it (per query), and for the sums between
    # chunks.
    key_scale = (top[..., None, :] - peak[..., None]).to(wide).exp().tril()  # (B, K, n, C, C)
    past_scale = (border[..., :-1, None] - peak).to(wide).exp()  # (B, K, n, C)
    chunk_scale = (border[..., None, :] - border[..., None]).to(wide)
    chunk_scale = chunk_scale.exp().tril()  # (B, K, n + 1, n + 1)

    to_border = (top - border[..., 1:, None]).to(wide).exp()  # (B, K, n, C)
    sums = (phi_k * to_border[..., None]).mT @ v  # (B, K, n, m, D_v + 1)
    sums = torch.cat([state.sums[:, :, None], sums], dim=2)  # (B, K, n + 1, m, D_v + 1)
    sums = (chunk_scale @ sums.flatten(3)).view_as(sums)  # of each chunk and all earlier chunks

    groups = (-1, C)  # the rows of a chunk are (H/K heads, C queries)
    weights = (phi_q @ phi_k.mT).unflatten(3, groups)
    weights = weights * key_scale[:, :, :, None]  # (B, K, n, H/K, C, C)
    earlier = (phi_q @ sums[:, :, :-1]).unflatten(3, groups)
    earlier = earlier * past_scale[:, :, :, None, :, None]
    y = (weights.flatten(3, 4) @ v).unflatten(3, groups) + earlier  # (B, K, n, H/K, C, D_v + 1)
    y = (y[..., :-1] / y[..., -1:]).transpose(2, 3).flatten(1, 2).flatten(2, 3)  # (B, H, T, D_v)
    return y.to(q.dtype), LinearState(sums[:, :, -1], border[..., -1:, None])
