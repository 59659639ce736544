"""Modelfiles: read as Ollama reads them, their templates render conversations as the chat template
does."""

import json
import re

import pytest
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thinker.data.chat import chat
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.ollama.modelfile import go_text, modelfile

pytest.importorskip("jinja2")
pytest.importorskip("transformers")

BYTE = make_tokenizer("byte", [])
CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
DEFAULT_SYSTEM = (
    """{% if messages[0].role != "system" %}<s>Be "kind" in {{ '{{' }} braces.</s>{% endif %}"""
    + CHATML
)
WITH_BOS = "{{ bos_token }}" + CHATML
TEMPLATES = {
    "ours": (ROOT / "configs" / "chat.jinja").read_text(),
    "chatml": CHATML,
    "default system": DEFAULT_SYSTEM,
    "bos": WITH_BOS,
    "bos and default system": "{{ bos_token }}" + DEFAULT_SYSTEM,
    "trimmed": CHATML.replace("message.content", "message.content | trim"),
}
REFUSED = {
    "numbers": "{% for message in messages %}{{ loop.index }}{{ message.content }}{% endfor %}",
    "the last alone": "{{ messages[-1].content }}",
    "twice": CHATML.replace("message.content", "message.content ~ message.content"),
    "upper": CHATML.replace("message.content", "message.content | upper"),
    "marks the last": "{% for m in messages %}{{ '*' if loop.last else '' }}{{ m.content }}\n{% endfor %}",
    "drops old answers": CHATML.replace(
        "message.content", "message.content if message.role != 'assistant'"
    ),
    "no system": '{% if messages[0].role == "system" %}{{ raise_exception("no system") }}{% endif %}'
    + CHATML,
}
TALK = [
    ("system", "Be brief."),
    ("user", "Who is {{ .Role }}?"),
    ("assistant", ' "A"\n girl '),
    ("user", "🙂 <|bos|>"),
]


def parse_modelfile(text):
    """The commands, read like Ollama's parser: a value ends with its line, or with its triple
    quotes."""
    commands, lines = [], iter(text.split("\n"))
    for line in lines:
        if not line or line.startswith("#"):
            continue
        name, value = line.split(" ", 1)
        if name == "PARAMETER":
            name, value = value.split(" ", 1)
        while unquote(value.strip()) is None:
            value += "\n" + next(lines)
        value = "".join(char for char in value if char.isprintable() or char in "\t\r\n")
        commands.append((name, unquote(value.strip())))
    return commands


def unquote(text):
    for quotes in ('"""', '"'):
        if text.startswith(quotes):
            n = len(quotes)
            return text[n:-n] if len(text) >= 2 * n and text.endswith(quotes) else None
    return text


def render_go(template, messages):
    """Render the few actions of Go templates that a Modelfile uses."""
    pieces = iter(re.split(r"\{\{ ((?:\"[^\"]*\"|[^\"}]+)*) \}\}", template))
    nodes, _ = parse(pieces)
    system = "\n\n".join(content for role, content in messages if role == "system")
    return "".join(execute(nodes, messages, system, None))


def parse(pieces):
    """Nodes up to {{ end }} or {{ else ... }}, and that action."""
    nodes = []
    for text in pieces:
        assert "{{" not in text
        assert "}}" not in text
        nodes.append(("text", text))
        action = next(pieces, "end")
        if action == "end" or action.startswith("else "):
            return nodes, action
        if action.startswith(("range ", "if ")):
            branches, after = [], action
            while after != "end":
                body, following = parse(pieces)
                branches.append((after.removeprefix("else "), body))
                after = following
            nodes.append(("branches", branches))
        else:
            nodes.append(("value", action))
    raise AssertionError("no end")


def execute(nodes, messages, system, message):
    for kind, value in nodes:
        if kind == "text":
            yield value
        elif value == ".Content":
            yield message[1]
        elif kind == "value":
            assert re.fullmatch(r'"(\\U[0-9a-f]{8})+"', value), value
            yield "".join(chr(int(digits, 16)) for digits in re.findall("U(.{8})", value))
        elif value[0][0] == "range .Messages":
            for each in messages:
                yield from execute(value[0][1], messages, system, each)
        else:
            tests = {"if not .System": not system}
            for action, body in value:
                role = re.fullmatch('if eq .Role "(.*)"', action)
                if message[0] == role[1] if role else tests[action]:
                    yield from execute(body, messages, system, message)
                    break


def template_of(tokenizer):
    commands = parse_modelfile(modelfile(tokenizer, "my model.gguf", 176))
    assert commands[:2] == [("FROM", "./my model.gguf"), ("num_ctx", "176")]
    return dict(commands).get("TEMPLATE")


def check(tokenizer, talk):
    """llama.cpp adds the BOS prefix to what Ollama renders."""
    messages = [{"role": role, "content": content} for role, content in talk]
    rendered = render_go(template_of(tokenizer), talk)
    text = chat.render(tokenizer, messages, add_generation_prompt=True)
    assert rendered == (text.removeprefix(tokenizer.bos_token) if tokenizer.bos_prefix else text)
    ids = [*tokenizer.bos_prefix, *tokenizer.encode(rendered, allow_special=True)]
    # Ollama reads names of special tokens in messages as these tokens.
    assert ids == chat.encode_prompt(tokenizer, messages, allow_special=True)


def test_without_a_chat_template_it_is_the_prompt():
    text = modelfile(BYTE, "a.gguf", 64)
    expected = [
        ("FROM", "./a.gguf"),
        ("num_ctx", "64"),
        ("stop", "<|bos|>"),
        ("TEMPLATE", "{{ .Prompt }}"),
    ]
    assert parse_modelfile(text) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_bos", [True, False])
def test_conversations_render_as_by_the_chat_template(name, add_bos):
    tokenizer = other_tokenizer({"<|bos|>": 256}, add_bos=add_bos).with_chat_template(
        TEMPLATES[name]
    )
    stripped = [(role, content.strip()) for role, content in TALK]
    for talk in (
        stripped[1:2],
        stripped[:2],
        stripped[1:],
        stripped,
        [*stripped, ("assistant", "B"), ("user", "C")],
    ):
        check(tokenizer, talk)
    if name != "trimmed":
        check(tokenizer, TALK)


def other_tokenizer(special_tokens, **options):
    tokens = [*(bytes([i]) for i in range(256)), *[None] * len(special_tokens)]
    return Tokenizer("byte", tokens, special_tokens, **options)


@settings(max_examples=10)
@given(st.lists(st.text(st.sampled_from('ab{} "\\\n\r\t\u200b☃🙂-#%') | st.characters(exclude_categories=["Cs"]),
                        max_size=8), min_size=9, max_size=9))  # fmt: skip
def test_any_text_around_messages_is_safe(texts):
    start, answer, default, *around = map(json.dumps, texts)
    branches = "".join(
        f'{{% if m.role == "{role}" %}}{{{{ {around[2 * i]} ~ m.content ~ {around[2 * i + 1]} }}}}{{% endif %}}'
        for i, role in enumerate(("system", "user", "assistant"))
    )
    loop = f"{{% for m in messages %}}{branches}{{% endfor %}}"
    default = f'{{% if messages[0].role != "system" %}}{{{{ {default} }}}}{{% endif %}}'
    end = f"{{% if add_generation_prompt %}}{{{{ {answer} }}}}{{% endif %}}"
    tokenizer = BYTE.with_chat_template(f"{{{{ {start} }}}}{default}{loop}{end}")
    check(tokenizer, TALK)
    check(tokenizer, TALK[1:])


@given(st.text(st.sampled_from('a{}"\\\n\r\u00a0 ') | st.characters(exclude_categories=["Cs"])))
@example('a"""\nFROM b')
def test_text_survives_the_modelfile_and_the_template(text):
    assert '"""' not in go_text(text)
    ((_, value),) = parse_modelfile(f'TEMPLATE """{go_text(text)}"""')
    assert render_go(value, []) == text


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_does_more_is_left_out_with_a_comment(name):
    tokenizer = BYTE.with_chat_template(REFUSED[name])
    assert template_of(tokenizer) is None
    comments = [
        line
        for line in modelfile(tokenizer, "a.gguf", 64).splitlines()
        if line.startswith("# No TEMPLATE: ")
    ]
    assert len(comments) == 1
    assert "chat template" in comments[0]


def test_every_end_of_text_token_stops():
    special = {"<|bos|>": 256, '<"end">': 257, "<|end of turn|>": 258, "<|other|>": 259}
    tokenizer = other_tokenizer(special, eos_ids=[258, 257])
    stops = [
        value
        for name, value in parse_modelfile(modelfile(tokenizer, "a.gguf", 64))
        if name == "stop"
    ]
    assert stops == ['<"end">', "<|end of turn|>"]
