"""Loss, perplexity and bits per byte of a text: by hand, with intervals that cover, however windows
overlap."""

import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinker.data.batches.windows import PackedDataset
from thinker.data.text.sources import open_source
from thinker.data.tokenizers.text_bytes import token_byte_lengths
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.evaluation.entropy_floor import entropy_floor
from thinker.evaluation.perplexity import estimate_ratio, text_loss, tokenize
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
BYTES = make_tokenizer("byte", [])
TEXT = "The naïve cat sat on the mat, 1234 times.\n" * 5 + "End"


@pytest.fixture
def tokens(tmp_path):
    (tmp_path / "my.txt").write_text(TEXT)
    return tokenize(open_source("text", path=str(tmp_path / "my.txt")), BYTES, 10**6, tmp_path)


@pytest.fixture
def model(random_model):
    return random_model(vocab_size=257)


def by_hand(model, length, stride):
    """Nats of every token of TEXT, one window after the other, in plain Python."""
    ids = [BYTES.bos_id, *BYTES.encode(TEXT)]
    nats = {}
    for start in range(0, len(ids) - 1, stride):
        window = ids[start : start + length]
        with torch.no_grad():
            logits = model(torch.tensor([window]))[0].double()
        for place in range(len(window)):
            target = start + place + 1
            if target < len(ids) and target not in nats:
                nats[target] = -(
                    logits[place, ids[target]] - logits[place].exp().sum().log()
                ).item()
    return list(nats.values())


@pytest.mark.parametrize(("length", "stride"), [(32, 32), (32, 8), (50, 13), (64, 1), (4096, 4096)])
def test_text_loss_equals_a_direct_computation(model, tokens, length, stride):
    windows = PackedDataset(tokens, length, "contiguous", stride=stride)
    found = text_loss(model, windows, token_byte_lengths(BYTES))
    expected = by_hand(model, length, stride)
    assert found.n_tokens == len(expected) == len(TEXT.encode())
    assert found.n_bytes == len(TEXT.encode())
    assert found.nats_per_token.mean == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert found.bits_per_byte.mean == pytest.approx(
        sum(expected) / math.log(2) / found.n_bytes, rel=1e-5
    )
    assert found.perplexity.mean == pytest.approx(math.exp(found.nats_per_token.mean))
    assert found.by_position.counts.sum() == found.n_tokens


def test_strided_and_unstrided_losses_agree(random_model, tokens):
    """Where no window is full, and where a model sees no further back than the overlap anyway."""
    lengths = token_byte_lengths(BYTES)
    local = random_model(
        vocab_size=257, attention="window(5)"
    )  # two layers: 9 tokens back, itself included
    losses = [
        text_loss(local, PackedDataset(tokens, 48, "contiguous", stride=stride), lengths)
        .by_position.nats.nansum()
        .item()
        for stride in (1, 7, 39)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    whole = text_loss(local, PackedDataset(tokens, 4096, "contiguous"), lengths)
    assert whole.nats_per_token.mean * whole.n_tokens == pytest.approx(losses[0], rel=1e-6)
    full = random_model(vocab_size=257)
    expected = text_loss(
        full, PackedDataset(tokens, 4096, "contiguous"), lengths
    ).nats_per_token.mean
    for stride in (1, 100, 4096):
        found = text_loss(full, PackedDataset(tokens, 4096, "contiguous", stride=stride), lengths)
        assert found.nats_per_token.mean == expected


@given(length=st.integers(1, 60), stride=st.integers(1, 60), n=st.integers(2, 200))
def test_every_stride_counts_each_token_once(length, stride, n):
    from thinker.data.corpus.shards import Shard, TokenShards

    stream = np.arange(n, dtype=np.uint16)
    shard = Shard(None, n, 1, 0, 0, stream, np.array([0, n - 1]), np.array([0]), None)
    if stride > length:
        with pytest.raises(UserError, match="stride"):
            PackedDataset(TokenShards([shard]), length, "contiguous", stride=stride)
        return
    windows = PackedDataset(TokenShards([shard]), length, "contiguous", stride=stride)
    seen = []
    for index in range(len(windows)):
        inputs, targets = windows[index]
        counted = targets != IGNORE_INDEX
        assert (targets[counted] == inputs[counted] + 1).all()
        seen += targets[counted].tolist()
    assert seen == list(range(1, n))


def test_a_stride_needs_contiguous_windows(tokens):
    with pytest.raises(UserError, match="packed documents"):
        PackedDataset(tokens, 32, "documents", stride=8)
    with pytest.raises(UserError, match="prefix"):
        PackedDataset(tokens, 32, "contiguous", stride=8, prefix_len=4)


@pytest.mark.parametrize(("n", "confidence"), [(2, 0.95), (3, 0.9), (12, 0.95), (60, 0.8)])
def test_confidence_intervals_have_their_coverage(n, confidence, stress):
    """Draws of uneven size whose tokens are alike: the interval about their ratio holds the true
    one."""
    rng = random.Random(n)
    covered, trials = 0, 3000 if stress else 800
    for _ in range(trials):
        sizes = torch.tensor([float(rng.randint(20, 40)) for _ in range(n)])
        sums = torch.tensor([size * rng.gauss(2.0, 0.5) for size in sizes.tolist()])
        found = estimate_ratio(sums, sizes, confidence)
        covered += found.low <= 2.0 <= found.high
    error = math.sqrt(confidence * (1 - confidence) / trials)
    assert covered / trials > confidence - 0.02 - 3 * error
    assert covered / trials < confidence + 0.02 + 3 * error


def test_a_single_window_has_no_interval(model, tokens):
    found = text_loss(model, PackedDataset(tokens, 4096, "contiguous"), token_byte_lengths(BYTES))
    assert (found.nats_per_token.low, found.perplexity.high) == (None, None)


def test_entropy_floor_of_tales(model, tmp_path):
    source = open_source("tales", max_documents=100, seed=5)
    tokens = tokenize(source, BYTES, 4000, tmp_path)
    assert 4000 <= tokens.n_tokens < 7000
    windows = PackedDataset(tokens, 2000, "documents")
    found = text_loss(model, windows, token_byte_lengths(BYTES))
    known = [story.log_prob for _, story in zip(range(tokens.n_documents), source.documents())]
    assert found.entropy_floor == pytest.approx(-sum(known) / (tokens.n_tokens - 1))
    assert found.n_tokens == tokens.n_tokens - 1


def test_a_single_text_is_cut_at_max_tokens(tmp_path):
    (tmp_path / "my.txt").write_text(TEXT)
    tokens = tokenize(open_source("text", path=str(tmp_path / "my.txt")), BYTES, 100, tmp_path)
    assert tokens.n_tokens == 101
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="no text"):
        tokenize(open_source("text", path=str(tmp_path / "empty.txt")), BYTES, 100, tmp_path)


def test_only_assistant_tokens_of_conversations_are_counted(model, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '?' }}{% endfor %}"
    talk = [{"role": "user", "content": "where"}, {"role": "assistant", "content": "here"}]
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 5)
    tokenizer = BYTES.with_chat_template(template)
    tokens = tokenize(
        open_source("jsonl", path=str(tmp_path / "talk.jsonl")), tokenizer, 10**4, tmp_path
    )
    found = text_loss(model, PackedDataset(tokens, 40, "contiguous"), token_byte_lengths(tokenizer))
    assert (found.n_tokens, found.n_bytes) == (5 * len("here<"), 5 * len("here"))


def test_the_entropy_floor_covers_the_counted_tokens(tmp_path):
    """Where texts end with a token of their own, the BOS token behind it is no target."""
    tokens = [BYTES.token_bytes(i) for i in range(256)] + [None, None]
    ended = Tokenizer("hf", tokens, {"<s>": 256, "</s>": 257}, "<s>", eos_ids=[257])
    for tokenizer in (BYTES, ended):
        source = open_source("tales", max_documents=20, seed=5)
        folder = tmp_path / str(tokenizer.vocab_size)
        folder.mkdir()
        windows = PackedDataset(tokenize(source, tokenizer, 10**6, folder), 2048, "documents")
        targets = sum(int((windows[i][1] >= 0).sum()) for i in range(len(windows)))
        nats = -sum(document.log_prob for document in source.documents())
        assert entropy_floor(windows) * targets == pytest.approx(nats)
