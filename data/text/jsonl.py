"""Rows of JSON files: one object per line or one array of objects, plain or compressed with gzip or Zstandard."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

MAX_ROW_BYTES = 1 << 28  # of a line or a whole array; longer rows are not data


def read_rows(path: str) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the objects of a file in order, each with the share of the file that has been read.

    Empty lines are skipped. Raises ValueError with the line number.
    """
    number, has_begun, size = 0, False, max(os.path.getsize(path), 1)
    with open(path, "rb") as plain:
        file = _decompressed(plain)
        try:
            while line := file.readline(MAX_ROW_BYTES):
                number += 1
                if not has_begun and line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
                    line += file.read(MAX_ROW_BYTES)  # an array may span many lines
                has_begun = has_begun or bool(line.strip())
                if len(line) >= MAX_ROW_BYTES:
                    raise ValueError(f"the row is longer than {MAX_ROW_BYTES >> 20} MB")
                text = line.decode("utf-8-sig")
                rows = json.loads(text) if text.strip() else []
                if b"\\u" in line:  # raises for half of a surrogate pair
                    json.dumps(rows, ensure_ascii=False).encode()
                for row in rows if isinstance(rows, list) else [rows]:
                    if not isinstance(row, dict):
                        raise ValueError(
                            f'the row is {type(row).__name__}, not an object such as {{"text": ...}}'
                        )
                    yield row, min(plain.tell() / size, 1.0)  # a compressed file is read ahead
        except RecursionError as error:
            raise ValueError(f"line {number}: the row is nested too deeply") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"line {number} is not UTF-8 text; convert it, for example with iconv"
            ) from error
        except json.JSONDecodeError as error:
            remedy = "write one object per line, or one array of objects per file"
            raise ValueError(f"line {number} is not valid JSON ({error.msg}); {remedy}") from error
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, DecompressionError) as error:
            raise ValueError(f"line {number}: {error}") from error


class DecompressionError(Exception):
    """Error for a damaged or truncated file."""


class _ZstdStream(io.RawIOBase):
    """The decompressed bytes of a Zstandard file."""

    def __init__(self, plain: io.BufferedReader) -> None:
        import pyarrow

        self.stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(plain), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self.stream.readinto(buffer)
        except OSError as error:
            if error.errno is not None:  # of the disk
                raise
            raise DecompressionError(str(error)) from error


def _decompressed(plain: io.BufferedReader) -> io.BufferedIOBase:
    """The bytes of a file, decompressed if it begins as a compressed file does, whatever its name."""
    begin = plain.read(4)
    plain.seek(0)
    if begin[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=plain)
    return io.BufferedReader(_ZstdStream(plain), 1 << 20) if begin == b"\x28\xb5\x2f\xfd" else plain
