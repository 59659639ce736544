"""Corpora: how they are split, what the cache keeps, and what a user is told."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, examples
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.corpus.shards import HEADER_BYTES
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.runtime.errors import UserError
from thinker.runtime.reading import sha256_of_file


def documents(corpus, tokens):
    """The texts in a split, decoded."""
    ids = (
        (shard, *pair)
        for shard in tokens.shards
        for pair in zip(shard.offsets[:-1], shard.offsets[1:])
    )
    return [corpus.tokenizer.decode(shard.tokens[start + 1 : end]) for shard, start, end in ids]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def quick(tmp_path):
    """Prepare with a small tokenizer, quietly, and a cache of the test's own."""
    return lambda **options: prepare_corpus(
        **{"tokenizer": "byte", "cache_dir": tmp_path / "cache", "progress": False, **options}
    )


def test_documents_are_split_by_content(tmp_path, quick):
    texts = [f"story {i % 700}" for i in range(1000)]
    corpus = quick(source="jsonl", path=write_jsonl(tmp_path / "a.jsonl", texts), val_fraction=0.2)
    train, val = documents(corpus, corpus.train), documents(corpus, corpus.val)
    assert sorted(train + val) == sorted(texts)
    assert not set(train) & set(val)
    assert 0.15 < len(val) / len(texts) < 0.25
    assert train == [text for text in texts if text in set(train)]  # in the order of the source
    assert corpus.train.n_bytes == len("".join(train))
    assert corpus.val.n_documents == len(val)
    more = quick(
        source="jsonl", path=write_jsonl(tmp_path / "b.jsonl", texts[::-1]), val_fraction=0.3
    )
    assert set(val) <= set(
        documents(more, more.val)
    )  # where a document goes depends on itself alone


def write_token_file(path, tokenizer, texts, cut=""):
    ids = [token for text in texts for token in (tokenizer.bos_id, *tokenizer.encode(text))]
    ids += [tokenizer.bos_id, *tokenizer.encode(cut)]
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())
    return str(path)


def test_validation_on_a_file_of_tokens(tmp_path, quick):
    tokenizer = make_tokenizer("byte", [])
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    texts = [f"story {i} \u00e9" for i in range(200)]
    options = {"source": "jsonl", "path": write_jsonl(tmp_path / "a.jsonl", [*texts, ""])}
    options["tokenizer"] = str(tmp_path / "tokenizer")
    known = [*texts[50:80], "from elsewhere"]
    file = write_token_file(tmp_path / "val.bin", tokenizer, known, cut=texts[3][:4])
    corpus = quick(**options, val_tokens=file)
    assert documents(corpus, corpus.val) == known
    assert documents(corpus, corpus.train) == texts[:50] + texts[80:]
    assert quick(**options, val_tokens=file).folder == corpus.folder
    assert quick(**options).folder != corpus.folder
    write_token_file(tmp_path / "val.bin", tokenizer, known[1:])
    assert documents(corpus, quick(**options, val_tokens=file).val) == known[1:]


def test_mistakes_in_a_file_of_tokens(tmp_path, quick):
    tokenizer = make_tokenizer("byte", [])
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    options = {"source": "jsonl", "path": write_jsonl(tmp_path / "a.jsonl", ["a story", "another"])}
    path_tokenizer = {"tokenizer": str(tmp_path / "tokenizer")}
    whole = Path(write_token_file(tmp_path / "val.bin", tokenizer, ["abc", "def"])).read_bytes()
    no_bos = whole[:1024] + b"\0" * (len(whole) - 1024)
    unknown = whole[:-2] + b"\xff\xff"
    cases = {b"": "not a complete", whole[:9]: "not a complete", whole[:-1]: "not a complete",
             b"\0" + whole[1:]: "not a complete", no_bos: "not match data.tokenizer", unknown: "not match"}  # fmt: skip
    for number, (content, message) in enumerate(cases.items()):
        (tmp_path / f"{number}.bin").write_bytes(content)
        with pytest.raises(UserError, match=message):
            quick(**options, **path_tokenizer, val_tokens=str(tmp_path / f"{number}.bin"))
    with pytest.raises(UserError, match="is not a file"):
        quick(**options, **path_tokenizer, val_tokens=str(tmp_path))
    (tmp_path / "a.txt").write_text("a story")
    for bad in ({}, {"source": "text", "path": str(tmp_path / "a.txt")} | path_tokenizer):
        with pytest.raises(UserError, match="a source other than a single text file"):
            quick(**{**options, **bad}, val_tokens=str(tmp_path / "val.bin"))


def test_the_end_of_a_single_text_is_for_validation(tmp_path_factory):
    characters = st.characters(codec="utf-8", exclude_characters="\ufeff")

    @given(text=st.text(characters, min_size=12), fraction=st.floats(0.3, 0.7))
    def check(text, fraction):
        folder = tmp_path_factory.mktemp("text")
        data = text.encode()
        (folder / "a.txt").write_bytes(data)
        options = {"source": "text", "path": str(folder), "tokenizer": "byte", "progress": False}
        corpus = prepare_corpus(**options, val_fraction=fraction, cache_dir=folder / "cache")
        (train,), (val,) = documents(corpus, corpus.train), documents(corpus, corpus.val)
        assert (train + val).encode() == data
        assert (
            abs(len(val.encode()) - fraction * len(data)) <= 4.5
        )  # half a byte of rounding, and a character

    check()


def test_a_long_single_text_is_one_document_a_split(tmp_path, quick):
    text = "".join(f"{i} é€\r\n" for i in range(60_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    corpus = quick(
        source="text",
        path=str(tmp_path / "a.txt"),
        val_fraction=0.4,
        tokenizer="char",
        shard_tokens=500,
    )
    (train,), (val,) = documents(corpus, corpus.train), documents(corpus, corpus.val)
    assert train + val == text
    assert len(val.encode()) == pytest.approx(0.4 * len(text.encode()), abs=4)
    assert corpus.train.n_bytes + corpus.val.n_bytes == len(text.encode())
    assert corpus.train.shards[0].log_probs is None


def test_the_tokenizer_learns_from_the_training_split_alone(tmp_path, quick):
    (tmp_path / "a.txt").write_text("é" * 500 + "日" * 500)
    corpus = quick(source="text", path=str(tmp_path / "a.txt"), val_fraction=0.6, tokenizer="char")
    assert corpus.tokenizer.vocab_size == 258
    texts = [f"{chr(0x4E00 + i)}" for i in range(200)]
    corpus = quick(
        source="jsonl",
        path=write_jsonl(tmp_path / "a.jsonl", texts),
        val_fraction=0.3,
        tokenizer="char",
    )
    assert corpus.tokenizer.vocab_size == 257 + corpus.train.n_documents
    assert corpus.val.n_documents > 20


def test_bpe_on_pysource_keeps_the_text(quick):
    corpus = quick(
        source="pysource",
        tokenizer="bpe:1000",
        max_documents=40,
        val_fraction=0.3,
        shard_tokens=50_000,
    )
    assert corpus.tokenizer.vocab_size == 1000
    assert len(corpus.train.shards) > 1
    for tokens in (corpus.train, corpus.val):
        assert len("".join(documents(corpus, tokens)).encode()) == tokens.n_bytes
    assert corpus.train.n_tokens < 0.5 * corpus.train.n_bytes


def test_repeats_know_their_log_probability(quick):
    corpus = quick(source="repeated_random", max_documents=300, tokenizer="char")
    assert len(corpus.val.shards[0].log_probs) == corpus.val.n_documents
    assert (corpus.val.shards[0].log_probs[:] < -16 * 4.5).all()
    for wrong in ("bpe:300", str(make_tokenizer("bpe:258", ["aaaa"]).save(corpus.folder))):
        with pytest.raises(UserError, match="use byte or char with data.source=repeated_random"):
            quick(source="repeated_random", max_documents=300, tokenizer=wrong)


def test_the_second_start_reads_no_source(tmp_path, quick, capfd):
    file = tmp_path / "a.jsonl"
    options = {
        "source": "jsonl",
        "path": write_jsonl(file, ["one", "two", "three", "four"] * 3),
        "val_fraction": 0.5,
    }
    first = quick(**options)
    status = file.stat()
    file.write_bytes(
        b"!" * status.st_size
    )  # no jsonl any more, but neither its size nor its time has changed
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = quick(**options)
    assert second.folder == first.folder
    assert documents(second, second.train) == documents(first, first.train)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(UserError, match="cannot be read"):
        quick(**options)
    assert [folder.name for folder in first.folder.parent.iterdir()] == [
        first.folder.name
    ]  # what failed left nothing
    assert capfd.readouterr().err == ""


def test_what_changes_the_tokens_changes_the_folder(tmp_path, quick):
    path = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(50)])
    options = {"source": "jsonl", "path": path, "val_fraction": 0.5}
    folders = [
        quick(**options, **more).folder
        for more in ({}, {"tokenizer": "char"}, {"max_documents": 30})
    ]
    folders += [quick(**{**options, "val_fraction": 0.4}).folder]
    one, two = (make_tokenizer("bpe:258", [text]) for text in ("aa aa", "bb bb"))
    for tokenizer in (one, two):
        folders.append(
            quick(**options, tokenizer=str(tokenizer.save(tmp_path))).folder
        )  # a path, with other content
    assert len(set(folders)) == 6
    assert quick(**options, tokenizer=str(tmp_path)).tokenizer.content_hash == two.content_hash
    assert quick(**options).folder == folders[0]


KINDS_OF_DAMAGE = [
    "truncated shard",
    "missing shard",
    "swapped tokens",
    "wrong id",
    "zeros",
    "index",
    "tokenizer",
]


@pytest.mark.parametrize("damage", [*KINDS_OF_DAMAGE, "other tokenizer", "one bit of the index"])
def test_a_damaged_cache_is_made_again_and_says_so(tmp_path, quick, capfd, damage):
    options = {
        "source": "jsonl",
        "path": write_jsonl(tmp_path / "a.jsonl", ["a", "b", "c", "d"]),
        "val_fraction": 0.5,
    }
    first = quick(**options)
    expected = documents(first, first.train), documents(first, first.val)
    shard = first.val.shards[0].path
    if damage == "truncated shard":
        os.truncate(shard, shard.stat().st_size - 1)
    elif damage == "missing shard":
        shard.unlink()
    elif damage in ("swapped tokens", "wrong id", "zeros"):
        tokens = np.memmap(shard, np.uint16, "r+")[HEADER_BYTES // 2 :]
        tokens[1:3] = {"swapped tokens": tokens[2:0:-1].copy(), "wrong id": 0xFFFF, "zeros": 0}[
            damage
        ]
        tokens.base.flush()
    elif damage == "one bit of the index":
        index, digits = (first.folder / "corpus.json").read_text(), first.sha256[:8]
        (first.folder / "corpus.json").write_text(
            index.replace(digits, f"{int(digits, 16) ^ 1:08x}")
        )
    elif damage == "index":
        (first.folder / "corpus.json").write_text("[]")
    elif damage == "tokenizer":
        (first.folder / "thinker-tokenizer.json").write_text("{")
    else:
        make_tokenizer("char", ["é"]).save(first.folder)
    again = quick(**options)
    assert (documents(again, again.train), documents(again, again.val)) == expected
    assert capfd.readouterr().err.count("rebuilding the damaged token cache") == 1
    quick(**options)
    assert capfd.readouterr().err == ""


def test_every_byte_of_the_cache_is_verified(tmp_path, quick, capfd):
    options = {
        "source": "jsonl",
        "path": write_jsonl(tmp_path / "a.jsonl", ["a", "b", "c", "d"]),
        "val_fraction": 0.5,
    }
    first = quick(**options)
    contents = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    rng = random.Random(0)
    for name, i in (
        (name, rng.randrange(len(contents[name]))) for name in sorted(contents) * examples(30)
    ):
        changed = bytearray(contents[name])
        changed[i] ^= 1
        (first.folder / name).write_bytes(changed)
        assert quick(**options).sha256 == first.sha256
        assert "rebuilding the damaged token cache" in capfd.readouterr().err, (name, i)
        assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == contents


@pytest.fixture
def many(tmp_path):
    """Options of a corpus of several shards."""
    draw = random.Random(4)
    texts = [
        " ".join(str(draw.randrange(1000)) for _ in range(draw.randrange(1, 40)))
        for _ in range(300)
    ]
    return {"source": "jsonl", "path": write_jsonl(tmp_path / "many.jsonl", texts), "val_fraction": 0.3,
            "shard_tokens": 900}  # fmt: skip


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


KILLED = """
import os, signal, sys
from thinker.data.corpus import shard_writer
from thinker.data.corpus.corpus import prepare_corpus

closed, close = 0, shard_writer.ShardWriter.close

def close_and_die(writer):
    global closed
    is_open = writer._file is not None
    close(writer)
    closed += is_open
    if is_open and closed == {n_closed}:
        os.kill(os.getpid(), signal.SIGKILL)

shard_writer.ShardWriter.close = close_and_die
prepare_corpus(**{options})
"""


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:280"])
def test_a_killed_process_is_continued_after_its_finished_shards(
    tmp_path, quick, many, capfd, tokenizer, stress
):
    """After every shard; the files equal those of an undisturbed process, also after several
    kills."""
    options = {**many, "tokenizer": tokenizer, "progress": False}
    expected = quick(**options)
    n_shards = len(expected.train.shards) + len(expected.val.shards)
    assert n_shards > 12
    for kills in [[n] for n in range(1, n_shards, 1 if stress else 5)] + [[1, 2, 3]]:
        cache = tmp_path / f"cache-{kills}"
        for n_closed in kills:
            code = KILLED.format(n_closed=n_closed, options=options | {"cache_dir": str(cache)})
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
            )
            assert done.returncode == -9, done.stderr
        (building,) = (cache / "tokens").iterdir()
        assert building.name == f"{expected.folder.name}.building"
        written = {path.name: path.stat().st_mtime_ns for path in building.glob("*.tokens")}
        assert len(written) == sum(kills)
        capfd.readouterr()
        again = prepare_corpus(**options, cache_dir=cache)
        assert "continuing after" in capfd.readouterr().err
        assert contents(again.folder) == contents(expected.folder)
        assert {
            name: (again.folder / name).stat().st_mtime_ns for name in written
        } == written  # not written again


@pytest.mark.parametrize(
    "damage",
    [
        "bit of the header",
        "bit of a token",
        "no hash",
        "truncated",
        "missing",
        "strange file",
        "old index",
    ],
)
def test_damage_in_what_is_continued_is_written_again(tmp_path, quick, many, damage):
    expected = quick(**many)
    building = tmp_path / "other" / "tokens" / f"{expected.folder.name}.building"
    shutil.copytree(expected.folder, building)
    (building / "corpus.json").unlink()
    shard = building / "train-00002.tokens"
    for path in building.glob("*.tokens"):
        path.with_suffix(".sha256").write_text(sha256_of_file(path))
    if damage.startswith("bit of"):
        data = bytearray(shard.read_bytes())
        data[20 if "header" in damage else 300] ^= 1
        shard.write_bytes(data)
    elif damage == "no hash":
        shard.with_suffix(".sha256").unlink()
    elif damage == "truncated":
        os.truncate(shard, 1000)
    elif damage == "missing":
        shard.unlink()
    elif damage == "strange file":
        (building / "train-00002.tmp").write_bytes(b"half")
    else:
        (building / "corpus.json").write_text("{}")
    again = prepare_corpus(**many, tokenizer="byte", cache_dir=tmp_path / "other", progress=False)
    assert contents(again.folder) == contents(expected.folder)


@pytest.mark.parametrize("content", ["{", None])
def test_a_damaged_tokenizer_beside_finished_shards_is_trained_again(
    tmp_path, quick, many, content
):
    expected = quick(**many, tokenizer="bpe:280")
    building = tmp_path / "other" / "tokens" / f"{expected.folder.name}.building"
    shutil.copytree(expected.folder, building)
    (building / "thinker-tokenizer.json").unlink()
    if content is not None:
        (building / "thinker-tokenizer.json").write_text(content)
    again = prepare_corpus(
        **many, tokenizer="bpe:280", cache_dir=tmp_path / "other", progress=False
    )
    assert contents(again.folder) == contents(expected.folder)


def test_conversations_are_started_over(tmp_path, quick):
    """Their masks are part of the identity of a corpus."""
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "x" * i}]}
            for i in range(40)]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer("byte", []).with_chat_template(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    options = {
        "source": "jsonl",
        "path": str(tmp_path / "a.jsonl"),
        "tokenizer": tokenizer,
        "shard_tokens": 200,
    }
    expected = quick(**options, val_fraction=0.3)
    building = tmp_path / "other" / "tokens" / f"{expected.folder.name}.building"
    shutil.copytree(expected.folder, building)
    again = prepare_corpus(
        **options, val_fraction=0.3, cache_dir=tmp_path / "other", progress=False
    )
    assert contents(again.folder) == contents(expected.folder)


def test_processes_take_turns_and_abandoned_folders_go(tmp_path, quick, many, capfd):
    """One waits for the other and uses its corpus; folders that nobody continues are removed after
    a week."""
    tokens = quick(**many).folder.parent
    locks = tokens.parent / "locks"
    for name, age in (("old", 8 * 24 * 3600), ("new", 3600), ("alive", 8 * 24 * 3600)):
        (tokens / f"{name}.building").mkdir()
        os.utime(tokens / f"{name}.building", times=(time.time() - age,) * 2)
    with FileLock(locks / "alive.lock"):
        quick(**many, max_documents=200)
    assert sorted(path.name for path in tokens.glob("*.building")) == [
        "alive.building",
        "new.building",
    ]
    key = quick(**many, max_documents=150).folder
    key.rename(tmp_path / "finished")
    capfd.readouterr()
    with ThreadPoolExecutor(1) as pool:
        with FileLock(locks / f"{key.name}.lock"):
            waiting = pool.submit(quick, **many, max_documents=150)
            while "waiting for another process" not in capfd.readouterr().err:
                time.sleep(0.01)
            (tmp_path / "finished").rename(key)
        assert waiting.result().folder == key


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_while_tokenizing_leaves_nothing_behind(tmp_path, name):
    os.mkfifo(tmp_path / "b.txt")  # reading it waits until this test writes there
    (tmp_path / "a.txt").write_text("one text")
    code = f"""
import signal
from thinker.data.text.files import text_files
from thinker.data.corpus.corpus import prepare_corpus
from thinker.runtime.errors import run_command
signal.signal(signal.{name}, signal.SIG_DFL)  # the tests themselves may run under nohup
text_files.find_files = lambda source, path, extensions: [path + "/a.txt", path + "/b.txt"]
options = dict(source="text", path={str(tmp_path)!r}, tokenizer="byte", cache_dir={str(tmp_path / "cache")!r})
run_command(lambda: prepare_corpus(**options))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)
    writer = os.open(tmp_path / "b.txt", os.O_WRONLY)  # waits until the process reads
    assert len(list((tmp_path / "cache/tokens").glob("*.building"))) == 1
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=600)
    os.close(writer)
    assert process.returncode == 128 + getattr(signal, name)
    assert list((tmp_path / "cache/tokens").iterdir()) == []


def test_documents_without_text_are_left_out_and_said_so(tmp_path, quick, capfd):
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "", "b", None, "c", "d"])
    corpus = quick(source="jsonl", path=path, val_fraction=0.5)
    assert sorted(documents(corpus, corpus.train) + documents(corpus, corpus.val)) == [
        "a",
        "b",
        "c",
        "d",
    ]
    assert capfd.readouterr().err == "skipping 2 of 6 documents without text\n"


def test_progress_goes_to_standard_error(quick, capfd):
    quick(source="pysource", tokenizer="bpe:300", max_documents=40, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "training bpe:300" in err
    assert "tokens/s" in err


@pytest.mark.parametrize("texts", [[], ["", None]])
def test_an_empty_corpus(tmp_path, quick, texts):
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    for tokenizer in ("byte", "bpe:300"):
        with pytest.raises(UserError, match="the corpus is empty"):
            quick(source="jsonl", path=path, tokenizer=tokenizer)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="the corpus is empty"):
        quick(source="text", path=str(tmp_path / "a.txt"))


@pytest.mark.parametrize("folder", [False, True])
def test_a_bound_that_leaves_documents_out_says_so(tmp_path, quick, capsys, folder):
    options = {
        "source": "jsonl",
        "path": write_jsonl(tmp_path / "a.jsonl", [f"number {i}" for i in range(60)]),
    }
    if folder:
        (tmp_path / "texts").mkdir()
        for i in range(60):
            (tmp_path / "texts" / f"{i:02d}.txt").write_text(f"number {i}")
        options = {"source": "text", "path": str(tmp_path / "texts")}
    quick(**options, max_documents=60, val_fraction=0.2)
    assert "max_documents" not in capsys.readouterr().err
    quick(**options, max_documents=59, val_fraction=0.2)
    assert (
        "data.max_documents: using only the first 59 documents of the source"
        in capsys.readouterr().err
    )


def test_a_vocabulary_smaller_than_asked_for_says_so(tmp_path, quick, capsys):
    (tmp_path / "a.txt").write_text("the cat and the other cat " * 20)
    corpus = quick(source="text", path=str(tmp_path / "a.txt"), tokenizer="bpe:5000")
    assert (
        f"too short for bpe:5000; the vocabulary has {corpus.tokenizer.vocab_size} tokens"
        in capsys.readouterr().err
    )
    assert corpus.tokenizer.vocab_size < 300


def test_an_empty_split(tmp_path, quick):
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    for tokenizer in ("byte", "char", "bpe:300"):
        with pytest.raises(UserError, match="the train split is empty .*; add documents, or set"):
            quick(source="jsonl", path=path, tokenizer=tokenizer, val_fraction=0.9999999)
    path = write_jsonl(tmp_path / "a.jsonl", [str(i) for i in range(24)])
    with pytest.raises(UserError, match="the val split is empty .* validate on 2 of 24") as raised:
        quick(source="jsonl", path=path, val_fraction=1e-9)
    advised = re.search(r"data.val_fraction=(0\.\d+), to", str(raised.value))[1]
    assert quick(source="jsonl", path=path, val_fraction=float(advised)).val.n_documents == 2
    path = write_jsonl(tmp_path / "a.jsonl", ["the same"] * 9)
    with pytest.raises(UserError, match=r"the val split is empty .*; add documents$"):
        quick(source="jsonl", path=path, val_fraction=1e-9)


def test_a_fraction_of_zero_leaves_the_validation_split_empty(tmp_path, quick):
    for name, source in (("a.jsonl", "jsonl"), ("a.txt", "text")):
        path = write_jsonl(tmp_path / name, ["one", "two", "three"])
        corpus = quick(source=source, path=path, val_fraction=0)
        assert corpus.val.shards == []
        assert documents(corpus, corpus.train) in (
            ["one", "two", "three"],
            [(tmp_path / name).read_text()],
        )


@pytest.mark.parametrize("fraction", [1, -0.1, 1.5, float("nan")])
def test_wrong_fractions(quick, fraction):
    with pytest.raises(UserError, match="use a fraction between 0 and 1"):
        quick(source="pysource", val_fraction=fraction)


def test_a_wrong_tokenizer_is_refused_before_anything_is_read(quick):
    with pytest.raises(UserError, match="data.tokenizer=bite"):
        quick(source="pysource", tokenizer="bite")


def test_a_cache_that_cannot_be_a_folder(tmp_path, quick):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="data.cache_dir"):
        quick(source="pysource", cache_dir=tmp_path / "file")
