"""Writing of token shards, which an interrupted writer's successor continues."""

import hashlib
import math
import os
import zlib
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np

from thinker.data.corpus.shards import (
    FORMAT,
    HAS_LOG_PROBS,
    HAS_LOSS_MASK,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    SHARD_TOKENS,
    DamagedShard,
    Shard,
    aligned,
    token_dtype,
)
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write
from thinker.runtime.reading import sha256_of_file

# Of the file with the sha256 of a shard, which is removed when the corpus is finished.
HASH_SUFFIX = ".sha256"
READ_TOKENS = 1 << 22  # read at once


class ShardWriter:
    """Write the documents of a split to `NAME-00000.tokens`, `NAME-00001.tokens`, ... in a folder.

    Needs memory for a few numbers per document of the current shard, and for conversations one byte
    per token.

    keeps_hashes: write the sha256 of each shard to a file beside it, which resume() needs.
    number: of the first shard.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        tokenizer: Tokenizer,
        shard_tokens: int = SHARD_TOKENS,
        keeps_hashes: bool = False,
        number: int = 0,
    ) -> None:
        self.folder = folder
        self.name = name
        self.tokenizer = tokenizer
        self.shard_tokens = shard_tokens
        self.keeps_hashes = keeps_hashes
        self.number = number
        self.files: list[str] = []
        self.digest = hashlib.sha256()  # of all tokens
        self.started = False  # whether a document has been added
        self._may_begin_shard = True
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._bos = np.array([tokenizer.bos_id], self._dtype).tobytes()
        self._eos = b""
        if tokenizer.bos_id not in tokenizer.eos_ids:
            self._eos = np.array([tokenizer.eos_id], self._dtype).tobytes()
        self._file: BinaryIO | None = None
        self._begin_shard()

    def _begin_shard(self) -> None:
        """Empty what is known of the current shard."""
        self.n_tokens = 0
        self._offsets = array("q")
        self._document_bytes = array("q")
        self._log_probs = array("d")
        self._loss_mask = bytearray()  # of conversations, one byte per token
        self._bos_is_target = False  # whether the next BOS token is a target
        self._last: int | None = None  # the last token of the document

    def resume(self) -> int:
        """Take over the finished shards of a stopped writer and remove an unfinished one. Returns
        their documents.

        Damaged shards, and those of conversations, whose masks are part of the digest, are removed
        and written again.
        """
        paths = self.folder.glob(f"{self.name}-*")
        found = sorted(path for path in paths if path.suffix != HASH_SUFFIX)
        n_documents = 0
        for number, path in enumerate(found):
            try:
                shard = self._open_finished(path, number)
            except (DamagedShard, OSError):
                for rest in found[number:]:
                    rest.unlink()
                break
            for start in range(0, shard.n_tokens, READ_TOKENS):
                self.digest.update(shard.tokens[start : start + READ_TOKENS].tobytes())
            self.files.append(path.name)
            n_documents += shard.n_documents
        self.started = bool(self.files)
        return n_documents

    def _open_finished(self, path: Path, number: int) -> Shard:
        """Open shard `number` of a stopped writer. Raises DamagedShard if it is of no use."""
        shard = Shard.open(path, self.tokenizer)
        if _hash_path(path).read_text() != sha256_of_file(path):
            raise DamagedShard(f"{path} does not match its sha256")
        if path.name != f"{self.name}-{number:05d}.tokens" or shard.loss_mask is not None:
            raise DamagedShard(f"{path} cannot be continued")
        return shard

    def add(
        self,
        ids: np.ndarray,
        n_bytes: int,
        log_prob: float | None = None,
        continues: bool = False,
        loss_mask: np.ndarray | None = None,
    ) -> None:
        """Append the ids and text bytes of a document, or with continues=True of the rest of the
        last document.

        loss_mask: which ids are targets, for all documents or for none. Conversations contain their
        EOS tokens.
        """
        has_mask = loss_mask is not None
        if self.started and has_mask != bool(self._loss_mask):
            raise UserError(
                "the rows mix conversations and text; put them in separate sources (data.sources)"
            )
        if not continues:
            self._begin_document(log_prob, has_mask)
        self._write_tokens(ids.astype(self._dtype).tobytes())
        self._last = int(ids[-1]) if len(ids) else None
        if has_mask:
            self._add_mask(loss_mask)
        self._document_bytes[-1] += n_bytes

    def add_rows(
        self,
        rows: list[tuple[np.ndarray, np.ndarray | None]],
        n_bytes: int,
        log_prob: float | None = None,
        continues: bool = False,
    ) -> None:
        """Append a text, or the rows of a conversation as documents of their own; see add().

        rows: ids and loss mask of each. The bytes count in the first one. All are in one shard.
        """
        for number, (ids, loss_mask) in enumerate(rows):
            self._may_begin_shard = number == 0
            self.add(ids, n_bytes, log_prob, continues, loss_mask)
            n_bytes = 0
        self._may_begin_shard = True

    def _begin_document(self, log_prob: float | None, has_mask: bool) -> None:
        self._finish_document()
        is_full = self.n_tokens >= self.shard_tokens
        if self._file is not None and is_full and self._may_begin_shard:
            self.close()
        if self._file is None:
            self._open()
        self.started = True
        self._offsets.append(self.n_tokens)
        self._write_tokens(self._bos)
        if has_mask:
            self._loss_mask.append(self._bos_is_target)
        self._document_bytes.append(0)
        if log_prob is None:
            log_prob = math.nan
        self._log_probs.append(log_prob)

    def _add_mask(self, loss_mask: np.ndarray) -> None:
        self._loss_mask += loss_mask.astype(np.uint8).tobytes()
        self.digest.update(loss_mask.tobytes())
        # If the template does not end the last answer, the token added here is also a target.
        ends_with_target = len(loss_mask) > 0 and bool(loss_mask[-1])
        self._bos_is_target = ends_with_target and self._last not in self.tokenizer.eos_ids

    def _finish_document(self) -> None:
        """End the document with an EOS token, if the tokenizer has one and it is not there."""
        if self._file is None or not self._eos or self._last in self.tokenizer.eos_ids:
            return
        if self._loss_mask:
            if not self._bos_is_target:
                return  # a conversation that does not end with an answer
            self._loss_mask.append(True)
        self._write_tokens(self._eos)
        self._last = self.tokenizer.eos_id
        self._bos_is_target = False

    def _open(self) -> None:
        number = self.number + len(self.files)
        self._path = self.folder / f"{self.name}-{number:05d}.tokens"
        self._file = open(self._path.with_suffix(".tmp"), "wb")  # noqa: SIM115 - closed by close()
        self._file.write(bytes(HEADER_BYTES))
        self._begin_shard()

    def _write_tokens(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.n_tokens += len(data) // self._dtype.itemsize

    def discard(self) -> None:
        """Remove the current shard, if any."""
        if self._file is not None:
            self._file.close()
            os.unlink(self._file.name)
            self._file = None

    def close(self) -> None:
        """Sync the current shard, if any, to disk and rename it."""
        if self._file is None:
            return
        self._finish_document()
        self._offsets.append(self.n_tokens)
        self._write_tokens(self._bos)
        flags = self._write_sections()
        self._file.seek(0)
        self._file.write(self._header(flags))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._file.name, self._path)
        if self.keeps_hashes:
            atomic_write(_hash_path(self._path), sha256_of_file(self._path))
        self.files.append(self._path.name)
        self._file = None

    def _write_sections(self) -> int:
        """Write what follows the tokens. Returns the flags of the header."""
        size = self._file.tell()
        self._file.write(bytes(aligned(size) - size))
        self._file.write(np.asarray(self._offsets, "<i8").tobytes())
        self._file.write(np.asarray(self._document_bytes, "<i8").tobytes())
        flags = 0
        if not np.isnan(self._log_probs).any():
            flags |= HAS_LOG_PROBS
            self._file.write(np.asarray(self._log_probs, "<f8").tobytes())
        if self._loss_mask:
            flags |= HAS_LOSS_MASK
            self._loss_mask.append(self._bos_is_target)
            self._file.write(self._loss_mask.ljust(aligned(len(self._loss_mask)), b"\0"))
        return flags

    def _header(self, flags: int) -> bytes:
        head = HEADER.pack(
            MAGIC,
            FORMAT,
            self._dtype.itemsize,
            self.tokenizer.vocab_size,
            self.n_tokens,
            len(self._document_bytes),
            sum(self._document_bytes),
            flags,
            bytes.fromhex(self.tokenizer.content_hash),
        )
        return head + zlib.crc32(head).to_bytes(8, "little")


def _hash_path(path: Path) -> Path:
    return path.with_suffix(HASH_SUFFIX)
