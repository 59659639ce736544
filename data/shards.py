"""Tokens on disk: memory-mapped shard files behind a header that is checked whenever one is opened.

The tokens of a shard are one stream, `bos d1 bos d2 ... bos dn bos`: every document starts with the BOS token, and
the last one ends with one too. Where texts end with a token of their own, it stands before the boundary, which
is then no target. A file holds, one after the other and each aligned to 8 bytes: the header, the tokens, where each
document starts (and, at the end, where the closing boundary lies), the bytes of text in each document, where all of
them are known, ln P of each document, and, of conversations, which tokens are to be learned, a byte each.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from thinker.data.tokenizer import Tokenizer
from thinker.runtime.errors import UserError

MAGIC = b"THNKTOKS"
FORMAT = 1
SHARD_TOKENS = 1 << 27  # a shard is closed after the document that reaches this; no document is cut
# magic, format, bytes of a token, vocab_size, tokens, documents, bytes of text, which sections there are (1: ln P,
# 2: what is to be learned), tokenizer hash
HEADER = struct.Struct("<8sIIQQQQQ32s")
HEADER_BYTES = HEADER.size + 8  # and its CRC-32, as 8 bytes


class DamagedShard(Exception):
    """A shard file that is not whole, or does not belong with its tokenizer. It can be made again from the text."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """One open shard. Arrays are read from the disk as they are used.

    Attributes:
        tokens: (n_tokens,) uint16 or uint32, BOS tokens included.
        offsets: (n_documents + 1,) int64, the position of each document's BOS token, and of the closing one.
        document_bytes: (n_documents,) int64, bytes of UTF-8 text.
        log_probs: (n_documents,) float64, ln P of each document, or None.
        loss_mask: (n_tokens,) uint8, 1 for tokens that are targets, or None if all are.
        has_eos: texts end with an EOS token, so that the BOS token after it is no target.
    """

    path: Path
    n_tokens: int
    n_documents: int
    n_bytes: int
    tokens: np.ndarray
    offsets: np.ndarray
    document_bytes: np.ndarray
    log_probs: np.ndarray | None
    loss_mask: np.ndarray | None = None
    has_eos: bool = False

    @classmethod
    def open(cls, path: Path, tokenizer: Tokenizer) -> Shard:
        """Map a shard that was written with this tokenizer; raises DamagedShard, which names the file."""
        try:
            with open(path, "rb") as file:
                head = file.read(HEADER_BYTES)
                size = file.seek(0, os.SEEK_END)
        except OSError as error:
            raise DamagedShard(f"{path} cannot be read: {error.strerror}") from error
        if len(head) < HEADER_BYTES or head[:8] != MAGIC or head[HEADER.size :] != _crc(head[: HEADER.size]):
            raise DamagedShard(f"{path} has no whole header")
        _, version, item, vocab, n_tokens, n_documents, n_bytes, extra, digest = HEADER.unpack_from(head)
        dtype = token_dtype(tokenizer.vocab_size)
        if version != FORMAT:
            raise DamagedShard(f"{path} has format {version}, not {FORMAT}")
        if (item, vocab, digest.hex()) != (dtype.itemsize, tokenizer.vocab_size, tokenizer.content_hash):
            raise DamagedShard(f"{path} was written with another tokenizer")
        sections = [(n_tokens, dtype), (n_documents + 1, "<i8"), (n_documents, "<i8")]
        sections += [(n_documents, "<f8")] * (extra & 1) + [(n_tokens, "u1")] * (extra >> 1 & 1)
        arrays, start = [], HEADER_BYTES
        for count, kind in sections:
            arrays.append((start, count, kind))
            start += _aligned(count * np.dtype(kind).itemsize)
        if start != size:
            raise DamagedShard(f"{path} has {size} bytes, its header says {start}")
        mapped = np.memmap(path, np.uint8, "r")
        views = [np.frombuffer(mapped, kind, count, offset) for offset, count, kind in arrays]
        tokens, offsets, document_bytes = views[:3]
        if offsets[0] != 0 or offsets[-1] != n_tokens - 1 or tokens[0] != tokenizer.bos_id or tokens[-1] != tokens[0]:
            raise DamagedShard(f"{path} does not begin and end with a document")
        log_probs = views[3] if extra & 1 else None
        loss_mask = views[-1] if extra & 2 else None
        has_eos = tokenizer.bos_id not in tokenizer.eos_ids
        return cls(path, n_tokens, n_documents, n_bytes, tokens, offsets, document_bytes, log_probs, loss_mask, has_eos)


class ShardWriter:
    """Writes the documents of one split into `NAME-00000.tokens`, `NAME-00001.tokens`, ... in a folder.

    Memory: a few numbers per document of the shard being written, and a byte per token of conversations.
    """

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.name = name
        self.tokenizer = tokenizer
        self.shard_tokens = shard_tokens
        self.files: list[str] = []
        self.digest = hashlib.sha256()  # of all tokens
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._bos = np.array([tokenizer.bos_id], self._dtype).tobytes()
        has_eos = tokenizer.bos_id not in tokenizer.eos_ids
        self._eos = np.array([tokenizer.eos_id], self._dtype).tobytes() if has_eos else b""
        self._file = None

    @property
    def started(self) -> bool:
        """Whether a document has been added."""
        return bool(self.files) or self._file is not None

    def add(
        self,
        ids: np.ndarray,
        n_bytes: int,
        log_prob: float | None = None,
        continues: bool = False,
        loss_mask: np.ndarray | None = None,
    ) -> None:
        """Append a document, or with continues=True more of the last one: its ids and its bytes of text.

        `loss_mask`: which ids are targets; for all documents or for none. Conversations contain their own EOS tokens.
        """
        if self.started and (loss_mask is None) != (not self._loss_mask):
            raise UserError("some rows are conversations and others are text; give them in files of their own")
        if not continues:
            self._finish_document()
            if self._file is not None and self._n_tokens >= self.shard_tokens:
                self.close()
            if self._file is None:
                self._open()
            self._offsets.append(self._n_tokens)
            self._write_tokens(self._bos)
            self._loss_mask += b"" if loss_mask is None else bytes([self._bos_is_target])
            self._document_bytes.append(0)
            self._log_probs.append(float("nan") if log_prob is None else log_prob)
        self._write_tokens(ids.astype(self._dtype).tobytes())
        self._last = int(ids[-1]) if len(ids) else None
        if loss_mask is not None:
            self._loss_mask += loss_mask.astype(np.uint8).tobytes()
            self.digest.update(loss_mask.tobytes())
            # If the template leaves an answer open, the token that ends it here is a target as well.
            self._bos_is_target = bool(len(ids) and loss_mask[-1]) and self._last not in self.tokenizer.eos_ids
        self._document_bytes[-1] += n_bytes

    def _finish_document(self) -> None:
        if self._file is None or not self._eos or self._last in self.tokenizer.eos_ids:
            return
        if self._loss_mask and not self._bos_is_target:
            return  # a conversation that does not end with an answer
        self._loss_mask += b"\1" if self._loss_mask else b""
        self._write_tokens(self._eos)
        self._last, self._bos_is_target = self.tokenizer.eos_id, False

    def _open(self) -> None:
        self._path = self.folder / f"{self.name}-{len(self.files):05d}.tokens"
        self._file = open(self._path.with_suffix(".tmp"), "wb")  # noqa: SIM115 - closed by close()
        self._file.write(bytes(HEADER_BYTES))
        self._n_tokens = 0
        self._offsets, self._document_bytes, self._log_probs = array("q"), array("q"), array("d")
        self._loss_mask, self._bos_is_target = bytearray(), False

    def _write_tokens(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self._n_tokens += len(data) // self._dtype.itemsize

    def close(self) -> None:
        """Finish the shard being written, if there is one: sync it to disk, then rename it."""
        if self._file is None:
            return
        self._finish_document()
        self._offsets.append(self._n_tokens)
        self._write_tokens(self._bos)
        self._loss_mask += bytes([self._bos_is_target]) if self._loss_mask else b""
        self._file.write(bytes(_aligned(self._file.tell()) - self._file.tell()))
        has_log_probs = not np.isnan(self._log_probs).any()
        self._file.write(np.asarray(self._offsets, "<i8").tobytes() + np.asarray(self._document_bytes, "<i8").tobytes())
        self._file.write(np.asarray(self._log_probs, "<f8").tobytes() if has_log_probs else b"")
        self._file.write(self._loss_mask.ljust(_aligned(len(self._loss_mask)), b"\0"))
        head = HEADER.pack(
            MAGIC,
            FORMAT,
            self._dtype.itemsize,
            self.tokenizer.vocab_size,
            self._n_tokens,
            len(self._document_bytes),
            sum(self._document_bytes),
            has_log_probs + 2 * bool(self._loss_mask),
            bytes.fromhex(self.tokenizer.content_hash),
        )
        self._file.seek(0)
        self._file.write(head + _crc(head))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._file.name, self._path)
        self.files.append(self._path.name)
        self._file = None


class TokenShards:
    """One split of a corpus: its shards, in order, and their totals."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards

    @classmethod
    def open(cls, folder: Path, files: list[str], tokenizer: Tokenizer) -> TokenShards:
        """Open shards by name; raises DamagedShard."""
        return cls([Shard.open(folder / file, tokenizer) for file in files])

    @cached_property
    def n_tokens(self) -> int:
        """Tokens, BOS tokens included."""
        return sum(shard.n_tokens for shard in self.shards)

    @property
    def has_conversations(self) -> bool:
        """Whether documents are conversations with a loss mask."""
        return any(shard.loss_mask is not None for shard in self.shards)

    @cached_property
    def n_documents(self) -> int:
        """Documents."""
        return sum(shard.n_documents for shard in self.shards)

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of UTF-8 text."""
        return sum(shard.n_bytes for shard in self.shards)


def _crc(data: bytes) -> bytes:
    return struct.pack("<Q", zlib.crc32(data))


def _aligned(size: int) -> int:
    return -(-size // 8) * 8
