"""Write files so that they appear complete, and check what is on the disk."""

import errno
import hashlib
import os
import tempfile
from pathlib import Path

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
