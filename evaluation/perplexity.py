"""How well a model predicts a text: nats per token, perplexity, bits per byte, each with its confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from thinker.data.batches import PackedDataset, entropy_floor
from thinker.data.corpus import encode_all
from thinker.data.shards import ShardWriter, TokenShards
from thinker.data.sources import Source
from thinker.data.tokenizer import Tokenizer
from thinker.evaluation.long_context import PositionLosses, loss_by_position
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

MIN_BLOCK_TOKENS = 1024  # tokens per sample of the interval, if there are enough


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens or bytes, with its confidence interval."""

    mean: float
    low: float | None  # None if there is only one window
    high: float | None


@dataclass(frozen=True)
class TextLoss:
    """The loss over windows of a text. `by_position` has the loss of every token."""

    context_length: int
    stride: int  # tokens that each window counts, its last ones: all, unless windows overlap
    n_tokens: int
    n_bytes: int
    n_windows: int
    nats_per_token: Estimate
    bits_per_byte: Estimate
    entropy_floor: float | None
    by_position: PositionLosses

    @property
    def perplexity(self) -> Estimate:
        """e to the nats per token."""
        return Estimate(*(x if x is None else math.exp(min(x, 700.0)) for x in vars(self.nats_per_token).values()))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = ("context_length", "stride", "n_tokens", "n_bytes", "n_windows", "entropy_floor")
        ratios = ("nats_per_token", "perplexity", "bits_per_byte")
        found = {name: getattr(self, name) for name in plain} | {name: vars(getattr(self, name)) for name in ratios}
        return found | {"by_position": self.by_position.to_dict()}


def estimate_ratio(sums: Tensor, sizes: Tensor, confidence: float) -> Estimate:
    """Σ sums / Σ sizes over samples (N,), with its confidence interval.

    The standard error is that of a ratio of two sums (Cochran 1977, Sampling Techniques, equation 2.46), times the
    quantile of Student's t for N − 1 degrees of freedom.
    """
    from scipy.stats import t  # takes a second to import

    sums, sizes = sums[sizes > 0].double(), sizes[sizes > 0].double()
    n, total = len(sums), sizes.sum().item()
    mean = sums.sum().item() / total
    if n < 2:
        return Estimate(mean, None, None)
    spread = (sums - mean * sizes).square().sum().item()
    error = math.sqrt(spread * n / (n - 1)) / total * float(t.ppf((1 + confidence) / 2, n - 1))
    return Estimate(mean, mean - error, mean + error)


def text_loss(
    model: Thinker,
    windows: PackedDataset,
    byte_lengths: np.ndarray,
    *,
    confidence: float = 0.95,
    trained_length: int | None = None,
    batch_tokens: int = 8192,
) -> TextLoss:
    """Loss, perplexity and bits per byte over all windows.

    Args:
        byte_lengths: bytes of text of each token, data.tokenizer.token_byte_lengths.
        confidence: level of the intervals.

    Raises UserError where none of the tokens stands for text.
    """
    batch_size = max(1, batch_tokens // windows.seq_len)
    losses = loss_by_position(model, windows, batch_size, None, trained_length, progress=True)
    is_counted = losses.targets != IGNORE_INDEX
    token_bytes = torch.from_numpy(byte_lengths.astype(np.int64))[losses.targets.clamp_min(0)]
    n_bytes = torch.where(is_counted, token_bytes, 0).sum(dim=1)  # (N,)
    nats, counts = losses.nats.nansum(dim=1), is_counted.sum(dim=1)  # (N,) each
    if not n_bytes.any():
        raise UserError("the tokens to predict have no text, so there are no bytes to count by")
    # Neighboring tokens and windows are correlated, so the samples are blocks of them.
    together = max(windows.seq_len, min(MIN_BLOCK_TOKENS, int(counts.sum()) // 32))
    block = torch.arange(len(counts)) // max(1, together // windows.stride)  # (N,)
    blocks = [torch.zeros(int(block[-1]) + 1).double().index_add(0, block, x.double()) for x in (nats, counts, n_bytes)]
    return TextLoss(
        windows.seq_len,
        windows.stride,
        int(counts.sum()),
        int(n_bytes.sum()),
        len(windows),
        estimate_ratio(blocks[0], blocks[1], confidence),
        estimate_ratio(blocks[0] / math.log(2), blocks[2], confidence),
        entropy_floor(windows),
        losses,
    )


def table(found: list[TextLoss]) -> str:
    """Losses at several lengths of context, a line each, with their intervals; on tales how far above the floor."""
    rows = [["context", "tokens", "nats per token", "perplexity", "bits per byte", "over the floor"]]
    for one in found:
        ratios = (one.nats_per_token, 4), (one.perplexity, 2), (one.bits_per_byte, 4)
        floor = f"{one.nats_per_token.mean / one.entropy_floor - 1:.2%}" if one.entropy_floor else ""
        rows.append([f"{one.context_length}", f"{one.n_tokens:,}", *(_in_brackets(*each) for each in ratios), floor])
    columns = [column for column in zip(*rows) if any(column[1:])]  # there may be no floor
    widths = [max(map(len, column)) for column in columns]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in zip(*columns))
    return "\n".join(line.rstrip() for line in lines)


def _in_brackets(ratio: Estimate, digits: int) -> str:
    interval = "" if ratio.low is None else f" [{ratio.low:,.{digits}f}, {ratio.high:,.{digits}f}]"
    return f"{ratio.mean:,.{digits}f}{interval}"


def tokenize(source: Source, tokenizer: Tokenizer, most: int, folder: Path) -> TokenShards:
    """The first documents of a source, up to so many tokens, whole; a single text is cut there. Written to `folder`."""
    writer, left = ShardWriter(folder, "text", tokenizer), most
    with tqdm(total=most, desc="tokenizing", unit=" tokens") as bar:
        for document in source.documents():
            ((ids, counted),) = encode_all(tokenizer, [document], assistant_only_loss=document.messages is not None)
            cut = ids[:left] if source.whole_text else ids
            n_bytes = len(tokenizer.decode_bytes(cut.tolist()))
            writer.add(cut, n_bytes, document.log_prob, source.whole_text and writer.started, counted)
            left -= len(cut)
            bar.update(len(cut))
            if left <= 0:
                break
        bar.total = bar.n  # the text may be shorter than what was asked for, and its last document longer
    if left == most:
        raise UserError(f"data.source={source.name}: there is no text to be predicted")
    writer.close()
    return TokenShards.open(folder, writer.files, tokenizer)
