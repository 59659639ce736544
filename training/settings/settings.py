"""Settings: a config resolved for a machine and a text. They are saved with the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from thinker.model import ThinkerConfig
from thinker.training.config import sections
from thinker.training.config.data_section import DataConfig
from thinker.training.config.stored import known_keys
from thinker.training.config.types import ConfigSection, Positive


class TrainSettings(sections.TrainConfig):
    """The section `train` without "auto" values."""

    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool
    micro_batch_size: Positive
    async_save: bool
    save_sharded: bool


def _read_architecture(value: Any) -> Any:
    return ThinkerConfig.from_dict(value) if isinstance(value, dict) else value


class Settings(ConfigSection):
    """A config resolved for this machine and data, without "auto" or missing values. Saved with the
    run."""

    run: sections.RunConfig
    model: Annotated[ThinkerConfig, BeforeValidator(_read_architecture)]
    data: DataConfig
    optimizer: sections.OptimizerConfig
    train: TrainSettings
    tracking: sections.TrackingConfig
    extensions: list[str] = Field(default=[])

    @model_validator(mode="before")
    @classmethod
    def _read_stored(cls, tree: Any) -> Any:
        return known_keys(tree, cls)

    def with_train(self, **changes: Any) -> Settings:
        """Return a copy with these values changed in the section `train`."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})
