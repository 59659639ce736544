"""Writing of token shards, which an interrupted writer's successor continues."""

import hashlib
import os
import zlib
from array import array
from pathlib import Path

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

# of the file with the sha256 of a shard, which is removed when the corpus is finished
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
        self, folder: Path, name: str, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS,
        keeps_hashes: bool = False, number: int = 0,
    ) -> None:  # fmt: skip
        self.folder, self.name, self.tokenizer, self.shard_tokens = (
            folder,
            name,
            tokenizer,
            shard_tokens,
        )
        self.keeps_hashes, self.number = keeps_hashes, number
        self.n_tokens = 0  # in the current shard
        self.files: list[str] = []
        self.digest = hashlib.sha256()  # of all tokens
        self.started = False  # whether a document has been added
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._bos = np.array([tokenizer.bos_id], self._dtype).tobytes()
        has_eos = tokenizer.bos_id not in tokenizer.eos_ids
        self._eos = np.array([tokenizer.eos_id], self._dtype).tobytes() if has_eos else b""
        self._file = None

    def resume(self) -> int:
        """Take over the finished shards of a stopped writer and remove an unfinished one. Returns
        their documents.

        Damaged shards, and those of conversations, whose masks are part of the digest, are removed
        and written again.
        """
        found = sorted(
            path for path in self.folder.glob(f"{self.name}-*") if path.suffix != HASH_SUFFIX
        )
        n_documents = 0
        for number, path in enumerate(found):
            try:
                shard = Shard.open(path, self.tokenizer)
                if _hash_path(path).read_text() != sha256_of_file(path):
                    raise DamagedShard(f"{path} does not match its sha256")
                if path.name != f"{self.name}-{number:05d}.tokens" or shard.loss_mask is not None:
                    raise DamagedShard(f"{path} cannot be continued")
            except (DamagedShard, OSError):
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
            self._finish_document()
            if self._file is not None and self.n_tokens >= self.shard_tokens:
                self.close()
            if self._file is None:
                self._open()
            self.started = True
            self._offsets.append(self.n_tokens)
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
            self._bos_is_target = (
                bool(len(ids) and loss_mask[-1]) and self._last not in self.tokenizer.eos_ids
            )
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
        self._path = self.folder / f"{self.name}-{self.number + len(self.files):05d}.tokens"
        self._file = open(self._path.with_suffix(".tmp"), "wb")  # noqa: SIM115 - closed by close()
        self._file.write(bytes(HEADER_BYTES))
        self.n_tokens = 0
        self._offsets, self._document_bytes, self._log_probs = array("q"), array("q"), array("d")
        self._loss_mask, self._bos_is_target = bytearray(), False

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
        self._file.write(bytes(aligned(self._file.tell()) - self._file.tell()))
        self._file.write(
            np.asarray(self._offsets, "<i8").tobytes()
            + np.asarray(self._document_bytes, "<i8").tobytes()
        )
        flags = 0
        if not np.isnan(self._log_probs).any():
            flags |= HAS_LOG_PROBS
            self._file.write(np.asarray(self._log_probs, "<f8").tobytes())
        if self._loss_mask:
            flags |= HAS_LOSS_MASK
            self._loss_mask.append(self._bos_is_target)
            self._file.write(self._loss_mask.ljust(aligned(len(self._loss_mask)), b"\0"))
        counts = self.n_tokens, len(self._document_bytes), sum(self._document_bytes)
        digest = bytes.fromhex(self.tokenizer.content_hash)
        head = HEADER.pack(
            MAGIC, FORMAT, self._dtype.itemsize, self.tokenizer.vocab_size, *counts, flags, digest
        )
        self._file.seek(0)
        self._file.write(head + zlib.crc32(head).to_bytes(8, "little"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._file.name, self._path)
        if self.keeps_hashes:
            atomic_write(_hash_path(self._path), sha256_of_file(self._path))
        self.files.append(self._path.name)
        self._file = None


def _hash_path(path: Path) -> Path:
    return path.with_suffix(HASH_SUFFIX)
