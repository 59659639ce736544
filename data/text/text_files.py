"""Sources of plain text: files of the user, and Python's standard library."""

import contextlib
import glob
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import partial

from thinker.data.text.document import Document, MissingData, Start
from thinker.data.text.sources import Source, SourceOptions, bounded_source, source_key, stamps
from thinker.runtime.errors import UserError

PIECE_BYTES = 1 << 20  # a single text is read in pieces of about this size
ANY_FILE = ("",)  # extensions

# Folders to skip beside the standard library's modules: tests, installed packages, bundled wheels,
# the IDLE editor.
EXCLUDED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "__pycache__",
}


def open_text(name: str, options: SourceOptions) -> Source:
    """One file as a whole, or several, each of which is a document."""
    files = find_files(name, options.path, ANY_FILE)
    if len(files) > 1:
        content = [stamps(files), options.max_documents]
        n_documents = len(files[: options.max_documents])
        documents = partial(_read_texts, files)
        return bounded_source(name, documents, content, options, options.max_documents, n_documents)
    _check_single_text(options)
    return Source(
        name=name,
        key=source_key(name, stamps(files)),
        documents=partial(_read_pieces, files[0]),
        whole_text=True,
        n_bytes=os.path.getsize(files[0]),
    )


def open_standard_library(name: str, options: SourceOptions) -> Source:
    """The modules of Python's standard library."""
    files = _standard_library()
    content = [platform.python_version(), stamps(files), options.max_documents]
    n_documents = len(files[: options.max_documents])
    documents = partial(_read_modules, files)
    return bounded_source(name, documents, content, options, options.max_documents, n_documents)


def _check_single_text(options: SourceOptions) -> None:
    """Raise UserError for a bound on documents, as a single text is one document."""
    if options.max_documents is not None:
        raise UserError(
            f"data.max_documents is set, but data.path={options.path} is a single text, which "
            f"is read as a "
            "whole; set it to null"
        )
    if options.first_bytes is not None:
        raise UserError(
            f"data.buffer_tokens is set, but data.path={options.path} is a single text; set "
            f"it to null"
        )


def _standard_library() -> list[str]:
    """The modules of Python's standard library, in a fixed order."""
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = sorted(set(subfolders) - EXCLUDED)
        files += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


def _read_modules(files: list[str], start: Start) -> Iterator[Document]:
    _, first = start
    for number in range(first or 0, len(files)):
        # A few test files have broken encodings on purpose.
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):
            with tokenize.open(files[number]) as opened:  # in the encoding that the file declares
                text = opened.read()
            yield Document(text, position=number)


def find_files(source: str, path: str, extensions: tuple[str, ...]) -> list[str]:
    """Sorted files that match a path, folder or glob, without hidden files and links to folders.

    extensions: of the files in a folder. Raises MissingData that names the source if there are
    none.
    """
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        paths = _files_in(path, extensions)
    else:
        paths = glob.glob(path, recursive=True)
    files = sorted(file for file in paths if os.path.isfile(file))
    if not files:
        reason = _why_no_files(source, path)
        raise MissingData(
            f"data.path={path} {reason}; use a file, a folder or a glob such as 'folder/*.txt'"
        )
    return files


def _files_in(top: str, extensions: tuple[str, ...]) -> list[str]:
    """Paths in a folder, without hidden ones."""
    paths = []
    for folder, _, names in os.walk(top):  # through no links
        for name in names:
            path = os.path.join(folder, name)
            is_hidden = f"{os.sep}." in path[len(top) - 1 :]
            if path.lower().endswith(extensions) and not is_hidden:
                paths.append(path)
    return paths


def _why_no_files(source: str, path: str) -> str:
    wanted = "file" if source == "text" else f"{source} file"
    if os.path.isdir(path):
        return f"contains no {wanted}"
    if glob.has_magic(path):
        return f"matches no {wanted}"
    if os.path.exists(path):
        return "is not a regular file"
    return "does not exist"


def _read_texts(files: list[str], start: Start) -> Iterator[Document]:
    number, _ = start
    for file in files[number:]:
        yield Document("".join(piece.text for piece in _read_pieces(file)))


def _read_pieces(file: str) -> Iterator[Document]:
    """Yield the text of a file in pieces of about PIECE_BYTES characters.

    They end at the end of a line if possible.
    """
    try:
        with open(file, encoding="utf-8-sig", newline="") as opened:
            is_first = True
            while text := opened.read(PIECE_BYTES):
                text += opened.readline(PIECE_BYTES)
                yield Document(text, continues=not is_first)
                is_first = False
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"data.path: {file} is not UTF-8 text (byte {byte:#04x}); "
            "convert it, for example with iconv, or choose other files"
        ) from error
