"""What a row of the table of families is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from thinker.interop.families.layouts import Layout
from thinker.model import ThinkerConfig


class ConfigPart(Protocol):
    """Some keys of config.json, and how they map to fields of ThinkerConfig."""

    @property
    def keys(self) -> set[str]:
        """The keys of config.json that it reads."""

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set fields from the values of config.json. Raises UserError for unsupported values."""

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """Set values of config.json. What they cannot express shows when they are read back."""


@dataclass(frozen=True)
class Family:
    """An architecture of transformers."""

    model_type: str
    architecture: str  # the class of transformers
    sizes: list[ConfigPart]  # read before
    choices: list[ConfigPart]
    # Our modules and theirs, without the number of the layer; "blocks" is the list of layers.
    # Modules with the same name there are stored as one.
    names: dict[str, str]
    layouts: dict[str, Layout] = field(default_factory=dict)  # by their names; Rows otherwise
    # Whether RoPE rotates neighbors (0, 1), (2, 3), ... instead of halves.
    rotates_neighbors: bool = False
    # The ends of names of tensors in old files that hold no weights.
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)

    @property
    def keys(self) -> set[str]:
        """The keys of config.json that change what the model computes."""
        keys = {"model_type", "architectures"}
        for part in self.parts:
            keys |= part.keys
        return keys

    @property
    def parts(self) -> list[ConfigPart]:
        """All keys, in the order in which they are read."""
        return [*self.sizes, *self.choices]
