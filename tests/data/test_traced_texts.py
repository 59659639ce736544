"""Names of special tokens that a template puts together from what a user wrote are plain text."""

import json
import random
import subprocess
import sys

import pytest

from thinker.data.chat import chat
from thinker.data.chat.traced_text import (
    MESSAGE,
    TEMPLATE,
    UNCLEAR,
    TracedText,
    as_text,
    call,
    joined,
    origin_spans,
    origins_of,
    with_origin,
)
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError

pytest.importorskip("transformers")


def said(text):
    return with_origin(text, MESSAGE)


def origins_by_case(text):
    """Capital letters come from a message, and all else from the template."""
    return "".join(chr(MESSAGE if x.isupper() else TEMPLATE) for x in text)


NAMES = {"<|bos|>": 256, "<|im_start|>": 257, "<|im_end|>": 258, "<|IM_END|>": 259}


def tokenizer_with(template):
    tokens = [bytes([i]) for i in range(256)] + [None] * len(NAMES)
    return Tokenizer("byte", tokens, NAMES, chat_template=template, add_bos=False)


def turns(expression):
    """A template that writes an expression for the content of each message."""
    return (
        "{% macro said(text) %}{{ text[:3] }}{{ text[3:] }}{% endmacro %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}:{% set c = m.content %}"
        f"{expression}<|im_end|>{{% endfor %}}"
    )


# What a template does with a message, a message, and the text of it that is rendered.
ASSEMBLED = [
    ("{{ c.split('</think>') | join }}", "<|im_</think>end|>", "<|im_end|>"),
    ("{{ ''.join(c.split('</think>')) }}", "<|im_</think>end|>", "<|im_end|>"),
    ("{{ c.split('\n')[0] ~ c.split('\n')[1] }}", "<|im_\nend|>", "<|im_end|>"),
    ("{{ c.partition('/')[0] + c.partition('/')[2] }}", "<|im_e/nd|>", "<|im_end|>"),
    ("{{ c[:2] ~ c[2:] }}", "<|im_end|>", "<|im_end|>"),
    ("{{ c[:4] + c[5:] }}", "<|im__end|>", "<|im_end|>"),
    ("{{ c[6:] ~ c[:6] }}", "_end|><|im", "<|im_end|>"),
    ("{{ c.replace('x', '') }}", "<|imx_exnd|>", "<|im_end|>"),
    ("{{ c | replace('(', '<') }}", "(|im_end|>", "<|im_end|>"),
    ("{{ c | upper }}", "<|im_end|>", "<|IM_END|>"),
    ("{{ c.lower() }}", "<|IM_End|>", "<|im_end|>"),
    ("{{ c | reverse }}", ">|dne_mi|<", "<|im_end|>"),
    ("{{ c[::-1] }}", ">|dne_mi|<", "<|im_end|>"),
    ("{% for x in c %}{{ x }}{% endfor %}", "<|im_end|>", "<|im_end|>"),
    ("{{ c | list | join }}", "<|im_end|>", "<|im_end|>"),
    ("{{ c.split() | map('trim') | join('') }}", "<|im_ end|>", "<|im_end|>"),
    ("{{ said(c) }}", "<|im_end|>", "<|im_end|>"),
    ("{% set x %}{{ c[:5] }}{% endset %}{{ x ~ c[6:] }}", "<|im_ end|>", "<|im_end|>"),
    ("{{ '%s' % c }}", "<|im_end|>", "<|im_end|>"),
    ("{{ '%s%s' % (c[:5], c[6:]) }}", "<|im_ end|>", "<|im_end|>"),
    ("{{ '{}{}'.format(c[:5], c[6:]) }}", "<|im_ end|>", "<|im_end|>"),
    ("{{ ('<|' ~ c).strip() }}", "im_end|> ", "<|im_end|>"),
    ("<|{{ c }}|>", "im_end", "<|im_end|>"),
    ("<{{ c[1:] }}", "<|im_end|>", "<|im_end|>"),
    ("{{ c | tojson }}", '"<|im_end|>\n', '"\\"<|im_end|>\\n"'),
    ("{{ {'a': [c]} }}", "'<|im_end|>\n", "{'a': [\"'<|im_end|>\\n\"]}"),
    ("{{ [c] ~ '' }}", "<|im_end|>", "['<|im_end|>']"),
    ("{{ [c] | string }}", "<|im_end|>", "['<|im_end|>']"),
    ("{{ c | safe }}", "<|im_end|>", "<|im_end|>"),
    ("{{ (c | default('')) or '' }}", "<|im_end|>", "<|im_end|>"),
    ("{{ c.strip('-').removeprefix('=') }}", "-=<|im_end|>--", "<|im_end|>"),
]


@pytest.mark.parametrize(("expression", "content", "text"), ASSEMBLED)
def test_a_name_that_a_template_puts_together_is_text(expression, content, text):
    tokenizer = tokenizer_with(turns(expression))
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes"}]
    start, end = NAMES["<|im_start|>"], NAMES["<|im_end|>"]
    ids = chat.encode_prompt(tokenizer, messages[:1])
    assert ids == [start, *f"user:{text}".encode(), end]
    # And in what is trained.
    (row,) = chat.encode(tokenizer, chat.Conversation(messages))
    assert row.ids[: len(ids)].tolist() == ids
    assert row.ids.tolist().count(end) == 2
    # The text is that of transformers, where names are tokens.
    assert chat.render(tokenizer, messages[:1]) == f"<|im_start|>user:{text}<|im_end|>"
    opted_out = chat.encode_prompt(tokenizer, messages[:1], allow_special=True)
    assert len(opted_out) < len(ids)


def test_pieces_of_several_messages_make_no_token():
    template = "{% for m in messages %}{{ m.content.split('/')[0] }}{% endfor %}<|im_end|>"
    messages = [{"role": "user", "content": "<|im_/"}, {"role": "user", "content": "end|>/x"}]
    ids = chat.encode_prompt(tokenizer_with(template), messages)
    assert ids == [*b"<|im_end|>", 258]


@pytest.mark.parametrize(
    ("expression", "content"),
    [
        ("{{ c | title | lower }}", "<|IM_END|> ß"),
        ("{{ c | indent(2, true) | center(40) }}", "a\n<|im_end|>"),
        ("{{ c | wordwrap(20) }}", "many words <|im_end|> many words"),
        ("{{ c.encode().decode() }}", "<|im_end|>"),
        ("{{ '%12s' % c }}", "<|im_end|>"),
        ("{{ '{:12}'.format(c) }}", "<|im_end|>"),
    ],
)
def test_what_cannot_be_traced_is_refused_if_it_has_a_name(expression, content):
    tokenizer = tokenizer_with(turns(expression))
    ids = chat.encode_prompt(tokenizer, [{"role": "user", "content": "a < b | c >\nim_end, ß"}])
    assert [i for i in ids if i > 255] == [257, 258]
    error = r"unclear whether <\|im_end\|> is a part of it or a special token"
    with pytest.raises(UserError, match=error):
        chat.encode_prompt(tokenizer, [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "expression",
    [
        "{{ '<|im_start|>%s' % m.role }}",
        "{{ '<|im_start|>{}'.format(m.role) }}",
        "{{ '<|im_' ~ 'start|>' ~ m.role }}",
        "{{ ('<|IM_START|>' | lower) + m.role }}",
        "{{ '<|im_start|>' + m.get('role') }}",
        "{{ '<|im_start|>%s' % (m['role'],) }}",
    ],
)
def test_names_that_a_template_writes_are_tokens(expression):
    template = f"{{% for m in messages %}}{expression}:{{{{ m.content }}}}<|im_end|>{{% endfor %}}"
    ids = chat.encode_prompt(tokenizer_with(template), [{"role": "user", "content": "<|im_end|>"}])
    assert ids == [257, *b"user:<|im_end|>", 258]


METHODS = [
    lambda text: text[2:-3],
    lambda text: text[-2],
    lambda text: text[::-2],
    lambda text: text.strip("ab "),
    lambda text: "".join(text.split()),
    lambda text: "-".join(text.split("a", 2)),
    lambda text: "".join(text.rsplit(None, 2)),
    lambda text: "+".join(text.rsplit("a", 1)),
    lambda text: "".join(text.splitlines()),
    lambda text: "".join(text.splitlines(True)),
    lambda text: "".join(text.partition("ab")),
    lambda text: "".join(reversed(text.rpartition("b"))),
    lambda text: text.replace("a", "cc", 3),
    lambda text: text.replace("B", ""),
    lambda text: text + "tail" + text,
    lambda text: "head" + text * 2,
    lambda text: 2 * text,
    lambda text: text.removeprefix("a").removesuffix("b"),
    lambda text: "".join(reversed(text)),
    lambda text: text.lstrip().rstrip("A"),
]


def test_methods_of_traced_texts_give_the_same_texts_and_keep_origins():
    draw = random.Random(0)

    def made(text):
        return TracedText(text, origins_by_case(text))

    for _ in range(2000):
        text = "".join(draw.choices("aAbB \n\r", k=draw.randrange(3, 14)))
        for method in METHODS:
            expected = method(text)
            found = method(made(text))
            assert found == expected
            if type(found) is str:  # a plain separator joined them
                continue
            assert isinstance(found, TracedText)
            assert origins_of(found) == origins_by_case(expected)


def test_all_methods_of_texts_are_traced():
    """Those that return a text, also in later versions of Python."""
    text = said("Ab c")
    arguments = {"join": [["x", "y"]], "replace": ["b", "c"], "center": [9], "ljust": [9], "rjust": [9], "zfill": [9],
                 "removeprefix": ["A"], "removesuffix": ["c"], "partition": ["b"], "rpartition": ["b"],
                 "translate": [{}], "format_map": [{}]}  # fmt: skip
    for name in dir(str):
        if name.startswith("_") or name in ("encode", "maketrans"):
            continue
        try:
            result = getattr(text, name)(*arguments.get(name, []))
        except TypeError:  # count, find, ...
            continue
        for part in result if isinstance(result, list | tuple) else [result]:
            assert isinstance(part, TracedText | bool), name


def test_json_and_repr_keep_origins():
    value = {"a": [said("x\"y'\n🐕"), 1, None], said("kéy"): {"b": "t"}}
    for write in (
        lambda item: json.dumps(item, ensure_ascii=False),
        lambda item: json.dumps(item, indent=2),
        repr,
    ):
        text = call(write, value, is_quoted=True)
        assert text == write(value)
        parts = [text[start:end] for start, end, _ in origin_spans(text)]
        assert parts == [write("x\"y'\n🐕")[1:-1], write("kéy")[1:-1]] or write is repr
    unsorted = {said("b"): 1, said("a"): 2, said("d"): 3}
    text = call(lambda item: json.dumps(item, sort_keys=True)[::-1], unsorted, is_quoted=True)
    assert origin_spans(text) == [(0, len(text), UNCLEAR)]
    assert as_text([said("it's")]) == '["it\'s"]'
    assert origin_spans(as_text([said("it's")])) == [(2, 6, MESSAGE)]
    assert joined(["a", "b"]) == "ab"


def test_a_rendering_that_was_not_traced_is_refused():
    """As by a version of transformers that does not use the tracing environment."""
    untraced = (
        "from thinker.data.chat import chat_template; "
        "print(chat_template._reply('{{ messages[0].content }}', {}, None, "
        "[{'role': 'user', 'content': 'a'}], [(1, False)], False, [], '2026-01-01')[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", untraced], capture_output=True, text=True, check=True
    )
    assert "renders chat templates in another way" in done.stdout
