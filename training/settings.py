"""What a config resolves to on this machine and data: nothing is "auto" or missing any more. Saved with the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from thinker.model import ThinkerConfig
from thinker.training.config_sections import (
    ConfigSection,
    DataConfig,
    OptimizerConfig,
    Positive,
    RunConfig,
    TrackingConfig,
    TrainConfig,
)


class TrainSettings(TrainConfig):
    """The section `train` with every choice made."""

    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool
    micro_batch_size: Positive
    save_sharded: bool


def _to_thinker_config(value: Any) -> Any:
    return ThinkerConfig.from_dict(value) if isinstance(value, dict) else value


class Settings(ConfigSection):
    """A resolved config, in the same sections: widths, learning rates, precision, micro-batch size, tokenizer."""

    run: RunConfig
    model: Annotated[ThinkerConfig, BeforeValidator(_to_thinker_config)]
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainSettings
    tracking: TrackingConfig

    def with_train(self, **changes: Any) -> Settings:
        """A copy with other values in the section `train`."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})

    def to_tree(self) -> dict[str, dict[str, Any]]:
        """As plain dictionaries, for YAML and JSON; a Config can be read from them."""
        return self.model_dump(mode="json")
