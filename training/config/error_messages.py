"""Turn an error of validation into one line that names the key, its value and what would be
right."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from thinker.runtime.errors import did_you_mean
from thinker.training.config.types import ConfigSection, nested_section

NUMBERS = "a list of two numbers, such as [0.8, 0.95]"
MAPPING = "a mapping of keys to values"
# What a value must be, by the start of pydantic's error type.
EXPECTED = {
    "bool_": "true or false",
    "int_": "an integer",
    "float_": "a number",
    "finite_": "a finite number",
    "string_pattern": "letters, digits, dots, _ and -",
    "string_": "text",
    "literal_": "{expected}",
    "list_": "a list",
    "tuple_": NUMBERS,
    "too_": NUMBERS,
    "missing": NUMBERS,
    "model_": MAPPING,
    "dict_": MAPPING,
    "greater_than_equal": "at least {ge:.16g}",
    "greater_than": "more than {gt:.16g}",
    "less_than_equal": "at most {le:.16g}",
    "less_than": "less than {lt:.16g}",
}
YAML_NAMES = {"None": "null", "True": "true", "False": "false"}  # as a user writes them

Location = tuple[int | str, ...]


def describe_error(error: ValidationError, config: type[ConfigSection]) -> str:
    """The first error, as one line."""
    errors = error.errors()
    first = errors[0]
    path = first["loc"]
    location, section, field = _find_key(path, config)
    name = ".".join(map(str, location))
    if first["type"] in ("extra_forbidden", "invalid_key"):
        return f"unknown config key {name}{_suggest(location, section)}"
    if first["type"] == "value_error":
        # Of the whole config, or of a part; then the message starts with the key.
        return f"{name}{'.' if name else ''}{first['ctx']['error']}"
    if first["type"] == "missing" and len(path) == len(location):
        return f"{name} is missing; set it, for example to {field.examples[0]}"
    if first["type"] != "missing":
        for part in path[len(location) :]:
            if isinstance(part, int):
                name += f"[{part}]"
    of_key = [each for each in errors if each["loc"][: len(location)] == location]
    shown = repr(first["input"])
    message = f"{name} is {YAML_NAMES.get(shown, shown)}; it must be {_expected(of_key)}"
    if first["type"] == "list_type" and "list[str]" in str(field.annotation):
        message += f", such as [{first['input']}]"
    return message


def _find_key(
    path: Location, config: type[ConfigSection]
) -> tuple[Location, type[ConfigSection], FieldInfo | None]:
    """The part of a location that names a key, such as ("data", "sources", 0, "weight"); its
    section and its field.

    What follows in a location is inside the value of the key.
    """
    section, field = config, None
    nested, is_list = config, False
    for length, part in enumerate(path):
        if is_list and isinstance(part, int):
            is_list = False
            continue
        if nested is None or is_list:
            return path[:length], section, field
        section = nested
        field = section.model_fields.get(part)
        if field is None:
            return path[: length + 1], section, None
        nested, is_list = nested_section(field)
    return path, section, field


def _suggest(location: Location, section: type[ConfigSection]) -> str:
    """End of the message about an unknown key."""
    *outer, key = map(str, location)
    names = list(section.model_fields)
    form = ".".join([*outer, "{}"])
    return did_you_mean(key, names, form) or f"; use one of {', '.join(names)}"


def _expected(errors: list[Any]) -> str:
    """What a value must be. There are several errors if the key's type is a union."""
    texts = []
    for error in errors:
        text = _expected_form(error["type"]).format(**error.get("ctx", {})).replace("'", "")
        if text not in texts:
            texts.append(text)
    *others, last = texts
    others = [text.replace(" or ", ", ") for text in others]
    return " or ".join([*others, last])


def _expected_form(kind: str) -> str:
    for start, form in EXPECTED.items():
        if kind.startswith(start):
            return form
    return "another value"
