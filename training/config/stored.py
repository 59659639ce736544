"""Read configs and settings that a run has stored, perhaps with features that are not installed
now."""

from __future__ import annotations

from typing import Any

from thinker.runtime.errors import UserError
from thinker.training.config.types import ConfigSection, nested_section


def known_keys(values: Any, section: type[ConfigSection], name: str = "") -> Any:
    """Stored values without the keys of features that are missing and were not used.

    Raises UserError if such a key has a value other than null or false: the run used the feature.
    """
    if not isinstance(values, dict):
        return values
    kept = {}
    for key, value in values.items():
        field = section.model_fields.get(key)
        where = f"{name}.{key}" if name else str(key)
        if field is None:
            if value is None or value is False:
                continue
            raise UserError(
                f"the run has {where}, a key of a feature that is not installed; install the "
                f"feature"
            )
        nested, is_list = nested_section(field)
        if nested is None:
            kept[key] = value
        elif is_list and isinstance(value, list):
            kept[key] = [known_keys(each, nested, f"{where}.{i}") for i, each in enumerate(value)]
        else:
            kept[key] = known_keys(value, nested, where)
    return kept
