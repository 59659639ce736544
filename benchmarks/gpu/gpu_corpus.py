"""A corpus from packages of Debian for a machine without a network: tokenized and compressed.

`apt-get download linux-source-6.1 perl-doc python3.11-doc git-doc anarchism` fetches the packages
without installing them. Their text is prose (manuals, documentation of the kernel, an FAQ), then C
files up to `--megabytes`. The same packages give the same bytes. `unpack_corpus()` makes the folder
that `data.source=tokens` reads.
"""

import argparse
import gzip
import hashlib
import io
import json
import lzma
import math
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from thinker.data.corpus.corpus import prepare_corpus
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write
from thinker.runtime.process.progress import Progress
from thinker.runtime.reading import read_json, sha256_of_file

PACKAGES = ("linux-source-6.1", "perl-doc", "python3.11-doc", "git-doc", "anarchism")
PROSE = (".rst", ".txt", ".pod", ".md")
CODE = (".c", ".h")
MIN_CHARS = 500
MAX_CHARS = 200_000  # longer files are tables of registers
MANIFEST = "manifest.json"
AR_MAGIC = b"!<arch>\n"
AR_HEADER = 60  # bytes before each member
# Tokens have two bytes, so what precedes a byte by two matters.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 3, "lp": 1, "pb": 1}]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--packages", type=Path, required=True, metavar="DIR", help="folder with the .deb files"
    )
    parser.add_argument(
        "--names", default=",".join(PACKAGES), metavar="NAME,...", help="packages to read"
    )
    parser.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="folder to write, not there yet"
    )
    parser.add_argument("--megabytes", type=float, default=200.0, help="size of the text")
    parser.add_argument("--vocabulary", type=int, default=16384, help="tokens of the vocabulary")
    parser.add_argument(
        "--val-fraction", type=float, default=0.02, help="share of documents held out"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the packages, tokenize their text, compress the tokens. Returns the manifest."""
    if arguments.folder.exists():
        raise UserError(f"--folder {arguments.folder} exists; remove it, or choose another one")
    if not 0 < arguments.megabytes < math.inf:
        raise UserError(f"--megabytes is {arguments.megabytes}; use a positive number")
    packages = find_packages(arguments.packages, arguments.names.split(","))
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "documents.jsonl"
        counts = write_documents(packages, rows, int(arguments.megabytes * 1e6))
        corpus = prepare_corpus(
            source="jsonl",
            path=str(rows),
            tokenizer=f"bpe:{arguments.vocabulary}",
            val_fraction=arguments.val_fraction,
            cache_dir=Path(scratch) / "cache",
        )
        arguments.folder.mkdir(parents=True)
        compress_corpus(corpus.folder, arguments.folder)
    manifest = {
        "packages": {path.name: sha256_of_file(path) for path in packages},
        **counts,
        "vocabulary": corpus.tokenizer.vocab_size,
        "train_tokens": corpus.train.n_tokens,
        "val_tokens": corpus.val.n_tokens,
        "train_documents": corpus.train.n_documents,
        "val_documents": corpus.val.n_documents,
        "bytes": corpus.train.n_bytes + corpus.val.n_bytes,
        "sha256": corpus.sha256,
    }
    sizes = {path.name: path.stat().st_size for path in sorted(arguments.folder.iterdir())}
    manifest["compressed_bytes"] = sum(sizes.values())
    manifest["files"] = {name: sha256_of_file(arguments.folder / name) for name in sizes}
    atomic_write(arguments.folder / MANIFEST, json.dumps(manifest, indent=1))
    return manifest


def find_packages(folder: Path, names: list[str]) -> list[Path]:
    """The file of each package, in the order of the names. Raises UserError for missing ones."""
    found = []
    missing = []
    for name in names:
        files = sorted(folder.glob(f"{name}_*.deb"))
        if files:
            found.append(files[-1])
        else:
            missing.append(name)
    if missing:
        command = f"apt-get download {' '.join(missing)}"
        raise UserError(f"{folder} lacks {', '.join(missing)}; run `{command}` there")
    return found


def write_documents(packages: list[Path], rows: Path, max_bytes: int) -> dict[str, int]:
    """Write a row per document: prose, then code, each in the order of hashes, up to `max_bytes`.

    Equal documents are written once. Returns how many there are of each kind.
    """
    found = {"prose": Documents(max_bytes), "code": Documents(max_bytes)}
    for package in packages:
        bar = Progress(read_package(package), desc=package.name, unit=" files", mininterval=1.0)
        for name, data in bar:
            kind = "prose" if name.endswith(PROSE) else "code"
            found[kind].add(data)
    counts = {"prose": 0, "code": 0}
    n_bytes = 0
    with rows.open("w", encoding="utf-8") as file:
        for kind, documents in found.items():
            for _, data in sorted(documents.by_hash.items()):
                n_bytes += len(data)
                if n_bytes > max_bytes:
                    return counts
                file.write(json.dumps({"text": data.decode()}) + "\n")
                counts[kind] += 1
    return counts


def order_of(data: bytes) -> str:
    """The key by which documents are sorted: a hash that is independent of the one that splits
    them."""
    return hashlib.sha256(b"order" + data).hexdigest()


class Documents:
    """Different documents, of which only those with the lowest hashes are kept if they are more
    than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.by_hash: dict[str, bytes] = {}
        self.n_bytes = 0

    def add(self, data: bytes) -> None:
        """Keep a document, unless it is there."""
        key = order_of(data)
        if key in self.by_hash:
            return
        self.by_hash[key] = data
        self.n_bytes += len(data)
        if self.n_bytes > 2 * self.max_bytes:
            self._drop()

    def _drop(self) -> None:
        kept: dict[str, bytes] = {}
        self.n_bytes = 0
        for key, data in sorted(self.by_hash.items()):
            if self.n_bytes > self.max_bytes:
                break
            kept[key] = data
            self.n_bytes += len(data)
        self.by_hash = kept


def read_package(path: Path) -> Iterator[tuple[str, bytes]]:
    """The texts in a package: (name without ".gz", UTF-8), of documents of a useful length."""
    with path.open("rb") as file:
        data, name = open_data(file, path)
        yield from read_tar(data, name)


def open_data(file: BinaryIO, path: Path) -> tuple[BinaryIO, str]:
    """The archive data.tar.* in a package, which is an archive of `ar`. Raises UserError."""
    if file.read(len(AR_MAGIC)) != AR_MAGIC:
        raise UserError(f"{path} is not a package of Debian; download it again")
    while header := file.read(AR_HEADER):
        if len(header) < AR_HEADER:
            break
        name = header[:16].decode().strip().rstrip("/")
        size = int(header[48:58])
        if name.startswith("data.tar"):
            data = file.read(size)
            if len(data) < size:
                raise UserError(f"{path} is not complete; download it again")
            return io.BytesIO(data), name
        file.seek(size + size % 2, io.SEEK_CUR)
    raise UserError(f"{path} has no data.tar; download it again")


def read_tar(archive: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """The texts in an archive, and in archives in it. Raises UserError for one that is damaged."""
    try:
        with tarfile.open(fileobj=archive, mode="r|*") as opened:
            yield from read_members(opened)
    except (tarfile.ReadError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{name} cannot be read: {error}") from error


def read_members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """See read_tar()."""
    for member in archive:
        if not member.isfile():
            continue
        file = archive.extractfile(member)
        if ".tar." in member.name:
            yield from read_tar(file, member.name)
            continue
        text_name = member.name.removesuffix(".gz")
        if not text_name.endswith(PROSE + CODE):
            continue
        data = file.read()
        if member.name.endswith(".gz"):
            data = gzip.decompress(data)
        if is_text(data):
            yield text_name, data


def is_text(data: bytes) -> bool:
    """Whether it is UTF-8 of a useful length."""
    try:
        return MIN_CHARS <= len(data.decode()) <= MAX_CHARS
    except UnicodeDecodeError:
        return False


def compress_corpus(source: Path, target: Path) -> None:
    """Copy the folder of a corpus, with compressed tokens."""
    for path in sorted(source.iterdir()):
        if path.suffix == ".tokens":
            packed = target / f"{path.name}.xz"
            with path.open("rb") as tokens, lzma.open(packed, "wb", filters=FILTERS) as file:
                shutil.copyfileobj(tokens, file, 1 << 20)
        else:
            shutil.copyfile(path, target / path.name)


def unpack_corpus(packed: Path, folder: Path) -> dict[str, Any]:
    """Write what data.source=tokens reads. Returns the manifest.

    Raises UserError for a folder that gpu_corpus has not written.
    """
    if not (packed / MANIFEST).is_file():
        raise UserError(f"{packed} has no {MANIFEST}; use a folder that gpu_corpus has written")
    manifest = read_json(packed / MANIFEST, UserError)
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in manifest["files"].items():
        path = packed / name
        if not path.is_file() or sha256_of_file(path) != digest:
            raise UserError(f"{path} is damaged or missing; copy {packed} again")
        if path.suffix == ".xz":
            with lzma.open(path) as tokens, (folder / path.stem).open("wb") as file:
                shutil.copyfileobj(tokens, file, 1 << 20)
        else:
            shutil.copyfile(path, folder / name)
    return manifest
