"""Rows of a file, folder, glob or dataset, whichever a path names."""

import glob
import os
import re

from thinker.data.text.sources import Source, SourceOptions
from thinker.data.text.tables.rows import ReadRow, open_hub, open_tables
from thinker.runtime.errors import UserError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".gz", ".zst", ".bz2", ".xz", ".txt", ".csv", ".tsv")
SAVED_DATASET = ("dataset_dict.json", "state.json")


def open_rows(options: SourceOptions, read_row: ReadRow) -> Source:
    """A source of the documents that read_row() makes of rows.

    Raises UserError for options that are only for datasets.
    """
    kind = _kind(options.path)
    if kind == "hub":
        return open_hub(kind, options, read_row)
    for option in ("config", "split", "streaming"):
        if getattr(options, option) is not None:
            raise UserError(
                f"data.{option} has no effect with data.path={options.path}, a file; remove it"
            )
    return open_tables(kind, options, read_row)


def _kind(path: str) -> str:
    """The source that reads the rows of a path: jsonl, parquet or hub."""
    if any(os.path.isfile(os.path.join(path, name)) for name in SAVED_DATASET):
        return "hub"
    pattern = os.path.join(path, "**") if os.path.isdir(path) else path
    files = [file for file in glob.glob(pattern, recursive=True) if os.path.isfile(file)]
    is_parquet = [file.lower().endswith(".parquet") for file in files]
    if any(is_parquet) and not all(is_parquet):
        raise UserError(
            f"data.path={path} has Parquet files and others; choose some with a glob such as "
            "'folder/*.parquet'"
        )
    if any(is_parquet):
        return "parquet"
    is_name = HUB_NAME.fullmatch(path) and not path.lower().endswith(FILE_ENDINGS)
    if not files and is_name:
        return "hub"
    return "jsonl"
