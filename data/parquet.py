"""Rows of a parquet file."""

import os
from collections.abc import Iterator
from typing import Any


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; an empty file has no rows. Raises errors of pyarrow."""
    from pyarrow.parquet import ParquetFile

    if os.path.getsize(path):
        with ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
