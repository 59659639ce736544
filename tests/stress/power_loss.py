"""What a disk may hold after a power failure, computed from a record of all writes (faults.c).

What was synced is there. Of the rest any part may be missing, in any order: writes to a file, and
the names that were made, changed and removed in a folder, because each disk and file system orders
them as it likes.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class File:
    """Its content on the disk, and the changes since the last sync: (offset, data), or (size, None)
    to truncate."""

    content: bytearray = field(default_factory=bytearray)
    pending: list = field(default_factory=list)

    def sync(self, keeps=lambda: True):
        for offset, data in self.pending:
            if not keeps():
                continue
            if data is None:
                self.content = self.content[:offset].ljust(offset, b"\0")
            else:
                self.content = self.content.ljust(offset, b"\0")
                self.content[offset : offset + len(data)] = data
        self.pending = []


@dataclass
class Folder:
    """Its entries on the disk, and the changes since the last sync: the names that go, and the
    entries that come."""

    entries: dict = field(default_factory=dict)
    now: dict = field(default_factory=dict)  # with all changes
    pending: list = field(default_factory=list)

    def change(self, removed, added):
        _apply(self.now, removed, added)
        self.pending.append((removed, added))

    def sync(self, keeps=lambda: True):
        for removed, added in self.pending:
            if keeps():
                _apply(self.entries, removed, added)
        self.pending = []


def _apply(entries, removed, added):
    for name in removed:
        entries.pop(name, None)
    entries.update(added)


def read_record(path):
    """The operations in a record: (kind, path, other path, offset, data)."""
    content, position, operations = path.read_bytes(), 0, []
    while position < len(content):
        end = content.index(b"\n", position)
        kind, name, other, offset, size = content[position:end].decode().split("\t")
        position = end + 1 + int(size)
        operations.append((kind, name, other, int(offset), content[end + 1 : position]))
    return operations


class Disk:
    """The files below `root`, which is empty at first."""

    def __init__(self, root):
        self.root, self.top = Path(root), Folder()

    def find(self, path):
        """The folder that `path` lies in, its name there and, if it exists now, the file or
        folder."""
        folder, parts = self.top, Path(path).relative_to(self.root).parts
        if not parts:
            return None, "", self.top
        for part in parts[:-1]:
            folder = folder.now[part]
        return folder, parts[-1], folder.now.get(parts[-1])

    def do(self, kind, path, other, offset, data):
        folder, name, found = self.find(path)
        if kind in ("create", "mkdir") and folder is not None:
            folder.change([], {name: File() if kind == "create" else Folder()})
        elif kind == "write":
            found.pending.append((offset, data))
        elif kind == "truncate":
            found.pending.append((offset, None))
        elif kind == "remove":
            folder.change([name], {})
        elif kind == "rename":
            other_folder, other_name, _ = self.find(other)
            assert other_folder is folder, "a rename between folders"
            folder.change([name], {other_name: found})
        elif kind == "sync":
            found.sync()

    def lose_power(self, rng, share):
        """Each change that is not synced yet is on the disk with a probability of `share`."""
        todo, seen = [self.top], set()
        while todo:
            each = todo.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, Folder):
                each.sync(lambda: rng.random() < share)
                todo += each.entries.values()
            else:
                each.sync(lambda: rng.random() < share)

    def write(self, folder=None, place=None):
        """Make the files on the disk real, below `root`."""
        folder, place = folder or self.top, place or self.root
        place.mkdir(parents=True, exist_ok=True)
        for name, entry in folder.entries.items():
            if isinstance(entry, Folder):
                self.write(entry, place / name)
            else:
                (place / name).write_bytes(entry.content)


def crash(operations, root, number, seed=0, shares=(0.0, 0.2, 0.5, 0.8, 1.0)):
    """Write below `root` what the disk may hold if power fails after `number` operations."""
    disk = Disk(root)
    for operation in operations[:number]:
        disk.do(*operation)
    rng = random.Random(seed)
    disk.lose_power(rng, rng.choice(shares))
    disk.write()
