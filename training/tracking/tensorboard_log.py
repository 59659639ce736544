"""The steps that event files of TensorBoard have.

A process that is killed leaves a file without the newest steps, and maybe with half an event.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

# A file is a list of records: the size of the content, a checksum, the content, a checksum.
SIZE = struct.Struct("<Q")
CHECKSUM_BYTES = 4


def event_files(folder: Path) -> list[Path]:
    """The event files of a run, in the order in which TensorBoard reads them."""
    return sorted(folder.glob("events.out.tfevents.*"))


def last_scalar_step(folder: Path) -> int:
    """The last step that has a scalar; -1 if there is none."""
    last = -1
    for path in event_files(folder):
        for event in _events(path):
            if event.HasField("session_log"):  # a run went on here: earlier files end before it
                last = min(last, event.step - 1)
            elif any(value.HasField("simple_value") for value in event.summary.value):
                last = max(last, event.step)
    return last


def _events(path: Path) -> "Iterator[Event]":
    """The complete events of a file. A damaged file ends where the damage begins."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    content = path.read_bytes()
    position = 0
    while position + SIZE.size <= len(content):
        (size,) = SIZE.unpack_from(content, position)
        start = position + SIZE.size + CHECKSUM_BYTES
        position = start + size + CHECKSUM_BYTES
        if position > len(content):
            return
        try:
            yield Event.FromString(content[start : start + size])
        except DecodeError:
            return
