"""Sources of plain text: files of the user, and Python's standard library."""

import contextlib
import functools
import glob
import io
import json
import os
import platform
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from thinker.data.text.document import BEGIN, Document, MissingData, Start
from thinker.data.text.files.compressed_files import UnreadableFile, decompressed
from thinker.data.text.sources import Source, SourceOptions, bounded_source, source_key, stamps
from thinker.runtime.errors import UserError

PIECE_BYTES = 1 << 20  # a single text is read in pieces of about this size
FEW_FILES = 1000  # the split of more is even
ANY_FILE = ("",)  # extensions

COMPRESSIONS = ("", ".gz", ".bz2", ".xz", ".zst", ".zip")
JSON_LINES = tuple(f"{name}{end}" for name in (".jsonl", ".ndjson") for end in COMPRESSIONS)
ROW_EXTENSIONS = (*JSON_LINES, *(f".json{end}" for end in COMPRESSIONS))

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
    for file in files:
        _check_name(file)
    with_rows: list[str] = []
    if len(files) > 1:
        content = [stamps(files), options.max_documents]
        used = files[: options.max_documents]
        documents = partial(_read_texts, files, with_rows)
        few_texts = None
        if len(used) <= FEW_FILES:
            few_texts = partial(_read_texts, used, with_rows)
            content.append("long documents may be cut at the split")
        bounded = bounded_source(
            name, documents, content, options, options.max_documents, len(used)
        )
        return replace(bounded, few_texts=few_texts)
    _check_single_text(options)
    return Source(
        name=name,
        key=source_key(name, stamps(files)),
        documents=partial(_read_pieces, files[0], with_rows),
        whole_text=True,
        size=functools.cache(partial(_text_bytes, files[0])),
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


def _check_name(file: str) -> None:
    """Raise UserError for a file that has rows of JSON by its name."""
    if not file.lower().endswith(JSON_LINES):
        return
    name = os.path.basename(file)
    renamed = f"{name[: name.lower().index('.')]}.txt"
    raise UserError(
        f"data.path: {file} has rows of JSON; set data.source=jsonl to train on the texts in "
        f"them, or rename it to {renamed} to train on the JSON itself"
    )


def _read_texts(files: list[str], with_rows: list[str], start: Start = BEGIN) -> Iterator[Document]:
    number, _ = start
    for file in files[number:]:
        yield Document("".join(piece.text for piece in _read_pieces(file, with_rows)))


def _read_pieces(file: str, with_rows: list[str]) -> Iterator[Document]:
    """Yield the text of a file in pieces of about PIECE_BYTES characters.

    They end at the end of a line if possible. with_rows: the files of the source that were found to
    have rows of JSON; the first one is reported.
    """
    is_first = True
    try:
        with open(file, "rb") as plain:
            # Line ends stay as they are.
            opened = io.TextIOWrapper(decompressed(plain), encoding="utf-8-sig", newline="")
            while text := opened.read(PIECE_BYTES):
                text += opened.readline(PIECE_BYTES)
                if is_first and not with_rows and _has_rows(text):
                    with_rows.append(file)
                    print(
                        f"data.path: {file} has rows of JSON, which are read as text; "
                        "data.source=jsonl reads the texts in them",
                        file=sys.stderr,
                    )
                yield Document(text, continues=not is_first)
                is_first = False
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"data.path: {file} is not UTF-8 text (byte {byte:#04x}); "
            "convert it, for example with iconv, or choose other files"
        ) from error
    except UnreadableFile as error:
        raise UserError(f"data.path: {file} cannot be read: {error}") from error


def _has_rows(text: str) -> bool:
    """Whether a text begins with two objects of JSON, one after the other or in an array."""
    decoder = json.JSONDecoder()
    text = text.lstrip()
    separator = ""
    if text.startswith("["):
        text = text[1:].lstrip()
        separator = ","
    try:
        first, end = decoder.raw_decode(text)
        rest = text[end:].lstrip().removeprefix(separator).lstrip()
        second, _ = decoder.raw_decode(rest)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and isinstance(second, dict)


def _text_bytes(file: str) -> int:
    """The bytes of a text, which a compressed file must be read for."""
    with open(file, "rb") as plain:
        try:
            opened = decompressed(plain)
            if opened is plain:
                return os.path.getsize(file)
            n_bytes = 0
            while block := opened.read(PIECE_BYTES):
                n_bytes += len(block)
        except UnreadableFile as error:
            raise UserError(f"data.path: {file} cannot be read: {error}") from error
    return n_bytes
