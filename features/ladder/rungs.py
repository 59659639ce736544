"""The sizes of a ladder: smaller copies of a model, each with as many tokens per parameter.

The compute of a run is C = FLOPs per token · tokens. With R tokens for each parameter that a token
is multiplied by (FLOPs per token / 6), C grows with the square of the size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.training.metrics import flops_per_token

FLOPS_PER_PARAMETER = 6  # and token, of a training step: forward, and both gradients
STEP = 2.0  # between the FLOPs of two sizes


@dataclass(frozen=True, eq=False)
class Rung:
    """A size and the length of its run."""

    model: ThinkerConfig
    flops_per_token: int
    steps: int
    tokens_per_step: int

    @property
    def name(self) -> str:
        """Width, layers and heads."""
        return f"{self.model.d_model}x{self.model.n_layers}x{self.model.n_heads}"

    @property
    def tokens(self) -> int:
        """Tokens that the run processes."""
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        """FLOPs of the whole run."""
        return float(self.flops_per_token) * self.tokens

    @property
    def parameters(self) -> float:
        """Parameters that a token is multiplied by. Attention counts with what its products
        cost."""
        return self.flops_per_token / FLOPS_PER_PARAMETER

    def as_row(self) -> dict[str, Any]:
        """The documented values of a size, for JSON."""
        return {
            "size": self.name,
            "parameters": round(self.parameters),
            "steps": self.steps,
            "tokens": self.tokens,
            "flops": self.flops,
        }


def make_rung(model: ThinkerConfig, ratio: float, seq_len: int, tokens_per_step: int) -> Rung:
    """The run of a model on `ratio` tokens per parameter, to the nearest step."""
    with torch.device("meta"):
        per_token = flops_per_token(Thinker(model), seq_len)
    steps = round(ratio * per_token / FLOPS_PER_PARAMETER / tokens_per_step)
    return Rung(model, per_token, max(1, steps), tokens_per_step)


def plan_rungs(target: Rung, n_sizes: int, gap: float, seq_len: int) -> list[Rung]:
    """Sizes below the target, smallest first. The largest has at most 1/gap of its FLOPs, and each
    other one about half of those of the next.

    Raises UserError if there are not so many different sizes.
    """
    ratio = target.tokens / target.parameters
    found = []
    for shape in smaller_shapes(target.model):
        rung = make_rung(shape, ratio, seq_len, target.tokens_per_step)
        if rung.flops <= target.flops / gap:
            found.append(rung)
    rungs: dict[str, Rung] = {}  # by name
    if found:
        for number in range(n_sizes):
            wanted = math.log(target.flops / gap / STEP**number)
            nearest = min(found, key=lambda rung: abs(math.log(rung.flops) - wanted))
            rungs[nearest.name] = nearest
    if len(rungs) < n_sizes:
        raise UserError(
            f"there are no {n_sizes} different sizes with at most 1/{gap:.0f} of the FLOPs of "
            f"{target.name}; lower --sizes or --gap, raise --minutes or --flops, or predict a "
            "larger model"
        )
    return list(rungs.values())[::-1]


def smaller_shapes(target: ThinkerConfig) -> Iterator[ThinkerConfig]:
    """Narrower copies of a model, widest first, with heads about as wide and an MLP in
    proportion. The number of layers stays."""
    unit = max(4, 2 ** int(math.log2(target.d_model / 32)))  # 4 up to a width of 255
    group = target.n_heads // target.n_kv_heads
    is_divided = target.n_heads * target.head_dim == target.d_model
    for width in range(target.d_model - unit, unit - 1, -unit):
        share = width / target.d_model
        wanted = share * target.n_heads
        head_dim = target.head_dim
        if is_divided:
            counts = [n for n in range(group, width // 2 + 1, group) if width % (2 * n) == 0]
        else:
            counts = [group * max(1, round(wanted / group))]
        if not counts:
            continue
        heads = min(counts, key=lambda n: abs(math.log(n / wanted)))
        if is_divided:
            head_dim = width // heads
        with suppress(UserError):  # another key, such as rope_dim, does not fit this copy
            yield replace(
                target,
                d_model=width,
                n_heads=heads,
                n_kv_heads=heads // group,
                head_dim=head_dim,
                d_ff=max(unit, unit * round(share * target.d_ff / unit)),
            )


def rung_values(rung: Rung) -> dict[str, str]:
    """The config keys of a rung."""
    model = rung.model
    keys = ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff")
    values = {f"model.{key}": str(getattr(model, key)) for key in keys}
    return values | {"train.max_steps": str(rung.steps)}
