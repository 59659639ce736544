"""Files that are complete or absent, even if the process is killed while it writes them."""

import errno
import hashlib
import os
import tempfile
from pathlib import Path

from thinker.runtime.constants import FULL_DISK
from thinker.runtime.errors import UserError


def atomic_write(path: Path, content: str | bytes, sync: bool = True) -> None:
    """Write a file, text as UTF-8, completely or not at all; a link of that name is replaced, not followed.

    With `sync` it survives a power failure. Raises OSError, and then leaves the previous file in place.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a write does not know its file's name
            error.filename = str(path)
        raise


def make_folder(path: Path, setting: str) -> None:
    """Make a folder, unless it exists. Raises UserError, which names the setting, where that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        raise UserError(f"{setting}: {path} cannot be made a folder: {error.strerror}") from error


def can_write(folder: Path) -> bool:
    """Whether files can be written into a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def sha256_of_file(path: Path) -> str:
    """The sha256 of a file's content, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
