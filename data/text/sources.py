"""Sources of documents, by name: the registry, and how a source is opened."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from thinker.data.text.document import BEGIN, Document, Start
from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.registry import Registry, features, import_offer


@dataclass(frozen=True)
class Source:
    """A stream of documents that can be read any number of times."""

    name: str  # in SOURCES
    key: str  # changes with the documents (except if the owner of a hub dataset changes it)
    # From a Start (default: BEGIN). Raises UserError for unreadable text.
    documents: Callable[..., Iterator[Document]]
    whole_text: bool = False  # the documents are consecutive pieces of one single text
    n_documents: int | None = None  # if known before reading
    size: Callable[[], int] | None = None  # the bytes of UTF-8 of a whole text, which may be read
    # All documents of few files of text, the longest of which may be cut at the split.
    few_texts: Callable[[], Iterable[Document]] | None = None

    @property
    def n_bytes(self) -> int | None:
        """The bytes of UTF-8 of a whole text; None for documents."""
        return None if self.size is None else self.size()


@dataclass(frozen=True)
class SourceOptions:
    """The options of open_source()."""

    path: str | None = None
    config: str | None = None
    split: str | None = None
    column: str | None = None
    allow_special_tokens: bool | None = None
    streaming: bool | None = None
    max_documents: int | None = None
    seed: int = 0
    first_bytes: int | None = None


@dataclass(frozen=True)
class SourceKind:
    """How sources of one name are opened.

    open: a function (name, SourceOptions) -> Source, or "module:function" to import it when it is
    used. options: the options that it reads, besides max_documents, seed and first_bytes.
    has_conversations: documents may be conversations, whose answers end with a token.
    is_read_alone: the model is trained on each document without those before it in a sequence.
    """

    open: str | Callable[[str, SourceOptions], Source]
    options: tuple[str, ...] = ()
    path_means: str = "a file, folder or glob"
    has_conversations: bool = False
    is_read_alone: bool = False


SOURCES: Registry[SourceKind] = Registry("data.source")
"""What data.source may name. A module of the user adds to it with
register_source()."""

_OF_ROWS = ("path", "column", "allow_special_tokens")
_TABLE = SourceKind("thinker.data.text.tables.rows:open_tables", _OF_ROWS, has_conversations=True)
_HUB_OPTIONS = (*_OF_ROWS, "config", "split", "streaming")
SOURCES.register("tales", SourceKind("thinker.data.text.generated_text:open_tales"))
SOURCES.register("pysource", SourceKind("thinker.data.text.files.text_files:open_standard_library"))
SOURCES.register("repeated_random", SourceKind("thinker.data.text.generated_text:open_repeated"))
SOURCES.register("text", SourceKind("thinker.data.text.files.text_files:open_text", ("path",)))
SOURCES.register(
    "tokens",
    SourceKind(
        "thinker.data.corpus.tokenized_folder:open_tokens", ("path",), "a folder with corpus.json"
    ),
)
SOURCES.register("jsonl", _TABLE)
SOURCES.register("parquet", _TABLE)
SOURCES.register(
    "hub",
    SourceKind(
        "thinker.data.text.tables.rows:open_hub",
        _HUB_OPTIONS,
        "the name or folder of a dataset",
        has_conversations=True,
    ),
)


def open_source(
    source: str,
    *,
    path: str | None = None,
    config: str | None = None,
    split: str | None = None,
    column: str | None = None,
    allow_special_tokens: bool | None = None,
    streaming: bool | None = None,
    max_documents: int | None = None,
    seed: int = 0,
    first_bytes: int | None = None,
) -> Source:
    """Check the options of a source and open it.

    Reads, generates and downloads nothing.

    Args:
        source: a name in SOURCES.
        path: a file, folder or glob (text, jsonl, parquet), or the name or folder of a dataset
            (hub).
        config, split, streaming: which part of a hub dataset to load (default split: train), and
            whether to stream it (default) or download it first.
        column: the column with the text (jsonl, parquet, hub; default: text, or messages in rows
            without text).
        allow_special_tokens: names of special tokens in the messages of conversations are these
            tokens (default: plain text).
        max_documents: upper bound (default: GENERATED_DOCUMENTS for tales and repeated_random, else
            none).
        seed: seed of the generated sources, tales and repeated_random.
        first_bytes: stop after the document that reaches this many bytes of text. Not for a single
            text file.

    Raises UserError for an unknown source, a missing file, or an option that the source does not
    use.
    """
    given = {
        "path": path,
        "config": config,
        "split": split,
        "column": column,
        "allow_special_tokens": allow_special_tokens,
        "streaming": streaming,
    }
    kind = _check_options(source, given, max_documents)
    given["path"] = None if path is None else os.path.expanduser(str(path))
    options = SourceOptions(
        **given, max_documents=max_documents, seed=seed, first_bytes=first_bytes
    )
    open_kind = import_offer(kind.open) if isinstance(kind.open, str) else kind.open
    return open_kind(source, options)


def _check_options(source: str, given: dict[str, Any], max_documents: int | None) -> SourceKind:
    """The kind of a source. Raises UserError if it is unknown, or for an option that does not fit
    it."""
    if source not in SOURCES:
        features()  # some add sources
    if source not in SOURCES:
        names = SOURCES.names()
        hint = did_you_mean(source, names)
        raise UserError(f"data.source={source}: choose from {', '.join(names)}{hint}")
    kind = SOURCES.get(source)
    if max_documents is not None and max_documents < 1:
        raise UserError(f"data.max_documents={max_documents}: use at least 1, or null for no limit")
    for option, value in given.items():
        if value is not None and option not in kind.options:
            raise UserError(f"data.{option} has no effect with data.source={source}; remove it")
    if "path" in kind.options and not given["path"]:
        raise UserError(f"data.source={source} needs data.path; set it to {kind.path_means}")
    return kind


def bounded_source(
    name: str,
    documents: Callable[[Start], Iterable[Document]],
    content: list[Any],
    options: SourceOptions,
    bound: int | None,
    n_documents: int | None = None,
) -> Source:
    """A source with at most `bound` documents, and at most options.first_bytes of text.

    documents: yields them from a Start on. content: JSON values that change with the documents, for
    the key.
    """
    if options.first_bytes is not None:
        content = [*content, options.first_bytes]
        n_documents = None
    read = partial(_read, documents, bound, options.first_bytes, [])
    return Source(name, source_key(name, *content), read, n_documents=n_documents)


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


def source_key(*parts: Any) -> str:
    """A hash of values that JSON can represent."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def stamps(files: Iterable[str]) -> list[tuple[str, int, int]]:
    """Absolute path, size and modification time, which identify the content of files."""
    found = []
    for file in files:
        status = os.stat(file)
        found.append((os.path.abspath(file), status.st_size, status.st_mtime_ns))
    return found
