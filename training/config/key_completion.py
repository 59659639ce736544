"""What a shell may put in place of a config, or of section.key=value, on a command line.

It reads configs/schema.json, as the classes of the config take much longer to import.
"""

import json
from collections.abc import Iterator
from typing import Any

from thinker.training.config.shipped import ROOT, shipped_configs

SCHEMA = ROOT / "configs" / "schema.json"


def complete_config(prefix: str, **_: Any) -> list[str]:
    """The configs that come with Thinker, and the YAML files and folders that begin so."""
    from argcomplete.completers import FilesCompleter

    return [*shipped_configs(), *FilesCompleter(("yaml", "yml"))(prefix)]


def complete_override(prefix: str, **_: Any) -> list[str]:
    """The keys as "section.key=", and after that the values of a key that has a list of them."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    keys = dict(_keys(schema, schema, ""))
    key, equals, _ = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in keys]
    if key not in keys:
        return []
    return [f"{key}={value}" for value in _values(keys[key])]


def _keys(schema: dict[str, Any], node: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The keys below a section of the schema, such as "train.max_steps", with their schemas."""
    for name, value in node["properties"].items():
        section = _section(schema, value)
        if section is not None:
            yield from _keys(schema, section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _section(schema: dict[str, Any], value: dict[str, Any]) -> dict[str, Any] | None:
    """The section that a key holds, or None if it holds a value."""
    for option in [value, *value.get("anyOf", [])]:
        if "$ref" in option:
            return schema["$defs"][option["$ref"].rpartition("/")[2]]
    return None


def _values(value: dict[str, Any]) -> list[str]:
    """The values that a key may have, if there is a list of them."""
    found = []
    for option in [value, *value.get("anyOf", [])]:
        found += option.get("enum", [])
        if "const" in option:
            found.append(option["const"])
        if option.get("type") == "boolean":
            found += [True, False]
        if option.get("type") == "null":
            found.append(None)
    return [each if isinstance(each, str) else json.dumps(each) for each in found]
