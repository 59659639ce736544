"""Token shards: files whose header is checked on opening and whose contents are read on demand.

The tokens of a shard are one stream, `bos d1 bos d2 ... bos dn bos`: every document starts with the BOS token, and
another BOS token follows the last document. If the tokenizer has a separate EOS token, it ends each document, and the
BOS token after it is not a target. A file has these sections, each aligned to 8 bytes: the header; the tokens; the
position of each document's BOS token and of the closing BOS token; the bytes of text per document; ln P per document,
if known for all; for conversations, one byte per token that marks targets.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinker.data.tokenizer import Tokenizer
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.file_array import FileArray, OpenFile

MAGIC = b"THNKTOKS"
FORMAT = 1
READ_TOKENS = 1 << 22  # read at once
SHARD_TOKENS = 1 << 27  # a shard is closed after the document that reaches this; no document is cut
HAS_LOG_PROBS, HAS_LOSS_MASK = 1, 2  # bits of the header's flags: the optional sections
# magic, format, bytes per token, vocab_size, n_tokens, n_documents, bytes of text, flags, tokenizer hash
HEADER = struct.Struct("<8sIIQQQQQ32s")
HEADER_BYTES = HEADER.size + 8  # including the CRC-32, as 8 bytes


class DamagedShard(RunError):
    """Error for a shard file that is incomplete or from another tokenizer. It can be rebuilt from the text."""


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 if it can represent every id, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """One open shard."""

    path: Path
    n_tokens: int
    n_documents: int
    n_bytes: int
    bos_id: int
    tokens: FileArray  # (n_tokens,) uint16 or uint32, including BOS tokens
    offsets: FileArray  # (n_documents + 1,) int64, start of each document, and the end of the last
    document_bytes: FileArray  # (n_documents,) int64, bytes of UTF-8 text
    log_probs: FileArray | None = None  # (n_documents,) float64, ln P of each document
    loss_mask: FileArray | None = None  # (n_tokens,) uint8, 1 for tokens that are targets; None: all are
    has_eos: bool = False  # documents end with an EOS token, so the BOS token after it is not a target

    @classmethod
    def open(cls, path: Path, tokenizer: Tokenizer) -> Shard:
        """Open a shard that was written with this tokenizer. Raises DamagedShard."""
        file = OpenFile(path, DamagedShard)
        head = file.read(0, min(file.size, HEADER_BYTES), np.uint8).tobytes()
        if len(head) < HEADER_BYTES or head[:8] != MAGIC or zlib.crc32(head[:-8]).to_bytes(8, "little") != head[-8:]:
            raise DamagedShard(f"{path} has an incomplete header")
        _, version, item, vocab, n_tokens, n_documents, n_bytes, flags, digest = HEADER.unpack_from(head)
        dtype = token_dtype(tokenizer.vocab_size)
        if version != FORMAT:
            raise DamagedShard(f"{path} has format {version}, not {FORMAT}")
        if (item, vocab, digest.hex()) != (dtype.itemsize, tokenizer.vocab_size, tokenizer.content_hash):
            raise DamagedShard(f"{path} was written with another tokenizer")
        sections = [("tokens", dtype, n_tokens), ("offsets", "<i8", n_documents + 1)]
        sections += [("document_bytes", "<i8", n_documents)]
        sections += [("log_probs", "<f8", n_documents)] if flags & HAS_LOG_PROBS else []
        sections += [("loss_mask", "u1", n_tokens)] if flags & HAS_LOSS_MASK else []
        arrays, end = {}, HEADER_BYTES
        for name, kind, length in sections:
            arrays[name] = FileArray(file, np.dtype(kind), length, end)
            end += _aligned(length * arrays[name].dtype.itemsize)
        if end != file.size:
            raise DamagedShard(f"{path} has {file.size} bytes, but its header expects {end}")
        tokens, offsets, bos_id = arrays["tokens"], arrays["offsets"], tokenizer.bos_id
        if offsets[0] != 0 or offsets[-1] != n_tokens - 1 or tokens[0] != bos_id or tokens[-1] != bos_id:
            raise DamagedShard(f"{path} does not start and end with a document")
        return cls(path, n_tokens, n_documents, n_bytes, bos_id, has_eos=bos_id not in tokenizer.eos_ids, **arrays)


class ShardWriter:
    """Write the documents of a split to `NAME-00000.tokens`, `NAME-00001.tokens`, ... in a folder.

    Needs memory for a few numbers per document of the current shard, and for conversations one byte per token.
    """

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.name, self.tokenizer, self.shard_tokens = folder, name, tokenizer, shard_tokens
        self.files: list[str] = []
        self.digest = hashlib.sha256()  # of all tokens
        self.started = False  # whether a document has been added
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._bos = np.array([tokenizer.bos_id], self._dtype).tobytes()
        has_eos = tokenizer.bos_id not in tokenizer.eos_ids
        self._eos = np.array([tokenizer.eos_id], self._dtype).tobytes() if has_eos else b""
        self._file = None

    def resume(self) -> int:
        """Take over the finished shards of a stopped writer and remove an unfinished one. Returns their documents.

        Damaged shards, and those of conversations, whose masks are part of the digest, are removed and written again.
        """
        found = sorted(self.folder.glob(f"{self.name}-*"))
        n_documents = 0
        for number, path in enumerate(found):
            try:
                shard = Shard.open(path, self.tokenizer)
                if path.name != f"{self.name}-{number:05d}.tokens" or shard.loss_mask is not None:
                    raise DamagedShard(f"{path} cannot be continued")
            except DamagedShard:
                for rest in found[number:]:
                    rest.unlink()
                break
            for start in range(0, shard.n_tokens, READ_TOKENS):
                self.digest.update(shard.tokens[start : start + READ_TOKENS].tobytes())
            self.files.append(path.name)
            n_documents += shard.n_documents
        self.started = bool(self.files)
        self._loss_mask = bytearray()
        return n_documents

    def add(
        self, ids: np.ndarray, n_bytes: int, log_prob: float | None = None, continues: bool = False,
        loss_mask: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Append the ids and text bytes of a document, or with continues=True of the rest of the last document.

        loss_mask: which ids are targets, for all documents or for none. Conversations contain their EOS tokens.
        """
        has_mask = loss_mask is not None
        if self.started and has_mask != bool(self._loss_mask):
            raise UserError("the rows mix conversations and text; put them in separate sources (data.sources)")
        if not continues:
            self._finish_document()
            if self._file is not None and self._n_tokens >= self.shard_tokens:
                self.close()
            if self._file is None:
                self._open()
            self.started = True
            self._offsets.append(self._n_tokens)
            self._write_tokens(self._bos)
            if has_mask:
                self._loss_mask.append(self._bos_is_target)
            self._document_bytes.append(0)
            self._log_probs.append(float("nan") if log_prob is None else log_prob)
        self._write_tokens(ids.astype(self._dtype).tobytes())
        self._last = int(ids[-1]) if len(ids) else None
        if has_mask:
            self._loss_mask += loss_mask.astype(np.uint8).tobytes()
            self.digest.update(loss_mask.tobytes())
            # If the template does not end the last answer, the token added here is also a target.
            self._bos_is_target = bool(len(ids) and loss_mask[-1]) and self._last not in self.tokenizer.eos_ids
        self._document_bytes[-1] += n_bytes

    def _finish_document(self) -> None:
        if self._file is None or not self._eos or self._last in self.tokenizer.eos_ids:
            return
        if self._loss_mask:
            if not self._bos_is_target:
                return  # a conversation that does not end with an answer
            self._loss_mask.append(True)
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
        """Sync the current shard, if any, to disk and rename it."""
        if self._file is None:
            return
        self._finish_document()
        self._offsets.append(self._n_tokens)
        self._write_tokens(self._bos)
        self._file.write(bytes(_aligned(self._file.tell()) - self._file.tell()))
        self._file.write(np.asarray(self._offsets, "<i8").tobytes() + np.asarray(self._document_bytes, "<i8").tobytes())
        flags = 0
        if not np.isnan(self._log_probs).any():
            flags |= HAS_LOG_PROBS
            self._file.write(np.asarray(self._log_probs, "<f8").tobytes())
        if self._loss_mask:
            flags |= HAS_LOSS_MASK
            self._loss_mask.append(self._bos_is_target)
            self._file.write(self._loss_mask.ljust(_aligned(len(self._loss_mask)), b"\0"))
        counts = self._n_tokens, len(self._document_bytes), sum(self._document_bytes)
        digest = bytes.fromhex(self.tokenizer.content_hash)
        head = HEADER.pack(MAGIC, FORMAT, self._dtype.itemsize, self.tokenizer.vocab_size, *counts, flags, digest)
        self._file.seek(0)
        self._file.write(head + zlib.crc32(head).to_bytes(8, "little"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._file.name, self._path)
        self.files.append(self._path.name)
        self._file = None


class TokenShards:
    """One split of a corpus: its shards in order, and totals of tokens (with BOS) and bytes of UTF-8 text."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.n_tokens = sum(shard.n_tokens for shard in shards)
        self.n_documents = sum(shard.n_documents for shard in shards)
        self.n_bytes = sum(shard.n_bytes for shard in shards)
        self.has_conversations = any(shard.loss_mask is not None for shard in shards)

    def __repr__(self) -> str:
        return f"TokenShards({self.n_tokens:,} tokens of {self.n_documents:,} documents)"

    @classmethod
    def open(cls, folder: Path, files: list[str], tokenizer: Tokenizer) -> TokenShards:
        """Open shards by name. Raises DamagedShard."""
        return cls([Shard.open(folder / file, tokenizer) for file in files])


def _aligned(size: int) -> int:
    return -(-size // 8) * 8
