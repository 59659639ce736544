"""Base class and types of the sections of a config."""

import os
import re
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from thinker.model.config import MAX_SIZE

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
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, str) and re.search("[\\0\ud800-\udfff]", value):
                raise ValueError(f"{name} is {value!r}; it must be UTF-8 text without NUL")
            if (
                isinstance(value, bool)
                and field is not None
                and "bool" not in str(field.annotation)
            ):
                choices = " or ".join(
                    choice for choice in get_args(field.annotation) if isinstance(choice, str)
                )
                shown = f"{str(value).lower()} (YAML reads on and yes as true, off and no as false)"
                raise ValueError(f"{name} is {shown}; it must be {choices or 'a number or text'}")
        return values
