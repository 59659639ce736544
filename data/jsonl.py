"""Rows of JSON files: one object per line or one array of objects, plain or gzip-compressed."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

MAX_ROW_BYTES = 1 << 28  # of a line or a whole array; longer rows are not data


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file in order, without empty lines. Raises ValueError with the line number."""
    number, has_begun = 0, False
    with open(path, "rb") as plain:
        is_compressed = plain.read(2) == b"\x1f\x8b"  # regardless of the file name
        plain.seek(0)
        file = gzip.GzipFile(fileobj=plain) if is_compressed else plain
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
                        raise ValueError(f'the row is {type(row).__name__}, not an object such as {{"text": ...}}')
                    yield row
        except RecursionError as error:
            raise ValueError(f"line {number}: the row is nested too deeply") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8 text; convert it, for example with iconv") from error
        except json.JSONDecodeError as error:
            remedy = "write one object per line, or one array of objects per file"
            raise ValueError(f"line {number} is not valid JSON ({error.msg}); {remedy}") from error
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"line {number}: {error}") from error
