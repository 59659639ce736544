"""Windows of attention in config.json, which each family describes in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinker.interop.families.config_parts import layers_as_patterns, one_window, read_value
from thinker.interop.families.family import ConfigPart
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError

KINDS = {"full_attention": False, "sliding_attention": True}
NAMES = {False: "full_attention", True: "sliding_attention"}


def read_layer_types(values: Mapping[str, Any], default: list[bool], window: Any) -> list[bool]:
    """Whether each layer has a window, by layer_types. Raises UserError if they do not fit."""
    layer_types = read_value(values, "layer_types", list, None)
    if layer_types is None:
        return default
    known = list(KINDS)  # a list, as the values may be of any type
    if window is None:
        known.remove("sliding_attention")
    if len(layer_types) != len(default) or any(kind not in known for kind in layer_types):
        wanted = f"it must list one of {', '.join(known)} per layer"
        raise UserError(f"config.json: layer_types is {layer_types}; {wanted}")
    return [KINDS[kind] for kind in layer_types]


def write_layer_types(config: ThinkerConfig) -> list[str]:
    """layer_types of config.json."""
    return [NAMES[pattern.text != "full"] for pattern in config.patterns]


WINDOW_KEYS = frozenset({"sliding_window", "layer_types", "use_sliding_window"})
WINDOW_KEYS |= {"max_window_layers"}


class NoWindows(ConfigPart):
    """Full attention in all layers."""

    keys = WINDOW_KEYS

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        need_layer_types(values, [False] * fields["n_layers"])


@dataclass(frozen=True)
class SameInAllLayers(ConfigPart):
    """A window in all layers or in none. `window`: the default of transformers."""

    window: int | None = None
    keys = WINDOW_KEYS

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        window = read_window(values, self.window)
        is_windowed = [window is not None] * fields["n_layers"]
        need_layer_types(values, is_windowed)
        fields["attention"] = layers_as_patterns(is_windowed, window)

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        values["sliding_window"] = one_window(config)


def need_layer_types(values: Mapping[str, Any], is_windowed: list[bool]) -> None:
    """Raise UserError if layer_types contradicts is_windowed. In these families, versions of
    transformers disagree about what it means."""
    layer_types = read_value(values, "layer_types", list, None)
    wanted = [NAMES[has_window] for has_window in is_windowed]
    if layer_types is not None and layer_types != wanted:
        raise UserError(
            f"config.json: layer_types is {layer_types}; {values['model_type']} needs "
            f"{wanted[0]} in every layer"
        )


def read_window(values: Mapping[str, Any], default: int | None) -> int | None:
    """The width of the window; null: there is none."""
    if "sliding_window" in values and values["sliding_window"] is None:
        return None
    return read_value(values, "sliding_window", int, default)


class LayersAfter(ConfigPart):
    """Windows in the layers from max_window_layers on, if use_sliding_window, as in Qwen."""

    DEFAULT_WINDOW = 4096
    DEFAULT_FIRST = 28
    keys = WINDOW_KEYS

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        n_layers = fields["n_layers"]
        first = values.get("max_window_layers")
        if first is None:
            first = self.DEFAULT_FIRST
        if type(first) is not int or first < 0:
            raise UserError(
                f"config.json: max_window_layers is {first!r}; it must be an integer from 0 on"
            )
        window = None
        if read_value(values, "use_sliding_window", bool, False):
            window = read_window(values, self.DEFAULT_WINDOW)
        default = [window is not None and layer >= first for layer in range(n_layers)]
        is_windowed = read_layer_types(values, default, window)
        fields["attention"] = layers_as_patterns(is_windowed, window)

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        is_windowed = [pattern.text != "full" for pattern in config.patterns]
        first = config.n_layers
        if any(is_windowed):
            first = is_windowed.index(True)
        values["use_sliding_window"] = any(is_windowed)
        values["sliding_window"] = one_window(config)
        values["max_window_layers"] = first
        values["layer_types"] = write_layer_types(config)


@dataclass(frozen=True)
class FullEveryNth(ConfigPart):
    """Windows in all but every n-th layer, as in Gemma 2 and 3 and OLMo 3, or by layer_types.

    period_key: a key that says n.
    """

    period: int
    window: int = 4096
    period_key: str | None = None

    @property
    def keys(self) -> set[str]:
        """As ConfigPart.keys."""
        keys = {"sliding_window", "layer_types"}
        if self.period_key is not None:
            keys |= {self.period_key, f"_{self.period_key}"}
        return keys

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        period = self.period
        if self.period_key is not None:
            period = read_value(values, self.period_key, int, period)
        window = read_window(values, self.window)
        default = [(layer + 1) % period != 0 for layer in range(fields["n_layers"])]
        is_windowed = read_layer_types(values, default, self.window)
        if window is None and any(is_windowed):
            raise UserError("config.json: sliding_window is null, but layer_types has windows")
        fields["attention"] = layers_as_patterns(is_windowed, window)

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        window = one_window(config)
        if window is None:
            window = self.window
        values["sliding_window"] = window
        values["layer_types"] = write_layer_types(config)


class LayersWithoutRope(ConfigPart):
    """Layers without RoPE, which alone may have a window, as in SmolLM3."""

    keys = WINDOW_KEYS | {"no_rope_layers", "no_rope_layer_interval"}

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        n_layers = fields["n_layers"]
        interval = read_value(values, "no_rope_layer_interval", int, 4)
        # The key has a 1 for each layer *with* RoPE.
        default = [int((layer + 1) % interval != 0) for layer in range(n_layers)]
        uses_rope = read_value(values, "no_rope_layers", list, default)
        if len(uses_rope) != n_layers or any(flag not in (0, 1) for flag in uses_rope):
            wanted = "it must be a list with a 0 or a 1 for each layer"
            raise UserError(f"config.json: no_rope_layers is {uses_rope}; {wanted}")
        without = [layer for layer in range(n_layers) if not uses_rope[layer]]
        if without:
            fields["no_rope_layers"] = without
        window = None
        if read_value(values, "use_sliding_window", bool, False):
            window = read_window(values, None)
        windowed = [window is not None and layer in without for layer in range(n_layers)]
        is_windowed = read_layer_types(values, windowed, window)
        fields["attention"] = layers_as_patterns(is_windowed, window)

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        without = config.no_rope_layers or []
        values["no_rope_layers"] = [int(n not in without) for n in range(config.n_layers)]


class GlobalOrLocal(ConfigPart):
    """Layers that are global or local, as in GPT-Neo."""

    DEFAULT_WINDOW = 256
    keys = frozenset({"attention_types", "attention_layers", "window_size"})

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        types = read_value(values, "attention_types", list, [[["global", "local"], 12]])
        layers: list[Any] = []
        try:
            for names, count in types:
                layers += list(names) * min(int(count), fields["n_layers"])
        except (TypeError, ValueError):
            layers = []
        known = ["global", "local"]
        if len(layers) != fields["n_layers"] or any(name not in known for name in layers):
            raise UserError(
                f"config.json: attention_types is {types}; it must be a list such as "
                f'[[["global", "local"], 6]] for {fields["n_layers"]} layers'
            )
        given = values.get("attention_layers")
        if given is not None and given != layers:
            raise UserError("config.json: attention_layers contradicts attention_types")
        window = read_value(values, "window_size", int, self.DEFAULT_WINDOW)
        is_windowed = [name == "local" for name in layers]
        fields["attention"] = layers_as_patterns(is_windowed, window)

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        window = one_window(config)
        if window is None:
            window = self.DEFAULT_WINDOW
        names = ["global"] * config.n_layers
        for layer, pattern in enumerate(config.patterns):
            if pattern.text != "full":
                names[layer] = "local"
        values["window_size"] = window
        values["attention_types"] = [[[name], 1] for name in names]
        values["attention_layers"] = names
