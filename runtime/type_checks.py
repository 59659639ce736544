"""Check the types of values that a user of the library passes."""

from collections.abc import Mapping
from typing import Any, get_args

from thinker.runtime.errors import UserError

NAMES = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    type(None): "None",
}


def describe(value: Any) -> str:
    """Describe a value in a message: by its repr if that is short, otherwise by its type."""
    text = repr(value) if isinstance(value, (*NAMES, list, tuple, dict)) else ""
    return text if 0 < len(text) <= 500 and "\n" not in text else f"a {type(value).__name__}"


def check_types(hints: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise UserError for a value that does not match the type hint of its name. An int is also a float."""
    for name, hint in hints.items():
        types, value = get_args(hint) or (hint,), values.get(name)
        is_number = type(value) is int and float in types
        is_allowed = (
            type(value) in types
            or (isinstance(value, types) and not isinstance(value, bool))
            or is_number
        )
        if name in values and not is_allowed:
            wanted = " or ".join(NAMES.get(each, f"a {each.__name__}") for each in types)
            raise UserError(f"{prefix}{name} is {describe(value)}; it must be {wanted}")
