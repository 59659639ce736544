"""Compressed files are read as what they contain; other formats than text are named."""

import bz2
import errno
import gzip
import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import BinaryIO

from thinker.data.text.files.file_formats import (
    BEGIN_BYTES,
    UNPACK,
    describe_format,
    is_bzip2,
    is_zstd,
)

BUFFER_BYTES = 1 << 20

# Of a damaged or cut file. Those of the disk have an errno, and stay.
_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)

# Of an archive that is damaged (EINVAL: it names a place before its start), encrypted, or
# compressed in a way that zipfile does not know.
_ZIP_ERRORS = (zipfile.BadZipFile, struct.error, ValueError, OSError, RuntimeError)


class UnreadableFile(ValueError):
    """Error for a file that is damaged, cut, or no text."""


class _Decompressed(io.RawIOBase):
    """What a function reads. Raises UnreadableFile for a damaged file.

    read: returns up to a number of bytes, and none only at the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._ahead = b""

    def begin(self) -> bytes:
        """The first BEGIN_BYTES, which are still to be read."""
        while len(self._ahead) < BEGIN_BYTES:
            more = self._read_some(BEGIN_BYTES)
            if not more:
                break
            self._ahead += more
        return self._ahead[:BEGIN_BYTES]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        content = self._ahead[: len(buffer)]
        self._ahead = self._ahead[len(content) :]
        if not content:
            content = self._read_some(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _read_some(self, n: int) -> bytes:
        try:
            return self._read(n)
        except _ERRORS as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise UnreadableFile(str(error)) from error


def decompressed(plain: BinaryIO) -> io.BufferedIOBase:
    """The bytes of a file, decompressed if it begins as a compressed file does.

    Reads gzip, bzip2, xz, Zstandard and zip. The name of the file does not matter. Raises
    UnreadableFile for a damaged file, and for other formats than text.
    """
    begin = _peek(plain)
    read = _open(plain, begin)
    if read is None:
        _check_format(begin)
        return plain
    content = _Decompressed(read)
    _check_format(content.begin(), is_compressed=True)
    return io.BufferedReader(content, BUFFER_BYTES)


def check_parquet(plain: BinaryIO) -> None:
    """Raise UnreadableFile if a file is no Parquet file, with its format if that is known."""
    begin = _peek(plain)
    if begin[:4] != b"PAR1":
        name = describe_format(begin) or "not a Parquet file"
        raise UnreadableFile(f"the file is {name}")


def _peek(plain: BinaryIO) -> bytes:
    begin = plain.read(BEGIN_BYTES)
    plain.seek(0)
    return begin


def _check_format(begin: bytes, is_compressed: bool = False) -> None:
    name = describe_format(begin)
    if is_compressed and name.startswith("compressed"):
        name = f"compressed twice{UNPACK}"
    if name:
        raise UnreadableFile(f"the file is {name}")


def _open(plain: BinaryIO, begin: bytes) -> Callable[[int], bytes] | None:
    """A function that reads what a file contains, or None if it is not compressed."""
    if begin[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=plain).read1
    if is_bzip2(begin):
        return bz2.BZ2File(plain).read1
    if begin[:6] == b"\xfd7zXZ\0" or begin[:3] == b"\x5d\0\0":  # xz, or its predecessor
        return lzma.LZMAFile(plain).read1
    if is_zstd(begin):
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(plain), "zstd").read
    if begin[:4] in (b"PK\x03\x04", b"PK\x05\x06"):  # the latter if it is empty
        return _open_zip(plain).read1
    return None


def _open_zip(plain: BinaryIO) -> zipfile.ZipExtFile:
    """The only file in a zip archive."""
    try:
        archive = zipfile.ZipFile(plain)
        members = []
        for member in archive.infolist():
            is_of_macos = member.filename.startswith("__MACOSX/")
            if not member.is_dir() and not is_of_macos:
                members.append(member)
        if len(members) == 1:
            return archive.open(members[0])
    except _ZIP_ERRORS as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise UnreadableFile(f"the file is a zip archive that cannot be opened: {error}") from error
    raise UnreadableFile(f"the file is a zip archive of {len(members)} files{UNPACK}")
