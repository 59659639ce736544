"""Streamed text equals the text decoded at once, wherever tokens are cut."""

from itertools import combinations, pairwise, product, takewhile

import pytest
from conftest import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thinker.data.tokenizers.tokenizer import BOS_TOKEN, Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation.streaming import TextStreamer

BYTES = make_tokenizer("byte", [])
# One of each kind that UTF-8 tells apart: ASCII, parts of continuation bytes, never valid, each
# group of first bytes.
KINDS = bytes.fromhex("41 80 8f 90 9f a0 bd bf c1 c2 e0 e1 ed ef f0 f1 f4 f5 ff")
CHARACTERS = (
    "ab\x00\n\r é π 漢字 \u0301\u200d\ufe0f\ufffd\ufeff\ud7ff\ue000\U0010ffff 😀👨👩👧👍🏽🇩🇪"
)
PARTS = [
    *CHARACTERS,
    "👨‍👩‍👧‍👦",
    "👍🏽",
    "🇩🇪",
    "e\u0301",
    *(bytes([b]) for b in KINDS),
    b"\xed\xa0\xbd",
    b"\xf0\x9f\x98",
]


def tokens_for(pieces):
    """A tokenizer in which every piece is one token (an empty one the BOS token), and the pieces'
    ids."""
    vocabulary = [bytes([b]) for b in range(256)]
    vocabulary += sorted({piece for piece in pieces if len(piece) > 1})
    tokenizer = Tokenizer("bpe", [*vocabulary, None], {BOS_TOKEN: len(vocabulary)})
    ids = {token: i for i, token in enumerate(vocabulary)}
    return tokenizer, [ids.get(piece, tokenizer.bos_id) for piece in pieces]


def certain(data):
    """The characters certain whatever bytes follow: of three ways on, two differ in an unfinished
    one."""
    ways_on = [(data + more).decode("utf-8", "replace") for more in (b"", b"\x80" * 3, b"\xbf" * 3)]
    return "".join(
        same[0] for same in takewhile(lambda characters: len(set(characters)) == 1, zip(*ways_on))
    )


def cut(text, stop):
    return text[: min(text.find(s) for s in stop if s in text)]


def check(pieces, stop=(), tokenizer=None, ids=None):
    """Feed the pieces one by one and compare with all bytes so far decoded at once; returns all
    that was given out."""
    if tokenizer is None:
        tokenizer, ids = tokens_for(pieces)
    stream, streamed, data, expected = TextStreamer(tokenizer, tuple(stop)), "", b"", None
    for piece, token in zip(pieces, ids, strict=True):
        streamed += stream.feed(token)
        data += piece
        text = certain(data)
        if expected is None and any(s in text for s in stop):
            expected = cut(text, stop)
        if expected is None:
            n_pending = max(
                (n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0
            )
            assert (streamed, stream.pending) == (
                text[: len(text) - n_pending],
                text[len(text) - n_pending :],
            )
        else:
            assert (streamed, stream.pending) == (expected, "")
        assert stream.stopped == (expected is not None)
    streamed += stream.finish()
    if expected is None:
        text = data.decode("utf-8", "replace")
        assert text == tokenizer.decode(ids)
        expected = cut(text, stop) if any(s in text for s in stop) else text
        assert stream.stopped == (expected != text)
    assert (streamed, stream.pending, stream.finish()) == (expected, "", "")
    return streamed


@st.composite
def cut_bytes(draw, parts=PARTS):
    """Bytes of text and of broken text, in pieces of any length, empty ones too."""
    drawn = draw(
        st.lists(
            st.sampled_from(parts)
            | (st.characters(codec="utf-8") if parts is PARTS else st.nothing()),
            max_size=14,
        )
    )
    data = b"".join(part if isinstance(part, bytes) else part.encode() for part in drawn)
    cuts = draw(
        st.lists(st.integers(0, len(data)), max_size=len(data)) | st.just(list(range(len(data))))
    )
    return [data[a:b] for a, b in pairwise([0, *sorted(cuts), len(data)])]


@given(pieces=cut_bytes() | st.lists(st.binary(max_size=4), max_size=12))
@example(
    pieces=[b"\xed", b"\xa0", b"\xbd"]
)  # half of a surrogate pair is no character, clear at its second byte
@settings(max_examples=examples(400), deadline=None)
def test_joined_pieces_equal_the_text_decoded_at_once(pieces):
    check(pieces)


def test_all_short_byte_sequences():
    for length in (1, 2, 3):
        for data in map(bytes, product(KINDS, repeat=length)):
            check([bytes([b]) for b in data], (), BYTES, data)


@pytest.mark.parametrize(
    "data", ["👍🏽a".encode(), "é\x00漢\ufffd".encode(), b"\xf0\x9f\xed\xa0\x80\xe2\x82\xf4\x90b"]
)
@pytest.mark.parametrize("stop", [(), ("🏽",), ("\ufffd", "漢\ufffd")])
def test_every_split_into_tokens(data, stop):
    spans = list(combinations(range(len(data) + 1), 2))
    tokenizer, ids = tokens_for([data[a:b] for a, b in spans])
    token_of = dict(zip(spans, ids))
    for count in range(len(data)):
        for inner in combinations(range(1, len(data)), count):
            cuts = list(pairwise([0, *inner, len(data)]))
            check([data[a:b] for a, b in cuts], stop, tokenizer, [token_of[c] for c in cuts])


FEW = ["a", "b", "😀", "é", b"\xff", b"\xed", b"\xa0"]


@given(
    pieces=cut_bytes(FEW) | cut_bytes(["a", "b"]),
    stop=st.lists(
        st.text("ab", min_size=1, max_size=6) | st.text("ab😀é\ufffd", min_size=1, max_size=4),
        max_size=4,
    ),
)
@settings(max_examples=examples(600), deadline=None)
def test_no_part_of_a_stop_string_is_returned(pieces, stop):
    check(pieces, stop)


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["aa", "ab", "aab"], ["aab"], "a"),  # begins within its own beginning
        (["a", "b", "a", "b", "a", "c"], ["abac"], "ab"),
        (["xa", "b", "c"], ["abc", "ab"], "x"),  # one a prefix of another
        (["xa", "b", "c"], ["abc", "b"], "xa"),  # one inside another, complete first
        (
            ["xa", "bc"],
            ["abc", "b"],
            "x",
        ),  # complete with the same token: the earliest begins first
        (["xab", "c", "d"], ["cd", "abc"], "x"),  # overlapping
        (["ab", "aba", "b"], ["aba", "bab"], ""),
        (["x😀", "\n", "\n"], ["😀\n\n"], "x"),
        (["x👨\u200d", "👩"], ["\u200d👩"], "x👨"),
        (["x", "ab"], ["ab", "ab"], "x"),
        (["xa"], ["ab", "aab"], "xa"),  # no stop string after all
    ],
)
def test_which_stop_string_ends_the_text(pieces, stop, text):
    pieces = [piece.encode() for piece in pieces]
    assert check(pieces, stop) == check(pieces, stop[::-1]) == text


@pytest.mark.parametrize("stop", [("\ufffd",), ("b\ufffd", "zz"), ("ab\ufffd",)])
def test_finish_may_complete_a_stop_string(stop):
    stream = TextStreamer(BYTES, stop)
    before = "".join(stream.feed(b) for b in b"xab\xf0\x9f\x98")
    assert not stream.stopped
    assert before + stream.finish() == cut("xab\ufffd", stop)
    assert stream.stopped
    assert (stream.pending, stream.feed(ord("c")), stream.finish()) == ("", "", "")


def test_special_tokens_have_no_text_and_split_nothing():
    stream = TextStreamer(BYTES, ("ab",))
    bos = BYTES.bos_id
    fed = [
        bos,
        *"é".encode()[:1],
        bos,
        *"é".encode()[1:],
        bos,
        ord("a"),
        bos,
        BYTES.eos_id,
        ord("b"),
        bos,
    ]
    assert [stream.feed(token) for token in fed] == ["", "", "", "é", "", "", "", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""
    assert TextStreamer(BYTES, ("ab",)).finish() == ""


@pytest.mark.parametrize("stop", [("\n\n",), ("b c", "zzz")])
def test_text_is_held_back_no_longer_than_needed(stop):
    stream = TextStreamer(BYTES, stop)
    assert [stream.feed(token) for token in b"a b"] == (
        ["a", " ", "b"] if stop[0] == "\n\n" else ["a", " ", ""]
    )


def test_a_long_stop_string_is_held_back():
    length = 500
    stop = (
        "a" * length + "z",
        "b" * length,
        "ab" * length,
    )  # the second is never begun while the first waits
    stream, given_out = TextStreamer(BYTES, stop), 0
    for count in range(1, 2 * length + 1):
        given_out += len(stream.feed(ord("a")))
        assert len(stream.pending) == min(count, length) == count - given_out
    assert stream.feed(ord("c")) == "a" * length + "c"
    assert stream.pending == ""


def test_long_stop_strings_take_little_time():
    """With quadratic work per token, this takes minutes."""
    tokenizer = make_tokenizer("byte", [])
    streamer = TextStreamer(tokenizer, ("a" * 60_000 + "b",) * 16)
    ids = tokenizer.encode("ab" * 200)
    assert "".join(map(streamer.feed, ids)) + streamer.finish() == "ab" * 200
