"""How models write calls: what chat templates in the shapes of well-known models show of it, and
answers of random models, which are constrained from where a call begins."""

import json
import random

import jsonschema
import pytest
from chat_templates import SPECIAL, TEMPLATES, TOKENIZERS, TOOLS
from installed import needs
from tool_models import KNOWN

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.sampling_params import SamplingParams
from thinker.generation.sequence import Completion, Sequence
from thinker.serving.calls.call_format import CallFormat, find_call_format
from thinker.serving.calls.call_readers import join
from thinker.serving.calls.calling import Calling
from thinker.serving.protocol import ChatRequest

MARKS = ("[TOOL_CALLS]", "<|python_tag|>", "<|eom_id|>", "<|calls|>", "<|/calls|>")
TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES = (
    TURNS + "{{ m.content }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}" + END
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}'
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}MARK"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "ENDMARK{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# What Qwen3 writes before each newest answer.
THINKS = HERMES.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)
PAIR = (
    TURNS + "{{ m.content }}{% if m.tool_calls %}<|calls|>[{% for call in m.tool_calls %}"
    "{{ call.function | tojson }}{% endfor %}]<|/calls|>{% endif %}" + END
)
NO_JSON = (
    TURNS + "{{ m.content }}{% for call in m.tool_calls or [] %}<function={{ call.function.name }}>"
    "{% endfor %}" + END
)
REFUSES = "{% if messages[-1].tool_calls %}{{ raise_exception('no') }}{% endif %}" + TURNS + END

NAMED = ("name", "parameters")
FORMATS = {
    "hermes": (HERMES, CallFormat(before_json="\n", before_closing="\n")),
    "thinks": (THINKS, CallFormat(before_json="\n", before_closing="\n")),
    "tools": (TOOLS, CallFormat()),
    "mistral": (
        MISTRAL,
        CallFormat("[TOOL_CALLS]", "", " ", "", ("name", "arguments", "id"), ("[TOOL_CALLS]",)),
    ),
    "llama": (
        LLAMA.replace("ENDMARK", "<|eot_id|>").replace("MARK", ""),
        CallFormat("", "", keys=NAMED),
    ),
    "python": (
        LLAMA.replace("ENDMARK", "<|eom_id|>").replace("MARK", "<|python_tag|>"),
        CallFormat("<|python_tag|>", "<|eom_id|>", keys=NAMED, hidden=("<|python_tag|>", "<|eom_id|>")),
    ),
    "pair": (PAIR, CallFormat("<|calls|>", "<|/calls|>", hidden=("<|calls|>", "<|/calls|>"))),
    "no-json": (NO_JSON, CallFormat()),
    "refuses": (REFUSES, CallFormat()),
}  # fmt: skip


def byte_tokenizer(template):
    """Bytes and special tokens, without a space at the start of a text."""
    ids = {name: 256 + i for i, name in enumerate((*SPECIAL, *MARKS))}
    tokens = [bytes([i]) for i in range(256)] + [None] * len(ids)
    ends = [ids["</s>"], ids["<|im_end|>"], ids["<|eot_id|>"]]
    return Tokenizer("byte", tokens, ids, "<s>", eos_ids=ends, chat_template=template)


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_what_the_template_writes(name):
    template, expected = FORMATS[name]
    found = find_call_format(byte_tokenizer(template))
    assert set(found.hidden) == set(expected.hidden)
    assert vars(found) | {"hidden": ()} == vars(expected) | {"hidden": ()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_without_calls_have_the_default(name):
    assert find_call_format(byte_tokenizer(TEMPLATES[name].source)) == CallFormat()


def request(tools=(KNOWN,), **fields):
    messages = [{"role": "user", "content": "Hi"}]
    return ChatRequest(model="a", messages=messages, tools=list(tools), **fields)


def answer(tokenizer, wanted, choose=None, **fields):
    """The message of a model that writes the tokens `wanted` where it may, and otherwise what
    `choose` picks from the tokens that may follow; and the tokens that it wrote."""
    if choose is None:
        choose = min
    calling = Calling(tokenizer)
    params = SamplingParams(max_new_tokens=2000)
    sequence = Sequence(0, Completion(""), params, [0], 2000, calling.tokenizer)
    reader = calling.prepare(sequence, request(**fields))
    deltas = []
    wanted = [*wanted, tokenizer.eos_id]
    has_ended = False
    while not has_ended:
        allowed = None
        if sequence.constraint is not None:
            words = sequence.constraint.allowed.numpy().view("uint8")
            bits = [int(bit) for byte in words for bit in f"{byte:08b}"[::-1]]
            allowed = [token for token in range(tokenizer.vocab_size) if bits[token]]
        if wanted and (allowed is None or wanted[0] in allowed):
            token = wanted.pop(0)
        else:
            wanted = []
            token = choose(allowed)
        text, has_ended = sequence.extend([(token, -1.0, {})])
        deltas += reader.feed(text)
    deltas += reader.finish(sequence.completion.constraint_met is True)
    return join(deltas), sequence.completion.token_ids


CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
LLAMA_CALL = CALL.replace("arguments", "parameters")
WITH_ID = CALL[:-1] + ', "id": "abc"}'
WRITTEN = {  # the format, what the model writes, the content, and the number of calls
    "hermes": ("hermes", f"Hm.\n<tool_call>\n{CALL}\n</tool_call>", "Hm.\n", 1),
    "two": ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n" * 2, None, 2),
    "parameters": ("hermes", f"<tool_call>{LLAMA_CALL}</tool_call>", None, 1),
    "mistral": ("mistral", f"[TOOL_CALLS] [{CALL}]", None, 1),
    "mistral-compact": ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", None, 2),
    "mistral-ids": ("mistral", f"So: [TOOL_CALLS] [{WITH_ID}, {WITH_ID}]", "So: ", 2),
    "mistral-one": ("mistral", f"[TOOL_CALLS] {CALL}", None, 1),
    "mistral-text": ("mistral", "[1] is a list, and [TOOL is not", "[1] is a list, and [TOOL is not", 0),
    "llama": ("llama", LLAMA_CALL, None, 1),
    "llama-tag": ("llama", f"<|python_tag|>{LLAMA_CALL}", None, 1),
    "llama-list": ("llama", f"[{CALL}]", None, 1),
    "llama-several": ("llama", f"{CALL}\n{CALL}", None, 2),
    "llama-text": ("llama", '{"name": "Tom"}', '{"name": "Tom"}', 0),
    "python": ("python", f"Hm.<|python_tag|>{LLAMA_CALL}<|eom_id|>", "Hm.", 1),
    "pair": ("pair", f"<|calls|>[{CALL}]<|/calls|> So.", " So.", 1),
    "no-json": ("no-json", "<function=weather>", "<function=weather>", 0),
}  # fmt: skip


@needs("structured_output")
@pytest.mark.parametrize("name", WRITTEN)
def test_a_model_writes_a_call_as_its_template_does(name):
    kind, text, content, n_calls = WRITTEN[name]
    tokenizer = byte_tokenizer(FORMATS[kind][0])
    wanted = tokenizer.encode(text, allow_special=True)
    message, written = answer(tokenizer, wanted)
    assert written == [*wanted, tokenizer.eos_id]  # nothing stopped it
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert message["content"] == content
    assert calls == [{"name": "weather", "arguments": '{"city": "Rome"}'}] * n_calls


@needs("structured_output")
@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama", "python", "pair"])
@pytest.mark.parametrize("tokens", ["byte", *TOKENIZERS])
def test_a_random_model_calls_rightly_once_it_has_begun(kind, tokens, tmp_path):
    """Whatever it writes behind the marks, and however its tokens are cut."""
    template, form = FORMATS[kind]
    if tokens == "byte":
        tokenizer = byte_tokenizer(template)
    else:
        tokenizer = TOKENIZERS[tokens](tmp_path).with_chat_template(template)
    begin = form.opening or '{"name": "weather", "parameters": '
    wanted = tokenizer.encode(f"{begin}", allow_special=True, continues=True)
    for seed in range(3):
        choose = random.Random(seed).choice
        message, _ = answer(tokenizer, wanted, choose, parallel_tool_calls=False)
        (call,) = message["tool_calls"]
        jsonschema.validate(
            json.loads(call["function"]["arguments"]), KNOWN["function"]["parameters"]
        )
