"""Minimal pairs: does a model give the right one of two sentences the higher probability?

The score of a sentence is ln P of all its tokens after the token that starts a document. Nothing is
divided by the length. A tie counts as half.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.long_context import hidden_states
from thinker.features.eval_suites.accuracy import Accuracy, share_of_items
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.checks import check_computed
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress
from thinker.runtime.reading import read_text

BATCH_SIZE = 32  # texts per pass, of similar length
CHANCE = 0.5
ALL = "all phenomena"
KEYS = ("good", "bad", "phenomenon")
BLIMP_KEYS = ("sentence_good", "sentence_bad", "UID")  # what BLiMP's own files call them


class MinimalPair(NamedTuple):
    """Two sentences that differ in one place."""

    good: str
    bad: str
    phenomenon: str


def read_pairs(path: Path) -> list[MinimalPair]:
    """The pairs of a JSONL file, or of all JSONL files in a folder.

    A line has `good`, `bad` and perhaps `phenomenon` (default: the name of the file), or the keys
    of BLiMP's files: `sentence_good`, `sentence_bad`, `UID`. Raises UserError.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise UserError(f"{path} has no *.jsonl file; use a folder with minimal pairs")
    pairs = []
    for file in files:
        # splitlines() would also split at separators that JSON allows in a text.
        for number, line in enumerate(read_text(file).split("\n"), start=1):
            if line.strip():
                pairs.append(_read_line(line, f"{file}, line {number}", file.stem))
    if not pairs:
        raise UserError(f"{path} has no pairs; write one JSON object per line")
    return pairs


def _read_line(line: str, place: str, default: str) -> MinimalPair:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise UserError(f'{place}: not a JSON object; write {{"good": "...", "bad": "..."}}')
    names = KEYS
    if "sentence_good" in row:
        names = BLIMP_KEYS
    values = [row.get(names[0]), row.get(names[1]), row.get(names[2], default)]
    for name, value in zip(names, values):
        if not isinstance(value, str) or not value:
            raise UserError(f"{place}: {name} is not a text; write a sentence there")
    pair = MinimalPair(*values)
    if pair.good == pair.bad:
        raise UserError(f"{place}: both sentences are equal; change one of them")
    return pair


@torch.no_grad()
def score_texts(
    model: Thinker, tokenizer: Tokenizer, texts: Sequence[str], progress: bool = False
) -> Tensor:
    """ln P of each text as the start of a document, in nats: (N,) float64.

    Raises UserError for a text that the model cannot read at once.
    """
    rows = _encode(tokenizer, texts)
    _check_rows(model.config, rows)
    # Texts of similar length share a batch, with little padding.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    nats = torch.zeros(len(rows), dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        starts = range(0, len(order), BATCH_SIZE)
        for start in Progress(starts, desc="scoring", disable=not progress, leave=False):
            batch = order[start : start + BATCH_SIZE]
            inputs = [torch.tensor(rows[i][:-1]) for i in batch]
            padded = pad_sequence(inputs, batch_first=True).to(model.device)
            hidden = hidden_states(model, padded)  # (B, T, C)
            for i, states in zip(batch, hidden):
                targets = torch.tensor(rows[i][1:])
                logits = model.lm_head(states[: len(targets)])
                # Ids above the tokenizer's are padding.
                logits = logits[:, : tokenizer.vocab_size].float().cpu()  # (T, V)
                logprobs = logits.log_softmax(dim=-1).gather(1, targets[:, None])
                nats[i] = logprobs.double().sum()
    finally:
        model.train(was_training)
    check_computed(nats.tolist())
    return nats


def check_pairs(config: ThinkerConfig, tokenizer: Tokenizer, pairs: Sequence[MinimalPair]) -> None:
    """Raise UserError as score_pairs() does, for pairs that a model of this config cannot score."""
    _check_rows(config, _encode(tokenizer, _texts_of(pairs)))


def _texts_of(pairs: Sequence[MinimalPair]) -> list[str]:
    return [pair.good for pair in pairs] + [pair.bad for pair in pairs]


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]


def _check_rows(config: ThinkerConfig, rows: list[list[int]]) -> None:
    """Raise UserError for a text without tokens or beyond the context, and for a model that reads
    backwards."""
    if config.prefix > 1:
        raise UserError(
            "minimal pairs need ln P of whole sentences, but the model's bidirectional prefix has "
            "none; use a model without the pattern `prefix`"
        )
    longest = max(len(row) - 1 for row in rows)
    if longest > config.max_seq_len:
        raise UserError(
            f"the longest sentence has {longest} tokens, but the model reads "
            f"{config.max_seq_len}; use a model with a longer context or shorter sentences"
        )
    if min(len(row) for row in rows) == 1:
        raise UserError("the tokenizer gives no token to one of the sentences; remove it")


class PairScores(NamedTuple):
    """The pairs, and ln P of both sentences of each: (N,) float64, in nats."""

    pairs: list[MinimalPair]
    good: Tensor
    bad: Tensor

    def accuracies(self, confidence: float = 0.95) -> list[Accuracy]:
        """The accuracy on each phenomenon in the order of the pairs, then on all pairs."""
        right = (self.good > self.bad).double() + (self.good == self.bad).double() / 2
        by_phenomenon: dict[str, list[float]] = {}
        for pair, value in zip(self.pairs, right.tolist()):
            by_phenomenon.setdefault(pair.phenomenon, []).append(value)
        rows = []
        for name, values in by_phenomenon.items():
            rows.append(share_of_items(name, math.fsum(values), len(values), CHANCE, confidence))
        if len(rows) > 1:
            n_right = float(right.sum())
            rows.append(share_of_items(ALL, n_right, len(self.pairs), CHANCE, confidence))
        return rows

    def to_dicts(self) -> list[dict[str, Any]]:
        """Each pair with its scores, for JSON."""
        rows = []
        for pair, good, bad in zip(self.pairs, self.good.tolist(), self.bad.tolist()):
            rows.append({**pair._asdict(), "good_nats": good, "bad_nats": bad})
        return rows


def score_pairs(
    model: Thinker, tokenizer: Tokenizer, pairs: Sequence[MinimalPair], progress: bool = False
) -> PairScores:
    """Score both sentences of each pair. Raises UserError as score_texts() does."""
    nats = score_texts(model, tokenizer, _texts_of(pairs), progress)
    return PairScores(list(pairs), nats[: len(pairs)], nats[len(pairs) :])


def first_pairs(pairs: Sequence[MinimalPair], limit: int | None) -> list[MinimalPair]:
    """The first `limit` pairs of each phenomenon; None: all."""
    counts: dict[str, int] = {}
    kept = []
    for pair in pairs:
        counts[pair.phenomenon] = counts.get(pair.phenomenon, 0) + 1
        if limit is None or counts[pair.phenomenon] <= limit:
            kept.append(pair)
    return kept
