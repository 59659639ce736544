"""Loss, perplexity and bits per byte of a model on a text, with confidence intervals."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from thinker.data.batches.batches import PackedDataset, entropy_floor
from thinker.data.corpus.encoding import encode_document
from thinker.data.corpus.shard_writer import ShardWriter
from thinker.data.corpus.shards import TokenShards
from thinker.data.text.sources import Source
from thinker.data.tokenizers.text_bytes import count_bytes, loses_text, warn_of_lost_text
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.long_context import PositionLosses, loss_by_position, ratio_with_error
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

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
        interval = "" if self.low is None else f" [{self.low:,.{digits}f}, {self.high:,.{digits}f}]"
        return f"{self.mean:,.{digits}f}{interval}"


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
        return Estimate(
            *(
                x if x is None else math.exp(min(x, 700.0))
                for x in vars(self.nats_per_token).values()
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        estimates = ("nats_per_token", "perplexity", "bits_per_byte")
        tree = vars(self) | {name: vars(getattr(self, name)) for name in estimates}
        return tree | {"by_position": self.by_position.to_dict()}


def estimate_ratio(sums: Tensor, sizes: Tensor, confidence: float) -> Estimate:
    """Σ sums / Σ sizes over samples (N,), with its interval by Student's t with N − 1 degrees of freedom."""
    from scipy.stats import t  # slow to import

    mean, error = ratio_with_error(sums[sizes > 0].double(), sizes[sizes > 0].double())
    if error is None:
        return Estimate(mean, None, None)
    error *= float(t.ppf((1 + confidence) / 2, int((sizes > 0).sum()) - 1))
    return Estimate(mean, mean - error, mean + error)


def text_loss(
    model: Thinker, windows: PackedDataset, byte_lengths: np.ndarray, confidence: float = 0.95, trained: int = 0,
    limit: int = 0,
) -> TextLoss:  # fmt: skip
    """Loss, perplexity and bits per byte over the first `limit` windows (0: all), with intervals of this confidence.

    `byte_lengths`: number of bytes of each token id (data.text_bytes). `trained`: length of the training windows
    (default: max_seq_len). Raises UserError if none of the counted tokens has text.
    """
    batch_size = max(1, BATCH_TOKENS // windows.seq_len)
    losses = loss_by_position(model, windows, batch_size, limit, trained, progress=True)
    is_counted = losses.targets != IGNORE_INDEX
    token_bytes = torch.from_numpy(byte_lengths)[losses.targets.clamp_min(0)]
    n_bytes = torch.where(is_counted, token_bytes, 0).sum(dim=1)  # (N,)
    nats, counts = losses.nats.nansum(dim=1), is_counted.sum(dim=1)  # (N,) each
    if not n_bytes.any():
        raise UserError(
            "the target tokens have no text, so bits per byte are undefined; use another text"
        )
    # Samples are blocks, because neighboring tokens and windows are correlated.
    block_tokens = max(windows.seq_len, min(MIN_BLOCK_TOKENS, int(counts.sum()) // 32))
    block = torch.arange(len(counts)) // max(1, block_tokens // windows.stride)  # (N,)
    blocks = [
        torch.zeros(int(block[-1]) + 1).double().index_add(0, block, x.double())
        for x in (nats, counts, n_bytes)
    ]
    sizes = (
        windows.seq_len,
        windows.stride,
        int(counts.sum()),
        round(float(n_bytes.sum())),
        len(losses.nats),
    )
    per_token = estimate_ratio(blocks[0], blocks[1], confidence)
    per_byte = estimate_ratio(blocks[0] / math.log(2), blocks[2], confidence)
    return TextLoss(*sizes, per_token, per_byte, entropy_floor(windows, limit or None), losses)


def format_excess(loss: float, floor: float, digits: int) -> str:
    """Compare a loss with the floor: "12.3% above", or "3.1 times" from a factor of 2."""
    ratio = loss / floor
    return f"{ratio:.{digits}f} times" if ratio >= 2 else f"{ratio - 1:.{digits}%} above"


def format_table(losses: list[TextLoss]) -> str:
    """Format one line per context length: estimates with intervals and, if known, the distance to the floor."""
    rows = [
        ["context", "tokens", "nats per token", "perplexity", "bits per byte", "against the floor"]
    ]
    for loss in losses:
        estimates = [
            loss.nats_per_token.format(4),
            loss.perplexity.format(2),
            loss.bits_per_byte.format(4),
        ]
        floor = (
            format_excess(loss.nats_per_token.mean, loss.entropy_floor, 2)
            if loss.entropy_floor
            else ""
        )
        rows.append([str(loss.context_length), f"{loss.n_tokens:,}", *estimates, floor])
    columns = [
        column for column in zip(*rows) if any(column[1:])
    ]  # without the floor if it is unknown
    aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned))


def tokenize(source: Source, tokenizer: Tokenizer, max_tokens: int, folder: Path) -> TokenShards:
    """Write the first documents of a source to shards in `folder`, up to `max_tokens` tokens.

    The last document is kept in full. A single text is cut, and no token that ends it is a target, so that the tokens
    are the same as in Generator.score().
    """
    writer, n_left = ShardWriter(folder, "text", tokenizer), max_tokens
    n_texts = n_lost = 0
    with tqdm(total=max_tokens, desc="tokenizing", unit=" tokens") as bar:
        for document in source.documents():
            ids, loss_mask = encode_document(
                tokenizer, document, assistant_only_loss=document.messages is not None
            )
            n_texts += 1
            n_lost += document.messages is None and loses_text(tokenizer, document.text, ids)
            n_counted = min(n_left, len(ids)) if source.whole_text else len(ids)
            n_bytes = count_bytes(tokenizer, document.text, ids, 0, n_counted)
            ids = ids[:n_counted]
            writer.add(
                ids, n_bytes, document.log_prob, source.whole_text and writer.started, loss_mask
            )
            n_left -= len(ids)
            bar.update(len(ids))
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
    return TokenShards(
        [
            replace(shard, n_tokens=n_tokens, tokens=shard.tokens[:n_tokens])
            for shard in tokens.shards
        ]
    )
