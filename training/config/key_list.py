"""The keys of a config: their list, and the key that a misspelled flag may stand for."""

from __future__ import annotations

import json
import re
import shlex
import sys

from pydantic.fields import FieldInfo

from thinker.runtime.errors import UserError, did_you_mean
from thinker.training.config.config import config_sections
from thinker.training.config.types import ConfigSection, nested_section


def list_keys(section: str | None = None) -> str:
    """One line per key of a section, or of all sections: name, default and meaning. Raises
    UserError."""
    keys = _keys()
    nested = nested_sections()
    if section in nested:
        prefix, model = nested[section]
        shown = {f"{prefix}.{key}": field for key, field in model.model_fields.items()}
    elif section is None:
        shown = keys
    else:
        shown = {name: field for name, field in keys.items() if name.startswith(f"{section}.")}
    if not shown:
        sections = dict.fromkeys(name.partition(".")[0] for name in keys)
        raise UserError(f"unknown config section {section}; use one of {', '.join(sections)}")
    lines = []
    for name, field in shown.items():
        lines.append((f"{name}={_default(field)}", " ".join(field.description.split())))
    width = max(len(key) for key, _ in lines)
    return "\n".join(f"{key:{width}}  {meaning}" for key, meaning in lines)


def nested_sections() -> dict[str, tuple[str, type[ConfigSection]]]:
    """The sections in sections, such as data.clean: how the names of their keys begin, and their
    class.

    Of a list of sections, such as data.sources, it is the name of the first one.
    """
    nested = {}
    for name, field in _keys().items():
        section, is_list = nested_section(field)
        if section is not None:
            nested[name] = (f"{name}.0" if is_list else name, section)
    return nested


def _keys() -> dict[str, FieldInfo]:
    """All keys by name, such as train.max_steps."""
    keys = {}
    for name, section in config_sections().items():
        for key, field in section.model_fields.items():
            keys[f"{name}.{key}"] = field
    return keys


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    return json.dumps(field.default, ensure_ascii=False)


def suggest_key(flag: str) -> str:
    """End of the message about an unknown flag: the key that it stands for, with its value."""
    word, equals, value = flag.lstrip("-").partition("=")
    following = sys.argv[sys.argv.index(flag) + 1 :]
    if not equals and following and not re.match(r"-\D|[^=]+=", following[0]):
        value = following[0]
    word = word.replace("-", "_")
    names = list(_keys())
    keys = [name.partition(".")[2] for name in names]
    meant = [name for name, key in zip(names, keys) if word in (name, key)]
    if not meant:
        likely = did_you_mean(word, names) or did_you_mean(word, keys)
        if not likely:
            likely = "; write config keys as section.key=value"
        return f"{likely} (--keys lists them)"
    shown = shlex.quote(value) if value else "..."
    return "; write " + " or ".join(f"{name}={shown}" for name in meant)
