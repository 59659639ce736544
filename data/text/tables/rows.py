"""Documents from the rows of tables: JSON and Parquet files, and datasets of Hugging Face."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from thinker.data.chat.messages import (
    PAIR,
    check_messages,
    describe_unread,
    find_column,
    hint_of_form,
    join_pair,
    read_beside,
    without_nulls,
)
from thinker.data.text.document import BEGIN, Document, MissingData, Start
from thinker.data.text.files.text_files import ROW_EXTENSIONS, find_files
from thinker.data.text.sources import Source, SourceOptions, bounded_source, stamps
from thinker.data.text.tables import jsonl, parquet
from thinker.runtime.constants import FULL_DISK
from thinker.runtime.errors import UserError, did_you_mean

# A row, and the share of the file that has been read, if known.
Row = tuple[dict[str, Any], float | None]
# Makes the document of a row from its column, its number and the name of its file, or raises
# UserError.
ReadRow = Callable[[dict[str, Any], str, int, str], Document]

# Libraries whose errors are about the network, and have no common class.
NETWORK_LIBRARIES = (
    "aiohttp",
    "httpcore",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "requests",
    "urllib3",
)
STATE_ROWS = 1000  # rows of a streamed dataset between the positions that it is asked for
EXTENSIONS = {"jsonl": ROW_EXTENSIONS, "parquet": (".parquet",)}
READERS = {"jsonl": jsonl.read_rows, "parquet": parquet.read_rows}


def _read_row(row: dict[str, Any], column: str, number: int, where: str) -> Document:
    """The document in a row. Raises UserError."""
    name = f"row {number} of {where}"
    if column == PAIR:
        value = join_pair(row, name)
    elif column in row:
        value = row[column]
    else:
        hint = ""
        if number == 0:  # otherwise earlier rows have it
            hint = did_you_mean(column, row)
        hint = hint_of_form(row, column) or hint
        raise UserError(f"data.column={column} is not in {name} (has {', '.join(row)}){hint}")
    if value is None:
        return Document("")
    if isinstance(value, str):
        return Document(value, row=row)
    name = f"data.column={column}: {name}"
    if isinstance(value, list):
        messages = check_messages(value, name)
        messages, tools, variables = read_beside(row, column, messages, name)
        content: Any = messages
        if tools or variables:
            content = {"messages": messages, "tools": tools, "chat_template_kwargs": variables}
        text = json.dumps(content, ensure_ascii=False)
        unread = describe_unread(row, column, name)
        return Document(text, None, messages, tools, variables, unread=unread, where=name, row=row)
    raise UserError(f"{name} is {type(value).__name__}, not text")


def open_tables(name: str, options: SourceOptions, read_row: ReadRow = _read_row) -> Source:
    """JSON or Parquet files, with a document per row."""
    files = find_files(name, options.path, EXTENSIONS[name])
    content = [stamps(files), options.column or "text", options.max_documents]
    documents = partial(read_tables, name, files, options.column, read_row=read_row)
    if options.allow_special_tokens:
        content.append("allow_special_tokens")
        documents = partial(_with_special, documents)
    return bounded_source(name, documents, content, options, options.max_documents)


def open_hub(name: str, options: SourceOptions, read_row: ReadRow = _read_row) -> Source:
    """A dataset on the Hugging Face hub, or in a folder."""
    path = options.path
    # No files if the dataset is on the hub. `streaming` changes no text.
    files = [str(file) for file in sorted(Path(path).rglob("*")) if file.is_file()]
    part = [options.config, options.split or "train", options.column or "text"]
    content = [path, *part, options.max_documents, stamps(files)]
    documents = partial(
        read_dataset,
        path,
        options.config,
        options.split,
        options.column,
        options.streaming is not False,
        read_row=read_row,
    )
    if options.allow_special_tokens:
        content.append("allow_special_tokens")
        documents = partial(_with_special, documents)
    return bounded_source(name, documents, content, options, options.max_documents)


def _with_special(
    documents: Callable[[Start], Iterable[Document]], start: Start = BEGIN
) -> Iterator[Document]:
    """Documents in whose messages names of special tokens are these tokens."""
    for document in documents(start=start):
        document.allow_special = True
        yield document


def read_tables(
    source: str,
    files: list[str],
    column: str | None,
    start: Start = BEGIN,
    read_row: ReadRow = _read_row,
) -> Iterator[Document]:
    """Yield a document per row of some files.

    One file at a time, because their other columns may differ.
    """
    # A share of what has been read is a share of bytes.
    sizes = [os.path.getsize(file) for file in files]
    total = max(sum(sizes), 1)
    _, position = start
    first, n_before = position or (0, 0)  # a file, and the number of its rows to skip
    for number in range(first, len(files)):
        file = files[number]
        part = (sum(sizes[:number]) / total, sizes[number] / total)
        rows = partial(READERS[source], file)
        fills_nulls = source == "parquet"
        where = f"data.path={file}"
        documents = read_rows(where, column, rows, part, fills_nulls, read_row)
        for row, document in enumerate(documents):
            document.position = (number, row)
            if number > first or row >= n_before:
                yield document


def read_dataset(
    path: str,
    config: str | None,
    split: str | None,
    column: str | None,
    streaming: bool,
    start: Start = BEGIN,
    read_row: ReadRow = _read_row,
) -> Iterator[Document]:
    """Yield a document per row of a dataset.

    It is on the hub, a folder of data files, or a folder that the library `datasets` saved.
    """
    positions: list[Any] = []  # of the row that is being read
    rows = partial(_load_rows, path, config, split, streaming, start, positions)
    for document in read_rows(f"data.path={path}", column, rows, read_row=read_row):
        document.position = positions[-1]
        yield document


def _load_rows(
    path: str,
    config: str | None,
    split: str | None,
    streaming: bool,
    start: Start,
    positions: list[Any],
) -> Iterator[Row]:
    """Yield the rows of a dataset. Raises ValueError if the library datasets cannot read it.

    positions: receives the position of each row as its last element: a state of the dataset, and
    the number of rows to skip after it. None if the dataset is not streamed.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we report its errors
    datasets.disable_progress_bars()
    number, position = start
    try:
        loaded = _open_dataset(path, config, split, streaming)
        if not hasattr(loaded, "load_state_dict"):
            positions.append(None)
            rest = loaded
            if number > 0:
                rest = loaded.select(range(number, len(loaded)))
            for row in rest:
                number += 1
                yield row, number / len(loaded)
            return
        known = (loaded.info.splits or {}).get(split or "train")
        total = known.num_examples if known else None
        for row in _streamed_rows(loaded, start, positions):
            number += 1
            share = min(number / total, 1.0) if total else None
            yield row, share
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(str(error) or type(error).__name__) from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        has_begun = len(positions) > 0
        if position is None or has_begun:
            raise
        raise ValueError(
            "the library datasets does not understand the position that it has reported"
        ) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in NETWORK_LIBRARIES:
            raise
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def _open_dataset(path: str, config: str | None, split: str | None, streaming: bool) -> Any:
    """One split of a dataset. Raises ValueError if an option does not fit."""
    import datasets

    names = ("dataset_dict.json", "state.json")
    is_saved = any((Path(path) / name).is_file() for name in names)
    if not is_saved:
        return datasets.load_dataset(path, config, split=split or "train", streaming=streaming)
    loaded = _load_saved(path)
    if isinstance(loaded, datasets.DatasetDict):
        split = split or "train"
        if split not in loaded:
            raise ValueError(
                f"it has no split {split}; set data.split to one of {', '.join(loaded)}"
            )
        loaded = loaded[split]
    elif split not in (None, str(loaded.split)):
        raise ValueError(f"it has only the split {loaded.split}; remove data.split={split}")
    if config is not None:
        raise ValueError(f"data.config={config} has no effect on a saved dataset; remove it")
    return loaded


def _streamed_rows(loaded: Any, start: Start, positions: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a streamed dataset from a start, and note their positions."""
    number, position = start
    if position is None:
        state = loaded.state_dict()
        n_to_skip = number
    else:
        state, n_to_skip = position
        loaded.load_state_dict(state)
    n_after = 0  # rows since the state
    for row in loaded:
        positions[:] = [(state, n_after)]
        n_after += 1
        if n_to_skip > 0:
            n_to_skip -= 1
            continue
        yield row
        if n_after >= STATE_ROWS:  # a state takes long to get
            state = loaded.state_dict()
            n_after = 0


def _load_saved(path: str) -> Any:
    """A dataset or several splits from a folder, with plain rows. Raises ValueError."""
    import datasets

    try:
        return datasets.load_from_disk(path).with_format(None)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("the folder is not a dataset that Dataset.save_to_disk wrote") from error


def read_rows(
    where: str,
    column: str | None,
    rows: Callable[[], Iterable[Row]],
    part: tuple[float, float] = (0.0, 1.0),
    fills_nulls: bool = True,
    read_row: ReadRow = _read_row,
) -> Iterator[Document]:
    """Yield a document per row: the column's text or conversation.

    column: None for the one that messages.find_column() finds in the first row. A null in it
    becomes an empty document.
    part: the share of the source before these rows, and their own.
    fills_nulls: rows have the keys of all rows, with nulls, also within objects.
    """
    share_before, share_of_rows = part
    try:
        for number, (row, share) in enumerate(rows()):
            if not column:
                column = find_column(row)
            if fills_nulls:
                row = _without_nulls(row)
            document = read_row(row, column, number, where)
            if share is not None:
                document.share_read = share_before + share_of_rows * share
            yield document
    except (OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        message = f"{where} cannot be read: {reason[:300]}"
        if isinstance(error, FileNotFoundError | ConnectionError):
            raise MissingData(message) from error
        raise UserError(message) from error


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the nulls within its columns, for keys that only other rows have."""
    return {key: without_nulls(value) for key, value in row.items()}
