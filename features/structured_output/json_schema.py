"""Checks of JSON schemas for constrained decoding."""

import json
from collections.abc import Iterator
from typing import Any

from thinker.runtime.checks import describe
from thinker.runtime.errors import UserError

ANY_OBJECT = {"type": "object"}
MAX_BOUND = 2**63
EXPECTED = "use a JSON schema as a dict or JSON text, or True for any JSON object"
# Those that llguidance enforces, by where they contain schemas.
_SCHEMA = (
    "items",
    "additionalItems",
    "additionalProperties",
)  # also a list of schemas, in old drafts
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_OTHERS = (
    "$ref",
    "const",
    "enum",
    "type",
    "minItems",
    "maxItems",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "multipleOf",
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ANNOTATIONS = (  # restrict nothing
    "$anchor",
    "$comment",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "deprecated",
    "description",
    "discriminator",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
)
KEYWORDS = frozenset((*_SCHEMA, *_SCHEMAS, *_NAMED_SCHEMAS, *_OTHERS, *_BOUNDS, *_ANNOTATIONS))


def canonical_schema(schema: Any) -> str:
    """Return a schema (dict, JSON text, or True for any JSON object) as compact JSON text, its keys
    in their order.

    The order matters: objects are generated with their properties in the order of the schema.
    Raises UserError for anything else, and for keywords that constrained decoding would ignore.
    """
    value = schema
    try:
        if isinstance(value, str):
            value = json.loads(value)
        value = ANY_OBJECT if value is True else value
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, dict):
            value = json.loads(text)  # with the keys as JSON has them
            _drop_names_of_strings(value)
            _check_keywords(value)
            return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"json_schema is {describe(schema)}, which is not valid JSON ({error}); {EXPECTED}"
        ) from None
    raise UserError(f"json_schema is {describe(schema)}; {EXPECTED}")


def _drop_names_of_strings(schema: Any) -> None:
    """Remove what Zod writes for records: that the names of properties are strings, as all are."""
    for keyword in list(schema) if isinstance(schema, dict) else ():
        if keyword == "propertyNames" and schema[keyword] == {"type": "string"}:
            del schema[keyword]
            continue
        for inner in _inner_schemas(keyword, schema[keyword]):
            _drop_names_of_strings(inner)


def _check_keywords(schema: Any) -> None:
    """Raise UserError for a keyword that is unknown or not supported. The compiler reports wrong
    values."""
    for keyword in schema if isinstance(schema, dict) else ():
        if keyword not in KEYWORDS:
            raise UserError(
                f"json_schema has the keyword {keyword!r}, which is not supported; correct or "
                f"remove it"
            )
        _check_bound(keyword, schema[keyword])
        for inner in _inner_schemas(keyword, schema[keyword]):
            _check_keywords(inner)


def _check_bound(keyword: str, value: Any) -> None:
    """Raise UserError for a bound that llguidance would replace by another: it has 64 bits."""
    if keyword in _BOUNDS and isinstance(value, (int, float)) and abs(value) >= MAX_BOUND:
        raise UserError(
            f"json_schema has {keyword} {value}; use a number between -2**63 and 2**63, or none"
        )


def _inner_schemas(keyword: str, value: Any) -> Iterator[Any]:
    if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
        yield from value.values()
    elif keyword in (*_SCHEMA, *_SCHEMAS) and isinstance(value, list):
        yield from value
    elif keyword in _SCHEMA:
        yield value
