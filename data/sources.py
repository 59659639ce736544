"""Sources of documents: generated corpora, Python's standard library, files, and the Hugging Face hub."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from thinker.data.chat import Message, check_messages
from thinker.runtime.errors import FULL_DISK, UserError, did_you_mean

SOURCES = ("tales", "pysource", "repeated_random", "text", "jsonl", "parquet", "hub")
GENERATED_DOCUMENTS = 25_000  # of tales and repeated_random, which never end, if max_documents is not set
PIECE_BYTES = 1 << 20  # a single text is read in pieces of about this size
REPEAT_ALPHABET = "".join(chr(c) for c in range(33, 127))
REPEAT_LENGTHS = range(16, 65)
# Folders beside the standard library's modules: tests, installed packages, bundled wheels, the IDLE editor.
EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "__pycache__",
}
EXTENSIONS = {"text": "", "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"), "parquet": ".parquet"}


@dataclass(frozen=True)
class Document:
    """One text, or one conversation: `messages`, whose JSON is `text`.

    log_prob is ln P(text) in nats for the generated sources, None for others.
    """

    text: str
    log_prob: float | None = None
    messages: list[Message] | None = None


@dataclass(frozen=True)
class Source:
    """A stream of documents that can be read any number of times.

    Attributes:
        name: one of SOURCES.
        key: changes whenever the documents change (but not when the owner of a hub dataset changes it).
        documents: returns an iterator over all documents. Raises UserError if the text cannot be read.
        whole_text: the documents are consecutive pieces of one single text.
        n_documents: how many there are, if that is known before reading.
        n_bytes: the size of a whole text, in bytes of UTF-8.
    """

    name: str
    key: str
    documents: Callable[[], Iterator[Document]]
    whole_text: bool = False
    n_documents: int | None = None
    n_bytes: int | None = None


def open_source(
    source: str,
    *,
    path: str | None = None,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    streaming: bool = True,
    max_documents: int | None = None,
    seed: int = 0,
) -> Source:
    """Check the options of a source and open it; nothing is read, generated or downloaded yet.

    Args:
        source: one of SOURCES.
        path: a file, folder or glob (text, jsonl, parquet), or the name or folder of a dataset (hub).
        config, split, streaming: what to load from the hub, and whether to stream it instead of downloading it first.
        column: the column that holds the text (jsonl, parquet, hub).
        max_documents: an upper bound; for tales and repeated_random None means GENERATED_DOCUMENTS.
        seed: of the generated sources, tales and repeated_random.

    Raises UserError for an unknown source, a missing file, or an option that the source does not read.
    """
    if source not in SOURCES:
        raise UserError(f"data.source={source}: there are {', '.join(SOURCES)}{did_you_mean(source, SOURCES)}")
    if max_documents is not None and max_documents < 1:
        raise UserError(f"data.max_documents={max_documents}: it must be at least 1, or null for no bound")
    reads_path = source in ("text", "jsonl", "parquet", "hub")
    unread = {
        "path": path is not None and not reads_path,
        "config": config is not None and source != "hub",
        "split": split != "train" and source != "hub",
        "streaming": not streaming and source != "hub",
        "column": column != "text" and source not in ("jsonl", "parquet", "hub"),
    }
    for option, is_set in unread.items():
        if is_set:
            raise UserError(f"data.{option} is set, but data.source={source} does not read it; leave it out")
    if reads_path and not path:
        wanted = "a dataset's name or folder" if source == "hub" else "a file, folder or glob"
        raise UserError(f"data.source={source} needs data.path={wanted}")

    if source == "tales":
        return _tales(max_documents or GENERATED_DOCUMENTS, seed)
    if source == "repeated_random":
        return _repeated_random(max_documents or GENERATED_DOCUMENTS, seed)
    if source == "pysource":
        return _pysource(max_documents)
    if source == "hub":
        return _hub(str(path), config, split, column, streaming, max_documents)
    files = _find_files(source, str(path))
    if source == "text":
        return _text(files, max_documents)
    key = _key(source, _stamps(files), column, max_documents)
    return Source(source, key, lambda: _bounded(_read_tables(source, files, column), max_documents))


def _bounded(documents: Iterable[Document], max_documents: int | None) -> Iterator[Document]:
    """The first documents, with a message if there are more: the author of the config may have set the bound."""
    for number, document in enumerate(documents):
        if number == max_documents:
            print(
                f"data.max_documents: the first {max_documents:,} documents are taken, there are more", file=sys.stderr
            )
            return
        yield document


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _stamps(files: Iterable[str]) -> list[tuple[str, int, int]]:
    """What identifies the content of files: absolute path, size and modification time."""
    status = [(os.path.abspath(file), os.stat(file)) for file in files]
    return [(file, stat.st_size, stat.st_mtime_ns) for file, stat in status]


# Generated text


def _tales(count: int, seed: int) -> Source:
    from thinker.data import tales

    def read() -> Iterator[Document]:
        for index in range(count):
            story = tales.generate_story(seed, index)
            yield Document(story.text, story.log_prob)

    return Source("tales", _key("tales", seed, count, tales.GRAMMAR_HASH), read, n_documents=count)


def _repeated_random(count: int, seed: int) -> Source:
    key = _key("repeated_random", seed, count, REPEAT_ALPHABET, [*REPEAT_LENGTHS])
    return Source("repeated_random", key, lambda: (_repeat(seed, i) for i in range(count)), n_documents=count)


def _repeat(seed: int, index: int) -> Document:
    """n random printable characters, then the same n again; n is uniform over REPEAT_LENGTHS."""
    rng = random.Random(f"{seed}:{index}")
    n = rng.choice(REPEAT_LENGTHS)
    half = "".join(rng.choices(REPEAT_ALPHABET, k=n))
    return Document(half + half, -math.log(len(REPEAT_LENGTHS)) - n * math.log(len(REPEAT_ALPHABET)))


# Files of text


def _pysource(max_documents: int | None) -> Source:
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - EXCLUDED_FOLDERS)
        files += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]

    def read() -> Iterator[Document]:
        for file in files:
            try:
                with tokenize.open(file) as opened:  # in the encoding that the file declares
                    text = opened.read()
            except (SyntaxError, UnicodeDecodeError):  # a few files hold broken encodings on purpose
                continue
            yield Document(text)

    key = _key("pysource", platform.python_version(), _stamps(files), max_documents)
    return Source("pysource", key, lambda: _bounded(read(), max_documents))


def _find_files(source: str, path: str) -> list[str]:
    """The files that match a path, folder or glob, sorted; hidden files in folders are skipped."""
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        names = glob.glob("**", root_dir=path, recursive=True)
        paths = [os.path.join(path, name) for name in names if name.lower().endswith(EXTENSIONS[source])]
    else:
        paths = glob.glob(os.path.expanduser(path), recursive=True)
    files = sorted(file for file in paths if os.path.isfile(file))
    if not files:
        wanted = "file" if source == "text" else f"{source} file"
        reason = "does not exist"
        if os.path.isdir(path):
            reason = f"holds no {wanted}"
        elif glob.has_magic(path):
            reason = f"matches no {wanted}"
        raise UserError(f"data.path={path} {reason}; give a file, a folder or a glob such as 'folder/*.txt'")
    return files


def _text(files: list[str], max_documents: int | None) -> Source:
    if len(files) == 1:
        size = os.path.getsize(files[0])
        return Source("text", _key("text", _stamps(files)), lambda: _pieces(files[0]), True, n_bytes=size)

    def read() -> Iterator[Document]:
        yield from _bounded((Document("".join(p.text for p in _pieces(file))) for file in files), max_documents)

    count = len(files[:max_documents])
    return Source("text", _key("text", _stamps(files), max_documents), read, n_documents=count)


def _pieces(file: str) -> Iterator[Document]:
    """The text of a file in pieces of about PIECE_BYTES characters, cut at the end of a line if possible."""
    try:
        with open(file, encoding="utf-8-sig", newline="") as opened:
            while text := opened.read(PIECE_BYTES):
                yield Document(text + opened.readline(PIECE_BYTES))
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.path: {file} is not UTF-8 text (byte {error.object[error.start]:#04x}); convert it, for example"
            " with iconv, or choose other files with a glob such as 'folder/*.txt'"
        ) from error
    except OSError as error:
        raise UserError(f"data.path: cannot read {file}: {error.strerror}") from error


# Tables, through the datasets library


def _hub(path: str, config: str | None, split: str, column: str, streaming: bool, max_documents: int | None) -> Source:
    files = [str(file) for file in sorted(Path(path).rglob("*")) if file.is_file()]  # none if path is a dataset's name
    key = _key("hub", path, config, split, column, max_documents, _stamps(files))  # `streaming` changes no text
    arguments = {"path": path, "name": config, "split": split, "streaming": streaming}
    return Source("hub", key, lambda: _bounded(_read_rows(f"data.path={path}", column, arguments), max_documents))


def _read_tables(source: str, files: list[str], column: str) -> Iterator[Document]:
    loader = {"jsonl": "json", "parquet": "parquet"}[source]
    for file in files:  # one at a time: their other columns may differ
        if os.path.getsize(file):  # datasets cannot read empty files
            arguments = {"path": loader, "data_files": [os.path.abspath(file)], "split": "train", "streaming": True}
            yield from _read_rows(f"data.path={file}", column, arguments)


def _read_rows(where: str, column: str, arguments: dict[str, Any]) -> Iterator[Document]:
    """A document from each row's column: text, or a conversation. A null becomes an empty document."""
    try:
        import datasets
    except ImportError as error:
        raise UserError("this data.source needs the datasets library: pip install datasets") from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors become ours
    try:
        for number, row in enumerate(datasets.load_dataset(**arguments)):
            if column == "text" and column not in row and "messages" in row:
                column = "messages"
            if column not in row:
                hint = did_you_mean(column, row)
                raise UserError(f"data.column={column}: {where} has the columns {', '.join(row)}{hint}")
            text = row[column]
            if isinstance(text, list):
                messages = check_messages(text, f"data.column={column}: row {number} of {where}")
                yield Document(json.dumps(messages, ensure_ascii=False), messages=messages)
                continue
            if not (text is None or isinstance(text, str)):
                raise UserError(f"data.column={column}: row {number} of {where} holds {type(text).__name__}, not text")
            yield Document(text or "")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where} cannot be read: {reason[:300]}") from error
