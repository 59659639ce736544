"""Arrays of numbers in files, which are read while they are indexed."""

import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np


class OpenFile:
    """A file of numbers that threads read by position.

    It stays readable if it is removed or replaced. Raises `error_type` if the file is truncated,
    when a memory map would end the process with SIGBUS.
    """

    def __init__(self, path: Path, error_type: type[Exception]) -> None:
        self.path = path
        self.error_type = error_type
        self._lock = threading.Lock()
        try:
            self._file = path.open("rb", buffering=0)
            self.size = self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise error_type(f"{path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, self._file.close)

    def read(self, start: int, count: int, dtype: np.dtype | type) -> np.ndarray:
        """Read `count` numbers, starting at byte `start`."""
        numbers = np.empty(count, dtype)
        rest = numbers.view(np.uint8)
        try:
            with self._lock:
                self._file.seek(start)
                # A read may return less than asked for. It returns nothing at the end of the file.
                while len(rest) and (n := self._file.readinto(rest)):
                    rest = rest[n:]
        except OSError as error:
            raise self.error_type(f"{self.path} cannot be read: {error.strerror}") from error
        if len(rest):
            raise self.error_type(
                f"{self.path} was truncated while in use; run the same command again"
            )
        return numbers


@dataclass(frozen=True)
class FileArray:
    """`length` numbers in an open file, starting at byte `start`.

    Like a memory map: an index or a slice without a step reads them.
    """

    file: OpenFile
    dtype: np.dtype
    length: int
    start: int = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int | slice) -> np.ndarray:
        positions = range(self.length)[index]  # also checks the index
        if not isinstance(index, slice):
            return self[positions : positions + 1][0]
        first_byte = self.start + positions.start * self.dtype.itemsize
        return self.file.read(first_byte, len(positions), self.dtype)
