"""Read untrusted files: only regular files of bounded size."""

import codecs
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from thinker.runtime.errors import UserError

# An untrusted file must not fill the memory. The largest real file, o200k_base, has 4 MB.
MAX_FILE_BYTES = 64 << 20

MAX_REPETITIONS = 4  # in a regular expression; each multiplies the time by the length of a name


def read_bytes(path: Path, error_type: type[Exception] = UserError) -> bytes:
    """Read a file.

    Raises `error_type` if it is missing, unreadable, too large, or a pipe or device.
    """
    try:
        if not path.exists():
            raise error_type(f"{path} does not exist")
        if not path.is_file():
            raise error_type(f"{path} is not a regular file")
        with path.open("rb") as file:
            # One byte more shows that the file is too large, and a size from stat() may be wrong.
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise error_type(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(content) > MAX_FILE_BYTES:
        raise error_type(f"{path} is too large; the limit is {MAX_FILE_BYTES >> 20} MB")
    return content


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text. Raises UserError."""
    return decode_text(read_bytes(path), str(path))


def decode_text(content: bytes, name: str, encoding: str = "utf-8") -> str:
    """Decode the text of a file, as "utf-8" or "utf-8-sig". Raises UserError for other bytes."""
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        what = f"not UTF-8 text (byte {byte:#04x} at {error.start})"
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            what = "UTF-16 text"
        raise UserError(f"{name} is {what}; save it as UTF-8") from None


def sha256_of_file(path: Path) -> str:
    """The sha256 of a file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_json(path: Path, error_type: type[Exception] = UserError) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises `error_type` if the file is missing or contains anything else.
    """
    try:
        content = json.loads(read_bytes(path, error_type))
    except (ValueError, RecursionError) as error:
        raise error_type(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise error_type(f"{path} is not a JSON object")
    return content


def checked_pattern(pattern: str) -> str:
    """Return an untrusted regular expression.

    Raises re.error if a match may take forever, such as with "(a+)+b".
    """
    is_nested = re.search(r"[*+}?][^()]*\)[*+{]", pattern)
    if is_nested or len(re.findall(r"[*+{]", pattern)) > MAX_REPETITIONS:
        raise re.error(f"it has nested repetitions, or more than {MAX_REPETITIONS}")
    return pattern
