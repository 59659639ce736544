"""Sources that a module of the user registers."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from thinker.data.text.document import Document, Start
from thinker.data.text.sources import (
    SOURCES,
    Source,
    SourceKind,
    SourceOptions,
    bounded_source,
    stamps,
)


def register_source(
    name: str,
    texts: Callable[..., Iterable[str | Document]],
    version: str,
    options: tuple[str, ...] = (),
) -> None:
    """Make texts available as data.source=NAME.

    Args:
        texts: called with the `options` that the config sets, such as path="poems.txt". Returns the
            texts, the same ones in the same order each time. They may also be Documents, such as
            conversations.
        version: identifies the texts in the token cache: change it whenever they change. A file at
            data.path is compared anyway.
        options: keys of the section data that `texts` takes: path, config, split, column,
            streaming.

    Raises UserError if there is another source of this name.
    """
    SOURCES.register(name, SourceKind(partial(_open_registered, texts, version, options), options))


def _open_registered(
    texts: Callable[..., Iterable[str | Document]],
    version: str,
    used: tuple[str, ...],
    name: str,
    options: SourceOptions,
) -> Source:
    values = {}
    for option in used:
        value = getattr(options, option)
        if value is not None:
            values[option] = value
    files = []
    if options.path is not None and os.path.isfile(options.path):
        files = stamps([options.path])
    content = [version, sorted(values.items()), files, options.max_documents]
    documents = partial(_read_registered, partial(texts, **values))
    return bounded_source(name, documents, content, options, options.max_documents)


def _read_registered(
    texts: Callable[[], Iterable[str | Document]], start: Start
) -> Iterator[Document]:
    first, _ = start
    for text in itertools.islice(texts(), first, None):
        yield Document(text) if isinstance(text, str) else text
