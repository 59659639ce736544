"""Overrides of a config on the command line: section.key=value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from thinker.runtime.errors import UserError
from thinker.runtime.yaml_files import Loader
from thinker.training.config.config import config_sections
from thinker.training.config.types import nested_section


def apply_override(tree: dict[str, Any], override: str, path: Path) -> None:
    """Change a key of a config that was read from `path`. Raises UserError.

    A key may be nested, such as train.distill.weight=0.5 or data.sources.0.weight=2.
    """
    name, equals, text = override.partition("=")
    section, _, key = name.strip().partition(".")
    text = text.strip()
    if section == "extensions":
        raise UserError(f"{override!r} cannot stand here; set extensions in the YAML file")
    if not (equals and key and text):
        raise UserError(
            f"{override!r} is not an override; write section.key=value, such as train.max_steps=100"
        )
    values = tree.setdefault(section, {})
    if not isinstance(values, dict):
        raise UserError(f"{path}: {section} is {values!r}; it must be a mapping of keys to values")
    values, key = _find_nested(values, section, key, override)
    values[key] = _parse(text)


def _find_nested(
    values: dict[str, Any], section: str, key: str, override: str
) -> tuple[dict[str, Any], str]:
    """The mapping that a key of a section is in, and its name there."""
    outer, _, inner = key.partition(".")
    model = config_sections().get(section)
    field = None if model is None else model.model_fields.get(outer)
    nested, is_list = (None, False) if field is None else nested_section(field)
    if nested is None or not inner:
        return values, key
    if is_list:
        index, _, inner = inner.partition(".")
        if not index.isdecimal() or not inner:
            return values, key
        return _item(values.get(outer), int(index), f"{section}.{outer}", override), inner
    if values.get(outer) is None:
        values[outer] = {}
    if not isinstance(values[outer], dict):
        return values, key
    return values[outer], inner


def _item(items: Any, index: int, name: str, override: str) -> dict[str, Any]:
    """One of several mappings, such as a source in data.sources. Raises UserError if it does not
    exist."""
    items = items if isinstance(items, list) else []
    if index >= len(items) or not isinstance(items[index], dict):
        raise UserError(f"{override}: the config has {len(items)} {name}, numbered from 0")
    return items[index]


def _parse(text: str) -> Any:
    """Read a value as in YAML, or as the text that it is: YAML would drop the end of "runs/a
    #2"."""
    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    is_text = not isinstance(value, bool | int | float | list | dict | None)
    is_quoted = text[0] in "'\""
    return text if is_text and not is_quoted else value
