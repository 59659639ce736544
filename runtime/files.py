"""Write files atomically, and read arrays of numbers from files while they are indexed."""

import errno
import hashlib
import os
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinker.runtime.constants import FULL_DISK
from thinker.runtime.errors import UserError


def atomic_write(path: Path, content: str | bytes, sync: bool = True) -> None:
    """Write a file (text as UTF-8) completely or not at all. Replaces a link of that name.

    With `sync` the file survives a power failure. Raises OSError and keeps the previous file on
    failure.
    """
    if isinstance(content, str):
        content = content.encode()
    # Several processes may write the same file, so each has a temporary one.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # write errors lack the file name
            error.filename = str(path)
        raise


def make_folder(path: Path, setting: str) -> None:
    """Create a folder, unless it exists. Raises UserError that names the setting if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        raise UserError(
            f"{setting}={path}: cannot create the folder ({error.strerror}); use another path"
        ) from error


def can_write(folder: Path) -> bool:
    """Whether files can be written into a folder. Creates it if needed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def sha256_of_file(path: Path) -> str:
    """The sha256 of a file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync_to_disk(path: Path) -> None:
    """fsync a file, or a folder (except on Windows, which cannot)."""
    is_windows = os.name == "nt"
    if is_windows and path.is_dir():
        return
    # Windows syncs only files that are open for writing.
    flags = os.O_RDWR if is_windows else os.O_RDONLY
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


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
