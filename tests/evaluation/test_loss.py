"""The evaluation, against losses computed one document at a time."""

import io
import math
import sys

import pytest
import torch

from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.tokenizers.text_bytes import token_byte_lengths
from thinker.evaluation import loss
from thinker.evaluation.loss import Evaluator
from thinker.model import Thinker, ThinkerConfig


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepare_corpus(
        source="tales",
        max_documents=300,
        tokenizer="bpe:600",
        cache_dir=tmp_path_factory.mktemp("c"),
    )


@pytest.fixture(scope="module")
def model(corpus):
    torch.manual_seed(0)
    model = Thinker(
        ThinkerConfig(vocab_size=600, d_model=16, n_layers=1, n_heads=2, max_seq_len=600)
    )
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    torch.nn.init.normal_(
        model.blocks[0].attention.o_proj.weight, std=0.5
    )  # zero in a fresh model, whose context would not matter
    return model.train()


def documents(token_set):
    for shard in token_set.shards:
        for start, end in zip(shard.offsets[:-1], shard.offsets[1:]):
            yield torch.from_numpy(shard.tokens[start : end + 1].astype("int64"))


def test_loss_floor_and_bits_of_aligned_documents(corpus, model):
    lengths = token_byte_lengths(corpus.tokenizer)
    windows = PackedDataset(corpus.val, max(len(d) for d in documents(corpus.val)), "documents")
    found = Evaluator(windows, 3, lengths)(model)
    assert model.training
    model.eval()
    nats = tokens = n_bytes = 0
    for document in documents(corpus.val):
        with torch.no_grad():
            loss, count = model(document[None, :-1], targets=document[None, 1:])
        nats, tokens = nats + loss.item(), tokens + count.item()
        n_bytes += len(corpus.tokenizer.decode(document.tolist()).encode())
    model.train()
    assert found.n_tokens == tokens
    assert found.bits_per_byte == pytest.approx(found.loss * tokens / math.log(2) / n_bytes)
    log_prob = sum(shard.log_probs[:].sum() for shard in corpus.val.shards)
    assert found.entropy_floor == pytest.approx(-log_prob / tokens)
    # Whole stories share a window with others, so attention sees a little more than alone; the
    # count is the same.
    assert found.loss == pytest.approx(nats / tokens, rel=0.02)


@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu_every_batch_has_the_same_shape(corpus, model, monkeypatch, masked):
    """The last one, too: a compiled model would be compiled for it once more."""
    windows = PackedDataset(corpus.val, 40, "documents", document_masking=masked)
    assert len(windows) % 4
    whole, shapes = Evaluator(windows, 4, token_byte_lengths(corpus.tokenizer))(model), set()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    handle = model.register_forward_pre_hook(lambda model, args: shapes.add(args[0].shape))
    found = Evaluator(windows, 4, token_byte_lengths(corpus.tokenizer))(model)
    handle.remove()
    assert shapes == {(4, 40)}
    assert (found.n_tokens, found.bits_per_byte) == (
        whole.n_tokens,
        pytest.approx(whole.bits_per_byte),
    )


def test_no_entropy_floor_for_cut_or_unaligned_documents(corpus, model):
    lengths = token_byte_lengths(corpus.tokenizer)
    assert Evaluator(PackedDataset(corpus.val, 40, "documents"), 3, lengths).floor is None
    assert Evaluator(PackedDataset(corpus.val, 600, "contiguous"), 3, lengths).floor is None


def test_a_limit_evaluates_the_first_windows(corpus, model):
    lengths = token_byte_lengths(corpus.tokenizer)
    windows = PackedDataset(corpus.val, 400, "documents")
    part = Evaluator(windows, 2, lengths, limit=1)(model)
    whole = Evaluator(windows, 2, lengths)(model)
    assert part.n_tokens < whole.n_tokens
    assert part.entropy_floor != whole.entropy_floor
    assert part.entropy_floor == pytest.approx(whole.entropy_floor, rel=0.3)


def test_masked_documents_have_the_same_loss_as_alone(corpus, model):
    windows = PackedDataset(corpus.val, 500, "documents", document_masking=True)
    found = Evaluator(windows, 3, token_byte_lengths(corpus.tokenizer))(model)
    model.eval()
    with torch.no_grad():
        parts = [
            model(document[None, :-1], targets=document[None, 1:])
            for document in documents(corpus.val)
        ]
    model.train()
    alone = sum(loss.item() for loss, _ in parts) / sum(count.item() for _, count in parts)
    assert found.loss == pytest.approx(alone, rel=1e-6)
    together = Evaluator(
        PackedDataset(corpus.val, 500, "documents"), 3, token_byte_lengths(corpus.tokenizer)
    )(model)
    assert abs(together.loss - alone) > 1e-4
    assert together.n_tokens == found.n_tokens


def test_the_bidirectional_prefix_is_not_counted_and_has_no_floor(corpus, model):
    lengths, limit = token_byte_lengths(corpus.tokenizer), 2
    windows = PackedDataset(corpus.val, 500, "documents", prefix_len=20)
    evaluator = Evaluator(windows, 3, lengths, limit)
    assert evaluator.floor is None
    found = evaluator(model)
    plain = Evaluator(PackedDataset(corpus.val, 500, "documents"), 3, lengths, limit)(model)
    assert (
        found.n_tokens == plain.n_tokens - limit * 19
    )  # the last of 20 predicts the first that is not given


def test_progress_is_shown_where_an_evaluation_takes_long(corpus, model, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    windows, lengths = (
        PackedDataset(corpus.val, 500, "documents"),
        token_byte_lengths(corpus.tokenizer),
    )
    monkeypatch.setattr(loss, "PROGRESS_DELAY", 1e9)
    quick = Evaluator(windows, 3, lengths, progress=True)(model)
    assert "evaluating" not in terminal.getvalue()
    monkeypatch.setattr(loss, "PROGRESS_DELAY", 0)
    assert Evaluator(windows, 3, lengths, progress=True)(model) == quick
    assert "evaluating:   0%|" in terminal.getvalue()
    before = terminal.getvalue()
    Evaluator(windows, 3, lengths)(model)
    assert terminal.getvalue() == before
