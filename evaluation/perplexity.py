"""How well a model predicts a text: nats a token, perplexity, bits a byte, each with its confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from thinker.data.batches import PackedDataset, entropy_floor, sequential_batches
from thinker.data.corpus import encode_all
from thinker.data.shards import ShardWriter, TokenShards
from thinker.data.sources import Source
from thinker.data.tokenizer import Tokenizer
from thinker.evaluation.long_context import LongLoss, loss_by_position
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

BLOCK = 1024  # tokens that are taken as one draw, at least, where there are enough of them


@dataclass(frozen=True)
class Ratio:
    """A mean over tokens or bytes, and the interval that covers the true one as often as asked for."""

    mean: float
    low: float | None  # None where there is one window only
    high: float | None


@dataclass(frozen=True)
class TextLoss:
    """The loss over windows of a text. `by_position` has the loss of every token."""

    context_length: int
    stride: int  # tokens that each window counts, its last ones: all, unless windows overlap
    n_tokens: int
    n_bytes: int
    n_windows: int
    nats_per_token: Ratio
    bits_per_byte: Ratio
    entropy_floor: float | None
    by_position: LongLoss

    @property
    def perplexity(self) -> Ratio:
        """e to the nats a token."""
        return Ratio(*(x if x is None else math.exp(min(x, 700.0)) for x in vars(self.nats_per_token).values()))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = ("context_length", "stride", "n_tokens", "n_bytes", "n_windows", "entropy_floor")
        ratios = ("nats_per_token", "perplexity", "bits_per_byte")
        found = {name: getattr(self, name) for name in plain} | {name: vars(getattr(self, name)) for name in ratios}
        return found | {"by_position": self.by_position.to_dict()}


def student(share: float, freedom: int) -> float:
    """How many standard errors to either side hold a share of Student's distribution (Hill 1970, CACM 13:617).

    By the expansion about the normal one, wrong by less than 0.5 % from 5 degrees of freedom on; exact for 1 and 2.
    """
    tail = (1 + share) / 2
    if freedom == 1:
        return math.tan(math.pi * (tail - 0.5))
    if freedom == 2:
        return (2 * tail - 1) / math.sqrt(2 * tail * (1 - tail))
    z = NormalDist().inv_cdf(tail)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def ratio(sums: Tensor, sizes: Tensor, share: float) -> Ratio:
    """Σ sums / Σ sizes over draws (N,), and its interval.

    The error is that of a ratio of two sums over draws (Cochran 1977, Sampling Techniques, equation 2.46), times
    Student's quantile for N − 1 degrees of freedom.
    """
    sums, sizes = sums[sizes > 0].double(), sizes[sizes > 0].double()
    n, total = len(sums), sizes.sum().item()
    mean = sums.sum().item() / total
    if n < 2:
        return Ratio(mean, None, None)
    spread = (sums - mean * sizes).square().sum().item()
    error = math.sqrt(spread * n / (n - 1)) / total * student(share, n - 1)
    return Ratio(mean, mean - error, mean + error)


def text_loss(
    model: Thinker,
    windows: PackedDataset,
    byte_lengths: np.ndarray,
    *,
    share: float = 0.95,
    trained_length: int | None = None,
    batch_tokens: int = 8192,
) -> TextLoss:
    """Loss, perplexity and bits per byte over all windows.

    Args:
        byte_lengths: bytes of text of each token, data.tokenizer.token_byte_lengths.
        share: of the confidence interval.

    Raises UserError where none of the tokens stands for text.
    """
    lengths, n_bytes = torch.from_numpy(byte_lengths.astype(np.int64)), []
    batch = max(1, batch_tokens // windows.seq_len)
    found = loss_by_position(model, windows, batch, None, trained_length, progress=True)
    for _, targets in sequential_batches(windows, batch):
        n_bytes.append(torch.where(targets != IGNORE_INDEX, lengths[targets.clamp_min(0)], 0).sum(dim=1))  # (B,)
    if not sum(int(each.sum()) for each in n_bytes):
        raise UserError("the tokens to be predicted stand for no text, so that there are no bytes to count by")
    sizes, nats = torch.cat(n_bytes), found.nats.nansum(dim=1)  # (N,) each
    counts = (~found.nats.isnan()).sum(dim=1)  # (N,)
    # Tokens side by side are alike, those of windows side by side too: what is drawn is blocks of them.
    together = max(windows.seq_len, min(BLOCK, int(counts.sum()) // 32))
    block = torch.arange(len(counts)) // max(1, together // windows.stride)  # (N,)
    blocks = [torch.zeros(int(block[-1]) + 1).double().index_add(0, block, x.double()) for x in (nats, counts, sizes)]
    return TextLoss(
        windows.seq_len,
        windows.stride,
        int(counts.sum()),
        int(sizes.sum()),
        len(windows),
        ratio(blocks[0], blocks[1], share),
        ratio(blocks[0] / math.log(2), blocks[2], share),
        entropy_floor(windows),
        found,
    )


def table(found: list[TextLoss]) -> str:
    """Losses at several lengths of context, a line each, with their intervals; on tales how far above the floor."""
    rows = [["context", "tokens", "nats a token", "perplexity", "bits a byte", "over the floor"]]
    for one in found:
        ratios = (one.nats_per_token, 4), (one.perplexity, 2), (one.bits_per_byte, 4)
        floor = f"{one.nats_per_token.mean / one.entropy_floor - 1:.2%}" if one.entropy_floor else ""
        rows.append([f"{one.context_length}", f"{one.n_tokens:,}", *(_in_brackets(*each) for each in ratios), floor])
    columns = [column for column in zip(*rows) if any(column[1:])]  # there may be no floor
    widths = [max(map(len, column)) for column in columns]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in zip(*columns))
    return "\n".join(line.rstrip() for line in lines)


def _in_brackets(ratio: Ratio, digits: int) -> str:
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
