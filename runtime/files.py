"""Write files so that they appear complete or not at all."""

import errno
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


def output_file(name: str | Path) -> Path:
    """Check that a file can be written before long work begins. Raises UserError if not."""
    path = Path(name)
    if path.is_dir():
        raise UserError(f"cannot write {name}: it is a folder; give a file name")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"cannot write {name}: its folder does not exist or is not writable")
    return path


def can_write(folder: Path) -> bool:
    """Whether files can be written into a folder. Creates it if needed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


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
