"""Compressed files are read as what they contain, and files of other formats are named."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import shutil
import subprocess
import tarfile
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.text.sources import open_source
from thinker.runtime.errors import UserError

TEXT = "".join(f"line {i * 7919 % 1000} of the café\r\n" for i in range(3000))
ROWS = [{"text": line} for line in TEXT.splitlines()]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def zip_of(*contents):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        for number, content in enumerate(contents):
            archive.writestr(f"folder/{number}.txt", content)
        archive.writestr("__MACOSX/folder/._0.txt", b"\0\5")  # what macOS adds
    return file.getvalue()


def zstd(data):
    return pyarrow.compress(data, "zstd", asbytes=True)


def skippable(data):
    """A frame that decompressors skip (RFC 8878, section 3.1.2)."""
    return (0x184D2A50).to_bytes(4, "little") + len(data).to_bytes(4, "little") + data


def halves(compress):
    """Two frames or members, one after the other, as parallel compressors write."""
    return lambda data: compress(data[:999]) + compress(data[999:])


def parallel_zstd(data):
    """As pzstd: a skippable frame before each frame says how long that is."""
    frames = [zstd(data[:999]), zstd(data[999:])]
    return b"".join(skippable(len(frame).to_bytes(4, "little")) + frame for frame in frames)


COMPRESS = {
    "plain": bytes,
    "gz": gzip.compress,
    "gz members": halves(gzip.compress),
    "bz2": bz2.compress,
    "bz2 streams": halves(bz2.compress),
    "xz": lzma.compress,
    "xz streams": halves(lzma.compress),
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "zip": zip_of,
    "zst": zstd,
    "zst frames": halves(zstd),
    "pzstd": parallel_zstd,
}


def texts(source, path):
    return [document.text for document in open_source(source, path=str(path)).documents()]


@pytest.mark.parametrize("form", COMPRESS)
def test_a_compressed_text_is_its_text(tmp_path, form):
    """Also the split, whose place depends on the length of the text."""
    path = tmp_path / "a.txt"
    path.write_bytes(COMPRESS[form](TEXT.encode()))
    assert "".join(texts("text", path)) == TEXT
    assert open_source("text", path=str(path)).n_bytes == len(TEXT.encode())
    options = {"tokenizer": "byte", "cache_dir": tmp_path / "cache", "progress": False}
    corpus = prepare_corpus(source="text", path=str(path), val_fraction=0.1, **options)
    assert corpus.val.n_bytes == pytest.approx(len(TEXT.encode()) * 0.1, abs=2)
    assert corpus.train.n_bytes + corpus.val.n_bytes == len(TEXT.encode())


@pytest.mark.parametrize("form", COMPRESS)
def test_compressed_rows_are_rows(tmp_path, form):
    path = tmp_path / "a.jsonl"
    path.write_bytes(COMPRESS[form](LINES.encode()))
    documents = list(open_source("jsonl", path=str(path)).documents())
    assert [document.text for document in documents] == [row["text"] for row in ROWS]
    shares = [document.share_read for document in documents]
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] <= 1
    assert shares[-1] > 0.9  # an archive ends with a list of its files


def test_a_folder_may_hold_files_compressed_in_any_way(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "texts").mkdir()
    names = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zip": zip_of,
        "zst": zstd,
    }
    for name, compress in names.items():
        row = json.dumps({"text": name}).encode()
        (tmp_path / "rows" / f"a.jsonl.{name}").write_bytes(compress(row))
        (tmp_path / "rows" / f"b.json.{name}").write_bytes(compress(row))
        (tmp_path / "texts" / f"a.txt.{name}").write_bytes(compress(name.encode()))
    assert texts("jsonl", tmp_path / "rows") == 2 * sorted(names)
    assert texts("text", tmp_path / "texts") == sorted(names)


@pytest.mark.parametrize("command", ["pzstd", "zstd", "bzip2", "xz", "gzip", "pigz", "pbzip2"])
def test_what_the_commands_write_is_read(tmp_path, command):
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    (tmp_path / "a.jsonl").write_text(LINES)
    with open(tmp_path / "a.jsonl") as plain, open(tmp_path / "b.jsonl", "wb") as compressed:
        subprocess.run([command, "-c"], stdin=plain, stdout=compressed, check=True)
    assert (tmp_path / "b.jsonl").stat().st_size < len(LINES) / 2
    assert texts("jsonl", tmp_path / "b.jsonl") == [row["text"] for row in ROWS]


@pytest.mark.parametrize("form", [form for form in COMPRESS if form not in ("plain", "lzma")])
def test_no_cut_file_is_taken_for_a_whole_one(tmp_path, form):
    whole = COMPRESS[form](LINES.encode())
    whole_parts = set()  # there, the file is whole, though shorter
    if " " in form:
        whole_parts = {len(COMPRESS[form.split()[0]](LINES.encode()[:999]))}
    if form == "pzstd":
        first = len(zstd(LINES.encode()[:999]))
        whole_parts = {12, 12 + first, 24 + first}
    last = range(len(whole) - 8, len(whole))
    cuts = {*range(10, 40), *range(40, len(whole), len(whole) // 40), *last}
    path = tmp_path / "a.jsonl"
    for cut in sorted(cuts - whole_parts):
        path.write_bytes(whole[:cut])
        for source in ("jsonl", "text"):
            with pytest.raises(UserError, match="cannot be read: |is a zip archive|is not UTF-8"):
                texts(source, path.rename(tmp_path / "a") if source == "text" else path)
        (tmp_path / "a").rename(path)


def test_a_damaged_archive_gives_its_text_or_an_error(tmp_path):
    for form in ("gz", "bz2", "xz", "zip", "zst"):
        whole = COMPRESS[form](TEXT[:300].encode())
        for position in range(len(whole)):
            changed = whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :]
            (tmp_path / "a.txt").write_bytes(changed)
            with contextlib.suppress(UserError):
                found = "".join(texts("text", tmp_path / "a.txt"))
                if form != "zst":  # without a checksum, as pyarrow and pzstd write it
                    assert found in (TEXT[:300], "")


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def tar_of(content):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def parquet():
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), file)
    return file.getvalue()


def lz4(data):
    stream = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(stream, "lz4") as compressed:
        compressed.write(data)
    return stream.getvalue().to_pybytes()


OTHERS = {  # content, and what the error says
    "npy": (npy(np.arange(9)), "is a NumPy array"),
    "parquet": (parquet(), "is a Parquet file; set data.source=parquet"),
    "lz4": (lz4(LINES.encode()), "is compressed with LZ4; unpack it"),
    "tar": (tar_of(b"text"), "is a tar archive; unpack it"),
    "tar.gz": (gzip.compress(tar_of(b"text")), "is a tar archive; unpack it"),
    "two": (zip_of(b"a", b"b"), "is a zip archive of 2 files; unpack it"),
    "empty": (zip_of(), "is a zip archive of 0 files; unpack it"),
    "npz": (zip_of(npy(np.arange(9))), "is a NumPy array"),
    "twice": (gzip.compress(bz2.compress(b"text")), "is compressed twice; unpack it"),
    "pdf": (b"%PDF-1.7\n\xe2\xe3", "is a PDF document"),
    "png": (b"\x89PNG\r\n\x1a\n", "is a PNG image"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\4", "is a 7z archive; unpack it"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_another_format_is_named(tmp_path, source, name):
    content, message = OTHERS[name]
    path = tmp_path / f"a.{name}"
    path.write_bytes(content)
    if (source, name) == ("parquet", "parquet"):
        assert texts(source, path) == ["a", "b"]
        return
    with pytest.raises(UserError) as caught:
        texts(source, path)
    assert f"a.{name}" in str(caught.value)
    assert "iconv" not in str(caught.value)
    assert "\n" not in str(caught.value)
    if source != "parquet" or name not in ("tar.gz", "two", "empty", "npz", "twice"):
        assert message in str(caught.value)


@pytest.mark.parametrize("form", ["plain", "gz", "zip"])
def test_rows_are_not_parquet(tmp_path, form):
    (tmp_path / "a").write_bytes(COMPRESS[form](LINES.encode()))
    with pytest.raises(UserError, match="is not a Parquet file|is compressed|is a zip archive"):
        texts("parquet", tmp_path / "a")


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL.gz", "a.ndjson", "a.jsonl.zst"])
def test_rows_are_not_trained_on_as_text(tmp_path, name):
    """Those who want the JSON itself can have it, under another name."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("text")
    for path in (tmp_path / name, tmp_path / "folder" / name):
        path.write_text(LINES)
        with pytest.raises(UserError, match=r"set data.source=jsonl .*rename it to .*\.txt"):
            open_source("text", path=str(path.parent if "folder" in str(path) else path))
    assert texts("text", (tmp_path / name).rename(tmp_path / "b.txt")) == [LINES]


@pytest.mark.parametrize("form", ["plain", "gz"])
def test_rows_under_another_name_are_noticed(tmp_path, form, capsys):
    (tmp_path / "a.txt").write_bytes(COMPRESS[form](LINES.encode()))
    source = open_source("text", path=str(tmp_path / "a.txt"))
    for _ in range(2):
        assert "".join(document.text for document in source.documents()) == LINES
    message = "has rows of JSON, which are read as text; data.source=jsonl reads the texts in them"
    assert capsys.readouterr().err == f"data.path: {tmp_path / 'a.txt'} {message}\n"
    for content in ('{"name": "package"}', '{"a": 1}\nText.\n', TEXT):
        (tmp_path / "b.txt").write_text(content)
        texts("text", tmp_path / "b.txt")
    assert capsys.readouterr().err == ""
