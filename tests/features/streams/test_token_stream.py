"""Streams: sources read from any document, and blocks of tokens that are written ahead and removed
behind."""

import contextlib
import errno
import gzip
import json
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_runs import wait_for

from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.corpus.shard_writer import ShardWriter
from thinker.data.text.document import MissingData
from thinker.data.text.sources import open_source
from thinker.data.text.tables import rows
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.streams.stream_writer import BLOCKS, StreamClosed, StreamText
from thinker.features.streams.token_stream import TokenStream
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

BUFFER, SEQ_LEN, VAL = 2400, 16, 0.15
BYTE = make_tokenizer("byte", [])
KEY = (1, 0)  # seed and number of the source


def texts(n, seed=0):
    draw = random.Random(seed)
    return [f"{i} " + "".join(draw.choices("abcdef ", k=draw.randrange(1, 90))) for i in range(n)]


def write_rows(path, some, opened=open):
    with opened(path, "wt") as file:
        file.writelines(
            json.dumps({"text": text, "other": i}) + "\n" for i, text in enumerate(some)
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same 300 texts, with a few empty ones, as JSON lines, Parquet, text files and a saved
    dataset."""
    import datasets

    folder = tmp_path_factory.mktemp("texts")
    parts = [texts(300)[:120], ["", *texts(300)[120:130], ""], texts(300)[130:]]
    for name in ("jsonl", "mixed", "parquet", "text"):
        (folder / name).mkdir()
    for i, part in enumerate(parts):
        write_rows(folder / "jsonl" / f"{i}.jsonl", part)
        write_rows(folder / "mixed" / f"{i}.jsonl.gz", part, gzip.open)
        datasets.Dataset.from_dict({"text": part}).to_parquet(folder / "parquet" / f"{i}.parquet")
    everything = [text for part in parts for text in part]
    for i, text in enumerate(everything):
        (folder / "text" / f"{i:04d}.txt").write_text(text)
    datasets.Dataset.from_dict({"text": everything}).save_to_disk(folder / "saved")
    return folder


SOURCES = {
    "jsonl": {"source": "jsonl", "path": "jsonl"},
    "gzip": {"source": "jsonl", "path": "mixed"},
    "parquet": {"source": "parquet", "path": "parquet"},
    "text": {"source": "text", "path": "text"},
    "bounded": {"source": "jsonl", "path": "jsonl", "max_documents": 210},
    "streamed": {"source": "hub", "path": "jsonl"},
    "streamed parquet": {"source": "hub", "path": "parquet"},
    "bounded hub": {"source": "hub", "path": "jsonl", "max_documents": 210},
    "downloaded": {"source": "hub", "path": "parquet", "streaming": False},
    "saved": {"source": "hub", "path": "saved"},
    "tales": {"source": "tales", "max_documents": 40},
    "random": {"source": "repeated_random", "max_documents": 40},
    "pysource": {"source": "pysource", "max_documents": 30},
}


def source_of(folder, name):
    options = SOURCES[name]
    return open_source(
        **options | ({"path": str(folder / options["path"])} if "path" in options else {})
    )


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_begins_at_any_document(folder, name, monkeypatch):
    """Also at a document that was found after a beginning in the middle, as resumed runs do again
    and again."""
    monkeypatch.setattr(rows, "STATE_ROWS", 7)
    source = source_of(folder, name)
    documents = list(source.documents())
    assert [document.number for document in documents] == list(range(len(documents)))
    for number in (0, 1, 50, 119, 120, 121, 122, 131, 132, 209, len(documents) - 1):
        if number < len(documents):
            start = json.loads(json.dumps(documents[number].start))
            rest = list(source.documents(start))
            assert [(each.text, each.number) for each in rest] == [
                (each.text, each.number) for each in documents[number:]
            ]
            later = rest[len(rest) // 2]
            assert [each.text for each in source.documents(later.start)] == [
                each.text for each in documents[later.number :]
            ]


def make_stream(path, source, buffer_tokens=BUFFER, packing="contiguous", **options):
    tokenizer = options.pop("tokenizer", BYTE)
    text = StreamText(source, tokenizer, VAL, **options)
    pack = partial(PackedDataset, seq_len=SEQ_LEN, packing=packing)
    return TokenStream(path, lambda: text, tokenizer, buffer_tokens, pack, *KEY, progress=False)


def open_stream(path, source, window=0, **options):
    stream = make_stream(path, source, **options)
    stream.start(window)
    return stream


def read_windows(stream, first, end):
    """The windows of some places of the training order."""
    return [stream.window(stream.samples(n, 1)[0]) for n in range(first, end)]


def places_of(stream, first, n):
    """The windows at n places of the training order from `first` on."""
    return np.array([sample.index for sample in stream.samples(first, n)])


def assert_same_windows(left, right):
    assert len(left) == len(right)
    for ours, theirs in zip(left, right):
        assert all((a == b).all() for a, b in zip(ours, theirs))


def blocks_on_disk(path):
    """Numbers of the blocks that take space: those in the folder, and removed ones that are still
    open."""
    names = {file.name for file in path.glob("block-*.t*")}
    for file in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            target = os.readlink(file)
            if target.startswith(str(path)) and target.endswith(" (deleted)"):
                names.add(Path(target).name)
    return sorted({int(name[6:11]) for name in names if ".t" in name})


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The windows of more than two epochs of a stream, its folder, and the files that were there
    meanwhile."""
    path = tmp_path_factory.mktemp("whole")
    stream = open_stream(path, source_of(folder, "jsonl"))
    windows, seen = [], []
    for number in range(2200):
        windows += read_windows(stream, number, number + 1)
        seen.append(blocks_on_disk(path))
    stream.close()
    return windows, path, seen


def test_a_stream_has_the_training_split_in_order_and_again(folder, whole):
    """Block by block: whole documents, in the order of the source, none of the validation split."""
    windows, path, _ = whole
    stream = make_stream(path, source_of(folder, "jsonl"))
    stream.index.refresh()
    options = {
        "tokenizer": BYTE,
        "val_fraction": VAL,
        "cache_dir": path / "cache",
        "progress": False,
    }
    corpus = prepare_corpus(source="jsonl", path=str(folder / "jsonl"), **options)
    tokens = corpus.train.shards[0].tokens[:-1]
    read, orders = [], []
    for block in stream.index.blocks:
        last = block.first_window + block.n_windows
        if last > len(windows):
            break
        places = places_of(stream, block.first_window, block.n_windows)
        assert sorted(places.tolist()) == list(range(block.first_window, last))
        orders.append((places - block.first_window).tolist())
        ordered = [windows[block.first_window + i] for i in np.argsort(places)]
        inputs = np.concatenate([inputs[targets != IGNORE_INDEX] for inputs, targets in ordered])
        assert len(inputs) == block.n_tokens - 1
        assert block.n_tokens >= BUFFER // BLOCKS > block.n_tokens - 100
        assert block.epochs == pytest.approx(sum(map(len, [*read, inputs])) / len(tokens), abs=0.06)
        read.append(inputs)
    read = np.concatenate(read)
    assert len(read) > 2 * len(tokens)
    assert (
        len({tuple(order) for order in orders})
        == len(orders)
        > len({len(order) for order in orders})
    )  # all differ
    assert (read == np.resize(tokens, len(read))).all()


def test_the_disk_has_at_most_the_blocks_of_the_buffer(whole):
    _, path, seen = whole
    assert max(map(len, seen)) == BLOCKS
    assert max(seen[-1]) > 3 * BLOCKS
    assert blocks_on_disk(path) == seen[-1] or len(blocks_on_disk(path)) <= BLOCKS


def test_a_finished_stream_leaves_only_its_record(folder, tmp_path):
    stream = open_stream(tmp_path, source_of(folder, "jsonl"))
    read_windows(stream, 0, 3)
    stream.close(is_finished=True)
    assert [path.name for path in tmp_path.iterdir()] == ["blocks.jsonl"]
    with pytest.raises(StreamClosed):
        read_windows(stream, 5000, 5001)


@pytest.mark.parametrize(
    "name", ["jsonl", "gzip", "parquet", "text", "streamed", "downloaded", "saved"]
)
def test_a_stream_continues_anywhere(folder, whole, name, tmp_path, monkeypatch):
    """Beyond what is recorded, in the blocks on disk, and in blocks that were removed long ago."""
    monkeypatch.setattr(rows, "STATE_ROWS", 7)
    windows, source = whole[0], source_of(folder, name)
    parts = [(0, 3), (3, 500), (490, 600), (2, 40), (1000, 1100), (1900, 1905), (600, 640)]
    for first, end in parts:
        stream = open_stream(tmp_path, source, first)
        assert_same_windows(read_windows(stream, first, end), windows[first:end])
        stream.close()
        assert len(blocks_on_disk(tmp_path)) <= BLOCKS


@given(st.data())
def test_damage_to_its_files_costs_time_but_no_bit(folder, whole, tmp_path_factory, data):
    """Files that are missing, cut or changed are written again; lines of the record that are
    damaged, too."""
    windows, _, _ = whole
    path = tmp_path_factory.mktemp("damaged")
    stream = open_stream(path, source_of(folder, "jsonl"))
    read_windows(stream, 0, 300)
    stream.close()
    files = [path / "blocks.jsonl", *sorted(path.glob("block-*"))]
    kinds = st.sampled_from(["remove", "cut", "change"])
    damage = st.tuples(
        st.integers(0, BLOCKS), kinds, st.floats(0, 1, exclude_max=True), st.integers(0, 7)
    )
    for number, how, part, bit in data.draw(st.lists(damage, min_size=1, max_size=3)):
        file = files[number % len(files)]
        if how == "remove" or not file.exists():
            file.unlink(missing_ok=True)
            continue
        content = bytearray(file.read_bytes())
        at = int(part * len(content))
        if how == "change" and file.suffix == ".jsonl":
            lines = bytes(content).splitlines(keepends=True)
            content = b"".join(lines[:bit] + lines[bit + 1 :])  # a line is lost
        elif how == "change" and content:
            content[at] ^= 1 << bit
        file.write_bytes(content if how == "change" else content[:at])
    first = data.draw(st.integers(0, 320))
    stream = open_stream(path, source_of(folder, "jsonl"), first)
    assert_same_windows(read_windows(stream, first, first + 60), windows[first : first + 60])
    stream.close()
    shutil.rmtree(path)


def test_a_process_that_only_reads_waits_for_the_writer(folder, whole, tmp_path):
    """It sees the same windows, through the files alone, if it stays less than a block behind."""
    source, windows, read = source_of(folder, "jsonl"), whole[0], []
    reader, writer = make_stream(tmp_path, source), make_stream(tmp_path, source)

    def read_on():
        for number in range(200):
            read.extend(read_windows(reader, number, number + 1))

    thread = threading.Thread(target=read_on)
    thread.start()
    writer.start(0)
    for number in range(200):
        read_windows(writer, number, number + 1)
        assert wait_for(lambda number=number: len(read) > number - 30)
    thread.join()
    assert_same_windows(read, windows[:200])
    writer.close()


def test_a_process_that_waits_ends_when_the_run_does(folder, tmp_path):
    reader = make_stream(tmp_path, source_of(folder, "jsonl"))
    with ThreadPoolExecutor() as pool:
        result = pool.submit(read_windows, reader, 0, 1)
        reader.close()
        assert isinstance(result.exception(), StreamClosed)


# Its questions leave room for answers in windows of SEQ_LEN bytes.
SHORT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.mark.parametrize("packing", ["documents", "best_fit"])
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_packings_and_conversations(tmp_path, packing, kind):
    """Every target that fits comes once per epoch, also from conversations, whose masks stay."""
    some = texts(120)
    chats = [
        [{"role": "user", "content": text[:3]}, {"role": "assistant", "content": text[20:]}]
        for text in some
    ]
    values = some if kind == "text" else [{"messages": chat} for chat in chats]
    lines = [{"text": value} if kind == "text" else value for value in values]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = BYTE.with_chat_template(SHORT_TEMPLATE) if kind == "chat" else BYTE
    options = {"tokenizer": tokenizer, "assistant_only_loss": kind == "chat"}
    source = open_source("jsonl", path=str(tmp_path / "a.jsonl"))
    stream = open_stream(tmp_path / "stream", source, packing=packing, **options)
    corpus = prepare_corpus(
        source="jsonl", path=str(tmp_path / "a.jsonl"), val_fraction=VAL, cache_dir=tmp_path / "cache", progress=False,
        **options,
    )  # fmt: skip
    dataset = PackedDataset(corpus.train, SEQ_LEN, packing)
    expected = np.concatenate([dataset[i][1] for i in range(len(dataset))])
    counts = np.bincount(expected[expected != IGNORE_INDEX], minlength=300)
    n, found = 0, np.zeros(300, np.int64)
    while stream.index.n_windows == 0 or stream.index.blocks[-1].epochs < 3:  # at least one epoch
        _, targets = read_windows(stream, n, n + 1)[0]
        found += np.bincount(targets[targets != IGNORE_INDEX], minlength=300)
        n += 1
    stream.close()
    assert (found[counts == 0] == 0).all()
    assert found / found.sum() == pytest.approx(counts / counts.sum(), abs=0.01)


@pytest.mark.parametrize(
    "state", [{"x": 1}, {"examples_iterable": {"type": "Other"}, "epoch": 0}, [], "x"]
)
def test_a_position_of_another_version_of_the_library(folder, whole, tmp_path, state):
    """The place is found by reading, as if the library had lost it."""
    source = source_of(folder, "streamed")
    stream = open_stream(tmp_path, source)
    read_windows(stream, 0, 300)
    stream.close()
    lines = [json.loads(line) for line in (tmp_path / "blocks.jsonl").read_text().splitlines()]
    for line in lines:
        line["last"][1] = [state, 0]
    (tmp_path / "blocks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stream = open_stream(tmp_path, source, 500)
    assert_same_windows(read_windows(stream, 500, 520), whole[0][500:520])
    stream.close()


def test_documents_of_a_validation_file_are_left_out(tmp_path):
    """As in a corpus that is tokenized first, also in later epochs and after a beginning in the
    middle."""
    path, some = tmp_path / "a.jsonl", texts(120)
    write_rows(path, some)
    tokenizer = make_tokenizer("bpe:300", some)
    held_out = [text for i, text in enumerate(some) if i % 7 == 0]
    ids = [i for text in held_out for i in (tokenizer.bos_id, *tokenizer.encode(text))]
    ids.append(tokenizer.bos_id)  # the last document of a file may be cut, and does not count
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    (tmp_path / "val.bin").write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())
    source, expected = (
        open_source("jsonl", path=str(path)),
        [text for text in some if text not in held_out],
    )
    text = StreamText(source, tokenizer, VAL, str(tmp_path / "val.bin"))
    read = [
        document.text for (_, document), _ in islice(text.encoded(None, 100), 2 * len(expected))
    ]
    assert read == expected * 2


def test_two_streams_of_one_text_have_their_own_order(folder, tmp_path):
    orders = []
    for number in range(2):
        stream = make_stream(tmp_path / str(number), source_of(folder, "jsonl"))
        stream.source = number
        stream.start(0)
        orders.append(places_of(stream, 0, 20).tolist())
        stream.close()
    assert orders[0] != orders[1]


def test_a_text_that_changes_is_an_error(tmp_path):
    """Before the place where the run is: named. Files that were added before it: the place is found
    again."""
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts(300)):
        (tmp_path / "texts" / f"{i:04d}").write_text(text)
    windows = []
    for first in (0, 120):
        stream = open_stream(
            tmp_path / "stream", open_source("text", path=str(tmp_path / "texts")), first
        )
        windows += read_windows(stream, first, first + 60)
        stream.close()
    for file in (tmp_path / "stream").glob("block-*"):
        file.unlink()
    os.rename(tmp_path / "texts" / "0000", tmp_path / "texts" / "00000")  # no change of the order
    stream = open_stream(
        tmp_path / "stream", open_source("text", path=str(tmp_path / "texts")), 120
    )
    assert_same_windows(read_windows(stream, 120, 180), windows[60:])
    stream.close()
    last = json.loads((tmp_path / "stream" / "blocks.jsonl").read_text().splitlines()[-1])
    (tmp_path / "texts" / f"{last['last'][0]:04d}").write_text("another text")
    stream = open_stream(
        tmp_path / "stream", open_source("text", path=str(tmp_path / "texts")), 100_000
    )
    with pytest.raises(
        UserError, match=f"document {last['last'][0] + 1} is not the one that the run has read"
    ):
        read_windows(stream, 100_000, 100_001)
    stream.close()
    for file in (tmp_path / "stream").glob("block-*"):
        file.unlink()
    (tmp_path / "texts" / "0001").write_text("another text")
    stream = open_stream(tmp_path / "stream", open_source("text", path=str(tmp_path / "texts")), 0)
    with pytest.raises(UserError, match="the text has changed since the run read it"):
        read_windows(stream, 0, 1)
    stream.close()


def test_a_place_that_the_library_lost_is_found_by_reading_again(folder, whole, tmp_path, capsys):
    """The positions of some versions of `datasets` are wrong; then the record says where to
    look."""
    source = source_of(folder, "streamed")
    stream = open_stream(tmp_path, source)
    read_windows(stream, 0, 300)
    stream.close()
    path = tmp_path / "blocks.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["last"][1] = lines[0]["last"][1]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stream = open_stream(tmp_path, source, 290)
    assert_same_windows(read_windows(stream, 290, 400), whole[0][290:400])
    stream.close()
    assert "documents again to find the place" in capsys.readouterr().err


def test_a_full_disk_loses_the_unfinished_block(folder, tmp_path, monkeypatch):
    """Otherwise it would stay full."""
    added, add = [], ShardWriter.add

    def add_until_full(*args, **options):
        added.append(1)
        if len(added) == 60:
            raise OSError(errno.ENOSPC, "no space left")
        add(*args, **options)

    monkeypatch.setattr(ShardWriter, "add", add_until_full)
    stream = open_stream(tmp_path, source_of(folder, "jsonl"))
    with pytest.raises(OSError, match="no space left"):
        read_windows(stream, 0, 500)
    stream.close()
    assert not list(tmp_path.glob("*.tmp"))


def test_errors_of_network_libraries_are_those_of_missing_data(folder, monkeypatch):
    """They are no OSErrors; those of our own code keep their traceback."""
    import datasets

    for module, expected in (("httpx2", MissingData), ("thinker", RuntimeError)):
        kind = type("ReadTimeout", (RuntimeError,), {"__module__": module})

        def load(*args, kind=kind, **options):
            raise kind("too slow")

        monkeypatch.setattr(datasets, "load_dataset", load)
        with pytest.raises(expected, match="too slow"):
            list(source_of(folder, "streamed").documents())


def test_a_bound_is_reported_once(folder, tmp_path, capsys):
    stream = open_stream(tmp_path, source_of(folder, "bounded"))
    read_windows(stream, 0, 1500)
    stream.close()
    assert stream.index.blocks[-1].epoch >= 2
    assert 0.9 < max(block.share for block in stream.index.blocks) <= 1
    assert capsys.readouterr().err.count("using only the first 210 documents") == 1


def test_an_error_in_the_text_reaches_the_reader(tmp_path):
    """After the good rows before it."""
    some = texts(100)
    write_rows(tmp_path / "a.jsonl", some)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{broken\n")
    stream = open_stream(tmp_path / "stream", open_source("jsonl", path=str(tmp_path / "a.jsonl")))
    with pytest.raises(UserError, match="line 101 is not valid JSON"):
        read_windows(stream, 0, 10_000)
    stream.close()
    write_rows(tmp_path / "b.jsonl", ["x"])
    source = open_source("jsonl", path=str(tmp_path / "b.jsonl"))
    stream = TokenStream(
        tmp_path / "b", lambda: StreamText(source, BYTE, 0.9999), BYTE, BUFFER, None, *KEY
    )
    stream.start(0)
    with pytest.raises(UserError, match="the train split is empty"):
        stream.samples(0, 1)
