"""Rows of JSON files, whole and broken."""

import codecs
import contextlib
import gzip
import json

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinker.data.text.tables import jsonl


def read_rows(path):
    """The rows of a file. The share that has been read is known for each row and never falls."""
    found = list(jsonl.read_rows(str(path)))
    shares = [share for _, share in found]
    assert shares == sorted(shares)
    assert all(0 < share <= 1 for share in shares)
    return [row for row, _ in found]


def zstd(data):
    """Compress in two frames, as parallel compressors do."""
    return b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (data[:9], data[9:]))


TEXT = st.text(st.characters(codec="utf-8"))
ROWS = st.lists(
    st.dictionaries(TEXT, TEXT | st.none() | st.integers() | st.lists(TEXT)), max_size=5
)


@pytest.mark.parametrize(
    "form", ["lines", "array", "indented array", "gzip", "zstd", "byte order mark", "CRLF"]
)
def test_rows_come_back(tmp_path_factory, form):
    @given(rows=ROWS, escaped=st.booleans())
    def check(rows, escaped):
        lines = [json.dumps(row, ensure_ascii=escaped) for row in rows]
        text = {"array": f"[{', '.join(lines)}]", "indented array": json.dumps(rows, indent=1)}.get(
            form
        )
        data = (
            ("\r\n" if form == "CRLF" else "\n").join(lines).encode()
            if text is None
            else text.encode()
        )
        path = tmp_path_factory.mktemp("rows") / "a.jsonl"
        data = {"gzip": gzip.compress, "zstd": zstd}.get(form, bytes)(data)
        path.write_bytes(codecs.BOM_UTF8 + data if form == "byte order mark" else data)
        assert read_rows(path) == rows

    check()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n' + b"[" * 100_000, "line 2: the row is nested too deeply"),
        (
            b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "line 1: the row is nested too deeply",
        ),
        (
            b'{"text": "a"}\n{"text": \n',
            "line 2 is not valid JSON .*; write one object per line, or one array",
        ),
        (b"7\n", "line 1: the row is int, not an object"),
        (b'{"text": "\\ud83d"}\n', "line 1: .*surrogates not allowed"),
        (b"\xff\xfe\x00", "line 1 is not UTF-8 text; convert it, for example with iconv"),
    ],
)
def test_broken_rows_are_named(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "a.json")


def test_an_array_after_empty_lines_and_files_named_wrongly(tmp_path):
    rows = [{"text": "a"}, {"text": "b"}]
    (tmp_path / "a.json").write_text("\n \n" + json.dumps(rows, indent=1))
    (tmp_path / "b.jsonl").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    (tmp_path / "c.jsonl.gz").write_text('{"text": "a"}\n{"text": "b"}\n')
    for name in ("a.json", "b.jsonl", "c.jsonl.gz"):
        assert read_rows(tmp_path / name) == rows


def test_every_cut_and_every_changed_byte_of_a_compressed_file(tmp_path):
    rows = [{"text": f"row {i}"} for i in range(20)]
    whole = gzip.compress("\n".join(map(json.dumps, rows)).encode(), mtime=0)
    path = tmp_path / "a.jsonl.gz"
    for i in range(len(whole)):
        for data in (whole[:i], whole[:i] + bytes([whole[i] ^ 0xFF]) + whole[i + 1 :]):
            path.write_bytes(data)
            with contextlib.suppress(ValueError):
                assert read_rows(path) in (rows, [])  # some bytes of the header do not matter


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl"])
def test_a_truncated_zstd_file_is_named(tmp_path, name):
    """Every cut, and garbage after the last frame; rows before it are read."""
    rows = [{"text": f"row {i} {i * 7919 % 1000}"} for i in range(20)]
    whole = pyarrow.compress("\n".join(map(json.dumps, rows)).encode(), "zstd", asbytes=True)
    for data in [*(whole[:i] for i in range(4, len(whole))), whole + b"garbage"]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(
            ValueError, match="^line [0-9]+: |^Truncated compressed stream|^ZSTD decompress failed"
        ):
            read_rows(tmp_path / name)


def test_a_row_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("thinker.data.text.tables.jsonl.MAX_ROW_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text('{"text": "' + "a" * 2000)
    with pytest.raises(ValueError, match="line 1: the row is longer than"):
        read_rows(tmp_path / "a.jsonl")
