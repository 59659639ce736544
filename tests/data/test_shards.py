"""Shards: what is written comes back, and a file that is not whole is refused."""

import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinker.data.corpus.shard_writer import ShardWriter
from thinker.data.corpus.shards import HEADER_BYTES, DamagedShard, TokenShards, token_dtype
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer

TOKENIZER = make_tokenizer("byte", [])
BOS = TOKENIZER.bos_id
DOCUMENTS = st.lists(
    st.tuples(st.lists(st.integers(0, 255), max_size=30), st.floats(-1e3, 0) | st.none()),
    min_size=1,
    max_size=20,
)


def write(folder, documents, shard_tokens=1 << 20):
    """The TokenShards of [(ids, log_prob), ...]; each id counts as one byte of text."""
    writer = ShardWriter(folder, "train", TOKENIZER, shard_tokens)
    for ids, log_prob in documents:
        writer.add(np.array(ids, np.uint32), len(ids), log_prob)
    writer.close()
    return TokenShards.open(folder, writer.files, TOKENIZER)


@given(documents=DOCUMENTS, shard_tokens=st.integers(1, 60))
def test_documents_come_back_in_shards_of_bounded_size(documents, shard_tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    tokens = write(folder, documents, shard_tokens)
    found = []
    for shard in tokens.shards:
        assert shard.tokens[0] == shard.tokens[-1] == BOS
        assert shard.offsets[-1] == shard.n_tokens - 1 == len(shard.tokens) - 1
        for i in range(shard.n_documents):
            start, end = shard.offsets[i : i + 2]
            assert shard.tokens[start] == BOS
            found.append(shard.tokens[start + 1 : end].tolist())
            assert shard.document_bytes[i] == end - start - 1
            if shard.log_probs is not None:
                assert shard.log_probs[i] == documents[len(found) - 1][1]
        here = [log_prob for _, log_prob in documents[len(found) - shard.n_documents : len(found)]]
        assert (shard.log_probs is None) == (None in here)
        assert (
            shard.offsets[-2] < shard_tokens
        )  # without its last document the shard had not reached the bound
    assert all(shard.offsets[-1] >= shard_tokens for shard in tokens.shards[:-1])
    assert found == [ids for ids, _ in documents]
    total = sum(len(ids) for ids, _ in documents)
    assert (tokens.n_documents, tokens.n_bytes) == (len(documents), total)
    assert tokens.n_tokens == total + len(documents) + len(tokens.shards)
    assert sorted(file.suffix for file in folder.iterdir()) == [".tokens"] * len(
        tokens.shards
    )  # nothing temporary


def test_a_document_may_come_in_pieces_and_is_never_cut(tmp_path):
    writer = ShardWriter(tmp_path, "train", TOKENIZER, shard_tokens=4)
    assert not writer.started
    for i in range(5):
        writer.add(np.full(3, i), 3, continues=i > 0)
    writer.add(np.array([9]), 1)
    assert writer.started
    writer.close()
    tokens = TokenShards.open(tmp_path, writer.files, TOKENIZER)
    assert [shard.n_documents for shard in tokens.shards] == [1, 1]
    assert tokens.shards[0].tokens[:].tolist() == [BOS, *np.repeat(range(5), 3), BOS]
    assert tokens.shards[0].document_bytes[:].tolist() == [15]


def test_tokens_take_two_bytes_where_that_is_enough(tmp_path):
    assert [token_dtype(size).itemsize for size in (257, 65_535, 65_536, 65_537)] == [2, 2, 2, 4]
    assert write(tmp_path, [([1, 2], None)]).shards[0].tokens.dtype == np.uint16


def test_large_vocabularies_take_four_bytes(tmp_path):
    text = "".join(map(chr, range(128, 55_000))) + "".join(
        map(chr, range(0x10000, 0x10000 + 12_000))
    )
    tokenizer = make_tokenizer("char", [text])
    assert tokenizer.vocab_size > 1 << 16
    writer = ShardWriter(tmp_path, "train", tokenizer)
    ids = tokenizer.encode(text)
    writer.add(np.array(ids), len(text.encode()), -1.5)
    writer.close()
    shard = TokenShards.open(tmp_path, writer.files, tokenizer).shards[0]
    assert shard.tokens.dtype == np.uint32
    assert shard.tokens[:].tolist() == [tokenizer.bos_id, *ids, tokenizer.bos_id]
    assert shard.log_probs[:].tolist() == [-1.5]


@pytest.fixture
def file(tmp_path):
    return write(tmp_path, [([1, 2, 3], -math.pi), ([4], -1.0)]).shards[0].path


def reopen(file, tokenizer=TOKENIZER):
    return TokenShards.open(file.parent, [file.name], tokenizer)


@pytest.mark.parametrize("position", range(HEADER_BYTES))
def test_every_byte_of_the_header_is_checked(file, position):
    assert reopen(file).n_documents == 2
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedShard, match=file.name):
        reopen(file)


@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, -8, -1])
def test_a_truncated_file_is_refused(file, length):
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(DamagedShard, match=file.name):
        reopen(file)


def test_a_file_with_more_in_it_is_refused(file):
    file.write_bytes(file.read_bytes() + bytes(8))
    with pytest.raises(DamagedShard, match="its header expects"):
        reopen(file)


def test_zeros_where_tokens_were_are_refused(file):
    data = file.read_bytes()
    file.write_bytes(
        data[:HEADER_BYTES] + bytes(len(data) - HEADER_BYTES)
    )  # as some file systems leave after a crash
    with pytest.raises(DamagedShard, match="start and end"):
        reopen(file)


def test_another_tokenizer_is_refused(file):
    with pytest.raises(DamagedShard, match="another tokenizer"):
        reopen(file, make_tokenizer("char", ["é"]))
    with pytest.raises(DamagedShard, match="another tokenizer"):  # of the same size
        reopen(file, make_tokenizer("char", [""]))


def test_a_file_that_is_cut_while_it_is_open_is_an_error_and_one_that_is_removed_is_none(file):
    (shard,) = reopen(file).shards
    numbers = [shard.tokens[:], shard.offsets[:], shard.log_probs[:]]
    assert [*shard.tokens] == numbers[0].tolist() == [BOS, 1, 2, 3, BOS, 4, BOS]
    assert shard.tokens[-3:-1].tolist() == [BOS, 4]
    assert shard.tokens[9:].tolist() == []
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(bytes(8))
    for array, expected in zip((shard.tokens, shard.offsets, shard.log_probs), numbers):
        assert array[:].tolist() == expected.tolist()
    file.write_bytes(content)
    (shard,) = reopen(file).shards
    os.truncate(file, HEADER_BYTES + 6)
    assert shard.tokens[:3].tolist() == [BOS, 1, 2]
    for array in (shard.tokens, shard.offsets, shard.log_probs):
        with pytest.raises(DamagedShard, match=f"{file.name} was truncated while in use"):
            array[:]


def test_many_threads_read_one_file(tmp_path):
    (shard,) = write(tmp_path, [([i % 256], None) for i in range(5000)]).shards
    whole = shard.tokens[:]

    def read(seed):
        starts = np.random.default_rng(seed).integers(0, len(whole), 300)
        return all((shard.tokens[i : i + 50] == whole[i : i + 50]).all() for i in starts)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


def test_an_absent_file_is_refused(file):
    file.unlink()
    with pytest.raises(DamagedShard, match="cannot be read"):
        reopen(file)
