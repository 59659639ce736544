"""Token shards: files whose header is checked on opening and whose contents are read on demand.

The tokens of a shard are one stream, `bos d1 bos d2 ... bos dn bos`: every document starts with the
BOS token, and another BOS token follows the last document. If the tokenizer has a separate EOS
token, it ends each document, and the BOS token after it is not a target. A file has these sections,
each aligned to 8 bytes: the header; the tokens; the position of each document's BOS token and of
the closing BOS token; the bytes of text per document; ln P per document, if known for all; for
conversations, one byte per token that marks targets.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinker.data.corpus.file_arrays import FileArray, OpenFile
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import RunError

MAGIC = b"THNKTOKS"
FORMAT = 1
SHARD_TOKENS = 1 << 27  # a shard is closed after the document that reaches this; no document is cut
HAS_LOG_PROBS, HAS_LOSS_MASK = 1, 2  # bits of the header's flags: the optional sections
# magic, format, bytes per token, vocab_size, n_tokens, n_documents, bytes of text, flags, tokenizer
# hash
HEADER = struct.Struct("<8sIIQQQQQ32s")
HEADER_BYTES = HEADER.size + 8  # including the CRC-32, as 8 bytes


class DamagedShard(RunError):
    """Error for a shard file that is incomplete or from another tokenizer. It can be rebuilt from
    the text."""


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 if it can represent every id, else uint32."""
    if vocab_size <= 1 << 16:
        return np.dtype("<u2")
    return np.dtype("<u4")


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
    # (n_tokens,) uint8, 1 for tokens that are targets; None: all are.
    loss_mask: FileArray | None = None
    # Documents end with an EOS token, so the BOS token after it is not a target.
    has_eos: bool = False

    @classmethod
    def open(cls, path: Path, tokenizer: Tokenizer) -> Shard:
        """Open a shard that was written with this tokenizer. Raises DamagedShard."""
        file = OpenFile(path, DamagedShard)
        head = _read_header(file, path)
        _, version, item_bytes, vocab_size, n_tokens, n_documents, n_bytes, flags, digest = head
        if version != FORMAT:
            raise DamagedShard(f"{path} has format {version}, not {FORMAT}")
        dtype = token_dtype(tokenizer.vocab_size)
        found = (item_bytes, vocab_size, digest.hex())
        if found != (dtype.itemsize, tokenizer.vocab_size, tokenizer.content_hash):
            raise DamagedShard(f"{path} was written with another tokenizer")

        sections = [
            ("tokens", dtype, n_tokens),
            ("offsets", "<i8", n_documents + 1),
            ("document_bytes", "<i8", n_documents),
        ]
        if flags & HAS_LOG_PROBS:
            sections.append(("log_probs", "<f8", n_documents))
        if flags & HAS_LOSS_MASK:
            sections.append(("loss_mask", "u1", n_tokens))
        arrays = {}
        end = HEADER_BYTES
        for name, kind, length in sections:
            arrays[name] = FileArray(file, np.dtype(kind), length, end)
            end += aligned(length * arrays[name].dtype.itemsize)
        if end != file.size:
            raise DamagedShard(f"{path} has {file.size} bytes, but its header expects {end}")

        bos_id = tokenizer.bos_id
        tokens = arrays["tokens"]
        offsets = arrays["offsets"]
        has_ends = offsets[0] == 0 and offsets[-1] == n_tokens - 1
        if not has_ends or tokens[0] != bos_id or tokens[-1] != bos_id:
            raise DamagedShard(f"{path} does not start and end with a document")
        has_eos = bos_id not in tokenizer.eos_ids
        return cls(path, n_tokens, n_documents, n_bytes, bos_id, has_eos=has_eos, **arrays)


def _read_header(file: OpenFile, path: Path) -> tuple:
    """The values of HEADER. Raises DamagedShard if it is incomplete."""
    head = file.read(0, min(file.size, HEADER_BYTES), np.uint8).tobytes()
    is_whole = len(head) == HEADER_BYTES and head.startswith(MAGIC)
    if not is_whole or zlib.crc32(head[:-8]).to_bytes(8, "little") != head[-8:]:
        raise DamagedShard(f"{path} has an incomplete header")
    return HEADER.unpack_from(head)


class TokenShards:
    """One split of a corpus: its shards in order, and totals of tokens (with BOS) and bytes of
    UTF-8 text.

    n_conversations: of which the documents are rows; None: each is one row (see data/chat/chat.py).
    """

    def __init__(self, shards: list[Shard], n_conversations: int | None = None) -> None:
        self.shards = shards
        self.n_tokens = sum(shard.n_tokens for shard in shards)
        self.n_documents = sum(shard.n_documents for shard in shards)
        self.n_conversations = n_conversations
        if n_conversations is None:
            self.n_conversations = self.n_documents
        self.n_bytes = sum(shard.n_bytes for shard in shards)
        self.has_conversations = any(shard.loss_mask is not None for shard in shards)

    def __repr__(self) -> str:
        return f"TokenShards({self.n_tokens:,} tokens of {self.n_documents:,} documents)"

    @classmethod
    def open(
        cls,
        folder: Path,
        files: list[str],
        tokenizer: Tokenizer,
        n_conversations: int | None = None,
    ) -> TokenShards:
        """Open shards by name. Raises DamagedShard."""
        shards = [Shard.open(folder / file, tokenizer) for file in files]
        return cls(shards, n_conversations)


def aligned(size: int) -> int:
    """The size rounded up to a multiple of 8."""
    return -(-size // 8) * 8
