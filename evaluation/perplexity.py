"""Loss, perplexity and bits per byte of a model on a text, with confidence intervals."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.encoding import encode_document
from thinker.data.corpus.shard_writer import ShardWriter
from thinker.data.corpus.shards import TokenShards
from thinker.data.text.sources import Source
from thinker.data.tokenizers.text_bytes import count_bytes, loses_text, warn_of_lost_text
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.entropy_floor import entropy_floor, format_excess
from thinker.evaluation.long_context import PositionLosses, loss_by_position, ratio_with_error
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

BATCH_TOKENS = 8192
MIN_BLOCK_TOKENS = 1024  # per sample of the confidence interval, if the text is long enough


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens or bytes, with its confidence interval."""

    mean: float
    low: float | None  # None if there is only one window
    high: float | None

    def format(self, digits: int) -> str:
        """For example "1.23 [1.20, 1.26]"."""
        mean = f"{self.mean:,.{digits}f}"
        if self.low is None:
            return mean
        return f"{mean} [{self.low:,.{digits}f}, {self.high:,.{digits}f}]"


@dataclass(frozen=True)
class TextLoss:
    """Loss over windows of a text; `by_position` contains the loss of every token."""

    context_length: int
    stride: int  # tokens counted per window, from its end; all unless windows overlap
    n_tokens: int
    n_bytes: int
    n_windows: int
    nats_per_token: Estimate
    bits_per_byte: Estimate
    entropy_floor: float | None
    by_position: PositionLosses

    @property
    def perplexity(self) -> Estimate:
        """exp(nats per token)."""
        nats = self.nats_per_token
        return Estimate(_bounded_exp(nats.mean), _bounded_exp(nats.low), _bounded_exp(nats.high))

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        estimates = ("nats_per_token", "perplexity", "bits_per_byte")
        tree = vars(self) | {name: vars(getattr(self, name)) for name in estimates}
        return tree | {"by_position": self.by_position.to_dict()}


def _bounded_exp(nats: float | None) -> float | None:
    """exp(nats), at most exp(700), which a float can represent."""
    if nats is None:
        return None
    return math.exp(min(nats, 700.0))


def estimate_ratio(sums: Tensor, sizes: Tensor, confidence: float) -> Estimate:
    """Σ sums / Σ sizes over samples (N,), with its confidence interval.

    The interval is by Student's t with N − 1 degrees of freedom.
    """
    from scipy.stats import t  # slow to import

    has_size = sizes > 0
    # Empty samples, such as windows without targets, say nothing about the spread.
    mean, error = ratio_with_error(sums[has_size].double(), sizes[has_size].double())
    if error is None:
        return Estimate(mean, None, None)
    degrees_of_freedom = int(has_size.sum()) - 1
    error *= float(t.ppf((1 + confidence) / 2, degrees_of_freedom))
    return Estimate(mean, mean - error, mean + error)


def text_loss(
    model: Thinker,
    windows: PackedDataset,
    byte_lengths: np.ndarray,
    confidence: float = 0.95,
    trained: int = 0,
    limit: int = 0,
) -> TextLoss:
    """Loss, perplexity and bits per byte over the first `limit` windows (0: all).

    `byte_lengths`: number of bytes of each token id (data.text_bytes). `confidence`: of the
    intervals. `trained`: length of the training windows (default: max_seq_len). Raises UserError if
    none of the counted tokens has text.
    """
    # Batches have about the same number of tokens for any context.
    batch_size = max(1, BATCH_TOKENS // windows.seq_len)
    losses = loss_by_position(model, windows, batch_size, limit, trained, progress=True)
    is_counted = losses.targets != IGNORE_INDEX
    token_bytes = torch.from_numpy(byte_lengths)[losses.targets.clamp_min(0)]

    # Sums over each window, (N,).
    nats = losses.nats.nansum(dim=1)
    counts = is_counted.sum(dim=1)
    n_bytes = torch.where(is_counted, token_bytes, 0).sum(dim=1)
    if not n_bytes.any():
        raise UserError(
            "the target tokens have no text, so bits per byte are undefined; use another text"
        )

    # Samples are blocks, because neighboring tokens and windows are correlated.
    block_tokens = max(windows.seq_len, min(MIN_BLOCK_TOKENS, int(counts.sum()) // 32))
    block = torch.arange(len(counts)) // max(1, block_tokens // windows.stride)  # (N,)
    n_blocks = int(block[-1]) + 1

    def sum_blocks(values: Tensor) -> Tensor:  # (N,) -> (blocks,)
        return torch.zeros(n_blocks).double().index_add(0, block, values.double())

    block_nats = sum_blocks(nats)
    return TextLoss(
        context_length=windows.seq_len,
        stride=windows.stride,
        n_tokens=int(counts.sum()),
        n_bytes=round(float(n_bytes.sum())),
        n_windows=len(losses.nats),
        nats_per_token=estimate_ratio(block_nats, sum_blocks(counts), confidence),
        bits_per_byte=estimate_ratio(block_nats / math.log(2), sum_blocks(n_bytes), confidence),
        entropy_floor=entropy_floor(windows, limit or None),
        by_position=losses,
    )


def format_table(losses: list[TextLoss]) -> str:
    """Format one line per context length.

    It has estimates with intervals and, if known, the distance to the floor.
    """
    header = ["context", "tokens", "nats per token", "perplexity", "bits per byte"]
    has_floor = any(loss.entropy_floor for loss in losses)
    if has_floor:
        header.append("against the floor")
    rows = [header]
    for loss in losses:
        row = [
            str(loss.context_length),
            f"{loss.n_tokens:,}",
            loss.nats_per_token.format(4),
            loss.perplexity.format(2),
            loss.bits_per_byte.format(4),
        ]
        if loss.entropy_floor:
            row.append(format_excess(loss.nats_per_token.mean, loss.entropy_floor, 2))
        elif has_floor:
            row.append("")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def tokenize(source: Source, tokenizer: Tokenizer, max_tokens: int, folder: Path) -> TokenShards:
    """Write the first documents of a source to shards in `folder`, up to `max_tokens` tokens.

    The last document is kept in full. A single text is cut, and no token that ends it is a target,
    so that the tokens are the same as in Generator.score().
    """
    writer = ShardWriter(folder, "text", tokenizer)
    n_left = max_tokens
    n_texts = 0
    n_lost = 0
    with Progress(total=max_tokens, desc="tokenizing", unit=" tokens") as bar:
        for document in source.documents():
            is_chat = document.messages is not None
            rows = encode_document(tokenizer, document, assistant_only_loss=is_chat)
            n_texts += 1
            if is_chat:
                n_counted = sum(len(ids) for ids, _ in rows)
                n_bytes = len(document.text.encode())
                writer.add_rows(rows, n_bytes)
            else:
                ((ids, _),) = rows
                if loses_text(tokenizer, document.text, ids):
                    n_lost += 1
                n_counted = len(ids)
                if source.whole_text:
                    n_counted = min(n_left, n_counted)
                n_bytes = count_bytes(tokenizer, document.text, ids, 0, n_counted)
                # A single text is one document, although it comes in pieces.
                continues = source.whole_text and writer.started
                writer.add(ids[:n_counted], n_bytes, document.log_prob, continues)
            n_left -= n_counted
            bar.update(n_counted)
            if n_left <= 0:
                break
        bar.total = bar.n  # the text may have fewer or more tokens
    warn_of_lost_text(n_lost, n_texts)
    if n_left == max_tokens:
        raise UserError(
            f"data.source={source.name}: the source has no text to predict; choose another"
        )
    writer.close()
    tokens = TokenShards.open(folder, writer.files, tokenizer)
    if not source.whole_text:
        return tokens
    n_tokens = 1 + max_tokens - n_left  # with the BOS token
    shards = []
    for shard in tokens.shards:
        shards.append(replace(shard, n_tokens=n_tokens, tokens=shard.tokens[:n_tokens]))
    return TokenShards(shards)
