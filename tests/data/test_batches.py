"""PackedDataset and their order: nothing lost, nothing twice, and a pure function of (seed,
step)."""

import itertools
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from token_shards import TOKENIZER, write_tokens

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.best_fit import pack_best_fit
from thinker.data.batches.dataset import ShuffledDataset
from thinker.data.batches.permutation import permute
from thinker.data.batches.windows import PackedDataset, check_fills_a_window, sequential_batches
from thinker.data.corpus.shards import FileArray, TokenShards
from thinker.evaluation.entropy_floor import entropy_floor
from thinker.runtime.errors import UserError

BOS = TOKENIZER.bos_id
PACKINGS = pytest.mark.parametrize("packing", ["contiguous", "documents"])
LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=25)


@pytest.fixture(scope="session")
def make_tokens(tmp_path_factory):
    return lambda lengths, **options: write_tokens(
        tmp_path_factory.mktemp("tokens"), lengths, **options
    )


def span(windows, index, shift=0):
    """The shard and the only part of a window."""
    shard, (part,) = windows.spans(index, shift)
    return shard, *part


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**9))
def test_permute_is_a_bijection_of_any_size(size, seed, epoch):
    image = permute(np.arange(size), size, (seed, epoch))
    assert sorted(image.tolist()) == list(range(size))
    assert permute(np.array([size // 2]), size, (seed, epoch)) == image[size // 2]


@given(size=st.integers(2**40, 2**62), seed=st.integers(0, 100))
def test_permute_needs_no_table(size, seed):
    indices = np.array([i * (size - 1) // 49 for i in range(50)])
    image = permute(indices, size, (seed, 0))
    assert ((image >= 0) & (image < size)).all()
    assert len(np.unique(image)) == len(indices)


@pytest.mark.parametrize("index", [np.array([8]), np.array([3, 8]), np.array([-1, 3])])
def test_permute_refuses_what_is_out_of_range(index):
    with pytest.raises(IndexError):
        permute(index, 8, (0, 0))


def test_permute_sends_every_index_everywhere():
    size, keys = 11, 2200
    images = np.stack([permute(np.arange(size), size, (7, epoch)) for epoch in range(keys)])
    for index in range(size):
        counts = np.bincount(images[:, index], minlength=size)
        chi_square = ((counts - keys / size) ** 2 / (keys / size)).sum()
        assert chi_square < 35  # 10 degrees of freedom: one in ten thousand by chance
    order = permute(np.arange(5000), 5000, (7, 0))
    for other in (
        np.arange(5000),
        permute(np.arange(5000), 5000, (7, 1)),
        permute(np.arange(5000), 5000, (8, 0)),
    ):
        assert abs(np.corrcoef(order, other)[0, 1]) < 0.06
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.06


@given(lengths=st.lists(st.integers(1, 70), max_size=60), seq_len=st.integers(1, 30))
def test_best_fit_packs_every_token_once_and_whole_documents(lengths, seq_len):
    offsets = np.cumsum([0, *lengths])
    segments, firsts = pack_best_fit(offsets, seq_len)
    windows = [segments[a:b].tolist() for a, b in itertools.pairwise(firsts.tolist())]
    assert firsts[-1] == len(segments)
    assert sorted(x for window in windows for a, b in window for x in range(a, b)) == list(
        range(sum(lengths))
    )
    starts = set(offsets[:-1].tolist())
    for window in windows:
        assert 0 < sum(b - a for a, b in window) <= seq_len
        assert all(
            a in starts for a, _ in window[1:]
        )  # only the first segment may continue a document
    cut = {end for _, end in segments.tolist()} - set(offsets[1:].tolist())
    long = [(a, b) for a, b in itertools.pairwise(offsets.tolist()) if b - a > seq_len]
    assert cut == {
        x for a, b in long for x in range(a + seq_len, b, seq_len)
    }  # only long documents are cut
    assert [min(window)[0] for window in windows] == sorted(min(window)[0] for window in windows)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80))
def test_best_fit_is_best_fit_decreasing(lengths):
    """As many windows as when documents are placed one by one, up to the order among equal ones."""
    free = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in free if room >= length]
        if fitting:
            free[free.index(min(fitting))] -= length
        else:
            free.append(30 - length)
    _, firsts = pack_best_fit(np.cumsum([0, *lengths]), 30)
    assert len(firsts) - 1 <= len(free)
    _, firsts = pack_best_fit(np.cumsum([0, 20, 18, 10, 6, 6]), 30)
    assert len(firsts) - 1 == 2  # 3 if a document goes into the emptiest window


@given(lengths=LENGTHS, seq_len=st.integers(1, 30), shard_tokens=st.integers(1, 200))
def test_best_fit_windows_have_every_target_once(lengths, seq_len, shard_tokens, make_tokens):
    tokens = make_tokens(lengths, shard_tokens=shard_tokens)
    windows = PackedDataset(tokens, seq_len, "best_fit", document_masking=True)
    targets = Counter()
    for i in range(len(windows)):
        shard, spans = windows.spans(i)
        inputs, target = windows[i]
        stream = shard.tokens[:]
        expected = [(int(stream[x]), int(stream[x + 1])) for a, b in spans for x in range(a, b)]
        used = len(expected)
        assert list(zip(inputs[:used].tolist(), target[:used].tolist())) == expected
        assert (inputs[used:] == BOS).all()
        assert (target[used:] == -1).all()
        targets.update((shard.path.name, x + 1) for a, b in spans for x in range(a, b))
        ids = windows.document_ids(torch.from_numpy(inputs)[None])[0].tolist()
        numbers = [number for number, (a, b) in enumerate(spans) for _ in range(a, b)]
        assert [x - ids[0] for x in ids[:used]] == numbers  # each segment is a document of its own
    assert set(targets.values()) == {1}
    assert sum(targets.values()) == sum(lengths) + len(lengths)


@PACKINGS
@given(lengths=LENGTHS, seq_len=st.integers(1, 30), shard_tokens=st.integers(1, 200))
def test_windows_reproduce_the_stream(packing, lengths, seq_len, shard_tokens, make_tokens):
    tokens = make_tokens(lengths, shard_tokens=shard_tokens)
    windows = PackedDataset(tokens, seq_len, packing)
    stream, counted = [], 0
    for i in range(len(windows)):
        inputs, targets = windows[i]
        assert inputs.shape == targets.shape == (seq_len,)
        used = int((targets >= 0).sum())
        assert used > 0
        assert (targets[:used] >= 0).all()  # padding comes last, and is the BOS token
        assert (inputs[used:] == BOS).all()
        assert inputs[1:used].tolist() == targets[: used - 1].tolist()
        stream += (
            [*inputs[:1].tolist(), *targets[:used].tolist()]
            if not stream
            else targets[:used].tolist()
        )
        counted += used
    first_tokens = [int(shard.tokens[0]) for shard in tokens.shards]
    whole = [token for shard in tokens.shards for token in shard.tokens[1:].tolist()]
    assert stream == [
        first_tokens[0],
        *whole,
    ]  # each token is a target once: only the first BOS token is not
    assert counted == sum(lengths) + len(lengths)


@given(lengths=LENGTHS, seq_len=st.integers(1, 30), shard_tokens=st.integers(1, 200))
def test_documents_are_packed_greedily_and_whole(lengths, seq_len, shard_tokens, make_tokens):
    tokens = make_tokens(lengths, shard_tokens=shard_tokens)
    windows = PackedDataset(tokens, seq_len, "documents")
    expected = []
    for shard in tokens.shards:  # the same, one document at a time
        start, starts = None, []
        for begin, end in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist()):
            if start is None or end - start > seq_len:
                starts.append(begin)
                start = begin
            if end - begin > seq_len:
                starts += range(begin + seq_len, end, seq_len)
                start = None
        expected += [(shard, *pair) for pair in zip(starts, [*starts[1:], shard.n_tokens - 1])]
    assert [span(windows, i) for i in range(len(windows))] == expected
    for shard, start, end in expected:
        inside = [
            (a, b) for a, b in zip(shard.offsets[:-1], shard.offsets[1:]) if a < end and b > start
        ]
        assert (
            all(start <= a and b <= end for a, b in inside) or len(inside) == 1
        )  # whole, or alone in its windows


def test_the_packing_table_lies_on_disk_and_is_made_again_when_damaged(make_tokens):
    tokens = make_tokens([3, 4, 5, 30, 1])
    first = PackedDataset(tokens, 10, "documents")
    (table,) = tokens.shards[0].path.parent.glob("*.windows-*")
    assert isinstance(first.starts[0], FileArray)
    expected, age = [span(first, i) for i in range(len(first))], table.stat().st_mtime_ns
    swapped = bytearray(table.read_bytes())
    swapped[8:24] = swapped[16:24] + swapped[8:16]  # two of its numbers
    for damage in (None, b"", b"nonsense", table.read_bytes()[:-1], swapped):
        if damage is not None:
            table.write_bytes(damage)
        again = PackedDataset(tokens, 10, "documents")
        assert [span(again, i) for i in range(len(again))] == expected
        if damage is None:
            assert table.stat().st_mtime_ns == age
    assert [file.name for file in tokens.shards[0].path.parent.glob("*.windows-*")] == [table.name]
    assert len(PackedDataset(tokens, 5, "documents")) > len(
        first
    )  # another length has a table of its own


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
def test_the_packing_table_is_kept_in_memory_where_nothing_can_be_written(make_tokens, monkeypatch):
    folder = make_tokens([3, 4, 5, 30, 1]).shards[0].path.parent
    monkeypatch.chdir(folder)  # another user may read nothing above it
    tokens = TokenShards.open(Path(), ["train-00000.tokens"], TOKENIZER)
    is_root = os.geteuid() == 0  # who could write all the same
    folder.chmod(0o555)
    try:
        if is_root:
            os.seteuid(65534)
        windows = PackedDataset(tokens, 10, "documents")
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
    assert [file.name for file in folder.iterdir()] == ["train-00000.tokens"]
    expected = PackedDataset(tokens, 10, "documents")
    assert len(list(folder.iterdir())) == 2
    assert [span(windows, i) for i in range(len(windows))] == [
        span(expected, i) for i in range(len(expected))
    ]


@PACKINGS
@given(
    lengths=LENGTHS,
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 1000),
    shard_tokens=st.integers(1, 200),
)
def test_each_window_once_an_epoch_whatever_the_batch_size(
    packing, lengths, batch_size, seed, shard_tokens, make_tokens
):
    windows = PackedDataset(make_tokens([*lengths, 8], shard_tokens=shard_tokens), 7, packing)
    loader = BatchLoader(ShuffledDataset(windows, seed), batch_size)
    size = len(windows)
    ids = [i for step in range(3 * size // batch_size + 1) for i in loader.sample_ids(step)]
    for epoch in range(3):
        assert sorted(ids[epoch * size : (epoch + 1) * size]) == list(range(size))
    other = BatchLoader(
        ShuffledDataset(windows, seed), batch_size + 1
    )  # the order is the seed's, however it is cut into steps
    assert [i for step in range(size) for i in other.sample_ids(step)][: len(ids)] == ids[
        : size * (batch_size + 1)
    ]


def test_batches_are_a_pure_function_of_seed_and_step(make_tokens):
    windows = PackedDataset(make_tokens([20, 3, 14, 9] * 5), 8, "contiguous")
    loader = BatchLoader(ShuffledDataset(windows, seed=3), 4)
    forwards = [loader.batch(step) for step in range(12)]
    for step in (7, 0, 11, 7):
        inputs, targets = BatchLoader(ShuffledDataset(windows, seed=3), 4).batch(step)
        assert torch.equal(inputs, forwards[step][0])
        assert torch.equal(targets, forwards[step][1])
        assert inputs.shape == targets.shape == (4, 8)
        assert inputs.dtype == targets.dtype == torch.int64
        for row, i in enumerate(loader.sample_ids(step)):
            assert inputs[row].tolist() == windows[i][0].tolist()
            assert targets[row].tolist() == windows[i][1].tolist()
        assert torch.equal(loader.batch(step, slice(1, 3))[1], targets[1:3])
    assert [loader.sample_ids(s) for s in range(5)] != [
        BatchLoader(ShuffledDataset(windows, seed=4), 4).sample_ids(s) for s in range(5)
    ]


def test_every_epoch_has_an_order_of_its_own(make_tokens):
    windows = PackedDataset(make_tokens([20, 3, 14, 9] * 5), 8, "contiguous")
    size = len(windows)
    ids = [
        BatchLoader(ShuffledDataset(windows, seed=3), size).sample_ids(epoch) for epoch in range(4)
    ]
    assert len({tuple(order) for order in ids}) == 4
    assert ids == [permute(np.arange(size), size, (3, epoch)).tolist() for epoch in range(4)]


@PACKINGS
def test_in_order_goes_through_the_first_windows_once(packing, make_tokens):
    windows = PackedDataset(make_tokens([5, 9, 2, 30, 7], shard_tokens=20), 6, packing)
    everything = [windows[i][1].tolist() for i in range(len(windows))]
    for limit in (None, 1, 5, len(windows), len(windows) + 9):
        batches = list(sequential_batches(windows, 4, limit))
        assert [row for _, targets in batches for row in targets.tolist()] == everything[:limit]
        assert {len(inputs) for inputs, _ in batches[:-1]} <= {4}


@given(
    lengths=LENGTHS,
    limit=st.none() | st.integers(1, 30),
    shard_tokens=st.integers(1, 200),
    data=st.data(),
)
def test_the_floor_counts_the_documents_in_the_windows(
    lengths, limit, shard_tokens, data, make_tokens
):
    log_probs = data.draw(
        st.lists(st.floats(-500, 0), min_size=len(lengths), max_size=len(lengths))
    )
    windows = PackedDataset(
        make_tokens(lengths, shard_tokens=shard_tokens, log_probs=log_probs), 26, "documents"
    )
    counted = sum(int((targets >= 0).sum()) for _, targets in sequential_batches(windows, 4, limit))
    documents, targets = 0, 0
    while targets < counted:  # whole documents, from the first
        targets += lengths[documents] + 1
        documents += 1
    assert targets == counted
    assert entropy_floor(windows, limit) == pytest.approx(
        -math.fsum(log_probs[:documents]) / targets
    )


def test_no_floor_where_none_is_known(make_tokens):
    known = make_tokens([4, 12, 4], log_probs=[-1.0, -2.0, -3.0])
    assert entropy_floor(PackedDataset(known, 13, "documents")) == pytest.approx(6 / 23)
    assert entropy_floor(PackedDataset(known, 13, "documents"), limit=1) == pytest.approx(1 / 5)
    assert entropy_floor(PackedDataset(known, 12, "documents")) is None  # the second is cut
    assert entropy_floor(PackedDataset(known, 12, "documents"), limit=1) == pytest.approx(1 / 5)
    assert entropy_floor(PackedDataset(known, 13, "contiguous")) is None
    assert entropy_floor(PackedDataset(make_tokens([4], log_probs=None), 13, "documents")) is None


def test_a_corpus_shorter_than_one_window(make_tokens):
    tokens = make_tokens([4, 3])  # 10 tokens: BOS, 4, BOS, 3, BOS
    assert tokens.n_tokens == 10
    check_fills_a_window(tokens, 9)
    with pytest.raises(
        UserError, match=r"10 tokens.*data.seq_len=10 needs 11; lower data.seq_len or add text"
    ):
        check_fills_a_window(tokens, 10)


def test_wrong_options(make_tokens):
    tokens = make_tokens([4])
    with pytest.raises(UserError, match="data.packing=tight: choose from contiguous, documents"):
        PackedDataset(tokens, 4, "tight")
    with pytest.raises(UserError, match="the context length, 0"):
        PackedDataset(tokens, 0, "contiguous")
    with pytest.raises(IndexError):
        PackedDataset(tokens, 4, "contiguous")[2]


def test_order_uses_every_window_equally_over_epochs(make_tokens):
    windows = PackedDataset(make_tokens([10] * 10), 5, "contiguous")
    loader = BatchLoader(ShuffledDataset(windows, seed=1), 3)
    counts = Counter(i for step in range(len(windows)) for i in loader.sample_ids(step))
    assert set(counts.values()) == {3}


@given(lengths=LENGTHS, seq_len=st.integers(1, 30), shard_tokens=st.integers(1, 200))
def test_documents_are_numbered_from_border_to_border(lengths, seq_len, shard_tokens, make_tokens):
    tokens = make_tokens(lengths, shard_tokens=shard_tokens)
    windows = PackedDataset(tokens, seq_len, "contiguous", document_masking=True)
    assert (
        PackedDataset(tokens, seq_len, "contiguous").document_ids(
            torch.zeros(1, seq_len, dtype=torch.long)
        )
        is None
    )
    inputs, _ = windows.batch(range(len(windows)))
    numbers = windows.document_ids(inputs)
    assert numbers.shape == inputs.shape
    same = numbers[:, 1:] == numbers[:, :-1]
    assert torch.equal(same, inputs[:, 1:] != BOS)  # a new one at each BOS token, and nowhere else


def test_the_first_tokens_of_a_window_can_be_given(make_tokens):
    tokens = make_tokens([40])
    inputs, targets = PackedDataset(tokens, 10, "contiguous")[1]
    given_inputs, given_targets = PackedDataset(tokens, 10, "contiguous", prefix_len=4)[1]
    assert given_inputs.tolist() == inputs.tolist()
    assert given_targets.tolist() == [-1, -1, -1, *targets[3:]]


@PACKINGS
@given(
    lengths=LENGTHS,
    seq_len=st.integers(1, 30),
    size=st.integers(1, 5),
    ranks=st.integers(1, 5),
    limit=st.integers(1, 9),
)
def test_ranks_see_each_window_once_in_equally_many_batches(
    packing, lengths, seq_len, size, ranks, limit, make_tokens
):
    windows = PackedDataset(make_tokens(lengths), seq_len, packing)
    whole = [
        row for _, targets in sequential_batches(windows, size, limit) for row in targets.tolist()
    ]
    parts = [list(sequential_batches(windows, size, limit, rank, ranks)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    assert all(len(inputs) == len(targets) > 0 for part in parts for inputs, targets in part)
    rows = [row for part in parts for _, targets in part for row in targets.tolist()]
    counted = [[row for row in each if max(row) >= 0] for each in (rows, whole)]
    assert sorted(counted[0]) == sorted(counted[1])


@given(
    lengths=LENGTHS,
    seq_len=st.integers(2, 9),
    seed=st.integers(0, 9),
    shard_tokens=st.sampled_from([40, 1 << 20]),
)
def test_shifted_windows_cover_the_stream_from_another_token_in_each_epoch(
    lengths, seq_len, seed, shard_tokens, make_tokens
):
    tokens = make_tokens([max(1, length) for length in lengths] + [9], shard_tokens=shard_tokens)
    dataset = PackedDataset(tokens, seq_len, "contiguous")
    shifted = ShuffledDataset(dataset, seed, shift_windows=True)
    loader = BatchLoader(shifted, len(dataset))  # a step is an epoch
    plain = BatchLoader(ShuffledDataset(dataset, seed), len(dataset))
    shifts = []
    for epoch in range(2 * seq_len):
        assert {sample.epoch for sample in loader.samples(epoch)} == {epoch}
        shift = shifted.shift(epoch)
        shifts.append(shift)
        assert loader.sample_ids(epoch) == plain.sample_ids(epoch)
        covered = {shard.path: np.zeros(shard.n_tokens, int) for shard in tokens.shards}
        for index in range(len(dataset)):
            shard, start, end = span(dataset, index, shift)
            assert 0 < end - start <= seq_len
            covered[shard.path][start + 1 : end + 1] += 1
        for counts in covered.values():
            assert (counts[1 + shift :] >= 1).all() or len(counts) <= seq_len + shift
            assert counts[1:].sum() <= len(dataset) * seq_len
            if shift == 0:
                assert (counts[1:] == 1).all()
    assert (
        sorted(shifts[:seq_len]) == sorted(shifts[seq_len:]) == list(range(seq_len))
    )  # every shift equally often
    assert shifts[0] == 0
    inputs, targets = loader.batch(1)
    assert (
        (targets == (inputs + 1) % 256) | (inputs == BOS) | (targets == BOS) | (targets == -1)
    ).all()
    again = BatchLoader(ShuffledDataset(dataset, seed, True), len(dataset)).batch(1)
    assert torch.equal(inputs, again[0])
    assert torch.equal(targets, again[1])
