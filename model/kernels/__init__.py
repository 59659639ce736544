"""Attention and loss kernels, each tested against a plain equivalent.

Most models need few of them, so each is imported when a model, a mask or a pass first needs it:
never in the middle of a block that is being compiled.
"""

from collections.abc import Callable
from typing import Any

from thinker.runtime.registry import import_offer

KERNEL_CODE = {
    "blockwise": "thinker.model.kernels.blockwise_attention:BlockwiseAttention",
    "local": "thinker.model.kernels.local_attention:LocalAttention",
    "flex": "thinker.model.kernels.flex_attention:FlexAttention",
    "varlen": "thinker.model.kernels.varlen_attention:VarlenAttention",
    "linear": "thinker.model.kernels.linear_attention:linear_attention",
    "linear state": "thinker.model.kernels.linear_attention:LinearState",
    "random features": "thinker.model.kernels.linear_attention:random_features",
    "loss": "thinker.model.kernels.linear_cross_entropy:linear_cross_entropy",
}
LOADED: dict[str, Callable[..., Any]] = {}


def load_kernel(name: str) -> Callable[..., Any]:
    """A function or class of KERNEL_CODE, imported at its first use."""
    if name not in LOADED:
        LOADED[name] = import_offer(KERNEL_CODE[name])
    return LOADED[name]
