"""Documents from the rows of tables: JSON and Parquet files, and datasets of Hugging Face."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from thinker.data.text import jsonl, parquet
from thinker.data.text.document import BEGIN, Document, MissingData, Start
from thinker.data.text.messages import PAIR, check_messages, find_column, join_pair
from thinker.runtime.constants import FULL_DISK
from thinker.runtime.errors import UserError, did_you_mean

Row = tuple[
    dict[str, Any], float | None
]  # a row, and the share of the file that has been read, if known
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
READERS = {"jsonl": jsonl.read_rows, "parquet": parquet.read_rows}


def read_tables(
    source: str, files: list[str], column: str | None, start: Start = BEGIN
) -> Iterator[Document]:
    """Yield a document per row of some files, one file at a time because their other columns may differ."""
    sizes = [os.path.getsize(file) for file in files]
    total = max(sum(sizes), 1)
    first, n_before = start[1] or (0, 0)  # a file, and the number of its rows to skip
    for number, file in list(enumerate(files))[first:]:
        part = sum(sizes[:number]) / total, sizes[number] / total
        documents = read_rows(f"data.path={file}", column, partial(READERS[source], file), part)
        for row, document in enumerate(documents):
            document.position = number, row
            if number > first or row >= n_before:
                yield document


def read_dataset(
    path: str,
    config: str | None,
    split: str | None,
    column: str | None,
    streaming: bool,
    start: Start = BEGIN,
) -> Iterator[Document]:
    """Yield a document per row of a dataset on the hub, of a folder of data files, or of one that `datasets` saved."""
    positions: list[Any] = []  # of the row that is being read
    rows = partial(_load_rows, path, config, split, streaming, start, positions)
    for document in read_rows(f"data.path={path}", column, rows):
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

    positions: receives the position of each row as its last element: a state of the dataset, and the number of rows to
    skip after it. None if the dataset is not streamed.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we report its errors
    datasets.disable_progress_bars()
    is_saved = any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    n_after = 0  # rows since the last state of the dataset
    try:
        loaded = _load_saved(path) if is_saved else None
        if isinstance(loaded, datasets.DatasetDict):
            names, split = list(loaded), split or "train"
            if split not in names:
                raise ValueError(
                    f"it has no split {split}; set data.split to one of {', '.join(names)}"
                )
            loaded = loaded[split]
        elif is_saved and split not in (None, str(loaded.split)):
            raise ValueError(f"it has only the split {loaded.split}; remove data.split={split}")
        if is_saved and config is not None:
            raise ValueError(f"data.config={config} has no effect on a saved dataset; remove it")
        if loaded is None:
            loaded = datasets.load_dataset(
                path, config, split=split or "train", streaming=streaming
            )
        if not hasattr(loaded, "load_state_dict"):
            positions.append(None)
            rest = loaded.select(range(start[0], len(loaded))) if start[0] else loaded
            for number, row in enumerate(rest, start[0] + 1):
                yield row, number / len(loaded)
            return
        known = (loaded.info.splits or {}).get(split or "train")
        total, number = known and known.num_examples, start[0]
        state, n_skipped = start[1] or (loaded.state_dict(), start[0])
        if start[1] is not None:
            loaded.load_state_dict(state)
        for row in loaded:
            positions[:] = [(state, n_after)]
            n_after += 1
            if n_skipped:
                n_skipped -= 1
                continue
            number += 1
            yield row, min(number / total, 1.0) if total else None
            if n_after >= STATE_ROWS:
                state, n_after = loaded.state_dict(), 0
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(str(error) or type(error).__name__) from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        if start[1] is None or n_after:
            raise
        raise ValueError(
            "the library datasets does not understand the position that it has reported"
        ) from error
    except Exception as error:  # those of the network libraries have no common class
        if type(error).__module__.partition(".")[0] not in NETWORK_LIBRARIES:
            raise
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


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
) -> Iterator[Document]:
    """Yield a document per row: the column's text or conversation. A null becomes an empty document.

    column: None for the one that messages.find_column() finds in the first row.
    part: the share of the source before these rows, and their own.
    """
    try:
        for number, (row, share) in enumerate(rows()):
            share_read = None if share is None else part[0] + part[1] * share
            column = column or find_column(row)
            row_name = f"data.column={column}: row {number} of {where}"
            if column == PAIR:
                text = join_pair(row, f"row {number} of {where}")
            elif column in row:
                text = row[column]
            else:
                hint = did_you_mean(column, row) if number == 0 else ""  # earlier rows have it
                if {"role", "content"} <= row.keys():
                    hint = '; write each conversation as {"messages": [{"role": ..., "content": ...}, ...]}'
                raise UserError(
                    f"data.column={column} is not in row {number} of {where} (has {', '.join(row)}){hint}"
                )
            if isinstance(text, list):
                messages = check_messages(text, row_name)
                yield Document(
                    json.dumps(messages, ensure_ascii=False), None, messages, row_name, share_read
                )
            elif text is None or isinstance(text, str):
                yield Document(text or "", share_read=share_read)
            else:
                raise UserError(f"{row_name} is {type(text).__name__}, not text")
    except (OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        kind = MissingData if isinstance(error, FileNotFoundError | ConnectionError) else UserError
        raise kind(f"{where} cannot be read: {reason[:300]}") from error
