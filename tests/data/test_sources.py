"""Sources: what each gives, what changes its key, and what it refuses. The datasets library reads
real local files."""

import gzip
import io
import itertools
import json
import math
import os
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.text.document import Document
from thinker.data.text.generated_text import GENERATED_DOCUMENTS, REPEAT_ALPHABET
from thinker.data.text.registered_source import register_source
from thinker.data.text.sources import SOURCES, open_source
from thinker.runtime.errors import UserError

ROOT = Path(__file__).parents[2]


def texts(source, **options):
    return [document.text for document in open_source(source, **options).documents()]


def key(source, **options):
    return open_source(source, **options).key


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


# Generated


def test_tales_are_the_stories_of_the_seed():
    from thinker.data.text import tales

    source = open_source("tales", max_documents=5, seed=3)
    first, again = list(source.documents()), list(source.documents())
    assert first == again
    stories = [tales.generate_story(3, i) for i in range(5)]
    assert [(d.text, d.log_prob) for d in first] == [
        (story.text, story.log_prob) for story in stories
    ]
    assert source.n_documents == 5
    assert open_source("tales").n_documents == GENERATED_DOCUMENTS
    assert len({key("tales", seed=s, max_documents=m) for s in (0, 1) for m in (None, 5)}) == 4


def test_repeats_say_everything_twice_and_know_their_probability():
    source = open_source("repeated_random", max_documents=2000, seed=1)
    documents = list(source.documents())
    assert documents == list(source.documents())
    lengths = Counter()
    for text, log_prob in ((d.text, d.log_prob) for d in documents):
        n = len(text) // 2
        assert text[:n] == text[n:]
        assert set(text) <= set(REPEAT_ALPHABET)
        assert log_prob == pytest.approx(math.log(1 / 49) + n * math.log(1 / 94))
        lengths[n] += 1
    assert sorted(lengths) == list(range(16, 65))
    assert max(lengths.values()) < 80  # 41 on average
    assert len({d.text for d in documents}) == 2000
    assert (
        list(itertools.islice(open_source("repeated_random", seed=2).documents(), 9))
        != documents[:9]
    )
    assert key("repeated_random", seed=1) != key("repeated_random", seed=2)


# Files of text


def test_pysource_is_pythons_own_library_without_its_tests():
    source = open_source("pysource")
    documents = [document.text for document in source.documents()]
    assert len(documents) > 300
    assert any(text.startswith('r"""OS routines for NT or Posix') for text in documents)
    assert not any("class TestCase_" in text and "test.support" in text for text in documents[:50])
    assert Path(json.__file__).read_text() in documents
    assert documents[:20] == texts("pysource", max_documents=20)
    assert source.key == key("pysource") != key("pysource", max_documents=20)


def test_one_file_is_one_text_in_pieces(tmp_path):
    file = tmp_path / "long.txt"
    text = "é€ \r\nline\n" * 150_000 + "no end" * 300_000 + "\r"
    file.write_bytes(text.encode())
    for path in (file, tmp_path, tmp_path / "*.txt"):
        source = open_source("text", path=str(path))
        pieces = [document.text for document in source.documents()]
        assert "".join(pieces) == text  # line ends as they are
        assert source.whole_text
        assert source.n_bytes == len(text.encode())
        assert len(pieces) > 2
        assert pieces[0].endswith("\n")
        assert max(map(len, pieces)) <= 2 << 20


def test_several_files_are_documents_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    for name, text in {"b.txt": "B", "a.md": "A", "deep/c.txt": "C", ".hidden": "H"}.items():
        (tmp_path / name).write_text(text)
    assert texts("text", path=str(tmp_path)) == ["A", "B", "C"]
    assert texts("text", path=str(tmp_path / "**" / "*.txt")) == ["B", "C"]
    assert texts("text", path=str(tmp_path), max_documents=2) == ["A", "B"]
    assert not open_source("text", path=str(tmp_path)).whole_text


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert texts("text", path=str(tmp_path)) == ["hello"]


def test_text_that_is_not_utf8_names_the_file(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.txt is not UTF-8 text \(byte 0xe9\)"):
        texts("text", path=str(tmp_path))


def test_text_that_has_gone_meanwhile(tmp_path):
    (tmp_path / "a.txt").write_text("here")
    source = open_source("text", path=str(tmp_path))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(FileNotFoundError):
        list(source.documents())


# Tables


def test_jsonl_from_a_file_a_folder_and_a_glob(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", [{"text": "3", "n": 1}, {"text": None, "n": 2}])
    write_jsonl(tmp_path / "a.jsonl", [{"text": "1"}, {"text": "2"}])
    for name, content in {
        "0-empty.jsonl": "",
        "0-lines.jsonl": "\n\n",
        "0-array.jsonl": "[]\n",
    }.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(b'{"text": "4 \xe2\x82\xac"}\n'))
    (tmp_path / "notes.txt").write_text("no table")
    assert texts("jsonl", path=str(tmp_path)) == ["1", "2", "3", "", "4 €"]  # no text is empty text
    assert texts("jsonl", path=str(tmp_path / "?.jsonl")) == ["1", "2", "3", ""]
    assert texts("jsonl", path=str(tmp_path / "a.jsonl")) == ["1", "2"]
    assert texts("jsonl", path=str(tmp_path), max_documents=3) == ["1", "2", "3"]
    assert texts("jsonl", path=str(tmp_path / "0-empty.jsonl")) == []


def test_parquet_and_its_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", text=["1", "2"], story=["x", "y"])
    write_parquet(tmp_path / "b.parquet", text=["3"], story=["z"])
    write_parquet(tmp_path / "0-no-rows.parquet", text=pyarrow.array([], pyarrow.string()))
    write_parquet(tmp_path / "0-no-columns.parquet")
    (tmp_path / "0-no-bytes.parquet").touch()
    assert texts("parquet", path=str(tmp_path)) == ["1", "2", "3"]
    assert texts("parquet", path=str(tmp_path / "a.parquet"), column="story") == ["x", "y"]
    with pytest.raises(
        UserError,
        match="data.column=stori is not in row 0 of .*a.parquet .has text, story.; did you mean story",
    ):
        texts("parquet", path=str(tmp_path / "a.parquet"), column="stori")


def test_a_later_row_without_the_column_is_no_misspelling(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"txt": "b"}])
    with pytest.raises(UserError, match=r"row 1 of .* .has txt.$"):
        texts("jsonl", path=path)
    path = write_jsonl(tmp_path / "b.jsonl", [[{"role": "user", "content": "a"}]])
    with pytest.raises(UserError, match='write each conversation as {"messages": '):
        texts("jsonl", path=path)


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
FORMS = [
    {"messages": TALK},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"conversations": TALK},
    {"prompt": "Hi", "completion": "Hello"},
    {"prompt": TALK[:1], "completion": TALK[1:]},
]


@pytest.mark.parametrize("row", FORMS, ids=lambda row: "-".join(row))
def test_conversations_are_read_in_every_common_form(tmp_path, row):
    (document,) = open_source("jsonl", path=write_jsonl(tmp_path / "a.jsonl", [row])).documents()
    assert document.messages == TALK
    assert json.loads(document.text) == TALK


def test_roles_of_sharegpt(tmp_path):
    names = ["system", "human", "gpt", "function", "observation", "user", "assistant", "tool"]
    row = {"conversations": [{"from": name, "value": name} for name in names]}
    (document,) = open_source("jsonl", path=write_jsonl(tmp_path / "a.jsonl", [row])).documents()
    roles = [message["role"] for message in document.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"role": "user", "content": "a"}, 'write each conversation as {"messages": '),
        (
            {"conversations": [{"from": "human", "value": "a"}]},
            "row 0 .* has no answer; add a message with the role",
        ),
        (
            {"conversations": [{"from": "human", "text": "a"}]},
            "data.column=conversations: row 0 of .* is not a conver",
        ),
        (
            {"prompt": "a", "completion": 3},
            "row 0 of .*: completion is int; it must be text or a list of messages",
        ),
        ({"prompt": "a", "completion": None}, "row 0 of .*: completion is NoneType; it must be"),
    ],
)
def test_conversations_in_another_form_are_told_the_right_one(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        texts("jsonl", path=write_jsonl(tmp_path / "a.jsonl", [row]))


def test_text_goes_before_conversations_and_a_column_before_both(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b", "text": "c"}])
    assert texts("jsonl", path=path) == ["c"]
    assert texts("jsonl", path=path, column="prompt") == ["a"]


def test_a_parquet_file_of_several_batches_and_of_conversations(tmp_path):
    expected = [f"story {i}" for i in range(3000)]
    assert texts("parquet", path=write_parquet(tmp_path / "a.parquet", text=expected)) == expected
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (document,) = open_source(
        "parquet", path=write_parquet(tmp_path / "b.parquet", messages=[talk])
    ).documents()
    assert document.messages == talk
    with pytest.raises(
        UserError, match="data.column=text is not in .*b.parquet .has messages."
    ):  # as it says
        texts("parquet", path=str(tmp_path / "b.parquet"), column="text")


def test_hub_reads_csv_webdataset_and_zstd_folders(tmp_path):
    """Through the library datasets, which recognizes the files by their names."""
    for name in ("csv", "tar", "zst"):
        (tmp_path / name).mkdir()
    (tmp_path / "csv" / "a.csv").write_text('text,n\n"hello, ""x""\nline",1\nabc,2\n,3\n')
    with tarfile.open(tmp_path / "tar" / "a.tar", "w") as archive:
        for i in range(3):
            entry = tarfile.TarInfo(f"{i}.txt")
            entry.size = 1
            archive.addfile(entry, io.BytesIO(str(i).encode()))
    rows = "".join(json.dumps({"text": str(i)}) + "\n" for i in range(3)).encode()
    (tmp_path / "zst" / "a.jsonl.zst").write_bytes(pyarrow.compress(rows, "zstd", asbytes=True))
    for streaming in (True, False):
        assert texts("hub", path=str(tmp_path / "csv"), streaming=streaming) == [
            'hello, "x"\nline',
            "abc",
            "",
        ]
        assert texts("hub", path=str(tmp_path / "tar"), column="txt", streaming=streaming) == [
            "0",
            "1",
            "2",
        ]
    assert texts("jsonl", path=str(tmp_path / "zst")) == ["0", "1", "2"]


def test_hub_reads_what_datasets_has_saved(tmp_path):
    import datasets

    train, test = (datasets.Dataset.from_dict({"text": [name, "x"]}) for name in ("train", "test"))
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "two")
    assert texts("hub", path=str(tmp_path / "one")) == ["train", "x"]
    assert texts("hub", path=str(tmp_path / "two")) == ["train", "x"]
    assert texts("hub", path=str(tmp_path / "two"), split="test") == ["test", "x"]
    with pytest.raises(
        UserError, match="it has no split val; set data.split to one of train, test"
    ):
        texts("hub", path=str(tmp_path / "two"), split="val")
    with pytest.raises(UserError, match="it has only the split None; remove data.split=test"):
        texts("hub", path=str(tmp_path / "one"), split="test")
    with pytest.raises(UserError, match="data.config=x has no effect on a saved dataset"):
        texts("hub", path=str(tmp_path / "one"), config="x")


@pytest.mark.parametrize("streaming", [True, False])
def test_hub_on_a_local_folder(tmp_path, streaming, monkeypatch):
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"text": str(i), "n": i} for i in range(5)])
    write_jsonl(folder / "test.jsonl", [{"text": "t", "n": 0}])
    options = {"path": str(folder), "streaming": streaming}
    assert texts("hub", **options) == ["0", "1", "2", "3", "4"]
    assert texts("hub", **options, max_documents=2) == ["0", "1"]
    assert texts("hub", **options, split="test") == ["t"]
    for wrong, message in {
        "split": "split.*train.*test",
        "config": "'nope' not found. Available: .*default",
        "column": "(has text, n)",
    }.items():
        with pytest.raises(UserError, match=message):
            texts("hub", **options, **{wrong: "nope"})
    with pytest.raises(UserError, match="row 0 .* is int, not text"):
        texts("hub", **options, column="n")
    assert key("hub", **options) == key("hub", path=str(folder))
    write_jsonl(folder / "test.jsonl", [{"text": "changed", "n": 0}])
    assert key("hub", **options) != key("hub", path=str(tmp_path))


def test_a_hub_name_without_network_is_one_line():
    code = "from thinker.data.text.sources import open_source\nfrom thinker.runtime.errors import run_command\n"
    code += "run_command(lambda: list(open_source('hub', path='nobody/no-such-set').documents()))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "data.path=nobody/no-such-set cannot be read" in done.stderr


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.jsonl", b'{"text": "a"}\n{"text": \n'),
        ("binary.jsonl", b"\xff\xfe\x00"),
        ("surrogate.jsonl", b'{"text": "a\\ud83d"}\n'),
        ("no.parquet", b"this is no parquet"),
    ],
)
def test_damaged_tables(tmp_path, name, content, capfd):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} cannot be read: ") as error:
        texts(name.split(".")[1], path=str(tmp_path / name))
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


# Options and keys


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("tale", {}, "choose from tales, pysource, .*did you mean tales"),
        ("tales", {"path": "x"}, "data.path has no effect with data.source=tales"),
        ("pysource", {"config": "x"}, "data.config has no effect"),
        ("repeated_random", {"column": "x"}, "data.column has no effect"),
        ("text", {"path": "x", "split": "test"}, "data.split has no effect"),
        ("jsonl", {"path": "x", "streaming": False}, "data.streaming has no effect"),
        ("jsonl", {"path": "x", "streaming": True}, "data.streaming has no effect"),
        ("text", {"path": "x", "column": "text"}, "data.column has no effect"),
        ("parquet", {"path": "x", "split": "train"}, "data.split has no effect"),
        (
            "text",
            {"path": str(ROOT / "README.md"), "max_documents": 5},
            "README.md is a single text, .*to null$",
        ),
        (
            "text",
            {"path": str(ROOT / "READM*.md"), "max_documents": 5},
            "data.max_documents is set, but .* is a single",
        ),
        ("parquet", {"path": "x", "config": "x"}, "data.config has no effect"),
        ("tales", {"max_documents": 0}, "data.max_documents=0"),
        ("text", {}, "needs data.path; set it to a file, folder or glob"),
        ("hub", {}, "needs data.path; set it to the name or folder of a dataset"),
        ("text", {"path": "/nowhere/at/all.txt"}, "data.path=/nowhere/at/all.txt does not exist"),
        ("jsonl", {"path": "/nowhere/*.jsonl"}, "matches no jsonl file"),
        ("parquet", {"path": str(ROOT / "data")}, "contains no parquet file"),
    ],
)
def test_mistakes(source, options, message):
    with pytest.raises(UserError, match=message):
        open_source(source, **options)


def test_a_folder_at_home_and_a_pipe(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one text")
    assert [document.text for document in open_source("text", path="~/texts").documents()] == [
        "one text"
    ]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="data.path=.*pipe is not a regular file; use a file"):
        open_source("text", path=str(tmp_path / "pipe"))


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_the_key_changes_with_a_file(tmp_path, source):
    file = Path(write_jsonl(tmp_path / "a.json", [{"text": "1"}]))
    path = str(tmp_path)
    first = key(source, path=path)
    assert key(source, path=path) == first
    status = file.stat()
    write_jsonl(file, [{"text": "2"}])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # the same size, a moment later
    second = key(source, path=path)
    write_jsonl(file, [{"text": "22"}])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # the first time, another size
    third = key(source, path=path)
    write_jsonl(tmp_path / "b.json", [{"text": "1"}])
    assert len({first, second, third, key(source, path=path)}) == 4
    assert key(source, path=path, max_documents=1) != key(source, path=path)


def test_links_of_a_folder_to_itself_multiply_nothing(tmp_path):
    (tmp_path / "data" / "inner").mkdir(parents=True)
    for name in ("a.txt", "inner/b.txt", ".hidden.txt", "inner/.hidden.txt"):
        (tmp_path / "data" / name).write_text(name)
    for name in ("one", "two", "inner/three"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "data", target_is_directory=True)
    assert texts("text", path=str(tmp_path / "data")) == ["a.txt", "inner/b.txt"]
    assert texts("text", path=f"{tmp_path / 'data'}/") == ["a.txt", "inner/b.txt"]


class TestRegisteredSources:
    """Sources of a user's module."""

    @pytest.fixture
    def name(self):
        """A name that is free again after the test."""
        yield "poems"
        SOURCES._values.pop("poems", None)

    def test_its_texts_are_a_corpus(self, name, tmp_path):
        calls = []

        def poems(path="none"):
            calls.append(path)
            return [f"{path} {number}" for number in range(40)]

        register_source(name, poems, version="1", options=("path",))
        options = {"tokenizer": "byte", "val_fraction": 0.2, "cache_dir": tmp_path}
        corpus = prepare_corpus(source=name, path="a.txt", progress=False, **options)
        assert corpus.train.n_documents + corpus.val.n_documents == 40
        assert set(calls) == {"a.txt"}
        n_calls = len(calls)
        again = prepare_corpus(source=name, path="a.txt", progress=False, **options)
        assert (again.sha256, len(calls)) == (corpus.sha256, n_calls)  # from the cache

    def test_its_key_changes_with_what_it_depends_on(self, name, tmp_path):
        keys = set()
        for version in ("1", "2"):
            register_source(name, lambda **options: ["a", "b"], version, ("path", "split"))
            for more in ({"split": None}, {"split": "test"}, {"max_documents": 1}):
                keys.add(open_source(name, path=str(tmp_path / "file"), **more).key)
            SOURCES._values.pop(name)
        (tmp_path / "file").write_text("a")
        register_source(name, lambda **options: ["a", "b"], "1", ("path", "split"))
        keys.add(open_source(name, path=str(tmp_path / "file")).key)
        assert len(keys) == 7

    def test_it_begins_anywhere_and_keeps_documents(self, name):
        talk = Document("[]", messages=[{"role": "user", "content": "Hi"}])
        register_source(name, lambda: ["a", "b", talk, "d"], "1")
        source = open_source(name, max_documents=3)
        documents = list(source.documents())
        assert [document.text for document in documents] == ["a", "b", "[]"]
        assert documents[2].messages == talk.messages
        rest = list(source.documents(documents[1].start))
        assert [document.text for document in rest] == ["b", "[]"]

    def test_mistakes(self, name):
        register_source(name, list, "1")
        with pytest.raises(UserError, match="there is already a data.source called poems"):
            register_source(name, list, "2")
        with pytest.raises(UserError, match="data.path has no effect with data.source=poems"):
            open_source(name, path="a")
        with pytest.raises(
            UserError, match="choose from tales, .*hub, .*poems; did you mean poems"
        ):
            open_source("poem")
        with pytest.raises(UserError, match="there is already a data.source called tales"):
            register_source("tales", list, "1")
