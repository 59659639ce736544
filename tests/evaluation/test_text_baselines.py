"""The models of text that a run is compared with: true probabilities, known values, and which text
they are given."""

import gzip
import json
import lzma
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from thinker.data.corpus.corpus import prepare_corpus
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.evaluation import text_baselines
from thinker.evaluation.text_baselines import NgramModel

TEXTS = st.one_of(
    st.binary(min_size=5, max_size=300), st.text("abc", min_size=5, max_size=300).map(str.encode)
)


def by_the_definition(text, context, byte):
    """Witten and Bell's interpolation, from the counts of one n-gram after the other."""
    following = defaultdict(Counter)
    for i in range(4, len(text)):
        for length in range(5):
            following[text[i - length : i]][text[i]] += 1
    p = 1 / 256
    for length in range(5):
        counts = following.get(context[4 - length :])
        if counts:
            p = (counts[byte] + len(counts) * p) / (counts.total() + len(counts))
    return p


@given(TEXTS, st.data())
@example(b"\xff" * 5, None)
def test_the_probabilities_of_all_next_bytes_sum_to_1(text, data):
    model = NgramModel(text)
    contexts = [text[:4], b"\0\0\0\0", b"\xff\xff\xff\xff", b"zz" + text[:2]]
    if data is not None:
        contexts += data.draw(
            st.lists(st.one_of(st.binary(min_size=4, max_size=4), st.just(text[-4:])), min_size=1)
        )
    for context in contexts:
        windows = np.array([[*context, byte] for byte in range(256)], np.uint8)
        probabilities = model.probabilities(windows)
        assert (probabilities > 0).all()
        assert probabilities.sum() == pytest.approx(1, abs=1e-12)


@given(TEXTS, st.integers(0, 255), st.data())
def test_probabilities_are_those_of_the_definition(text, byte, data):
    start = data.draw(st.integers(0, len(text) - 5))
    for context in (text[start : start + 4], b"??" + text[start : start + 2]):
        for following in (byte, text[start + 4]):
            (p,) = NgramModel(text).probabilities(np.array([[*context, following]], np.uint8))
            assert p == pytest.approx(by_the_definition(text, context, following), rel=1e-12)


def test_bits_of_a_text_are_the_sum_over_its_bytes():
    model = NgramModel(b"the cat sat on the mat")
    expected = -sum(
        np.log2(by_the_definition(b"the cat sat on the mat", context, byte))
        for context, byte in ((b" the", ord(" ")), (b"the ", ord("c")), (b"he c", ord("x")))
    )
    assert model.bits(b" cx", b" the") == pytest.approx(expected)


def corpus_of(tmp_path, text, tokenizer="byte", **options):
    path = tmp_path / "text.txt"
    path.write_text(text)
    options = {
        "source": "text",
        "path": str(path),
        "cache_dir": tmp_path,
        "progress": False,
    } | options
    return prepare_corpus(tokenizer=tokenizer, **options)


def random_words(n_bytes, seed=0):
    words = np.random.default_rng(seed).integers(97, 123, (500, 6), dtype=np.uint8)
    chosen = np.random.default_rng(seed + 1).integers(0, 500, n_bytes // 7 + 1)
    return b" ".join(words[i].tobytes() for i in chosen).decode()[:n_bytes]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_the_text_of_the_corpus_is_what_is_measured(tmp_path, tokenizer):
    text = random_words(60_000)
    corpus = corpus_of(tmp_path, text, tokenizer, val_fraction=0.2)
    n_val = corpus.val.n_bytes
    train = b"\0" + text[:-n_val].encode() + b"\0"
    val = text[-n_val:].encode() + b"\0"  # its end costs bits, as a token does, but is no text
    result = text_baselines.text_baselines(corpus)
    assert list(result) == ["5-gram", "xz", "gzip"]
    assert result["5-gram"] == NgramModel(train).bits(val, train[-4:]) / n_val
    gzipped = len(gzip.compress(train + val)) - len(gzip.compress(train))
    assert result["gzip"] == 8 * gzipped / n_val
    xz = len(lzma.compress(train + val)) - len(lzma.compress(train))
    assert result["xz"] == pytest.approx(8 * xz / n_val, abs=0.02)
    entropy = np.log2(500) / 7  # of a text of words, each as likely
    assert all(entropy < bits < 3 for bits in result.values())


def test_only_xz_remembers_text_that_is_farther_back_than_gzips_window(tmp_path):
    noise = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 100_000)))
    result = text_baselines.text_baselines(
        corpus_of(tmp_path, noise + noise[:5000], val_fraction=5000 / 105_000)
    )
    assert result["xz"] < 0.3
    assert result["gzip"] > 4


def test_no_more_than_the_last_training_text_and_the_first_validation_text_is_used(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(text_baselines, "MAX_TRAIN_BYTES", 6000)
    monkeypatch.setattr(text_baselines, "MAX_VAL_BYTES", 3000)
    text = random_words(60_000)
    corpus = corpus_of(tmp_path, text, "bpe:300", val_fraction=0.2)
    start = len(text) - corpus.val.n_bytes
    train = (text[:start].encode() + b"\0")[-6000:]
    result = text_baselines.text_baselines(corpus)
    expected = [
        NgramModel(train).bits(text[start : start + n].encode(), train[-4:]) / n
        for n in range(2990, 3001)  # whole tokens only
    ]
    assert any(result["5-gram"] == pytest.approx(value, rel=1e-12) for value in expected)


def test_each_document_ends_with_a_byte_that_is_no_text(tmp_path):
    texts = [random_words(400, seed) for seed in range(100)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = corpus_of(tmp_path, "", source="jsonl", path=str(path), val_fraction=0.3)
    (shard,) = corpus.val.shards
    is_val = [text in corpus.tokenizer.decode(shard.tokens[:]) for text in texts]
    train, val = (
        b"".join(t.encode() + b"\0" for t, v in zip(texts, is_val) if v == split)
        for split in (False, True)
    )
    assert val.count(b"\0") == corpus.val.n_documents > 10
    result = text_baselines.text_baselines(corpus)
    assert result["5-gram"] == NgramModel(b"\0" + train).bits(val, train[-4:]) / corpus.val.n_bytes


def test_conversations_are_not_measured(tmp_path):
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer = make_tokenizer("byte", []).with_chat_template(template)
    talks = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": random_words(400, i)}]
        for i in range(50)
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    corpus = corpus_of(tmp_path, "", tokenizer, source="jsonl", path=str(path), val_fraction=0.3)
    assert corpus.val.n_bytes > 2000
    assert text_baselines.text_baselines(corpus) is None


@pytest.mark.parametrize(("n_bytes", "is_measured"), [(9_990, False), (10_010, True)])
def test_short_texts_are_not_measured(tmp_path, n_bytes, is_measured):
    corpus = corpus_of(tmp_path, random_words(n_bytes), val_fraction=0.2)
    assert (corpus.val.n_bytes >= 2000) == is_measured
    assert (text_baselines.text_baselines(corpus) is not None) == is_measured
