"""Prompts in rows of their own, before the last answer of conversations, and beginnings of texts."""

import json

import pytest
from conftest import ROOT

from thinker.data.chat import chat
from thinker.data.text.document import Document
from thinker.data.text.sources import open_source
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.rewards.prompts import read_prompt, read_prompts
from thinker.runtime.errors import UserError

TEMPLATE = ROOT / "configs" / "chat.jinja"
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And?"},
]


def bytes_tokenizer(has_template):
    tokenizer = make_tokenizer("byte", [])
    if has_template:
        tokenizer = tokenizer.with_chat_template(TEMPLATE.read_text())
    return tokenizer


def documents_of(folder, rows, source="prompts", **options):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return list(open_source(source, path=str(path), **options).documents())


def test_a_row_keeps_all_its_columns(tmp_path):
    """Verifiers read them."""
    row = {"prompt": "1+1=", "answer": "2", "level": 3}
    (document,) = documents_of(tmp_path, [row])
    tokenizer = bytes_tokenizer(has_template=False)
    prompt = read_prompt(document, tokenizer, None)
    assert prompt.tokens == [*tokenizer.bos_prefix, *tokenizer.encode("1+1=")]
    assert prompt.text == "1+1="
    assert prompt.row == row


@pytest.mark.parametrize("prompt", ["And?", TALK[2:], TALK])
def test_with_a_template_a_prompt_is_a_conversation(tmp_path, prompt):
    system = {"role": "system", "content": "Be short."}
    (document,) = documents_of(tmp_path, [{"prompt": prompt, "system": "Be short."}])
    tokenizer = bytes_tokenizer(has_template=True)
    found = read_prompt(document, tokenizer, None)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    assert found.tokens == chat.encode_prompt(tokenizer, [system, *messages])
    assert found.text == "And?"


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([{"from": "human", "value": "hi"}], "hi"),
        ([TALK[0], {"role": "assistant", "tool_calls": [CALL]}], ""),
        ([TALK[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}], ""),
    ],
)
def test_the_text_of_a_prompt_is_that_of_its_last_message(tmp_path, prompt, text):
    """Also in another form of messages, and without a text."""
    (document,) = documents_of(tmp_path, [{"prompt": prompt}])
    found = read_prompt(document, bytes_tokenizer(has_template=True), None)
    assert found.text == text


def test_conversations_are_answered_where_they_were(tmp_path):
    rows = [{"messages": [*TALK, {"role": "assistant", "content": "More"}], "level": 3}]
    (document,) = documents_of(tmp_path, rows, source="jsonl")
    tokenizer = bytes_tokenizer(has_template=True)
    found = read_prompt(document, tokenizer, None)
    assert found.tokens == chat.encode_prompt(tokenizer, TALK)
    assert found.row["answer"] == "More"
    assert found.row["level"] == 3


def test_texts_are_cut_to_their_beginning():
    tokenizer = bytes_tokenizer(has_template=False)
    texts = [Document("abcdef"), Document("ab"), Document("abc", row={"text": "abc", "n": 1})]
    prompts, n_too_long = read_prompts(texts, tokenizer, prompt_tokens=3, longest=4)
    assert [(prompt.text, prompt.row) for prompt in prompts] == [
        ("abc", {"text": "abcdef"}),
        ("abc", {"text": "abc", "n": 1}),
    ]
    assert n_too_long == 0
    assert read_prompts(texts, tokenizer, prompt_tokens=3, longest=3) == ([], 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"promt": "a"}, r"row 0 of .*no column prompt \(has promt\)$"),
        ({"prompt": ""}, "row 0 of .*: prompt is empty"),
        ({"prompt": None}, "has no column prompt"),
        ({"prompt": 3}, "prompt is int; it must be text or a list of messages"),
        ({"prompt": []}, "prompt is list; it must be text or a list of messages"),
        ({"prompt": [{"role": "user"}]}, "prompt"),
    ],
)
def test_rows_that_are_no_prompt(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        documents_of(tmp_path, [row])


def test_what_has_no_prompt(tmp_path):
    plain = bytes_tokenizer(has_template=False)
    (document,) = documents_of(tmp_path, [{"prompt": TALK}])
    with pytest.raises(UserError, match="has messages, and the tokenizer no chat template"):
        read_prompt(document, plain, None)
    with pytest.raises(UserError, match=r"set their length in tokens, train.grpo.prompt_tokens"):
        read_prompt(Document("abc"), plain, None)
