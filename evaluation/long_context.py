"""Loss by position in texts longer than the trained length."""

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.shards import TokenShards
from thinker.evaluation.loss import batch_losses
from thinker.model import Thinker, ThinkerConfig
from thinker.model.positions import Rope
from thinker.model.rope_scaling import RopeScaling
from thinker.runtime.checks import check_computed
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

LOGIT_ROWS = 256  # positions whose logits are in memory at once


@dataclass(frozen=True)
class Segment:
    """Mean loss and standard error at positions start..end-1, in nats per token.

    The error is over windows, because tokens in a window are correlated. None for a single window.
    """

    start: int
    end: int
    loss: float
    error: float | None
    n_tokens: int


@dataclass(frozen=True)
class PositionLosses:
    """The loss of every token of N windows."""

    trained_length: int
    nats: Tensor  # (N, T) float64, NaN where the target is IGNORE_INDEX
    targets: Tensor  # (N, T)

    @property
    def counts(self) -> Tensor:
        """The number of windows that have a token at each position, (T,) int64."""
        return (~self.nats.isnan()).sum(dim=0)

    @property
    def by_position(self) -> Tensor:
        """Mean over windows at each position, (T,); NaN if no window has a token there."""
        return self.nats.nanmean(dim=0)

    def segment(self, start: int, end: int) -> Segment:
        """Mean over all tokens at these positions, with its standard error over windows."""
        part = self.nats[:, start:end]
        counts = (~part.isnan()).sum(dim=1)  # (N,)
        loss, error = ratio_with_error(part.nansum(dim=1), counts)
        return Segment(start, end, loss, error, int(counts.sum()))

    def segments(self) -> list[Segment]:
        """Both halves of the trained length, then multiples of it, without empty segments."""
        length = self.trained_length
        T = self.nats.shape[1]
        # The first half has less context than the second, so they are apart.
        edges = sorted({0, length // 2, *range(length, T, length), T})
        counts = self.counts
        segments = []
        for start, end in pairwise(edges):
            if counts[start:end].any():
                segments.append(self.segment(start, end))
        return segments

    def format_table(self) -> str:
        """The segments, one per line."""
        lines = [f"{'positions':>15}  {'nats per token':>12}  {'std error':>9}  {'tokens':>9}"]
        for part in self.segments():
            positions = f"{part.start}-{part.end - 1}"
            error = "" if part.error is None else f"{part.error:.4f}"
            note = "  beyond the trained length" if part.start >= self.trained_length else ""
            lines.append(
                f"{positions:>15}  {part.loss:12.4f}  {error:>9}  {part.n_tokens:9,}{note}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the segments, and the loss and number of tokens at each position, for JSON."""
        counts = self.counts.tolist()
        means = self.by_position.tolist()
        for position, count in enumerate(counts):
            if count == 0:
                means[position] = None  # NaN is not JSON
        return {
            "segments": [asdict(part) for part in self.segments()],
            "by_position": means,
            "counts": counts,
        }


def ratio_with_error(sums: Tensor, sizes: Tensor) -> tuple[float, float | None]:
    """Σ sums / Σ sizes over samples (N,), and its standard error.

    The error is None if only one sample is not empty. Cochran 1977, Sampling Techniques, equation
    2.46: the error of a ratio of two sums.
    """
    n = int((sizes > 0).sum())
    total = sizes.sum().item()
    mean = (sums.sum() / total).item()  # NaN without tokens
    if n <= 1:
        return mean, None
    # Samples differ in size: deviations are from the share of the mean that each would have.
    spread = (sums - mean * sizes).square().sum().item()
    return mean, math.sqrt(spread * n / (n - 1)) / total


def long_windows(config: ThinkerConfig, tokens: TokenShards, length: int) -> PackedDataset:
    """Contiguous windows of `length` tokens across documents.

    They are shorter if learned positions or tokens run out.
    """
    length = min(length, max(shard.n_tokens - 1 for shard in tokens.shards))
    if config.positions == "learned":
        length = min(length, config.max_seq_len)
    return PackedDataset(tokens, length, "contiguous", prefix_len=config.prefix)


def override_rope_scaling(model: Thinker, scaling: dict[str, Any] | str) -> None:
    """Set RoPE scaling, for example {"type": "linear", "factor": 4}, as a dict or YAML.

    Raises UserError.
    """
    if model.rope is None:
        raise UserError(f"model.positions is {model.config.positions}; RoPE scaling needs rope")
    if isinstance(scaling, str):
        try:
            scaling = yaml.safe_load(scaling)
        except yaml.YAMLError as error:
            raise UserError(
                f"RoPE scaling {scaling!r} is not a mapping such as {{type: linear, factor: 4}}"
            ) from error
    scaling = RopeScaling.from_dict(scaling)
    model.rope = Rope(
        model.config.head_dim, model.config.rope_theta, scaling, model.config.rope_dim
    )


def hidden_states(model: Thinker, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Final hidden states, (B, T) -> (B, T, C).

    Without the logits of all positions, which may not fit in memory.
    """
    return model.forward_blocks(tokens, model.make_context(tokens, tokens, document_ids))


def loss_by_position(
    model: Thinker,
    windows: PackedDataset,
    batch_size: int,
    limit: int = 0,
    trained: int = 0,
    progress: bool = False,
) -> PositionLosses:
    """Loss of each token in the first `limit` windows (0: all).

    trained: the trained length (0: max_seq_len).
    """

    def token_losses(inputs: Tensor, targets: Tensor, document_ids: Tensor | None) -> Tensor:
        # Logits of a long sequence would not fit in memory at once.
        states = hidden_states(model, inputs, document_ids).flatten(0, 1)  # (B T, C)
        losses = []
        for hidden, y in zip(states.split(LOGIT_ROWS), targets.flatten().split(LOGIT_ROWS)):
            logits = model.lm_head(hidden).float()  # (n, V)
            loss = F.cross_entropy(logits, y, ignore_index=IGNORE_INDEX, reduction="none")
            losses.append(loss.cpu())
        return torch.cat(losses).view(targets.shape).double()

    n_windows = len(windows)
    if limit > 0:
        n_windows = min(limit, n_windows)
    n_batches = math.ceil(n_windows / batch_size)
    batches = batch_losses(model, windows, batch_size, token_losses, n_windows)
    batches = Progress(batches, desc="evaluating", total=n_batches, disable=not progress)
    targets = []
    losses = []
    for batch_targets, batch_nats in batches:
        targets.append(batch_targets)
        losses.append(batch_nats)
    all_targets = torch.cat(targets)  # (N, T)
    all_losses = torch.cat(losses)  # (N, T)
    # A sum shows any number that is not finite.
    check_computed([all_losses.sum().item()])
    nats = all_losses.masked_fill(all_targets == IGNORE_INDEX, math.nan)
    return PositionLosses(trained or model.config.max_seq_len, nats, all_targets)
