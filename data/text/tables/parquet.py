"""Rows of a parquet file."""

import os
from collections.abc import Iterator
from typing import Any

from thinker.data.text.files.compressed_files import check_parquet


def read_rows(path: str) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the rows of a file, each with the share of rows up to it.

    An empty file has no rows. Raises ValueError for other files, and errors of
    pyarrow.
    """
    from pyarrow.parquet import ParquetFile

    if os.path.getsize(path) == 0:
        return
    with open(path, "rb") as plain:
        check_parquet(plain)
    with ParquetFile(path) as table:
        number = 0
        total = table.metadata.num_rows
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield row, number / total
