"""Tokenizers that multiply text are refused, and those that people use are not."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinker.data.tokenizers.text_growth import MAX_GROWTH, _growth, check_growth

tokenizers = pytest.importorskip("tokenizers")

WORDS = st.text("ab \ufdfaÉ", max_size=3)
PATTERNS = st.sampled_from(["a", "", "b*"])
STEPS = st.one_of(
    st.sampled_from([{"type": name} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")]),
    st.builds(lambda p, c: {"type": "Replace", "pattern": {"String": p}, "content": c}, WORDS, WORDS),
    st.builds(lambda p, c: {"type": "Replace", "pattern": {"Regex": p}, "content": c}, PATTERNS, WORDS),
)  # fmt: skip


@given(steps=st.lists(STEPS, max_size=4), text=st.text("ab \ufdfaÉ", max_size=20))
def test_no_text_grows_by_more_than_is_computed(steps, text):
    content = {"normalizer": {"type": "Sequence", "normalizers": steps}}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    library = tokenizers.Tokenizer.from_str(json.dumps(json.loads(library.to_str()) | content))
    growth = _growth(content["normalizer"])
    try:
        made = library.normalizer.normalize_str(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the library, where two steps empty a text
            raise
    else:
        assert len(made.encode()) <= growth * (
            len(text.encode()) + 1
        )  # an empty match at the end of the text


def test_what_multiplies_is_refused():
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    for name, steps in (("normalizer", "normalizers"), ("decoder", "decoders")):
        content = {name: {"type": "Sequence", steps: [{"type": "Sequence", steps: [double] * 40}]}}
        with pytest.raises(
            ValueError, match=f"its {name} can make a text 1,099,511,627,776 times as long"
        ):
            check_growth(content)
    with pytest.raises(ValueError, match="can make a text 5,001 times as long"):
        check_growth(
            {"normalizer": {"type": "Replace", "pattern": {"Regex": "x?"}, "content": "a" * 5000}}
        )
    with pytest.raises(ValueError, match="adds 5,000 characters to every text"):
        check_growth({"normalizer": {"type": "Prepend", "prepend": "a" * 5000}})
    charsmap = base64.b64encode(
        (8).to_bytes(4, "little") + bytes(8) + b"a\0" + b"b" * 5000 + b"\0"
    ).decode()
    with pytest.raises(ValueError, match="can make a text 5,000 times as long"):
        check_growth({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}})


def test_what_people_use_is_read():
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    llama = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    t5 = {
        "type": "Sequence",
        "normalizers": [{"type": "Precompiled", "precompiled_charsmap": None}, spaces],
    }
    for normalizer in (None, {"type": "NFC"}, llama, t5):
        check_growth({"normalizer": normalizer, "decoder": None})
    assert 33 * _growth(spaces) < MAX_GROWTH
