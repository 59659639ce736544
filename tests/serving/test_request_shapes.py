"""Requests in the shapes that libraries send: the modes of instructor, and the AI SDK's generateObject.

They are written down from the documentation of these libraries, and sent with OpenAI's client.
"""

import json

import jsonschema
import openai
import pytest
from installed import needs
from pydantic import BaseModel, Field
from tool_models import BRIEF, GREETED

OBJECT_MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON_OBJECT_SCHEMA")


class Cat(BaseModel):
    """A cat."""

    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=20)


SCHEMA = Cat.model_json_schema()
TASK = (
    "As a genius expert, your task is to understand the content and provide the parsed objects in json "
    f"that match the following json_schema:\n\n{json.dumps(SCHEMA, indent=2)}\n\n"
    "Make sure to return an instance of the JSON, not the schema itself"
)


def instructor_request(mode):
    """What instructor adds to a request for a Cat."""
    messages = [{"role": "system", "content": TASK}, *GREETED]
    if mode == "TOOLS":
        function = {
            "name": "Cat",
            "description": "Correctly extracted `Cat` with all the required parameters with correct types",
            "parameters": {key: SCHEMA[key] for key in ("properties", "required", "type")},
        }
        named = {"type": "function", "function": {"name": "Cat"}}
        tools = [{"type": "function", "function": function}]
        return {"messages": GREETED, "tools": tools, "tool_choice": named}
    if mode == "TOOLS_STRICT":
        named = {"type": "function", "function": {"name": "Cat"}}
        tools = [openai.pydantic_function_tool(Cat)]
        return {"messages": GREETED, "tools": tools, "tool_choice": named}
    if mode == "JSON":
        return {"messages": messages, "response_format": {"type": "json_object"}}
    if mode == "JSON_SCHEMA":
        form = {"type": "json_schema", "json_schema": {"name": "Cat", "schema": SCHEMA}}
        return {"messages": messages, "response_format": form}
    if mode == "JSON_OBJECT_SCHEMA":  # as its older versions, and other servers, write it
        return {"messages": messages, "response_format": {"type": "json_object", "schema": SCHEMA}}
    assert mode == "MD_JSON"
    wanted = "Return the correct JSON response within a ```json codeblock. not the JSON_SCHEMA"
    messages[-1] = {"role": "user", "content": [
        {"type": "text", "text": "Hi"}, {"type": "text", "text": wanted}
    ]}  # fmt: skip
    return {"messages": messages}


@pytest.fixture(scope="module")
def client(tool_server):
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def create(client, model="plain", **fields):
    options = {
        "model": model,
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 300,
        "logit_bias": BRIEF,
    }
    return client.chat.completions.create(**options | fields)


def text_of(completion):
    """The JSON of an answer: its content, or the arguments of its call."""
    (choice,) = completion.choices
    if choice.message.tool_calls:
        (call,) = choice.message.tool_calls
        assert (call.function.name, choice.finish_reason) == ("Cat", "tool_calls")
        return call.function.arguments
    assert choice.finish_reason == "stop"
    return choice.message.content


@needs("structured_output")
@pytest.mark.parametrize("model", ["knows", "plain"])
@pytest.mark.parametrize("mode", OBJECT_MODES)
def test_instructor_gets_an_object(client, model, mode):
    request = instructor_request(mode)
    text = text_of(create(client, model, **request))
    assert isinstance(Cat.model_validate_json(text, strict=True), Cat)
    streamed = ""
    for chunk in create(client, model, stream=True, **request):
        delta = chunk.choices[0].delta
        for call in delta.tool_calls or ():
            streamed += call.function.arguments
        streamed += delta.content or ""
    assert streamed == text


def test_a_schema_without_the_type_of_an_object(client):
    form = {"type": "text", "schema": SCHEMA}
    with pytest.raises(openai.BadRequestError, match="schema goes with the type json_object"):
        create(client, messages=GREETED, response_format=form)


@needs("structured_output")
def test_instructor_gets_some_json_and_asks_again(client):
    """JSON mode promises an object; what is wrong with it goes back to the model."""
    request = instructor_request("JSON")
    completion = create(client, **request)
    assert isinstance(json.loads(text_of(completion)), dict)
    message = completion.choices[0].message.model_dump()
    correct = "Correct your JSON ONLY RESPONSE, based on the following errors:\nname is missing"
    request["messages"] += [message, {"role": "user", "content": correct}]
    assert isinstance(json.loads(text_of(create(client, **request))), dict)


@needs("structured_output")
def test_instructor_asks_again_after_a_call(client):
    request = instructor_request("TOOLS")
    message = create(client, **request).choices[0].message
    (call,) = message.tool_calls
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "name": call.function.name,
        "content": "Validation Error found:\nname is missing\nRecall the function correctly, fix the errors",
    }
    request["messages"] = [*GREETED, message.model_dump(exclude_none=True), result]
    assert isinstance(Cat.model_validate_json(text_of(create(client, **request))), Cat)


def test_instructor_in_markdown(client):
    """Nothing constrains this mode: a model writes the block if it has learned that."""
    (choice,) = create(client, logit_bias=None, **instructor_request("MD_JSON")).choices
    assert isinstance(choice.message.content, str)


ZOD = {  # what Zod writes for objects, optional fields, unions, records and integers
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        "kind": {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"type": {"type": "string", "const": "a"}, "n": {"type": "null"}},
                    "required": ["type", "n"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"type": {"type": "string", "const": "b"}},
                    "required": ["type"],
                    "additionalProperties": False,
                },
            ]
        },
        "colors": {"type": "array", "items": {"enum": ["red", "blue"], "type": "string"}, "maxItems": 2},
        "sizes": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "boolean"},
        },
        "note": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
    },
    "required": ["name", "age", "kind", "colors", "sizes", "note"],
    "additionalProperties": False,
}  # fmt: skip


@needs("structured_output")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("model", ["knows", "plain"])
def test_an_object_for_the_ai_sdk(client, model, role, stream):
    form = {"name": "response", "description": "An object.", "schema": ZOD, "strict": True}
    body = {
        "messages": [
            {"role": role, "content": "You write JSON."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        ],
        "response_format": {"type": "json_schema", "json_schema": form},
        "max_tokens": openai.omit,
        "max_completion_tokens": 500,
        "logit_bias": BRIEF | {"93": 90},
        "user": "somebody",
        "store": False,
        "frequency_penalty": 0,
    }
    if not stream:
        completion = create(client, model, **body)
        jsonschema.validate(json.loads(text_of(completion)), ZOD)
        return
    chunks = list(
        create(client, model, stream=True, stream_options={"include_usage": True}, **body)
    )
    *pieces, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    jsonschema.validate(json.loads(text), ZOD)
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.total_tokens > 0) == ([], True)
    assert all(chunk.usage is None for chunk in pieces)
