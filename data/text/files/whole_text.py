"""The text of one file that a command reads whole, such as a prompt."""

import io
import sys
from pathlib import Path

from thinker.data.text.files.compressed_files import UnreadableFile, decompressed
from thinker.runtime.errors import UserError
from thinker.runtime.reading import decode_text


def read_text_or_stdin(name: str) -> str:
    """Read a file of UTF-8 text, which may be compressed, or standard input for "-".

    Raises UserError if that fails.
    """
    try:
        if name == "-":
            content = sys.stdin.buffer.read()
        else:
            content = Path(name).read_bytes()
        content = decompressed(io.BytesIO(content)).read()
    except UnreadableFile as error:
        reason, _, _ = str(error).partition("; set data.")  # a remedy in training
        raise UserError(f"cannot read {name}: {reason}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", error)
        raise UserError(f"cannot read {name}: {reason}") from None
    return decode_text(content, name, "utf-8-sig")  # without a byte order mark
