"""JSON schemas of calls of tools."""

from __future__ import annotations

from typing import Any

from thinker.serving.calls.call_format import CallFormat

Schema = dict[str, Any]

MAX_ID_CHARS = 64
# What templates write beside the name and the arguments.
OTHERS = {"id": {"type": "string", "maxLength": MAX_ID_CHARS}, "type": {"const": "function"}}


def call_schema(parameters: dict[str, Schema]) -> Schema:
    """The schema of {"name": ..., "arguments": {...}}, a call of one of these tools.

    `parameters`: the schema of the arguments, by the name of the tool.
    """
    calls = [_call(name, ("name", "arguments")) for name in parameters]
    return _any_of(calls, parameters)


def call_or_answer_schema(parameters: dict[str, Schema], answer: Schema) -> Schema:
    """The schema of a call of a tool, or of an answer with a schema of its own."""
    name = "!answer"  # which is no name of a tool
    choices = [_call(name, ("name", "arguments")) for name in parameters]
    choices.append({"$ref": _pointer(name)})
    return _any_of(choices, {**parameters, name: answer})


def written_calls_schema(
    parameters: dict[str, Schema], call_format: CallFormat, max_calls: int | None
) -> Schema:
    """The schema of what a model writes by itself: a call, or a list of up to `max_calls`."""
    forms = [call_format.keys, ("name", "arguments"), ("name", "parameters")]
    calls = []
    for keys in dict.fromkeys(forms):
        calls += [_call(name, keys) for name in parameters]
    several: Schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if max_calls is not None:
        several["maxItems"] = max_calls
    return _any_of([*calls, several], parameters)


def _call(name: str, keys: tuple[str, ...]) -> Schema:
    """The schema of a call of one tool, with these keys in this order."""
    properties = {}
    required = []
    for key in keys:
        if key in OTHERS:
            properties[key] = OTHERS[key]
            continue
        properties[key] = {"const": name} if key == "name" else {"$ref": _pointer(name)}
        required.append(key)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _any_of(choices: list[Schema], definitions: dict[str, Schema]) -> Schema:
    """The schema of any of the choices, which refer to the definitions by their _pointer()."""
    moved = {name: _with_moved_root(schema, name) for name, schema in definitions.items()}
    if len(choices) == 1:
        return {**choices[0], "$defs": moved}
    return {"anyOf": choices, "$defs": moved}


def _pointer(name: str) -> str:
    return f"#/$defs/{name}"


def _with_moved_root(schema: Any, name: str) -> Any:
    """A schema whose references from its root still hold when it is a definition."""
    if isinstance(schema, list):
        return [_with_moved_root(one, name) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key in ("const", "enum", "default", "examples"):  # data
            moved[key] = value
        elif key in ("properties", "patternProperties", "$defs", "definitions"):
            # Their keys are names of the user, not keywords.
            moved[key] = value
            if isinstance(value, dict):
                moved[key] = {inner: _with_moved_root(value[inner], name) for inner in value}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = _pointer(name) + value[1:]
        else:
            moved[key] = _with_moved_root(value, name)
    return moved
