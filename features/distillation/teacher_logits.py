"""The largest logits of a teacher on disk, so that it reads each window of the text only once."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from thinker.runtime.errors import RunError, UserError
from thinker.runtime.files import atomic_write, make_folder
from thinker.runtime.memory import format_bytes

CHUNK_ROWS = 256  # positions whose logits are in memory at once


class TopLogits(NamedTuple):
    """A teacher's k most probable tokens at N positions."""

    ids: Tensor  # (N, k) int64
    log_probs: Tensor  # (N, k + 1) fp32: of these tokens, and of all others together


class TeacherLogits:
    """The k most probable tokens at every position of `n_windows` windows of T tokens, in one file.

    The file has a record per window: ids, log-probabilities in fp16, and a last byte that says that
    it is complete. What is read has passed through this rounding at first use, too, so a resumed
    run gets the same values.
    """

    def __init__(self, folder: Path, n_windows: int, seq_len: int, vocab_size: int, k: int) -> None:
        """For train.distill.cached_logits=k, which is less than the size of the vocabulary."""
        self.folder = folder
        self.path = folder / "logits"
        self.n_windows = n_windows
        self.k = k
        id_type = np.uint16 if vocab_size <= 2**16 else np.int32
        fields = [
            ("ids", id_type, (seq_len, k)),
            ("log_probs", np.float16, (seq_len, k + 1)),
            ("is_stored", bool),
        ]
        self.record = np.dtype(fields)

    def create(self, key: str) -> None:
        """Create an empty file, unless there is one with the same `key`, which names what its
        content depends on.

        Raises UserError if the disk has too little space.
        """
        path = self.folder / "key.json"
        text = json.dumps([key, self.n_windows, str(self.record)])
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return
        make_folder(self.folder, "run.dir")
        path.unlink(missing_ok=True)
        needed = self.n_windows * self.record.itemsize
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"the teacher's logits need {format_bytes(needed)} on disk, but only "
                f"{format_bytes(free)} is free; lower train.distill.cached_logits, or set it "
                f"to null"
            )
        with self.path.open("wb") as file:
            file.truncate(needed)  # zeros: no record is stored
        atomic_write(path, text)

    def read(self, windows: Tensor) -> TopLogits | None:
        """The logits of these windows, (B,) -> B · T positions; None unless all are stored."""
        records = np.empty(len(windows), self.record)
        with self._open("rb") as file:
            for i, window in enumerate(windows.tolist()):
                file.seek(window * self.record.itemsize)
                data = file.read(self.record.itemsize)
                if len(data) < self.record.itemsize:
                    raise RunError(
                        f"{self.path} was truncated; delete it and run the same command again"
                    )
                records[i] = np.frombuffer(data, self.record)[0]
        if not records["is_stored"].all():
            return None
        ids = torch.from_numpy(records["ids"].astype(np.int64)).flatten(0, 1)
        log_probs = torch.from_numpy(records["log_probs"].astype(np.float32)).flatten(0, 1)
        return TopLogits(ids, log_probs.log_softmax(-1))  # after rounding, they sum to 1 again

    def write(self, windows: Tensor, x: Tensor, lm_head: nn.Module) -> None:
        """Store the logits of these windows, (B,), except of those that are stored: a resumed run
        may have used them.

        x (B · T, C): the inputs of the teacher's LM head.
        """
        ids = np.empty((len(x), self.k), self.record["ids"].base)
        log_probs = np.empty((len(x), self.k + 1), np.float16)
        for start in range(0, len(x), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            probs = lm_head(x[part]).float().softmax(-1)  # (n, V)
            top, top_ids = probs.topk(self.k)
            rest = probs.scatter_(1, top_ids, 0.0).sum(-1, keepdim=True)
            both = torch.cat((top, rest), dim=1).clamp_min(1e-30).log()  # (n, k + 1)
            ids[part] = top_ids.cpu().numpy()
            log_probs[part] = both.cpu().numpy()

        records = np.empty(len(windows), self.record)
        records["ids"] = ids.reshape(len(windows), -1, self.k)
        records["log_probs"] = log_probs.reshape(len(windows), -1, self.k + 1)
        records["is_stored"] = True
        with self._open("r+b") as file:
            for record, window in zip(records, windows.tolist()):
                file.seek((window + 1) * self.record.itemsize - 1)
                if file.read(1) == b"\0":
                    file.seek(window * self.record.itemsize)
                    file.write(record.tobytes())

    @contextlib.contextmanager
    def _open(self, mode: str) -> Iterator[IO[bytes]]:
        try:
            with self.path.open(mode) as file:
                yield file
        except OSError as error:
            raise RunError(f"{self.path}: {error.strerror}; run the same command again") from error
