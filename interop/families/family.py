"""What a row of the table of families is made of."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from thinker.interop.families.layouts import Layout
from thinker.model import ThinkerConfig


class ConfigPart:
    """Some keys of config.json, and how they map to fields of ThinkerConfig.

    A family can express a config if reading what its parts write gives the same config. So write()
    need not check what it cannot express.
    """

    keys: Set[str] = frozenset()  # of config.json that it reads

    def read(self, values: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set fields from the values of config.json. Raises UserError for unsupported values."""

    def write(self, config: ThinkerConfig, values: dict[str, Any]) -> None:
        """Set values of config.json."""


@dataclass(frozen=True)
class Family:
    """An architecture of transformers."""

    model_type: str
    architecture: str  # the class of transformers
    # Parts, in the order in which they are read: the shape and the norms, then what follows from
    # them. Windows come before RoPE, which may differ in them.
    shape: list[ConfigPart]
    choices: list[ConfigPart]
    # Our modules and theirs, without the number of the layer; "blocks" is the list of layers.
    # Modules of ours with the same name in transformers are stored as one.
    names: dict[str, str]
    layouts: dict[str, Layout] = field(default_factory=dict)  # by their name; default: Rows
    # Whether RoPE rotates neighbors (0, 1), (2, 3), ... instead of halves.
    rotates_neighbors: bool = False
    # How the names of tensors in old files end that are no weights.
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)

    @property
    def keys(self) -> set[str]:
        """The keys of config.json that are known."""
        keys = {"model_type", "architectures"}
        for part in self.parts:
            keys |= part.keys
        return keys

    @property
    def parts(self) -> list[ConfigPart]:
        """All parts, in the order in which they are read."""
        return [*self.shape, *self.choices]
