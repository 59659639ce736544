"""Streamed text equals the text decoded at once, wherever tokens are cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import make_tokenizer
from generation.stream import TextStream

BYTES = make_tokenizer("byte", [])


@given(text=st.text() | st.text(alphabet="aéπ漢😀\u200d"))
@settings(max_examples=200, deadline=None)
def test_byte_by_byte(text):
    stream = TextStream(BYTES)
    pieces = [stream.feed(token) for token in BYTES.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@given(data=st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_broken_utf8_is_decoded_as_at_once(data):
    stream = TextStream(BYTES)
    assert "".join(stream.feed(b) for b in data) + stream.finish() == data.decode("utf-8", errors="replace")


@given(
    text=st.text(alphabet="ab😀", max_size=30),
    stop=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_a_stop_string_never_leaks(text, stop):
    stream = TextStream(BYTES, tuple(stop))
    streamed = ""
    for token in BYTES.encode(text):
        streamed += stream.feed(token)
        if stream.stopped:
            break
    streamed += stream.finish()
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert stream.stopped == bool(ends)
    if ends:  # the string that is complete first ends the text, where the earliest one complete there begins
        seen = text[: min(ends)]
        assert streamed == seen[: min(seen.find(s) for s in stop if s in seen)]
    else:
        assert streamed == text


@pytest.mark.parametrize("stop", [("\n\n",), ("b c", "zzz")])
def test_text_before_a_possible_stop_is_held_no_longer_than_needed(stop):
    stream = TextStream(BYTES, stop)
    assert [stream.feed(token) for token in b"a b"] == (["a", " ", "b"] if stop[0] == "\n\n" else ["a", " ", ""])
