"""Tokenizers: any text comes back, specials stay text, files are checked, samples are bounded."""

import base64
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinker.data.text.sources import open_source
from thinker.data.text.split import split_documents
from thinker.data.text.text_sample import sample_texts
from thinker.data.tokenizers import tokenizer_factory
from thinker.data.tokenizers.text_bytes import token_byte_lengths
from thinker.data.tokenizers.tokenizer import FILE_NAME, Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.runtime.errors import UserError

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).read_text(encoding="utf-8") + "naïve café 日本語 🎉 "
TOKENIZERS = {spec: make_tokenizer(spec, [SAMPLE]) for spec in ("byte", "char", "bpe:600")}
TEXTS = st.lists(
    st.text() | st.sampled_from(["<|bos|>", "\0", "日本", "🎉👩‍👩‍👧", " ", "\r\n", "123456"])
).map("".join)

every_kind = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@every_kind
@given(text=TEXTS)
def test_any_text_comes_back_and_holds_no_special_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert token_byte_lengths(tokenizer)[ids].sum() == len(text.encode())


@every_kind
def test_special_names_are_special_only_when_asked(tokenizer):
    plain = tokenizer.encode("a<|bos|>b")
    special = tokenizer.encode("a<|bos|>b", allow_special=True)
    assert special == [*tokenizer.encode("a"), tokenizer.bos_id, *tokenizer.encode("b")]
    assert plain != special
    assert tokenizer.decode(plain) == "a<|bos|>b"
    assert tokenizer.decode(special) == "ab"  # a special token stands for no text
    assert (
        tokenizer.bos_id
        == tokenizer.eos_id
        == tokenizer.special_tokens["<|bos|>"]
        == tokenizer.vocab_size - 1
    )


def test_bytes_are_ids():
    assert TOKENIZERS["byte"].encode("aé\0") == list("aé\0".encode())
    assert TOKENIZERS["byte"].vocab_size == 257


def test_characters_are_ids_and_unseen_ones_fall_back_to_bytes():
    tokenizer = make_tokenizer("char", ["é日é", "🎉a"])
    assert tokenizer.vocab_size == 256 + 3 + 1
    assert [len(tokenizer.encode(c)) for c in "aé日🎉"] == [1, 1, 1, 1]
    assert tokenizer.encode("本ü") == list("本ü".encode())


def test_bpe_has_the_size_asked_for_and_is_the_same_each_time():
    tokenizer = TOKENIZERS["bpe:600"]
    assert tokenizer.vocab_size == 600
    assert len(tokenizer.encode(SAMPLE)) < len(SAMPLE) / 2
    assert make_tokenizer("bpe:600", [SAMPLE]).content_hash == tokenizer.content_hash
    assert make_tokenizer("bpe:599", [SAMPLE]).content_hash != tokenizer.content_hash
    assert (
        max(len(tokenizer.token_bytes(i)) for i in tokenizer.encode("1234567 7654321")) <= 3
    )  # digits in threes


def test_text_too_short_for_the_vocabulary_gives_a_smaller_one():
    text = "the cat and the other cat"
    short = make_tokenizer("bpe:9000", [text])
    assert 257 < short.vocab_size < 300
    assert make_tokenizer(f"bpe:{short.vocab_size}", [text]).content_hash == short.content_hash
    with pytest.raises(UserError, match="use byte"):
        make_tokenizer("bpe:300", ["a"])


@every_kind
def test_a_million_spaces_and_half_a_surrogate_pair(tokenizer):
    text = "x" + " " * 1_100_000 + "y"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"


def test_training_survives_a_million_spaces():
    assert make_tokenizer("bpe:300", [SAMPLE, " " * 1_100_000]).vocab_size == 300


def test_decoding_ids_that_are_no_text():
    tokenizer = TOKENIZERS["byte"]
    assert tokenizer.decode([0xE2, 0x82, ord("a")]) == "\ufffda"
    assert tokenizer.decode_bytes([0xE2, 0x82]) == b"\xe2\x82"
    for wrong in (-1, 257):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            tokenizer.decode([wrong])


@pytest.mark.parametrize("spec", ["char", "bpe:300"])
def test_an_endless_text_is_read_up_to_the_bound(spec, monkeypatch):
    monkeypatch.setattr(tokenizer_factory, "SAMPLE_BYTES", 6 << 20)
    pieces = ((SAMPLE * 500)[: 1 << 20] for _ in itertools.count())
    make_tokenizer(spec, pieces)
    read = itertools.count()
    make_tokenizer("char", ("é" * (1 << 20) for _ in range(10_000) if next(read) < 10_000))
    assert next(read) == 3


@pytest.mark.parametrize("spec", ["byte", "tiktoken:nope", "bpe:257", "nowhere"])
def test_what_needs_no_text_reads_none(spec):
    def texts():
        raise AssertionError("a text was read")
        yield

    if spec == "byte":
        assert make_tokenizer(spec, texts()).vocab_size == 257
    else:
        with pytest.raises(UserError):
            make_tokenizer(spec, texts())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bpe:257", "from 258"),
        ("bpe:", "bpe:4096"),
        ("bpe:4k", "bpe:4096"),
        ("bpe:99999999", "to 1048576"),
        ("bpe:４０９６", "bpe:4096"),
        ("tiktoken:gpt3", "gpt2, .*did you mean gpt2"),
        ("gpt2", "did you mean tiktoken:gpt2"),
        ("bite", "neither byte, char, bpe:VOCAB, .*did you mean byte"),
        ("", "neither byte"),
    ],
)
def test_wrong_specs(spec, message):
    with pytest.raises(UserError, match=message):
        make_tokenizer(spec, [SAMPLE])


@every_kind
def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    path = tokenizer.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]
    for loaded in (
        Tokenizer.load(tmp_path),
        Tokenizer.load(path),
        make_tokenizer(str(tmp_path), []),
    ):
        assert loaded.content_hash == tokenizer.content_hash
        assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
        assert (loaded.kind, loaded.bos_id, loaded.vocab_size) == (
            tokenizer.kind,
            tokenizer.bos_id,
            tokenizer.vocab_size,
        )


def _seal(content):
    """Give a changed content the hash it needs to be believed."""
    del content["sha256"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()


def _encoded(data):
    return base64.b64encode(data).decode()


CHANGES = {
    "format": lambda c: c.update(format=3),
    "missing key": lambda c: c.pop("pattern"),
    "extra key": lambda c: c.update(more=1),
    "type": lambda c: c.update(tokens="abc"),
    "token type": lambda c: c["tokens"].__setitem__(3, 3),
    "base64": lambda c: c["tokens"].__setitem__(300, "***"),
    "same bytes twice": lambda c: c["tokens"].__setitem__(300, c["tokens"][301]),
    "no bytes": lambda c: c["tokens"].__setitem__(300, ""),
    "a byte is missing": lambda c: c["tokens"].__setitem__(65, _encoded(b"something else")),
    "special on a token": lambda c: c["special_tokens"].update({"<|x|>": 5}),
    "special out of range": lambda c: c["special_tokens"].update({"<|x|>": 5000}),
    "special negative": lambda c: c["special_tokens"].update({"<|x|>": -1}),
    "special no integer": lambda c: c["special_tokens"].update({"<|x|>": True}),
    "special without a name": lambda c: c["special_tokens"].update({"": 599}),
    "BOS token": lambda c: c.update(bos_token="<|eos|>"),
    "trailing gap": lambda c: c["tokens"].append(None),
    "pattern": lambda c: c.update(pattern="(?s."),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_is_no_tokenizer_is_refused_even_with_a_right_hash(change, tmp_path):
    path = TOKENIZERS["bpe:600"].save(tmp_path)
    content = json.loads(path.read_text())
    change(content)
    _seal(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="not a valid thinker-tokenizer.json"):
        Tokenizer.load(path)


def test_damaged_files(tmp_path):
    path = TOKENIZERS["byte"].save(tmp_path)
    whole = path.read_text()
    assert Tokenizer.load(path).vocab_size == 257
    for damaged in (whole[:-10], whole.replace('"byte"', '"bite"'), "", "[" * 100_000, "[1]", "\0"):
        path.write_text(damaged)
        with pytest.raises(UserError, match="not a valid|not valid JSON|not a JSON object"):
            Tokenizer.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not valid JSON"):
        Tokenizer.load(path)
    os.truncate(path, 1 << 27)
    with pytest.raises(UserError, match="is too large"):
        Tokenizer.load(path)
    with pytest.raises(UserError, match="absent does not exist"):
        Tokenizer.load(tmp_path / "absent")


def test_byte_lengths_count_no_special_token():
    lengths = token_byte_lengths(TOKENIZERS["char"])
    assert lengths.dtype == np.int64
    assert lengths[TOKENIZERS["char"].bos_id] == 0
    assert lengths[:256].tolist() == [1] * 256


# tiktoken finds encodings through plugins; this one stands for a named encoding whose file is at
# hand. It has a gap (257) and two names for one id, as o200k_harmony does.
PLUGIN = """
RANKS = {bytes([i]): i for i in range(256)} | {b"he": 256}
SPECIAL = {"<|endoftext|>": 258, "<|stop|>": 258}
ENCODING_CONSTRUCTORS = {
    "local": lambda: {"name": "local", "pat_str": r"\\\\w+|\\\\W+", "mergeable_ranks": RANKS, "special_tokens": SPECIAL}
}
"""
USE_PLUGIN = """
import sys
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.data.tokenizers.tokenizer import Tokenizer
tokenizer = make_tokenizer("tiktoken:local", [])
tokenizer.save(sys.argv[1])
print(tokenizer.encode("he<|endoftext|>", True), tokenizer.bos_id, repr(tokenizer.decode([256, 257, 258])))
"""


def _python(code, *arguments, **environment):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600
    )


def test_a_named_encoding_is_saved_with_its_ranks_and_opens_without_tiktokens_files(tmp_path):
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "local.py").write_text(PLUGIN.replace("\\\\", "\\"))
    done = _python(USE_PLUGIN, tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.stdout.strip() == "[256, 258] 258 'he'", done.stderr
    loaded = Tokenizer.load(tmp_path)
    assert loaded.kind == "tiktoken:local"
    assert (loaded.vocab_size, loaded.eos_id, loaded.bos_token) == (259, 258, "<|endoftext|>")
    assert loaded.encode("he hé") == [256, ord(" "), ord("h"), 0xC3, 0xA9]


def test_a_named_encoding_that_cannot_be_downloaded_is_one_line(tmp_path):
    code = "from thinker.data.tokenizers.tokenizer_factory import make_tokenizer\nfrom thinker.runtime.errors import run_command\n"
    code += "run_command(lambda: make_tokenizer('tiktoken:r50k_base', []))"
    done = _python(
        code, TIKTOKEN_CACHE_DIR=str(tmp_path), HTTPS_PROXY="http://127.0.0.1:9", NO_PROXY=""
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "r50k_base.tiktoken" in done.stderr
    assert "TIKTOKEN_CACHE_DIR" in done.stderr


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("a*", "cannot split the text"), ("x", "loses text"), ("", "cannot split the text"), ("(", "not a valid"),
     ("(?=(a+)+$)b|[\\s\\S]", None), ("\ud800", "not a valid")],
)  # fmt: skip
def test_a_strangers_pattern_is_tried_before_it_is_believed(tmp_path, pattern, says):
    """It runs in a library that panics where it matches nothing, and silently leaves out what it
    does not match."""
    path = make_tokenizer("byte", []).save(tmp_path)
    content = {**json.loads(path.read_text()), "pattern": pattern}
    _seal(content)
    path.write_text(json.dumps(content))
    if says is None:
        Tokenizer.load(tmp_path)
    else:
        with pytest.raises(UserError, match=says):
            Tokenizer.load(tmp_path)


def test_the_sample_is_spread_over_a_long_source_and_is_always_the_same(tmp_path):
    """A text of several times the sample: about equal parts of it come from each quarter."""
    texts = [f"{i:05d} " * 20 for i in range(2000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = open_source("jsonl", path=str(tmp_path / "a.jsonl"))
    samples = [sample_texts(source, split_documents(source, 0.1), 60_000) for _ in range(2)]
    assert samples[0] == samples[1]
    sample, read = samples[0]
    assert read is None
    numbers = [int(text[:5]) for text in sample]
    assert numbers == sorted(numbers)
    assert 58_000 < sum(map(len, sample)) <= 60_000
    assert min(np.histogram(numbers, 4, (0, 2000))[0]) > 90
    train = {
        text
        for split, text in ((s, d.text) for s, d in split_documents(source, 0.1))
        if split == "train"
    }
    assert set(sample) <= train


def test_a_short_source_is_sampled_as_a_whole_and_kept(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(100))
    )
    source = open_source("jsonl", path=str(tmp_path / "a.jsonl"))
    sample, read = sample_texts(source, split_documents(source, 0.3), 10_000)
    assert [document.text for _, document in read] == [f"text {i}" for i in range(100)]
    assert sample == [document.text for split, document in read if split == "train"]
