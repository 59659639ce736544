"""The tokens of the beginnings of a conversation, each encoded only from its last special token on."""

import json
import random
import time

import pytest
from chat_templates import TOKENIZERS

from thinker.data.chat.chat import _Beginnings, _Rendered
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer

PIECES = (
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "<|",
    "im_end|>",
    "the boy",
    " ",
    "\n",
    "  ",
    "A",
    "is",
    "x",
    "é",
    "1",
)


def with_flags(folder, make, **flags):
    """The tokenizer, whose special tokens have these flags."""
    make(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    scheme = flags.pop("prepend_scheme", None)
    if scheme:
        content["pre_tokenizer"]["prepend_scheme"] = scheme
    for token in content["added_tokens"]:
        token |= flags
    path.write_text(json.dumps(content))
    return load_tokenizer(folder)


IMPORTED = [name for name in TOKENIZERS if name not in ("byte", "bpe")]
CASES = [(name, {}) for name in TOKENIZERS]
for name in IMPORTED:
    for flags in ({"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}):
        CASES.append((name, flags))
CASES += [("metaspace", {"prepend_scheme": scheme}) for scheme in ("first", "always", "never")]


@pytest.mark.parametrize(("kind", "flags"), CASES)
def test_beginnings_have_the_tokens_that_they_have_alone(kind, flags, tmp_path):
    if flags:
        tokenizer = with_flags(tmp_path, TOKENIZERS[kind], **flags)
    else:
        tokenizer = TOKENIZERS[kind](tmp_path)
    draw = random.Random(0)
    n_cuts = 0
    for _ in range(60):
        parts = draw.choices(PIECES, k=draw.randrange(2, 14))
        text = "".join(parts)
        literal = []
        position = 0
        for part in parts:
            if part.startswith("<") and part.endswith(">") and draw.random() < 0.3:
                literal.append((position, position + len(part)))
            position += len(part)
        rendered = _Rendered(text, [], literal, [])
        beginnings = _Beginnings(tokenizer, rendered)
        n_cuts += len(beginnings.cuts) - 1
        for length in range(len(text) + 1):
            alone = rendered.encode(tokenizer, 0, length)
            expected = len(alone) if beginnings.ids[: len(alone)] == alone else None
            assert beginnings.n_tokens(length) == expected, (text, literal, length)
    assert n_cuts > 60  # they are used


def test_normalized_names_are_no_places_to_cut(tmp_path):
    tokenizer = with_flags(tmp_path, TOKENIZERS[IMPORTED[-1]], normalized=True)
    assert tokenizer.cut_spans("<|im_start|>a<|im_end|>", []) == []


@pytest.mark.parametrize("kind", IMPORTED)
def test_the_time_for_all_beginnings_is_proportional_to_the_turns(kind, tmp_path, monkeypatch):
    """What is encoded for them: less than four times the text."""
    tokenizer = TOKENIZERS[kind](tmp_path)
    turn = "<|im_start|>user\nWho is the boy?<|im_end|>\n<|im_start|>assistant\nA boy.<|im_end|>\n"
    n_encoded = []
    encode = type(tokenizer).encode_array
    monkeypatch.setattr(
        type(tokenizer),
        "encode_array",
        lambda self, text, *rest, **more: (
            n_encoded.append(len(text)) or encode(self, text, *rest, **more)
        ),
    )
    for n_turns in (20, 200, 2000):
        n_encoded.clear()
        start = time.perf_counter()
        beginnings = _Beginnings(tokenizer, _Rendered(turn * n_turns, [], [], []))
        for number in range(n_turns):
            begin = number * len(turn)
            assert beginnings.n_tokens(begin + turn.index("A boy")) is not None
            assert beginnings.n_tokens(begin + len(turn) - 1) is not None
        print(kind, n_turns, "turns", time.perf_counter() - start, "s")
        assert sum(n_encoded) < 4 * len(turn) * n_turns
