"""Base class and types of the sections of a config. Imports neither torch nor the model, as
features' keys use it."""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from thinker.runtime.constants import MAX_SIZE
from thinker.runtime.registry import offers_by_name

MAX_COUNT = 2**53  # every file format stores integers up to here exactly
Positive = Annotated[int, Field(ge=1, lt=MAX_COUNT)]
Natural = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Rate = Annotated[float, Field(gt=0, le=1e38)]  # fits into fp32
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]


class ConfigSection(BaseModel):
    """A section of a config. Frozen; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_and_nul(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if isinstance(value, str) and re.search("[\\0\ud800-\udfff]", value):
                raise ValueError(f"{name} is {value!r}; it must be UTF-8 text without NUL")
            field = cls.model_fields.get(name)
            if field is None or not isinstance(value, bool):
                continue
            if "bool" not in str(field.annotation):
                texts = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
                if value is False and "off" in texts:
                    values = values | {name: "off"}  # which YAML reads as false
                    continue
                wanted = " or ".join(texts) or "a number or text"
                shown = f"{str(value).lower()} (YAML reads on and yes as true, off and no as false)"
                raise ValueError(f"{name} is {shown}; it must be {wanted}")
        return values


Section = TypeVar("Section", bound=type[ConfigSection])


def with_feature_keys(name: str) -> Callable[[Section], Section]:
    """Class decorator: add the keys that features have for the section `name` (Feature.keys).

    A class of a feature comes before the section in the order of methods, so it can also extend the
    section's methods.
    """

    def extend(section: Section) -> Section:
        added = list(offers_by_name("keys", name))
        known = set(section.model_fields)
        for keys in added:
            assert not known & keys.__annotations__.keys(), f"{keys} repeats a key of {name}"
            known |= keys.__annotations__.keys()
        if not added:
            return section
        # Pydantic lists the keys of the last base first.
        bases = (*reversed(added), section)
        names = ("__doc__", "__module__", "__qualname__")
        return type(section)(section.__name__, bases, {key: getattr(section, key) for key in names})

    return extend


def nested_section(field: FieldInfo) -> tuple[type[ConfigSection] | None, bool]:
    """The section that a key holds, or None; and whether the key holds a list of them.

    `clean: CleanConfig | None` holds one; `sources: list[MixedSource] | None` holds a list.
    """
    options = [field.annotation]
    if typing.get_origin(field.annotation) in (typing.Union, types.UnionType):
        options = list(get_args(field.annotation))
    for option in options:
        is_list = typing.get_origin(option) is list
        kind = get_args(option)[0] if is_list else option
        if isinstance(kind, type) and issubclass(kind, ConfigSection):
            return kind, is_list
    return None, False
