"""The steps that an offline file of wandb has.

wandb collects what it writes, so a killed process leaves a file without its newest steps.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from thinker.runtime.errors import UserError

# The file is a log as LevelDB writes it: after a header, blocks of records. A record is split into
# parts where it does not fit into a block.
MAGIC = b":W&B"
HEADER_BYTES = 7
BLOCK_BYTES = 32768
PART_HEADER_BYTES = 7  # a checksum, the size (2 bytes) and the kind (1 byte)
WHOLE, LAST = 1, 4  # kinds


def last_written_step(folder: Path, run_id: str) -> int:
    """The last step in the offline logs of a wandb run; -1 if there is none.

    Raises UserError if a log cannot be read.
    """
    steps = [-1]
    for path in folder.glob(f"offline-run-*-{run_id}/*.wandb"):
        steps += _steps(path)
    return max(steps)


def _steps(path: Path) -> Iterator[int]:
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    try:
        for content in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                yield _step(record.history)
    except (OSError, ValueError, DecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _step(history: "wandb_internal_pb2.HistoryRecord") -> int:  # noqa: F821
    for item in history.item:
        if "_step" in (item.key, *item.nested_key):
            return int(json.loads(item.value_json))
    return history.step.num


def _records(content: bytes) -> Iterator[bytes]:
    """The complete records of a log, whose last one may be cut."""
    if content[: len(MAGIC)] != MAGIC:
        raise ValueError("it is no log of wandb")
    position = HEADER_BYTES
    record = b""
    while position + PART_HEADER_BYTES <= len(content):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < PART_HEADER_BYTES:  # padding
            position += left_in_block
            continue
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        position += PART_HEADER_BYTES
        record += content[position : position + size]
        position += size
        if position > len(content):
            return
        if kind in (WHOLE, LAST):
            yield record
            record = b""
