"""Hostile files end in one line or lose nothing, and no part of a corpus is taken for a whole
one."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, run_script

from thinker.data.corpus.corpus import prepare_corpus

ROWS = [{"text": f"document number {i} of the file"} for i in range(200)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
SMALL = ["data.tokenizer=byte", "data.max_documents=null", "data.seq_len=16", "data.val_fraction=0.1",
         "model.d_model=16", "model.n_layers=1", "model.n_heads=1", "train.max_steps=2", "train.device=cpu",
         "train.eval_sequences=2", "train.precision=fp32"]  # fmt: skip

HOSTILE = {  # by name: source, content, part of the message
    "truncated.jsonl.zst": (
        "jsonl",
        pyarrow.compress(LINES, "zstd", asbytes=True)[:-9],
        "Truncated compressed stream",
    ),
    "truncated.jsonl.gz": ("jsonl", gzip.compress(LINES)[:-12], "cannot be read: line"),
    "mixed.jsonl": (
        "jsonl",
        LINES + '{"text": "é"}\n'.encode("latin-1"),
        "line 201 is not UTF-8 text",
    ),
    "mixed.txt": (
        "text",
        LINES + "é".encode("latin-1") + b" more",
        "is not UTF-8 text (byte 0xe9)",
    ),
    "utf16.txt": ("text", LINES.decode().encode("utf-16"), "is not UTF-8 text"),
    "nulls.jsonl": ("jsonl", LINES[:999] + bytes(5000) + LINES, "is not valid JSON"),
    "half.jsonl": ("jsonl", LINES + b'{"text": "hal', "line 201 is not valid JSON"),
    "column.jsonl": ("jsonl", LINES + b'{"body": "x"}\n', "data.column=text is not in row 200 of"),
    "number.jsonl": ("jsonl", LINES + b'{"text": 7}\n', "row 200 of data.path="),
    "list.jsonl": ("jsonl", LINES + b"[1, 2]\n", "the row is int, not an object"),
    "cut.parquet": ("parquet", None, "cannot be read"),
    "folder.jsonl": (
        "jsonl",
        LINES + b'{"text": "a"}{"text": "b"}\n',
        "line 201 is not valid JSON",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_in_one_line_and_leaves_no_corpus(tmp_path, name):
    """The next start says the same, and the mended file works."""
    source, content, message = HOSTILE[name]
    path = tmp_path / name
    if content is None:
        pyarrow.parquet.write_table(pyarrow.table({"text": [row["text"] for row in ROWS]}), path)
        content = path.read_bytes()[:-40]
    path.write_bytes(content)
    places = [f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={tmp_path / 'run'}"]
    command = [ROOT / "train.py", ROOT / "tests/fixtures/base.yaml", *SMALL, *places]
    for _ in range(2):
        done = run_script(*command, f"data.source={source}", f"data.path={path}")
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert (done.returncode, len(errors)) == (2, 1), done.stderr
        assert message in errors[0]
        assert "Traceback" not in done.stderr
        assert list((tmp_path / "cache" / "tokens").iterdir()) == []
        assert not (tmp_path / "run").exists()
    path.write_bytes(LINES)
    done = run_script(
        *command, f"data.source={'text' if source == 'text' else 'jsonl'}", f"data.path={path}"
    )
    assert done.returncode == 0, done.stderr


def test_many_empty_documents_lose_nothing(tmp_path, capfd):
    """100,000 of them, among which are two hundred with text."""
    empty = [b'{"text": ""}\n', b'{"text": null}\n']
    lines = [empty[i % 2] for i in range(100_000)]
    for i, line in enumerate(LINES.splitlines(True)):
        lines.insert(i * 500, line)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    options = {
        "tokenizer": "byte",
        "cache_dir": tmp_path / "cache",
        "progress": False,
        "val_fraction": 0.1,
    }
    corpus = prepare_corpus(source="jsonl", path=str(tmp_path / "a.jsonl"), **options)
    assert corpus.train.n_documents + corpus.val.n_documents == 200
    assert capfd.readouterr().err == "skipping 100000 of 100200 documents without text\n"
    assert corpus.train.n_bytes + corpus.val.n_bytes == sum(len(row["text"]) for row in ROWS)


def test_a_single_long_line_is_read_as_a_whole(tmp_path, stress):
    """1 GB with --stress. As JSON, a row of this size is refused."""
    size = 1_000_000_000 if stress else 20_000_000
    piece = b"no end in sight, and yet it goes on; " * 1000
    with open(tmp_path / "a.txt", "wb") as file:
        for _ in range(size // len(piece)):
            file.write(piece)
    options = {
        "tokenizer": "byte",
        "cache_dir": tmp_path / "cache",
        "progress": False,
        "val_fraction": 0.1,
    }
    corpus = prepare_corpus(source="text", path=str(tmp_path / "a.txt"), **options)
    assert corpus.train.n_bytes + corpus.val.n_bytes == size // len(piece) * len(piece)
    assert corpus.train.n_documents == corpus.val.n_documents == 1


def test_null_bytes_in_a_text_are_text(tmp_path):
    text = "a\0b" * 1000 + "\0" * 5000 + "end " * 500
    (tmp_path / "a.txt").write_text(text)
    options = {
        "tokenizer": "byte",
        "cache_dir": tmp_path / "cache",
        "progress": False,
        "val_fraction": 0.1,
    }
    corpus = prepare_corpus(source="text", path=str(tmp_path / "a.txt"), **options)
    ids = [
        *corpus.train.shards[0].tokens[1:-1].tolist(),
        *corpus.val.shards[0].tokens[1:-1].tolist(),
    ]
    assert bytes(ids).decode() == text
