"""Loss by position, in texts longer than the model was trained on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from tqdm import tqdm

from thinker.data.batches import PackedDataset, sequential_batches
from thinker.data.shards import TokenShards
from thinker.model import Thinker, ThinkerConfig
from thinker.model.rope import Rope, RopeScaling
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

HEAD_ROWS = 256  # positions whose logits are held at once


@dataclass(frozen=True)
class Segment:
    """The positions from `start` to before `end`: mean loss and its standard error, in nats a token."""

    start: int
    end: int
    loss: float
    error: float | None  # windows are drawn, not tokens: those of one window are alike. None for a single window
    n_tokens: int


@dataclass(frozen=True)
class LongLoss:
    """The loss of every token of N windows: nats (N, T) float64, NaN where a window has no token any more."""

    trained_length: int
    nats: Tensor

    @property
    def counts(self) -> Tensor:
        """How many windows have a token at each position, (T,) int64."""
        return (~self.nats.isnan()).sum(dim=0)

    @property
    def by_position(self) -> Tensor:
        """The mean of each position over the windows, (T,); NaN where none has a token."""
        return self.nats.nanmean(dim=0)

    def segment(self, start: int, end: int) -> Segment:
        """The mean over all tokens of these positions: a ratio of two sums over windows, whose error it has."""
        part = self.nats[:, start:end]
        counts, sums = (~part.isnan()).sum(dim=1), part.nansum(dim=1)  # (N,) each
        n, windows = int(counts.sum()), int((counts > 0).sum())
        mean = (sums.sum() / n).item()
        spread = (sums - mean * counts).square().sum().item()
        error = math.sqrt(spread * windows / (windows - 1)) / n if windows > 1 else None
        return Segment(start, end, mean, error, n)

    def segments(self) -> list[Segment]:
        """Two halves of the trained length, then one length after the other; those without a token are left out."""
        length, T = self.trained_length, self.nats.shape[1]
        edges = sorted({0, length // 2, *range(length, T, length), T})
        return [self.segment(*ends) for ends in pairwise(edges) if self.counts[slice(*ends)].any()]

    def table(self) -> str:
        """The segments, one a line."""
        lines = [f"{'positions':>15}  {'nats a token':>12}  {'std error':>9}  {'tokens':>9}"]
        for part in self.segments():
            place, error = f"{part.start}-{part.end - 1}", "" if part.error is None else f"{part.error:.4f}"
            beyond = "  beyond the training" * (part.start >= self.trained_length)
            lines.append(f"{place:>15}  {part.loss:12.4f}  {error:>9}  {part.n_tokens:9,}{beyond}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the segments, and the loss and the number of tokens at each position."""
        means = [loss if count else None for loss, count in zip(self.by_position.tolist(), self.counts.tolist())]
        segments = [asdict(part) for part in self.segments()]
        return {"segments": segments, "by_position": means, "counts": self.counts.tolist()}


def long_windows(config: ThinkerConfig, tokens: TokenShards, length: int) -> PackedDataset:
    """PackedDataset of `length` that follow each other through `tokens`; shorter where positions or the tokens end.

    Documents are cut, and lie side by side, even if the training began each window with one: that costs some loss.
    """
    longest = max(shard.n_tokens - 1 for shard in tokens.shards)
    length = min(length, longest, config.max_seq_len if config.positions == "learned" else length)
    return PackedDataset(tokens, length, "contiguous", prefix_len=config.prefix)


def stretch(model: Thinker, scaling: dict[str, Any] | str) -> None:
    """Turn queries and keys by other angles from now on, such as {"type": "linear", "factor": 4}; weights stay.

    `scaling` may be YAML. Raises UserError where it is no scaling, or the model has no angles.
    """
    config = model.config
    if model.rope is None:
        raise UserError(f"model.positions is {config.positions}: there is no RoPE to scale")
    if isinstance(scaling, str):
        try:
            scaling = yaml.safe_load(scaling)
        except yaml.YAMLError as error:
            raise UserError(f"{scaling!r} is no table such as {{type: linear, factor: 4}}") from error
    model.rope = Rope(config.head_dim, config.rope_theta, RopeScaling.from_dict(scaling))


def hidden_states(model: Thinker, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """What the head would read, (B, T) -> (B, T, C): Thinker.forward up to the logits, which can be too large."""
    place = model.make_context(tokens, tokens, documents)
    rope = None if model.rope is None else model.rope(place.positions, place.end, model.dtype)
    return model.forward_blocks(model.embed(tokens, place), rope, place)


@torch.no_grad()
def loss_by_position(
    model: Thinker,
    windows: PackedDataset,
    batch_size: int,
    limit: int | None = None,
    trained_length: int | None = None,
    progress: bool = False,
) -> LongLoss:
    """The loss of each token in the first `limit` windows; evaluation mode, and then the mode that was.

    `trained_length`: that of the training's windows; config.max_seq_len unless given. `progress`: show a bar.
    """
    was_training = model.training
    model.eval()
    nats = []
    batches = -(-len(windows) // batch_size)
    for inputs, targets in tqdm(
        sequential_batches(windows, batch_size, limit), desc="evaluating", total=batches, disable=not progress
    ):
        given = [x if x is None else x.to(model.device) for x in (inputs, windows.document_ids(inputs))]
        rows = hidden_states(model, *given).flatten(0, 1).split(HEAD_ROWS)  # (n, C) each
        losses = []
        for x, y in zip(rows, targets.flatten().split(HEAD_ROWS)):
            logits = model.lm_head(x).float()  # (n, V)
            losses.append(F.cross_entropy(logits, y.to(x.device), ignore_index=IGNORE_INDEX, reduction="none").cpu())
        is_ignored = targets == IGNORE_INDEX
        nats.append(torch.cat(losses).view(targets.shape).double().masked_fill(is_ignored, math.nan))
    model.train(was_training)
    return LongLoss(trained_length or model.config.max_seq_len, torch.cat(nats))
