"""Attention flow through all layers (Abnar & Zuidema 2020, arXiv:2005.00928)."""

from itertools import accumulate

import torch
from torch import Tensor

from thinker.runtime.errors import UserError


def with_residual(weights: Tensor) -> Tensor:
    """Ã = (mean over heads of A + I) / 2, attention with the residual connection; (L, H, T, T) -> (L, T, T)."""
    eye = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
    return (weights.nanmean(dim=1) + eye) / 2  # nan for missing heads


def rollout(weights: Tensor) -> Tensor:
    """R_l = Ã_l R_{l−1}, R_0 = I: the share of token j in position i after each layer; (L, H, T, T) -> (L, T, T)."""
    return torch.stack(list(accumulate(with_residual(weights), lambda below, layer: layer @ below)))


def max_flow(weights: Tensor, position: int | None = None) -> Tensor:
    """Maximum flow from (L, i) to (0, j) with capacities Ã between layers; (L, H, T, T) -> (T, T).

    Slow: T² flows in a graph of L·T nodes. `position`: only this query, (T,). Raises UserError without networkx.
    """
    try:
        import networkx
    except ImportError as error:
        raise UserError(
            "maximum flow needs the networkx package; run pip install networkx"
        ) from error

    capacities, graph = with_residual(weights).double().cpu(), networkx.DiGraph()
    layers, T = len(capacities), capacities.shape[-1]
    for layer, query, key in capacities.nonzero().tolist():
        graph.add_edge(
            (layer + 1, query), (layer, key), capacity=capacities[layer, query, key].item()
        )
    queries = range(T) if position is None else [position % T]
    flows = torch.zeros(len(queries), T)
    for row, query in enumerate(queries):
        for key in range(T):
            if (0, key) in graph:
                flows[row, key] = networkx.maximum_flow_value(graph, (layers, query), (0, key))
    return flows if position is None else flows[0]
