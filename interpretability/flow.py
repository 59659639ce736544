"""Attention flow through all layers (Abnar & Zuidema 2020, arXiv:2005.00928)."""

import torch
from torch import Tensor

from thinker.runtime.errors import UserError, install_command


def with_residual(weights: Tensor) -> Tensor:
    """Ã = (mean over heads of A + I) / 2, attention with the residual connection.

    (L, H, T, T) -> (L, T, T).
    """
    eye = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
    return (weights.nanmean(dim=1) + eye) / 2  # nan for missing heads


def rollout(weights: Tensor) -> Tensor:
    """R_l = Ã_l R_{l−1}, R_0 = I: the share of token j in position i after each layer.

    (L, H, T, T) -> (L, T, T).
    """
    layers = with_residual(weights)
    shares = [layers[0]]
    for layer in layers[1:]:
        shares.append(layer @ shares[-1])
    return torch.stack(shares)


def max_flow(weights: Tensor, position: int | None = None) -> Tensor:
    """Maximum flow from (L, i) to (0, j) with capacities Ã between layers; (L, H, T, T) -> (T, T).

    Slow: T² flows in a graph of L·T nodes. `position`: only this query, (T,). Raises UserError
    without networkx.
    """
    try:
        import networkx
    except ImportError as error:
        problem = "maximum flow needs the networkx package"
        raise UserError(f"{problem}; run {install_command('inspect')}") from error

    capacities = with_residual(weights).double().cpu()
    layers = len(capacities)
    T = capacities.shape[-1]
    # A node is (layer, position). The nodes of layer 0 are the tokens; edges lead down to them.
    graph = networkx.DiGraph()
    for layer, query, key in capacities.nonzero().tolist():
        capacity = capacities[layer, query, key].item()
        graph.add_edge((layer + 1, query), (layer, key), capacity=capacity)
    queries = range(T)
    if position is not None:
        queries = [position % T]
    flows = torch.zeros(len(queries), T)
    for row, query in enumerate(queries):
        for key in range(T):
            if (0, key) in graph:  # otherwise nothing attends to it
                flows[row, key] = networkx.maximum_flow_value(graph, (layers, query), (0, key))
    if position is not None:
        return flows[0]
    return flows
