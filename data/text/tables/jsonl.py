"""Rows of JSON files: one object per line or one array of objects.

Plain or compressed (files/compressed_files.py).
"""

import codecs
import json
import os
from collections.abc import Iterator
from typing import Any

from thinker.data.text.files.compressed_files import decompressed

MAX_ROW_BYTES = 1 << 28  # of a line or a whole array; longer rows are not data


def read_rows(path: str) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the objects of a file in order, each with the share of the file that has been read.

    Empty lines are skipped. Raises ValueError, with the line number where there are lines.
    """
    number = 0
    has_begun = False
    size = max(os.path.getsize(path), 1)
    with open(path, "rb") as plain:
        try:
            file = decompressed(plain)
            while line := file.readline(MAX_ROW_BYTES):
                number += 1
                if not has_begun and _begins_array(line):
                    line += file.read(MAX_ROW_BYTES)  # it may span many lines
                if line.strip():
                    has_begun = True
                if len(line) >= MAX_ROW_BYTES:
                    raise ValueError(f"the row is longer than {MAX_ROW_BYTES >> 20} MB")
                for row in _parse(line):
                    if not isinstance(row, dict):
                        kind = type(row).__name__
                        raise ValueError(
                            f'the row is {kind}, not an object such as {{"text": ...}}'
                        )
                    # At most 1, because a compressed file is read ahead.
                    yield row, min(plain.tell() / size, 1.0)
        except RecursionError as error:
            raise ValueError(f"line {number}: the row is nested too deeply") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"line {number} is not UTF-8 text; convert it, for example with iconv"
            ) from error
        except json.JSONDecodeError as error:
            remedy = "write one object per line, or one array of objects per file"
            raise ValueError(f"line {number} is not valid JSON ({error.msg}); {remedy}") from error
        except ValueError as error:
            if number == 0:  # nothing could be read
                raise
            raise ValueError(f"line {number}: {error}") from error


def _begins_array(line: bytes) -> bool:
    return line.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _parse(line: bytes) -> list[Any]:
    """The rows in a line, or in a whole file that is an array. Raises ValueError."""
    text = line.decode("utf-8-sig")
    if not text.strip():
        return []
    rows = json.loads(text)
    if b"\\u" in line:  # raises for half of a surrogate pair
        json.dumps(rows, ensure_ascii=False).encode()
    if isinstance(rows, list):
        return rows
    return [rows]
