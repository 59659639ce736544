"""Sources of documents: generated, Python's standard library, files, and the Hugging Face hub."""

import contextlib
import glob
import hashlib
import json
import math
import os
import platform
import random
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from thinker.data.text.document import BEGIN, Document, MissingData, Start
from thinker.data.text.rows import read_dataset, read_tables
from thinker.runtime.errors import UserError, did_you_mean

# Options of each source besides max_documents and seed.
OPTIONS: dict[str, tuple[str, ...]] = {
    "tales": (),
    "pysource": (),
    "repeated_random": (),
    "text": ("path",),
    "jsonl": ("path", "column"),
    "parquet": ("path", "column"),
    "hub": ("path", "config", "split", "column", "streaming"),
}
GENERATED_DOCUMENTS = 25_000  # default size of tales and repeated_random, which are endless
PIECE_BYTES = 1 << 20  # a single text is read in pieces of about this size
REPEAT_ALPHABET = "".join(chr(c) for c in range(33, 127))
REPEAT_LENGTHS = range(16, 65)

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
EXTENSIONS = {
    "text": "",
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst"),
    "parquet": ".parquet",
}


@dataclass(frozen=True)
class Source:
    """A stream of documents that can be read any number of times."""

    name: str  # a key of OPTIONS
    key: str  # changes with the documents (except if the owner of a hub dataset changes it)
    # From a Start (default: BEGIN). Raises UserError for unreadable text.
    documents: Callable[..., Iterator[Document]]
    whole_text: bool = False  # the documents are consecutive pieces of one single text
    n_documents: int | None = None  # if known before reading
    n_bytes: int | None = None  # the size of a whole text, in bytes of UTF-8


def open_source(
    source: str,
    *,
    path: str | None = None,
    config: str | None = None,
    split: str | None = None,
    column: str | None = None,
    streaming: bool | None = None,
    max_documents: int | None = None,
    seed: int = 0,
    first_bytes: int | None = None,
) -> Source:
    """Check the options of a source and open it.

    Reads, generates and downloads nothing.

    Args:
        source: a key of OPTIONS.
        path: a file, folder or glob (text, jsonl, parquet), or the name or folder of a dataset
            (hub).
        config, split, streaming: which part of a hub dataset to load (default split: train), and
            whether to stream it (default) or download it first.
        column: the column with the text (jsonl, parquet, hub; default: text, or messages in rows
            without text).
        max_documents: upper bound (default: GENERATED_DOCUMENTS for tales and repeated_random, else
            none).
        seed: seed of the generated sources, tales and repeated_random.
        first_bytes: stop after the document that reaches this many bytes of text. Not for a single
            text file.

    Raises UserError for an unknown source, a missing file, or an option that the source does not
    use.
    """
    options = {
        "path": path,
        "config": config,
        "split": split,
        "column": column,
        "streaming": streaming,
    }
    _check_options(source, options, max_documents)
    path = os.path.expanduser(str(path))
    bound = max_documents
    n_documents = None
    # `content` has what the documents depend on, for the key.
    content: list[Any]
    if source in ("tales", "repeated_random"):
        n_documents = max_documents or GENERATED_DOCUMENTS
        bound = None  # it is the size of the source, of which nothing is left out
        if source == "tales":
            from thinker.data.text import tales

            content = [seed, n_documents, tales.GRAMMAR_HASH]
            documents = partial(_generate, tales.generate_story, seed, n_documents)
        else:
            content = [seed, n_documents, REPEAT_ALPHABET, list(REPEAT_LENGTHS)]
            documents = partial(_generate, _repeat, seed, n_documents)
    elif source == "pysource":
        files = _standard_library()
        n_documents = len(files[:max_documents])
        content = [platform.python_version(), stamps(files), max_documents]
        documents = partial(_read_modules, files)
    elif source == "hub":
        # No files if the dataset is on the hub. `streaming` changes no text.
        files = [str(file) for file in sorted(Path(path).rglob("*")) if file.is_file()]
        part = [config, split or "train", column or "text"]
        content = [path, *part, max_documents, stamps(files)]
        documents = partial(read_dataset, path, config, split, column, streaming is not False)
    elif source == "text":
        files = _find_files(source, path)
        if len(files) == 1:
            _check_single_text(path, max_documents, first_bytes)
            return _open_single_text(files[0])
        n_documents = len(files[:max_documents])
        content = [stamps(files), max_documents]
        documents = partial(_read_texts, files)
    else:
        files = _find_files(source, path)
        content = [stamps(files), column or "text", max_documents]
        documents = partial(read_tables, source, files, column)
    if first_bytes is not None:
        content.append(first_bytes)
        n_documents = None
    read = partial(_read, documents, bound, first_bytes, [])
    return Source(source, _key(source, *content), read, n_documents=n_documents)


def _check_options(source: str, options: dict[str, Any], max_documents: int | None) -> None:
    """Raise UserError for an unknown source, or an option that does not fit it."""
    if source not in OPTIONS:
        hint = did_you_mean(source, OPTIONS)
        raise UserError(f"data.source={source}: choose from {', '.join(OPTIONS)}{hint}")
    if max_documents is not None and max_documents < 1:
        raise UserError(f"data.max_documents={max_documents}: use at least 1, or null for no limit")
    for option, value in options.items():
        if value is not None and option not in OPTIONS[source]:
            raise UserError(f"data.{option} has no effect with data.source={source}; remove it")
    if "path" in OPTIONS[source] and not options["path"]:
        wanted = "a file, folder or glob"
        if source == "hub":
            wanted = "the name or folder of a dataset"
        raise UserError(f"data.source={source} needs data.path; set it to {wanted}")


def _check_single_text(path: str, max_documents: int | None, first_bytes: int | None) -> None:
    """Raise UserError for a bound on documents, as a single text is one document."""
    if max_documents is not None:
        raise UserError(
            f"data.max_documents is set, but data.path={path} is a single text, which is read as a "
            "whole; set it to null"
        )
    if first_bytes is not None:
        raise UserError(
            f"data.buffer_tokens is set, but data.path={path} is a single text; set it to null"
        )


def _open_single_text(file: str) -> Source:
    return Source(
        name="text",
        key=_key("text", stamps([file])),
        documents=partial(_read_pieces, file),
        whole_text=True,
        n_bytes=os.path.getsize(file),
    )


def _read(
    documents: Callable[[Start], Iterable[Document]],
    bound: int | None,
    first_bytes: int | None,
    messages: list[str],
    start: Start = BEGIN,
) -> Iterator[Document]:
    """Yield the documents from `start` to the bounds, with their numbers.

    Prints a message once if there are more than `bound`, because the config may come from someone
    else. messages: those that were printed.
    """
    number, _ = start
    n_bytes = 0
    for document in documents(start):
        if number == bound:
            if not messages:
                messages.append(
                    f"data.max_documents: using only the first {number:,} documents of the source"
                )
                print(messages[0], file=sys.stderr)
            return
        document.number = number
        if bound is not None:
            document.share_read = max(document.share_read or 0.0, (number + 1) / bound)
        yield document
        number += 1
        if first_bytes is not None:
            n_bytes += len(document.text.encode())
            if n_bytes >= first_bytes:
                return


def _key(*parts: Any) -> str:
    """A hash of values that JSON can represent."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def stamps(files: Iterable[str]) -> list[tuple[str, int, int]]:
    """Absolute path, size and modification time, which identify the content of files."""
    found = []
    for file in files:
        status = os.stat(file)
        found.append((os.path.abspath(file), status.st_size, status.st_mtime_ns))
    return found


def _generate(
    story: Callable[[int, int], Any], seed: int, count: int, start: Start
) -> Iterator[Document]:
    for index in range(start[0], count):
        made = story(seed, index)
        yield Document(made.text, made.log_prob)


def _repeat(seed: int, index: int) -> Document:
    """Generate n random printable characters twice, with n uniform over REPEAT_LENGTHS."""
    rng = random.Random(f"{seed}:{index}")
    n = rng.choice(REPEAT_LENGTHS)
    half = "".join(rng.choices(REPEAT_ALPHABET, k=n))
    log_prob = -math.log(len(REPEAT_LENGTHS)) - n * math.log(len(REPEAT_ALPHABET))
    return Document(half + half, log_prob)


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


def _find_files(source: str, path: str) -> list[str]:
    """Sorted files that match a path, folder or glob, without hidden files and links to folders."""
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        paths = _files_in(path, EXTENSIONS[source])
    else:
        paths = glob.glob(path, recursive=True)
    files = sorted(file for file in paths if os.path.isfile(file))
    if not files:
        reason = _why_no_files(source, path)
        raise MissingData(
            f"data.path={path} {reason}; use a file, a folder or a glob such as 'folder/*.txt'"
        )
    return files


def _files_in(top: str, extensions: str | tuple[str, ...]) -> list[str]:
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
            while text := opened.read(PIECE_BYTES):
                yield Document(text + opened.readline(PIECE_BYTES))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"data.path: {file} is not UTF-8 text (byte {byte:#04x}); "
            "convert it, for example with iconv, or choose other files"
        ) from error
