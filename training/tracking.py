"""Weights & Biases, when asked for. metrics.jsonl is written in any case, by the loop."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinker.checkpoint.run_directory import RunDirectory, replace_file
from thinker.runtime.errors import UserError
from thinker.training.config import Config

BLOCK, HEAD = 32768, 7  # of an offline file: bytes of a block, and of the header of a part of a record


class Tracker:
    """A run in wandb that goes on under the same id when the training is resumed; nothing at all when disabled.

    What was sent cannot be taken back, and what a killed process had not sent yet is lost to wandb. So a new process
    first looks how far wandb has come, sends what metrics.jsonl holds beyond, and of what is made again only the rest.
    """

    def __init__(self, config: Config, run: RunDirectory, run_id: str | None) -> None:
        """`run_id` is that of the earlier part of a resumed run, None for a new one. metrics.jsonl is cut already.

        Raises UserError where wandb is missing or cannot be reached.
        """
        self.run: Any = None
        self.sent = -1  # the last step that wandb has
        self.held: dict[str, Any] = {}  # of the step that may get another line; wandb takes a step once
        section, path = config.tracking, run.path / "tracking.json"
        if section.wandb == "disabled":
            return
        try:
            import wandb
        except ImportError as error:
            raise UserError("tracking.wandb needs the package wandb: pip install wandb, or disabled") from error
        run_id = run_id or _read_id(path) or secrets.token_hex(4)
        replace_file(path, json.dumps({"wandb_id": run_id}) + "\n")  # a checkpoint may be far off yet
        if section.wandb == "offline":
            files = run.path.glob(f"wandb/*-{run_id}/*.wandb")
            self.sent = max((step for file in files for step in _steps(file)), default=-1)
        try:
            self.run = wandb.init(
                project=section.project,
                name=section.name or run.path.name,
                id=run_id,
                resume="allow",
                mode=section.wandb,
                dir=str(run.path),
                config=config.model_dump(),
                settings=wandb.Settings(console="off", silent=section.wandb == "offline"),
            )
        except (wandb.Error, wandb.errors.CommError, wandb.errors.UsageError) as error:
            raise UserError(f"wandb cannot start: {error}; tracking.wandb=offline needs no account") from error
        if section.wandb == "online" and self.run.resumed:
            self.sent = self.run.starting_step - 1
        for line in run.read_metrics():
            self.log(line)

    @property
    def run_id(self) -> str | None:
        """The id to hand in when the run goes on."""
        return self.run.id if self.run else None

    def log(self, line: dict[str, Any]) -> None:
        """Send one line of metrics.jsonl under its step, unless wandb has that step."""
        if self.run and line["step"] > self.sent:
            if line["step"] != self.held.get("step"):
                self._send()
            self.held |= line

    def finish(self, whole: bool = True) -> None:
        """Send what is still on its way and end; the last step only if it is whole, not one whose evaluation is due."""
        if self.run:
            if whole:
                self._send()
            self.run.finish()

    def _send(self) -> None:
        if self.held:
            self.run.log({key: value for key, value in self.held.items() if key != "step"}, step=self.held["step"])
        self.held = {}


def _read_id(path: Path) -> str | None:
    """The id under which this run was tracked before; None where it was not, or the file is no longer whole."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["wandb_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _steps(path: Path) -> Iterator[int]:
    """The steps in a file that wandb wrote, up to where it was cut off."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(path.read_bytes()):
        record = Record()
        try:
            record.ParseFromString(data)
        except DecodeError:
            return
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "".join(item.nested_key): item.value_json for item in record.history.item}
            yield int(items.get("_step", record.history.step.num))


def _records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, behind wandb's own 7 bytes: blocks, each record perhaps in parts."""
    at, record = HEAD, b""
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:  # no header fits: padding
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4) and at <= len(data):  # whole, or its last part
            yield record
            record = b""
