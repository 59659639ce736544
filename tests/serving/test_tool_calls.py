"""Tools in chats: what the model reads, and calls in its answers, through OpenAI's client."""

import json

import jsonschema
import openai
import pytest
from installed import needs
from pydantic import BaseModel, Field
from tool_models import (
    ASKED,
    BRIEF,
    CALLED,
    DROPS_SYSTEM,
    GREETED,
    KNOWN,
    NO_SYSTEM,
    RESULT,
    SAID,
    WEATHER,
    WITH_TOOLS,
    WITHOUT_TOOLS,
    WRONG,
)
from transformers.utils.chat_template_utils import render_jinja_template

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.serving.api_errors import ApiError
from thinker.serving.calls.call_constraint import MAX_HELD
from thinker.serving.calls.call_format import CallFormat
from thinker.serving.calls.call_readers import ForcedCall, FreeCalls, join
from thinker.serving.calls.call_schemas import call_schema
from thinker.serving.chat_prompts import encode_chat
from thinker.serving.protocol import ChatRequest

TREE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["leaf", "node"]},
        "label": {"$ref": "#/$defs/Label"},
        "const": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["kind", "label", "const", "next"],
    "additionalProperties": False,
    "$defs": {"Label": {"type": "string", "maxLength": 4}},
}
PLANT = {"type": "function", "function": {"name": "plant_tree", "parameters": TREE}}
NOTHING = {"type": "function", "function": {"name": "do_nothing"}}


@pytest.fixture(scope="module")
def client(tool_server):
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(client):
    def ask(model, messages, **fields):
        options = {"tools": [WEATHER], "temperature": 0, "max_tokens": 200} | fields
        return client.chat.completions.create(model=model, messages=messages, **options)

    return ask


def tokens_of(body, template):
    tokenizer = make_tokenizer("byte", []).with_chat_template(template)
    return encode_chat(tokenizer, ChatRequest(model="a", **body)), tokenizer


# ---- what the model reads -----------------------------------------------------------------------


def test_a_template_gets_what_transformers_gives_it():
    messages = [{"role": "system", "content": "Be kind."}, *ASKED, CALLED, RESULT]
    tokens, tokenizer = tokens_of({"messages": messages, "tools": [WEATHER]}, WITH_TOOLS)
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    known = [*messages[:2], {**CALLED, "content": "", "tool_calls": [{"function": call}]}, RESULT]
    names = tokenizer.special_tokens_map
    ((text,), _) = render_jinja_template(
        [known], tools=[WEATHER], chat_template=WITH_TOOLS, add_generation_prompt=True, **names
    )
    assert '"arguments": {"city": "Rome"}' in text
    assert tokens == [*tokenizer.bos_prefix, *tokenizer.encode(text, allow_special=True)]


def test_variables_of_a_template():
    body = {"messages": GREETED, "chat_template_kwargs": {"shout": True}}
    tokens, tokenizer = tokens_of(body, WITH_TOOLS)
    assert tokenizer.decode(tokens) == "user: Hi\nassistant:!"
    with pytest.raises(ApiError, match="chat_template_kwargs has shout, which the chat template"):
        tokens_of(body, WITHOUT_TOOLS)


def test_without_tools_they_are_not_shown():
    plain, _ = tokens_of({"messages": GREETED}, WITH_TOOLS)
    for choice in ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
        assert tokens_of({"messages": GREETED, **choice}, WITH_TOOLS)[0] == plain


SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("template", "messages", "begin"),
    [
        (WITHOUT_TOOLS, GREETED, "system: You can call tools."),
        (WITHOUT_TOOLS, [SYSTEM, *GREETED], "system: Be kind.\n\nYou can call tools."),
        (NO_SYSTEM, GREETED, "user: You can call tools."),
        (DROPS_SYSTEM, GREETED, "user: You can call tools."),
    ],
)
def test_a_template_without_tools_shows_them_in_a_message(template, messages, begin):
    tokens, tokenizer = tokens_of({"messages": messages, "tools": [WEATHER, NOTHING]}, template)
    text = tokenizer.decode(tokens).lstrip()
    assert text.startswith(begin)
    assert json.dumps(WEATHER["function"]) in text
    assert '{"name": "do_nothing"}' in text
    assert text.endswith("Hi\nassistant:")


def test_a_template_that_shows_tools_nowhere():
    body = {"messages": [SYSTEM, *GREETED], "tools": [WEATHER]}
    for template, reason in ((DROPS_SYSTEM, "neither tools nor"), (NO_SYSTEM, "no system role")):
        with pytest.raises(ApiError, match=reason) as caught:
            tokens_of(body, template)
        assert (caught.value.status, caught.value.param) == (400, "tools")


def test_a_template_without_tools_shows_calls_and_results_as_turns():
    messages = [*ASKED, {**CALLED, "content": "Let me see."}, RESULT, RESULT, *GREETED]
    tokens, tokenizer = tokens_of({"messages": messages}, WITHOUT_TOOLS)
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert tokenizer.decode(tokens) == (
        f"user: Weather in Rome?\nassistant: Let me see.\n{call}\n"
        "user: sunny\nsunny\nHi\nassistant:"
    )


def test_developers_are_the_system():
    tokens, tokenizer = tokens_of(
        {"messages": [{"role": "developer", "content": "Be kind."}, *GREETED]}, WITHOUT_TOOLS
    )
    assert tokenizer.decode(tokens).startswith("system: Be kind.")


# ---- calls in answers -----------------------------------------------------------------------


@pytest.mark.parametrize("model", ["knows", "plain"])
def test_a_model_calls_a_tool_and_reads_its_result(answer, model):
    (choice,) = answer(model, ASKED).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (SAID[model] or None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert call.id.isalnum()
    assert len(call.id) == 9
    result = {**RESULT, "tool_call_id": call.id}
    (choice,) = answer(model, [*ASKED, choice.message, result]).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "It is sunny.")
    assert choice.message.tool_calls is None
    (choice,) = answer(model, GREETED).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "Hello!")


@pytest.mark.parametrize("model", ["knows", "plain"])
@pytest.mark.parametrize("messages", [ASKED, GREETED], ids=["call", "text"])
def test_a_stream_says_the_same(client, answer, model, messages):
    known = answer(model, messages).choices[0]
    options = {"tools": [WEATHER], "temperature": 0, "max_tokens": 200}
    chunks = list(answer(model, messages, stream=True, logprobs=True))
    assert chunks[-1].choices[0].delta.model_dump(exclude_unset=True) == {}
    assert chunks[-1].choices[0].finish_reason == known.finish_reason
    n_tokens = answer(model, messages).usage.completion_tokens
    entries = [chunk.choices[0].logprobs for chunk in chunks]
    assert sum(len(entry.content) for entry in entries if entry) == n_tokens
    with client.chat.completions.stream(model=model, messages=messages, **options) as stream:
        message = stream.get_final_completion().choices[0].message
    assert (message.content or None) == known.message.content
    found = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    calls = known.message.tool_calls or ()
    assert found == [(call.function.name, call.function.arguments) for call in calls]


def read_stream(chunks):
    """The content of a stream, the names and arguments of its calls, and why it ended."""
    content = ""
    calls = []
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments
    return content, calls, choice.finish_reason


@needs("structured_output")
@pytest.mark.parametrize("model", ["knows", "plain"])
@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_that_may_come_fits_the_schema(answer, model, mistake, stream):
    """The models have learned to call with wrong arguments, and a tool that is not there."""
    messages, _ = WRONG[mistake]
    options = {"tools": [KNOWN]}
    if stream:
        content, calls, reason = read_stream(answer(model, messages, stream=True, **options))
    else:
        (choice,) = answer(model, messages, **options).choices
        content, reason = choice.message.content or "", choice.finish_reason
        calls = [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or ()
        ]
    if model == "plain" and mistake == "tool":  # which without marks is only a text
        assert (content, calls, reason) == (WRONG["tool"][1], [], "stop")
        return
    assert (content, reason) == (SAID[model], "tool_calls")
    ((name, arguments),) = calls
    assert name == "weather"
    jsonschema.validate(json.loads(arguments), KNOWN["function"]["parameters"])


@needs("structured_output")
@pytest.mark.parametrize("model", ["knows", "plain"])
@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "plant_tree"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "plant_tree"}}]},
        },
    ],
    ids=["required", "named", "allowed"],
)  # fmt: skip
def test_a_forced_call_fits_the_schema(answer, model, choice):
    options = {"tools": [WEATHER, PLANT, NOTHING], "tool_choice": choice, "logit_bias": BRIEF}
    schemas = {"plant_tree": TREE, "weather": WEATHER["function"]["parameters"], "do_nothing": {}}
    names = set()
    for seed in range(4):
        options |= {"seed": seed, "temperature": 2.0, "max_tokens": 400}
        (got,) = answer(model, GREETED, **options).choices
        assert got.finish_reason == "tool_calls"
        assert got.message.content is None
        (call,) = got.message.tool_calls
        names.add(call.function.name)
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        pieces = [chunk.choices[0] for chunk in answer(model, GREETED, stream=True, **options)]
        parts = [part for piece in pieces for part in piece.delta.tool_calls or ()]
        assert [part.function.name for part in parts if part.function.name] == [call.function.name]
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        assert len(parts) > 2 or call.function.name == "do_nothing"
        assert {part.index for part in parts} == {0}
        assert pieces[-1].finish_reason == "tool_calls"
    assert names == {"plant_tree"} or choice == "required"


@needs("structured_output")
def test_a_forced_call_that_is_cut(answer):
    options = {"tool_choice": "required", "max_tokens": 45}
    (choice,) = answer("knows", ASKED, **options).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("length", "weather")
    with pytest.raises(ValueError, match="Unterminated|Expecting|delimiter"):
        json.loads(call.function.arguments)
    (choice,) = answer("knows", ASKED, **options | {"max_tokens": 5}).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


@needs("structured_output")
def test_a_forced_call_that_a_stop_string_cuts(answer):
    (choice,) = answer("knows", ASKED, tool_choice="required", stop="city").choices
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls[0].function.arguments.endswith('{"')


class Cat(BaseModel):
    """A cat."""

    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=20)


@needs("structured_output")
def test_arguments_of_a_pydantic_class(client):
    tools = [openai.pydantic_function_tool(Cat)]
    options = {"model": "plain", "messages": GREETED, "tools": tools, "logit_bias": BRIEF}
    options |= {"tool_choice": "required", "seed": 1, "max_tokens": 300}
    (choice,) = client.chat.completions.parse(**options).choices
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Cat)
    with client.chat.completions.stream(**options) as stream:
        message = stream.get_final_completion().choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Cat)


@needs("structured_output")
def test_a_form_leaves_room_for_calls(answer):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    kinds = set()
    for seed in range(40):
        options = {"response_format": form, "seed": seed, "temperature": 3.0, "logit_bias": BRIEF}
        (choice,) = answer("plain", GREETED, **options).choices
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
        else:
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments).keys() >= {"city"}
    assert kinds == {"stop", "tool_calls"}


NAN = float("nan")


def with_arguments(text):
    """A conversation with a call of these arguments."""
    call = {"id": "a", "type": "function", "function": {"name": "b", "arguments": text}}
    return {"messages": [*ASKED, {**CALLED, "tool_calls": [call]}]}


MISTAKES = [
    ({"tool_choice": "required", "tools": None}, "tool_choice", "there are no tools"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "wether"}}},
        "tool_choice",
        "tool_choice names 'wether', no tool; did you mean weather?",
    ),
    ({"tool_choice": "always"}, "tool_choice", 'use "none", "auto", "required" or'),
    ({"tools": [WEATHER, WEATHER]}, "tools", "two tools have the name 'weather'"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools", "use a list of"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools",
        "use a list of",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
        "tools",
        "the parameters of a have the type 'array'",
    ),
    *(
        (
            with_arguments(text),
            "messages",
            "messages.1.tool_calls.0.function.arguments is not a JSON object",
        )
        for text in (
            "{",
            "[]",
            '{"a": NaN}',
            '{"a": 1e999}',
            '{"a": "\\ud800"}',
            '{"a":' * 700 + "1" + "}" * 700,
            '{"a":' * 5000 + "1" + "}" * 5000,
        )
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"a": NAN}}}]},
        "tools",
        "tools.0.function.parameters has a number that is not finite",
    ),
    ({"chat_template_kwargs": {"shout": -NAN}}, "chat_template_kwargs", "is not finite"),
    ({"chat_template_kwargs": {"y" * 90_000: 1}}, "chat_template_kwargs", "y ... y"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "ignores"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot set messages"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), MISTAKES)
def test_mistakes(client, fields, param, message):
    body = {"model": "knows", "messages": ASKED, "tools": [WEATHER]} | fields
    headers = {"Content-Type": "application/json"}
    content = json.dumps(body)  # httpx writes no NaN
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(
            "/chat/completions", content=content, cast_to=object, options={"headers": headers}
        )
    assert caught.value.param == param
    assert message in caught.value.body["message"]


@needs("structured_output")
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parameters_that_cannot_be_enforced(client, choice):
    tool = {"name": "a", "parameters": {"type": "object", "not": {}}}
    body = {"model": "knows", "messages": ASKED, "tool_choice": choice}
    body["tools"] = [{"type": "function", "function": tool}]
    with pytest.raises(openai.BadRequestError, match="keyword 'not'") as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == "tools"


# ---- the text of answers ------------------------------------------------------------------------


def free_calls(max_calls=None):
    return FreeCalls(["f"], max_calls, CallFormat(), lambda call: True)


F = '{"name": "f", "arguments": {"a": {"b": "}"}}}'
ARGUMENTS = '{"a": {"b": "}"}}'
TEXTS = {  # text, content, arguments of the calls
    "the whole answer": (f" {F}\n", None, [ARGUMENTS]),
    "several": (f"{F}\n{F}", None, [ARGUMENTS] * 2),
    "tags": (f"<tool_call>\n{F}\n</tool_call>", None, [ARGUMENTS]),
    "text and tags": (f"Hm.\n<tool_call>{F}</tool_call>\n", "Hm.\n", [ARGUMENTS]),
    "tags and text": (f"\n<tool_call>{F}</tool_call>\nSo.", "\nSo.", [ARGUMENTS]),
    "two in tags": (f"<tool_call>{F}</tool_call>\n" * 2, None, [ARGUMENTS] * 2),
    "open tag": (f"<tool_call>{F}", None, [ARGUMENTS]),
    "parameters": ('{"name": "f", "parameters": {}}', None, ["{}"]),
    "not the whole answer": (f"{F} is a call", f"{F} is a call", []),
    "later": (f"So: {F}", f"So: {F}", []),
    "other name": (F.replace('"f"', '"g"'), F.replace('"f"', '"g"'), []),
    "arguments as text": ('{"name": "f", "arguments": "a"}', '{"name": "f", "arguments": "a"}', []),
    "no JSON in tags": ("<tool_call>f()</tool_call> x", "<tool_call>f()</tool_call> x", []),
    "not a number": ('{"name": "f", "arguments": {"a": NaN}}',) * 2 + ([],),
    "JSON": ('{"a": 1}', '{"a": 1}', []),
    "list": ("[1]", "[1]", []),
    "half a tag": ("a <tool_c", "a <tool_c", []),
    "cut": (F[:-2], F[:-2], []),
    "deep": ("{" * 9999, "{" * 9999, []),
    "too long": (F.replace("}", " " * 40000 + "}", 1) + "<tool_call>",) * 2 + ([],),
    "white": (" \n ", " \n ", []),
    "much white": (" " * 100, " " * 100, []),
    "much white before a call": (" " * 100 + F, " " * 100 + F, []),
    "much white before tags": (
        " " * 100 + f"<tool_call>{F}</tool_call>" + " " * 100,
        " " * 200,
        [ARGUMENTS],
    ),
    "nothing": ("", "", []),
}


@pytest.mark.parametrize(("text", "content", "arguments"), TEXTS.values(), ids=TEXTS)
def test_free_calls(text, content, arguments):
    for pieces in ([text], list(text)):
        reader = free_calls()
        deltas = []
        for piece in pieces:
            deltas += reader.feed(piece)
        message = join([*deltas, *reader.finish(True)])
        assert message["content"] == content
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert [call["arguments"] for call in calls] == arguments


def test_the_arguments_of_a_forced_call_come_at_once():
    """Up to what may be the end of the call, and with any whitespace in a string."""
    reader = ForcedCall()
    text = '{"name": "f", "arguments": {"a": "' + " " * 200 + '"} }'
    pieces = []
    for char in text:
        for delta in reader.feed(char):
            (call,) = delta["tool_calls"]
            pieces.append(call["function"]["arguments"])
    assert "".join(pieces) == '{"a": "' + " " * 200 + '"}'
    assert max(map(len, pieces)) <= MAX_HELD + 1
    assert list(reader.finish(True)) == []


def test_an_answer_that_only_begins_like_a_list_comes_at_once():
    reader = free_calls()
    pieces = [join(reader.feed(piece))["content"] for piece in ("[", "a", "](b) {", "}")]
    assert pieces == ["", "[a", "](b) {", "}"]


def test_calls_that_do_not_fit_are_text():
    for text in (F, f"<tool_call>{F}</tool_call>", f"[{F}]"):
        reader = FreeCalls(["f"], None, CallFormat(), lambda call: False)
        deltas = [*reader.feed(text), *reader.finish(True)]
        assert join(deltas) == {"content": text}


def test_text_before_a_tag_comes_at_once():
    reader = free_calls()
    pieces = [
        join(reader.feed(piece))["content"] for piece in ("He", "llo ", "<b", "> <tool_", "x")
    ]
    assert pieces == ["He", "llo ", "<b", "> ", "<tool_x"]


def test_only_one_call_without_parallel_ones():
    reader = free_calls(1)
    deltas = [*reader.feed(f"<tool_call>{F}</tool_call>" * 3), *reader.finish(True)]
    assert len(join(deltas)["tool_calls"]) == 1


def test_references_in_parameters_hold_inside_a_call():
    """Properties may have the names of keywords."""
    inner = {"type": "object", "properties": {"$ref": {"$ref": "#/$defs/A"}, "enum": {"$ref": "#"}}}
    inner["$defs"] = {"A": {"const": {"$ref": "#/no/reference"}}}
    schema = call_schema({"f": inner})
    assert schema["properties"]["arguments"] == {"$ref": "#/$defs/f"}
    moved = schema["$defs"]["f"]
    assert moved["properties"] == {
        "$ref": {"$ref": "#/$defs/f/$defs/A"},
        "enum": {"$ref": "#/$defs/f"},
    }
    assert moved["$defs"] == inner["$defs"]
    jsonschema.validate({"name": "f", "arguments": {"$ref": {"$ref": "#/no/reference"}}}, schema)
