"""Which matrices of a model inference reads as one."""

from torch import nn

from thinker.generation.mixed_bits import matrix_names
from thinker.model import Thinker
from thinker.model.layers import Linear


def fused_matrices(model: Thinker) -> dict[str, tuple[Linear, ...]]:
    """The matrices that inference reads as one, by name (mixed_bits.matrix_names)."""
    groups: list[tuple[Linear, ...]] = []
    for block in model.blocks:
        attention = block.attention
        groups.append((attention.q_proj, attention.k_proj, attention.v_proj))
        groups.append((attention.o_proj,))
        groups.append(_children(block.mlp, "gate_proj", "up_proj"))
        groups.append(_children(block.mlp, "down_proj"))
    groups.append((model.lm_head,))
    return dict(zip(matrix_names(len(model.blocks)), groups))


def _children(module: nn.Module, *names: str) -> tuple[nn.Module, ...]:
    """The parts of a module with these names, as far as it has them."""
    children = [getattr(module, name, None) for name in names]
    return tuple(child for child in children if child is not None)
