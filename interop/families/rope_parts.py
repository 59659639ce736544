"""RoPE in config.json: its base, its scaling, and the fraction of the channels that it rotates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinker.interop.families.config_parts import TYPE_NAMES, check_type, read_head_dim, read_value
from thinker.interop.families.family import ConfigPart
from thinker.model import ThinkerConfig
from thinker.model.rope_scaling import RopeScaling
from thinker.runtime.errors import UserError

# Keys of rope_scaling, and the fields of RopeScaling that they set.
ORIGINAL_LENGTH = "original_max_position_embeddings"
ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    ORIGINAL_LENGTH: "original_max_seq_len",
}
ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3")
KINDS_OF_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RopeKeys(ConfigPart):
    """RoPE that is the same in all layers.

    theta, fraction: the defaults of transformers. fraction_key: None if all channels are rotated.
    """

    theta: float = 1e4
    theta_key: str = "rope_theta"
    fraction: float = 1.0
    fraction_key: str | None = None

    @property
    def keys(self) -> set[str]:
        """As ConfigPart.keys."""
        keys = {"rope_scaling", "rope_parameters", ORIGINAL_LENGTH, self.theta_key}
        keys |= {"rope_theta", "partial_rotary_factor"}
        if self.fraction_key is not None:
            keys.add(self.fraction_key)
        return keys

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        for name in ("rope_scaling", "rope_parameters"):
            read_value(values, name, dict, None)
        read_value(values, ORIGINAL_LENGTH, int, None)
        rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
        if any(name in rope for name in KINDS_OF_LAYERS):
            raise UserError(
                "config.json: rope_parameters differs by layer, which only gemma3_text and olmo3 "
                "support"
            )
        self.read_rope(rope, values, fields)

    def read_rope(
        self, rope: dict[str, Any], values: Mapping[str, Any], fields: dict[str, Any]
    ) -> None:
        """Set fields from rope_scaling or rope_parameters, and from keys beside them."""
        theta = values.get(self.theta_key)
        if theta is None:
            theta = values.get("rope_theta")
        if theta is None:
            theta = self.theta
        theta_here = rope.pop("rope_theta", None)
        if theta_here is not None:
            theta = theta_here
        fields["rope_theta"] = theta
        self._read_fraction(rope, values, fields)
        scaling = read_scaling(rope, values, fields["max_seq_len"])
        if scaling is not None:
            fields["rope_scaling"] = scaling

    def _read_fraction(
        self, rope: dict[str, Any], values: Mapping[str, Any], fields: dict[str, Any]
    ) -> None:
        key = self.fraction_key
        fraction = rope.pop("partial_rotary_factor", None)
        for name in (key, "partial_rotary_factor"):
            if fraction is None and name is not None:
                fraction = values.get(name)
        if fraction is None:
            fraction = self.fraction
        check_type("partial_rotary_factor", fraction, float)
        if key is None and fraction != 1:
            raise UserError(
                f"config.json: partial_rotary_factor is {fraction}; "
                f"Thinker supports only 1 (RoPE on the whole head) for this model_type"
            )
        head_dim = read_head_dim(fields)
        rope_dim = int(head_dim * fraction)
        if rope_dim != head_dim:
            fields["rope_dim"] = rope_dim

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        values[self.theta_key] = config.rope_theta
        if self.fraction_key is not None:
            values[self.fraction_key] = rotated_fraction(config)
        write_scaling(config, values)


@dataclass(frozen=True)
class RopeKeysByLayer(RopeKeys):
    """RoPE that may differ between layers with full attention and layers with a window. That of the
    latter is never scaled.

    local_theta: the default for layers with a window; None: as in other layers.
    """

    local_theta: float | None = None

    @property
    def keys(self) -> set[str]:
        """As ConfigPart.keys."""
        return super().keys | {"rope_local_base_freq"}

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """As ConfigPart.read()."""
        ropes = dict(read_value(values, "rope_parameters", dict, {}))
        scaling = read_value(values, "rope_scaling", dict, {})
        is_by_layer = any(name in ropes for name in KINDS_OF_LAYERS)
        by_layer = {"full_attention": ropes, "sliding_attention": {}}
        if is_by_layer:
            by_layer = {name: read_value(ropes, name, dict, {}) for name in KINDS_OF_LAYERS}
        full = dict(by_layer["full_attention"]) | scaling
        local = dict(by_layer["sliding_attention"])
        self.read_rope(full, values, fields)

        local_theta = local.pop("rope_theta", None)
        if local_theta is None:
            local_theta = values.get("rope_local_base_freq")
        if local_theta is None:
            local_theta = self.local_theta
        if local_theta is None:
            local_theta = fields["rope_theta"]
        if local.pop("partial_rotary_factor", 1.0) != 1.0:
            raise UserError("config.json: partial_rotary_factor of windows must be 1")
        if read_scaling(local, values, fields["max_seq_len"]) is not None:
            raise UserError("config.json: RoPE scaling of layers with a window is not supported")
        differs = local_theta != fields["rope_theta"] or "rope_scaling" in fields
        if differs and fields["attention"] != "full":
            fields["window_rope_theta"] = local_theta

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """As ConfigPart.write()."""
        super().write(config, values)
        local_theta = config.window_rope_theta
        if local_theta is None:
            local_theta = config.rope_theta
        if self.local_theta is not None:
            values["rope_local_base_freq"] = local_theta
        full = {"rope_theta": config.rope_theta, "rope_type": "default"}
        if values["rope_scaling"] is not None:
            full |= values["rope_scaling"]
        # Newer versions read this, older ones the keys above.
        values["rope_parameters"] = {
            "full_attention": full,
            "sliding_attention": {"rope_theta": local_theta, "rope_type": "default"},
        }


def rotated_fraction(config: ThinkerConfig) -> float:
    """The fraction of the channels that RoPE rotates; int(head_dim * fraction) gives rope_dim."""
    if config.rope_dim is None:
        return 1.0
    fraction = config.rope_dim / config.head_dim
    if int(config.head_dim * fraction) != config.rope_dim:  # rounded down
        fraction = (config.rope_dim + 0.5) / config.head_dim
    return fraction


def read_scaling(
    rope: dict[str, Any], values: Mapping[str, Any], max_length: int
) -> dict[str, Any] | None:
    """model.rope_scaling, from rope_scaling without its base and fraction."""
    kind = rope.pop("rope_type", None) or rope.get("type", "default")
    rope.pop("type", None)
    rope = {name: value for name, value in rope.items() if value is not None}
    if kind == "default" and not rope.keys() - {ORIGINAL_LENGTH}:
        return None
    if kind not in ROPE_TYPES:
        choices = ", ".join(["default", *ROPE_TYPES])
        raise UserError(f"config.json: rope_type is {kind!r}; choose from {choices}")
    if kind != "linear":
        rope[ORIGINAL_LENGTH] = _read_original_length(values, rope, kind, max_length)
    if kind == "yarn":
        _complete_yarn(rope, max_length)
    scaling = {"type": kind}
    for name, value in rope.items():
        if name not in ROPE_SCALING:
            raise UserError(f"config.json: rope_scaling has an unsupported key {name}; remove it")
        scaling[ROPE_SCALING[name]] = value
    return scaling


def _read_original_length(
    values: Mapping[str, Any], rope: dict[str, Any], kind: str, max_length: int
) -> int:
    """The length of texts in pretraining."""
    if kind == "dynamic":
        return max_length  # transformers ignores any other value
    length = values.get(ORIGINAL_LENGTH) or rope.get(ORIGINAL_LENGTH, max_length)
    if type(length) is not int or length < 1:
        raise UserError(
            f"config.json: {ORIGINAL_LENGTH} is {length!r}; it must be {TYPE_NAMES[int]}"
        )
    return length


def _complete_yarn(rope: dict[str, Any], max_length: int) -> None:
    """Set the default factor, and remove what transformers ignores."""
    rope.setdefault("factor", max_length / rope[ORIGINAL_LENGTH])
    has_mscale = rope.get("mscale") and rope.get("mscale_all_dim")
    if "attention_factor" in rope or not has_mscale:
        rope.pop("mscale", None)
        rope.pop("mscale_all_dim", None)


def write_scaling(config: ThinkerConfig, values: dict[str, Any]) -> None:
    """Set rope_scaling, and for dynamic scaling the length of pretraining."""
    values["rope_scaling"] = None
    if config.rope_scaling is None:
        return
    scaling = vars(RopeScaling.from_dict(config.rope_scaling))
    scaling = {name: value for name, value in scaling.items() if value is not None}
    if scaling["type"] == "dynamic":
        # transformers reads the length of pretraining from here.
        values["max_position_embeddings"] = scaling.pop("original_max_seq_len")
    rope = {"rope_type": scaling.pop("type")}
    theirs = {ours: name for name, ours in ROPE_SCALING.items()}
    for ours, value in scaling.items():
        rope[theirs[ours]] = value
    values["rope_scaling"] = rope
