"""Bits per byte of gzip, xz and a 5-gram model on the validation text.

A trained model is compared with them. Each has read the last 1 MB of the training text and predicts
the first 100 KB of the validation text, so that all take a few seconds at most, whatever the size
of the corpus. Both texts are decoded from the tokens of the corpus. A zero byte ends each document,
where the model predicts a BOS token: it counts as bits, but not as a byte of text.
"""

import gzip
import lzma
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from thinker.data.corpus.corpus import Corpus
from thinker.data.corpus.shards import TokenShards
from thinker.data.tokenizers.tokenizer import Tokenizer

MAX_TRAIN_BYTES = 1_000_000
MAX_VAL_BYTES = 100_000
MIN_TEXT_BYTES = 2000
XZ_DICTIONARY = 4 << 20  # bytes; holds both texts
N = 5  # bytes per n-gram: the next one and its context
NGRAM = f"{N}-gram"
DOCUMENT_END = b"\0"


def text_baselines(corpus: Corpus) -> dict[str, float] | None:
    """Bits per byte of the validation text, by "5-gram", "xz" and "gzip".

    Uses the last 1 MB of the training text and the first 100 KB of the validation text. None for
    conversations, for mixtures, and if one of the two texts is shorter than 2,000 bytes.
    """
    if corpus.parts or corpus.train.has_conversations or corpus.val.has_conversations:
        return None
    train, _ = _decode(_last_ids(corpus.train, MAX_TRAIN_BYTES), corpus.tokenizer)
    train = train[-MAX_TRAIN_BYTES:]
    # Not the BOS token of the first document, which no model predicts.
    first_ids = corpus.val.shards[0].tokens[1:MAX_VAL_BYTES]
    val, n_bytes = _decode(first_ids, corpus.tokenizer, MAX_VAL_BYTES)
    if min(len(train), n_bytes) < MIN_TEXT_BYTES:
        return None
    # The bits that the validation text adds behind the training text.
    with ThreadPoolExecutor() as pool:  # compressors release the GIL
        xz_both = pool.submit(_xz_size, train + val)
        xz_train = pool.submit(_xz_size, train)
        gzip_both = pool.submit(_gzip_size, train + val)
        gzip_train = pool.submit(_gzip_size, train)
        ngram_bits = NgramModel(train).bits(val, train[-N + 1 :])
        xz_bits = 8 * (xz_both.result() - xz_train.result())
        gzip_bits = 8 * (gzip_both.result() - gzip_train.result())
    return {NGRAM: ngram_bits / n_bytes, "xz": xz_bits / n_bytes, "gzip": gzip_bits / n_bytes}


class NgramModel:
    """A byte-level 5-gram model with Witten-Bell smoothing.

    Smoothing interpolates contexts of 4 to 0 bytes and 1/256:
    P(c | h) = (n(h, c) + d(h) P(c | h')) / (n(h) + d(h)), where n counts occurrences in the
    training text, d(h) is the number of distinct bytes that follow h, and h' is h without its
    oldest byte. Where h is new, P(c | h) = P(c | h').
    """

    def __init__(self, text: bytes) -> None:
        """Count the n-grams of a text. Raises ValueError if it has fewer than 5 bytes."""
        codes = _codes(_windows(text))
        self._orders = []  # by length of context
        for length in range(N):
            grams, counts = np.unique(codes & _mask(length + 1), return_counts=True)
            # N-grams of one context are neighbors.
            contexts, starts, n_distinct = np.unique(
                grams >> 8, return_index=True, return_counts=True
            )
            totals = np.add.reduceat(counts, starts)
            self._orders.append((grams, counts, contexts, totals, n_distinct))

    def probabilities(self, windows: np.ndarray) -> np.ndarray:
        """P(last byte | the four before it) of each row, (n, 5) uint8 -> (n,) float64."""
        codes = _codes(windows)
        result = np.full(len(codes), 1 / 256)
        for length, (grams, counts, contexts, totals, n_distinct) in enumerate(self._orders):
            code = codes & _mask(length + 1)
            (n_gram,) = _look_up(grams, code, counts)
            n, d = _look_up(contexts, code >> 8, totals, n_distinct)
            np.divide(n_gram + d * result, n + d, out=result, where=n > 0)
        return result

    def bits(self, text: bytes, before: bytes) -> float:
        """Bits to encode a text that follows the four bytes `before`."""
        return float(-np.log2(self.probabilities(_windows(before + text))).sum())


def _windows(text: bytes) -> np.ndarray:
    """All n-grams of a text, (n, 5) uint8."""
    return np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), N)


def _codes(windows: np.ndarray) -> np.ndarray:
    """The bytes of each row as one number, the last byte lowest, (n, 5) uint8 -> (n,) uint64.

    A mask of the lowest bytes then gives shorter n-grams.
    """
    codes = np.zeros(len(windows), np.uint64)
    for column in windows.T:
        codes = codes << 8 | column
    return codes


def _mask(n_bytes: int) -> np.uint64:
    return np.uint64(256**n_bytes - 1)


def _look_up(keys: np.ndarray, wanted: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
    """The value of each wanted key, or 0 if there is no such key; `keys` is sorted."""
    # searchsorted() finds places where a key may not be.
    indices = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    is_found = keys[indices] == wanted
    return [np.where(is_found, array[indices], 0) for array in values]


def _xz_size(text: bytes) -> int:
    options = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": XZ_DICTIONARY}
    return len(lzma.compress(text, filters=[options]))


def _gzip_size(text: bytes) -> int:
    return len(gzip.compress(text))  # finds repetitions within 32 KB


def _last_ids(tokens: TokenShards, n: int) -> np.ndarray:
    """The last n ids of a split, or all if it has fewer."""
    parts = []
    for shard in reversed(tokens.shards):
        parts.append(shard.tokens[-n:])
        n -= len(parts[-1])
        if n <= 0:
            break
    return np.concatenate(parts[::-1])


def _decode(
    ids: np.ndarray, tokenizer: Tokenizer, max_bytes: int | None = None
) -> tuple[bytes, int]:
    """The bytes of the first ids, at most `max_bytes`.

    Also returns how many of them are text and not the end of a document.
    """
    distinct, indices = np.unique(ids, return_inverse=True)  # each id is decoded once
    pieces = []
    for token_id in distinct.tolist():
        if token_id == tokenizer.bos_id:
            pieces.append(DOCUMENT_END)
        else:
            pieces.append(tokenizer.token_bytes(token_id))
    # Cut between tokens, as half a token is no text.
    n = len(ids)
    if max_bytes is not None:
        lengths = np.array(list(map(len, pieces)))
        ends = np.cumsum(lengths[indices])
        n = int(np.searchsorted(ends, max_bytes, side="right"))
    data = b"".join([pieces[i] for i in indices[:n].tolist()])
    n_ends = int((ids[:n] == tokenizer.bos_id).sum())
    return data, len(data) - n_ends
