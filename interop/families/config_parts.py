"""Keys of config.json and the fields of ThinkerConfig that they set, in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thinker.interop.families.family import ConfigPart
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError

TYPE_NAMES = {
    list: "a list",
    dict: "a mapping",
    bool: "true or false",
    int: "an integer above 0",
    float: "a number",
    str: "a text",
}
NO_DEFAULT = object()


def read_head_dim(fields: Mapping[str, Any]) -> int:
    """The width of a head by fields that are set already."""
    head_dim = fields.get("head_dim")
    if head_dim is None:
        head_dim = fields["d_model"] // fields["n_heads"]
    return head_dim


def check_type(name: str, value: Any, kind: type) -> None:
    """Raise UserError if a value is not of this type, or is an integer below 1."""
    accepted: tuple[type, ...] = (kind,)
    if kind is float:
        accepted = (int, float)
    # Compared by type(), because True is not an integer here.
    if type(value) not in accepted or (kind is int and value < 1):
        raise UserError(f"config.json: {name} is {value!r}; it must be {TYPE_NAMES[kind]}")


def read_value(values: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """The value of a key, or its default. Raises UserError for another type, or without a
    default."""
    value = values.get(name)
    if value is None:
        if default is NO_DEFAULT:
            raise UserError(f"config.json has no {name}; add it")
        return default
    check_type(name, value, kind)
    return value


@dataclass(frozen=True)
class Key(ConfigPart):
    """A key with the same value as a field."""

    theirs: str
    ours: str
    kind: type = int
    default: Any = NO_DEFAULT

    @property
    def keys(self) -> set[str]:
        """As ConfigPart.keys."""
        return {self.theirs}

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        value = read_value(values, self.theirs, self.kind, self.default)
        if value is not None:
            fields[self.ours] = value

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        values[self.theirs] = getattr(config, self.ours)


class Fixed(ConfigPart):
    """Fields that all models of a family have."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        fields |= self.fields


class Unread(ConfigPart):
    """Keys that this family of transformers ignores."""

    def __init__(self, *keys: str) -> None:
        self.keys = frozenset(keys)


@dataclass(frozen=True)
class Only(ConfigPart):
    """Keys that change the result, each with the only value that is supported. It must also be
    transformers' default."""

    values: dict[str, Any]
    is_written: bool = False

    @property
    def keys(self) -> set[str]:
        """As ConfigPart.keys."""
        return set(self.values)

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        for name, supported in self.values.items():
            value = values.get(name)
            if value is not None and value != supported:
                if supported is None:
                    supported = "null"
                raise UserError(
                    f"config.json: {name} is {value!r}; Thinker supports only {supported}"
                )

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        if self.is_written:
            values |= self.values


@dataclass(frozen=True)
class Flag(ConfigPart):
    """A key that gives all these fields their value if it is true."""

    theirs: str
    fields: dict[str, Any]
    default: bool = False

    @property
    def keys(self) -> set[str]:
        """As ConfigPart.keys."""
        return {self.theirs}

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        if read_value(values, self.theirs, bool, self.default):
            fields |= self.fields

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        has = [getattr(config, name) == value for name, value in self.fields.items()]
        values[self.theirs] = all(has)


@dataclass(frozen=True)
class KVHeads(ConfigPart):
    """The number of KV heads. Null: that of query heads."""

    is_required: bool = False  # transformers has a default that is not the number of query heads
    theirs = "num_key_value_heads"
    keys = frozenset({theirs})

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        if self.is_required and self.theirs not in values:
            raise UserError(f"config.json has no {self.theirs}; add it")
        value = read_value(values, self.theirs, int, None)
        if value is not None:
            fields["n_kv_heads"] = value

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        values[self.theirs] = config.n_kv_heads


@dataclass(frozen=True)
class HeadDim(ConfigPart):
    """The width of a head."""

    default: int | None = None
    is_always_written: bool = True
    keys = frozenset({"head_dim"})

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        value = read_value(values, "head_dim", int, self.default)
        if value is not None:
            fields["head_dim"] = value

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        is_usual = config.head_dim * config.n_heads == config.d_model
        if self.is_always_written or not is_usual:
            values["head_dim"] = config.head_dim


@dataclass(frozen=True)
class FeedForwardWidth(ConfigPart):
    """The width inside the MLP. Null: four times the width of the model."""

    theirs: str

    @property
    def keys(self) -> set[str]:
        """As ConfigPart.keys."""
        return {self.theirs}

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        fields["d_ff"] = read_value(values, self.theirs, int, 4 * fields["d_model"])

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        values[self.theirs] = config.d_ff


# Names of activations in transformers, and ours. Of several names for one, the first is written.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class Activation(ConfigPart):
    """The activation of the MLP. `aliases`: names that this family uses for another activation."""

    theirs: str
    default: str
    aliases: dict[str, str] | None = None

    @property
    def keys(self) -> set[str]:
        """As ConfigPart.keys."""
        return {self.theirs}

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        name = read_value(values, self.theirs, str, self.default)
        if self.aliases is not None:
            name = self.aliases.get(name, name)
        if name not in ACTIVATIONS:
            choices = ", ".join(ACTIVATIONS)
            raise UserError(f"config.json: {self.theirs} is {name!r}; choose from {choices}")
        fields["activation"] = ACTIVATIONS[name]

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        if ACTIVATIONS[self.default] == config.activation:
            values[self.theirs] = self.default
            return
        for theirs, ours in ACTIVATIONS.items():
            if ours == config.activation:
                values[self.theirs] = theirs
                return


@dataclass(frozen=True)
class Number(ConfigPart):
    """A number that the two sides express in different ways.

    to_ours, to_theirs: inverse functions of (number, fields or config).
    """

    theirs: str
    ours: str
    default: float | None
    to_ours: Callable[[float, dict[str, Any]], float | None]
    to_theirs: Callable[[Any, ThinkerConfig], float | None]

    @property
    def keys(self) -> set[str]:
        """As ConfigPart.keys."""
        return {self.theirs}

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        value = read_value(values, self.theirs, float, self.default)
        if value is None:
            return
        if not 1e-9 <= value <= 1e9:
            raise UserError(
                f"config.json: {self.theirs} is {value}; it must be a number from 1e-9 to 1e9"
            )
        fields[self.ours] = self.to_ours(value, fields)

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        values[self.theirs] = self.to_theirs(getattr(config, self.ours), config)


def rounded(number: float) -> float:
    """A number without the last digits, which come from rounding: 6, not 6.000000000000001."""
    short = round(number, 9)
    if short == int(short):
        return int(short)
    return short


def window_of(text: str) -> int | None:
    """The width of a pattern window(n); None for other patterns. It includes the query, as in
    transformers."""
    match = re.fullmatch(r"window\((\d+)\)", text)
    if match is None:
        return None
    return int(match[1])


def one_window(config: ThinkerConfig) -> int | None:
    """The width of the first layer with a window: transformers has one for all layers."""
    for pattern in config.patterns:
        window = window_of(pattern.text)
        if window is not None:
            return window
    return None


def layers_as_patterns(is_windowed: list[bool], window: int | None) -> str | list[str]:
    """model.attention for layers with and without a window."""
    layers = ["full"] * len(is_windowed)
    for layer, has_window in enumerate(is_windowed):
        if has_window and window is not None:
            layers[layer] = f"window({window})"
    if len(set(layers)) == 1:
        return layers[0]
    return layers
