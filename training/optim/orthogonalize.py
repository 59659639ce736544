"""Orthogonalize batches of matrices by a Newton-Schulz iteration, for Muon."""

from typing import Any

import torch
from torch import Tensor

# Quintics a·σ + b·σ³ + c·σ⁵ that move all singular values in [0.01, 1] into [0.73, 1.27] when
# applied one after the other. Each is optimal in the maximum norm on the interval that the previous
# one produces (Amsel et al. 2025, Polar Express, arXiv:2505.16932, theorem 3.1).
POLAR_EXPRESS_COEFFICIENTS = (
    (8.093369, -23.62043, 17.446152),
    (3.636586, -2.721927, 0.536546),
    (2.6613, -1.977155, 0.452616),
)


def orthogonalize(x: Tensor) -> Tensor:
    """Approximate U·Vᵀ for each matrix U·S·Vᵀ of a batch (n, rows, columns), whose singular values
    move close to one.

    Three iterations replace five of torch's. Each has its own polynomial, and matrices are first
    divided by the fourth root of Σσ⁴. For n equal singular values this is n^¼ times too large, but
    the Frobenius norm is n^½ times.
    """
    is_wide = x.shape[1] <= x.shape[2]
    # So that the next product does not overflow.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    gram = _gram(x, is_wide)  # (n, short side, short side)
    norm = torch.linalg.matrix_norm(gram, keepdim=True).clamp(min=1e-14)  # (n, 1, 1): √Σσ⁴
    x, gram = x * norm.rsqrt(), gram / norm
    is_long = max(x.shape[1:]) >= 2 * min(x.shape[1:])
    if is_long and x.dtype == torch.float32:
        product = _product_of_polynomials(gram)
        return product @ x if is_wide else x @ product
    for step, (a, b, c) in enumerate(POLAR_EXPRESS_COEFFICIENTS):
        if step:
            gram = _gram(x, is_wide)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        if is_wide:
            x = torch.baddbmm(x, factor, x, beta=a)
        else:
            x = torch.baddbmm(x, x, factor, beta=a)
    return x


def _gram(x: Tensor, is_wide: bool) -> Tensor:
    """The smaller one of x·xᵀ and xᵀ·x, (n, short side, short side)."""
    return x @ x.mT if is_wide else x.mT @ x


def _product_of_polynomials(gram: Tensor) -> Tensor:
    """What all iterations together multiply a long matrix by, from its Gram matrix (n, r, r).

    None of its products has a long side. In bf16 small eigenvalues, squares of singular values,
    would be lost.
    """
    product = None
    for a, b, c in POLAR_EXPRESS_COEFFICIENTS:
        current = gram
        if product is not None:
            current = product @ gram @ product  # all these matrices commute
        factor = torch.baddbmm(current, current, current, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else factor @ product
    return product


def sharded_orthogonalize(shards: Tensor, n_rows: int, first_owner: int, group: Any) -> Tensor:
    """orthogonalize() for n matrices of `n_rows` rows, sharded over the ranks as (n, local rows,
    columns).

    The ranks own the matrices in round-robin order, starting at `first_owner`. All ranks send their
    rows to the owner, which sends the results back. Each rank sends and receives twice its shards;
    no matrix is computed twice.
    """
    world_size = torch.distributed.get_world_size(group)
    rank = torch.distributed.get_rank(group)
    n, local_rows, columns = shards.shape
    # As FSDP2 splits rows: the last ranks may have fewer, or none.
    max_rows = -(-n_rows // world_size)
    rows_per_rank = []
    n_owned = []  # matrices by rank
    for other in range(world_size):
        rows_per_rank.append(min(max_rows, max(0, n_rows - other * max_rows)))
        has_one_more = (other - first_owner) % world_size < n % world_size
        n_owned.append(n // world_size + has_one_more)

    # Send this rank's rows to the owners of the matrices; get rows of its own matrices from all
    # ranks.
    shard_sizes = [count * local_rows * columns for count in n_owned]  # by owner
    owned_sizes = [n_owned[rank] * rows * columns for rows in rows_per_rank]  # by holder
    received = shards.new_empty(sum(owned_sizes))
    torch.distributed.all_to_all_single(received, shards.flatten(), owned_sizes, shard_sizes, group)
    pieces = []
    for piece in received.split(owned_sizes):
        if len(piece):
            pieces.append(piece.view(n_owned[rank], -1, columns))
    if pieces:
        full = orthogonalize(torch.cat(pieces, dim=1))  # (matrices owned, n_rows, columns)
        parts = full.split(rows_per_rank, dim=1)
        received = torch.cat([part.flatten() for part in parts])

    # And back.
    out = torch.empty_like(shards).flatten()
    torch.distributed.all_to_all_single(out, received, shard_sizes, owned_sizes, group)
    return out.view_as(shards)
