"""Bits per byte count the bytes of the text, also where an imported tokenizer changes what it
encodes."""

from random import Random

import pytest
from conftest import random_model
from metaspace_tokenizer import metaspace_tokenizer
from tokenizers import normalizers

from thinker.data.batches.windows import PackedDataset
from thinker.data.text.sources import open_source
from thinker.data.tokenizers.text_bytes import count_bytes, loses_text, scaled_byte_lengths
from thinker.evaluation.needle import story_needles
from thinker.evaluation.perplexity import text_loss, tokenize
from thinker.generation import Generator

TEXT = "The wheel turns \ufb01ne, ab ½ 漢.\n" * 40


def unigram(folder, byte_fallback):
    """A tokenizer that adds a space; without byte fallback it does not know every character."""
    return metaspace_tokenizer(
        folder, {"\n": -3.0, "▁wheel": -2.5}, byte_fallback, normalizers.NFKC()
    )


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_score_and_evaluation_count_the_bytes_of_the_text(tmp_path, capsys, byte_fallback):
    tokenizer = unigram(tmp_path / "tokenizer", byte_fallback)
    ids = tokenizer.encode(TEXT)
    assert len(tokenizer.decode_bytes(ids)) != len(TEXT.encode())
    assert loses_text(tokenizer, TEXT, ids)
    assert loses_text(tokenizer, "plain words", tokenizer.encode("plain words")) is False
    model = random_model(1, 0.3, 0.4, vocab_size=tokenizer.vocab_size, max_seq_len=64)
    score = Generator(model, tokenizer).score(TEXT)
    assert score.n_bytes == len(TEXT.encode())
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "shards").mkdir()
    tokens = tokenize(
        open_source("text", path=str(tmp_path / "text.txt")),
        tokenizer,
        1 << 20,
        tmp_path / "shards",
    )
    assert (
        "the tokenizer loses characters of the text, so bits per byte are too low"
        in capsys.readouterr().err
    )
    windows = PackedDataset(tokens, 64, "contiguous", stride=32)
    loss = text_loss(model, windows, scaled_byte_lengths(tokens, tokenizer))
    assert loss.n_bytes == len(TEXT.encode())
    assert loss.bits_per_byte.mean == pytest.approx(score.bits_per_byte, rel=1e-6)


def test_a_part_of_a_text_has_its_share_of_the_bytes(tmp_path):
    tokenizer = unigram(tmp_path / "tokenizer", True)
    ids = tokenizer.encode("wheel wheel")
    assert tokenizer.decode_bytes(ids) == b" wheel wheel"  # 12 bytes instead of 11
    assert count_bytes(tokenizer, "wheel wheel", ids) == 11
    assert count_bytes(tokenizer, "wheel wheel", ids, 1) == round(11 / 2)
    assert count_bytes(tokenizer, "", []) == 0


def test_needles_are_found_though_the_tokenizer_adds_a_space(tmp_path):
    tokenizer = unigram(tmp_path / "tokenizer", True)
    random = Random(1)
    needles = [one for _ in range(20) for one in story_needles(tokenizer, 200, random)]
    assert needles
    for needle in needles:
        assert tokenizer.decode(needle.tokens[1:]) == needle.text
