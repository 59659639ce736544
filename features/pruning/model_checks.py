"""Whether a model can be pruned as train.prune says."""

from thinker.features.pruning.keys import PruneConfig
from thinker.features.pruning.pruning import check_norms
from thinker.model import Thinker, ThinkerConfig
from thinker.model.layers import Linear
from thinker.runtime.errors import UserError


def check_prunable(model: Thinker, options: PruneConfig) -> None:
    """Raise UserError if the matrices of this model are split, or if its KV heads cannot be
    removed."""
    if hasattr(model, "unshard"):  # FSDP2, which train.parallel=auto may choose
        raise UserError(
            "train.prune does not work with the split matrices of FSDP2; set train.parallel=ddp"
        )
    if options.heads:
        check_heads(model.config)


def check_heads(config: ThinkerConfig) -> None:
    """Raise UserError if KV heads of this model cannot be removed once they are zero."""
    check_norms(config)
    counts = [config.head_counts(layer)[1] for layer in range(config.n_layers)]
    try:
        ThinkerConfig.from_dict(config.to_dict() | {"n_kv_heads_per_layer": counts})
    except UserError:
        raise UserError(
            "train.prune.heads does not work with alibi, relative positions, per-head patterns or "
            "model.value_embeddings; remove it"
        ) from None


def check_shares(model: Thinker, options: PruneConfig) -> None:
    """Raise UserError unless pruning removes some, and not all, of the parts of every layer."""
    by_row = options.by == "activation"
    where = "a row" if by_row else "the smallest matrix"
    for layer, block in enumerate(model.blocks):
        n_weights = []
        for module in block.modules():
            if not isinstance(module, Linear):
                continue
            n = module.weight.shape[1] if by_row else module.weight.numel()
            n_weights.append(n)
        parts = (
            ("heads", options.heads, block.attention.n_kv_heads, "KV heads"),
            ("neurons", options.neurons, block.mlp.down_proj.in_features, "neurons"),
            ("weights", options.weights, min(n_weights), f"weights in {where}"),
        )
        for key, share, n, noun in parts:
            n_removed = round(share * n)
            if share and not 0 < n_removed < n:
                removes = "all" if n_removed else "none"
                raise UserError(
                    f"train.prune.{key}={share:g} removes {removes} of the {n} {noun} of layer "
                    f"{layer}; change it"
                )
