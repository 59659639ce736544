"""Files that are complete or absent, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, through to the disk; a link of that name is replaced, not followed.

    Text is written as UTF-8 with the line ends it has. Raises OSError, and then leaves what was there before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_to_disk(path: Path) -> None:
    """fsync a file, or the list of names in a folder where the system can do that (Windows cannot)."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
