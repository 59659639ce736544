"""The operations of a decoder: their FLOPs by formulas, and the bytes that they read."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.model.patterns.pattern import Pattern, TokenInfo
from thinker.runtime.memory import format_bytes

ROWS = 64  # queries whose visible keys are counted together, to bound memory
MLP_FORMULAS = {"swiglu": "6·L·T·C·F", "ungated": "4·L·T·C·F"}


class Operation(NamedTuple):
    """One kind of operation in all layers, in a forward pass over one sequence of T tokens.

    Counts multiplications and additions of matrix products alone, as torch's FlopCounterMode does.
    Scores that a mask hides count, too: a plain program computes them.
    """

    name: str
    formula: str  # of `flops`
    flops: int
    # Of one more token, whose query meets the T positions of a cache, its own included.
    next_token_flops: int
    n_parameters: int
    # Of the parameters; of scores and sums: of the keys and values in the cache of T positions.
    nbytes: int


def decoder_operations(model: Thinker, T: int, cache_dtype: torch.dtype) -> list[Operation]:
    """The operations of a model, in the order of a pass. Each parameter is in one of them.

    model: may be on the meta device. T: tokens of the sequence. cache_dtype: of keys and values.
    """
    blocks = list(model.blocks)
    attentions = [block.attention for block in blocks]
    seen: set[int] = set()
    operations = [_lookup("embedding", [model.embedding], seen)]
    tables = [model.positions, model.value_embeddings, model.bigram_embedding]
    tables = [table for table in tables if table is not None]
    if tables:
        operations.append(_lookup("other tables", tables, seen))
    queries = [attention.q_proj.weight for attention in attentions]
    operations.append(_product("queries", "2·L·T·C·H·D", queries, T, seen))
    keys_and_values = []
    for attention in attentions:
        keys_and_values += [attention.k_proj.weight, attention.v_proj.weight]
    operations.append(_product("keys and values", "4·L·T·C·K·D", keys_and_values, T, seen))
    operations += _attention_operations(model, T, cache_dtype)
    outputs = [attention.o_proj.weight for attention in attentions]
    operations.append(_product("output of heads", "2·L·T·H·D·C", outputs, T, seen))
    adapters = []
    for name, parameter in model.named_parameters():
        if name.endswith(("lora_A", "lora_B")):
            adapters.append(parameter)
    is_adapter = set(map(id, adapters))
    matrices = []
    for block in blocks:
        for parameter in block.mlp.parameters():
            if parameter.dim() == 2 and id(parameter) not in is_adapter:
                matrices.append(parameter)
    formula = MLP_FORMULAS.get(model.config.mlp, "2·T·parameters")
    operations.append(_product("MLP", formula, matrices, T, seen))
    if adapters:
        operations.append(_product("adapters", "2·T·parameters", adapters, T, seen))
    operations.append(_product("LM head", "2·T·C·V", [model.lm_head.weight], T, seen))
    others = [parameter for parameter in model.parameters() if id(parameter) not in seen]
    operations.append(Operation("norms, biases", "not counted", 0, 0, *_size(others, seen)))
    return operations


def _lookup(name: str, modules: Iterable[nn.Module], seen: set[int]) -> Operation:
    """Tables that are read, not multiplied."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return Operation(name, "0", 0, 0, *_size(parameters, seen))


def _product(
    name: str, formula: str, matrices: Iterable[Tensor], T: int, seen: set[int]
) -> Operation:
    """Matrices by which the vector of each token is multiplied."""
    matrices = list(matrices)
    per_token = 2 * sum(matrix.numel() for matrix in matrices)
    return Operation(name, formula, per_token * T, per_token, *_size(matrices, seen))


def _size(parameters: Iterable[Tensor], seen: set[int]) -> tuple[int, int]:
    """Numbers and bytes of the parameters that no earlier operation has, which are added to
    `seen`."""
    new = {}
    for parameter in parameters:
        if id(parameter) not in seen:
            new[id(parameter)] = parameter
    seen.update(new)
    numbers = sum(parameter.numel() for parameter in new.values())
    return numbers, sum(parameter.nbytes for parameter in new.values())


def _attention_operations(model: Thinker, T: int, cache_dtype: torch.dtype) -> list[Operation]:
    """Scores and weighted sums, and what linear layers compute instead."""
    cache = KVCache(model.config, 1, T, "meta", cache_dtype)
    D = model.config.head_dim
    whole = one = key_bytes = value_bytes = 0
    linear = linear_bytes = 0
    for layer, block in zip(cache.layers, model.blocks):
        H, K = block.attention.n_heads, block.attention.n_kv_heads
        n_features = getattr(block.attention, "n_features", 0)
        if n_features:
            linear += 2 * n_features * (2 * D + 1) * (H + K)
            linear_bytes += sum(getattr(layer, name).nbytes for name in layer.tensors)
            continue
        whole += 2 * T * T * H * D
        one += 2 * min(T, layer.size) * H * D  # a ring keeps only the newest keys
        key_bytes += layer.keys.nbytes
        value_bytes += layer.values.nbytes
    operations = []
    if whole:
        operations.append(Operation("scores", "2·L·T·T·H·D", whole, one, 0, key_bytes))
        operations.append(Operation("weighted sums", "2·L·T·T·H·D", whole, one, 0, value_bytes))
    if linear:  # features of queries and keys, then the sums; chunks of tokens take more
        formula = "2·L·T·m·(2·D+1)·(H+K)"
        name = "linear attention"
        operations.append(Operation(name, formula, linear * T, linear, 0, linear_bytes))
    return operations


def visible_share(config: ThinkerConfig, T: int) -> float | None:
    """The share of the T² scores that no mask hides, over all heads and layers but linear ones.

    None if no layer has scores, or if the text decides what is hidden.
    """
    counts: dict[Pattern, int] = {}
    visible = total = 0
    for layer, pattern in enumerate(config.patterns):
        if pattern.n_features:
            continue
        if pattern.tokens or pattern.by_score or pattern.by_content:
            return None
        H, _ = config.head_counts(layer)
        if pattern not in counts:
            counts[pattern] = _visible_pairs(pattern, H, T)
        n_heads = 1 if pattern.by_head else H
        visible += counts[pattern] * n_heads
        total += T * T * H
    if not total:
        return None
    return visible / total


def _visible_pairs(pattern: Pattern, H: int, T: int) -> int:
    """How many scores a pattern leaves: of all heads if it differs by head, else of one."""
    n_heads = H if pattern.by_head else 1
    heads = torch.arange(n_heads)[:, None, None]
    positions = torch.arange(T)
    n_visible = 0
    for start in range(0, T, ROWS):
        queries = positions[start : start + ROWS, None]
        visible = pattern(heads, TokenInfo(queries), TokenInfo(positions[None]))
        n_visible += int(visible.expand(n_heads, len(queries), T).sum())
    return n_visible


def describe_operations(model: Thinker, T: int, cache_dtype: torch.dtype) -> dict[str, Any]:
    """The sizes in the formulas, the operations, and the share of scores that no mask hides."""
    config = model.config
    sizes = {
        "T": T,
        "L": config.n_layers,
        "C": config.d_model,
        "H": config.n_heads,
        "K": config.n_kv_heads,
        "D": config.head_dim,
        "F": config.d_ff,
        "V": config.vocab_size,
    }
    features = [pattern.n_features for pattern in config.patterns if pattern.n_features]
    n_linear = len(features)
    if n_linear:
        sizes["m"] = max(features)
    return {
        "sizes": sizes,
        "rows": [row._asdict() for row in decoder_operations(model, T, cache_dtype)],
        "visible_share": visible_share(config, T),
        "layers_differ": config.n_kv_heads_per_layer is not None or 0 < n_linear < config.n_layers,
    }


def format_operations(operations: dict[str, Any]) -> str:
    """Format what describe_operations() returns as a table."""
    sizes = ", ".join(f"{name} = {size:,}" for name, size in operations["sizes"].items())
    lines = [f"A forward pass over one sequence: {sizes}", ""]
    header = ("operation", "FLOPs", "MFLOP", "next token", "bytes")
    rows = list(operations["rows"])
    total = {"name": "total", "formula": ""}
    for name in ("flops", "next_token_flops", "nbytes"):
        total[name] = sum(row[name] for row in rows)
    lines.append(_line(*header))
    for row in [*rows, total]:
        flops = f"{row['flops'] / 1e6:,.2f}"
        next_token = f"{row['next_token_flops'] / 1e6:,.3f}"
        lines.append(
            _line(row["name"], row["formula"], flops, next_token, format_bytes(row["nbytes"]))
        )
    lines += [
        "",
        "next token: MFLOP of one more token with a cache of T positions, its own included",
        "bytes: of the parameters; of scores and sums: of keys and values in the cache",
        "With its backward pass, a training step takes about three times the FLOPs.",
    ]
    if operations["layers_differ"]:
        lines.append("Layers differ: a formula holds for each layer that has its operation.")
    share = operations["visible_share"]
    if share is not None:
        lines.append(f"Masks leave {share:.0%} of the scores; a kernel may skip some of the rest.")
    return "\n".join(lines)


def _line(name: str, formula: str, flops: str, next_token: str, size: str) -> str:
    return f"{name:<16}  {formula:<21}  {flops:>14}  {next_token:>10}  {size:>9}".rstrip()
