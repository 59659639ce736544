"""The key model.size, and what it cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from thinker.training.config.types import ConfigSection

if TYPE_CHECKING:
    from thinker.training.config.config import Config


class AutoSizeKeys(ConfigSection):
    """Keys of the section `model`."""

    size: Literal["auto"] | None = None
    """auto: choose shape, tokenizer, batch, steps, dropout and decay by text and time
    (features/auto_size/guide.md)."""


def leave_tokenizer_open(tree: dict[str, Any]) -> None:
    """The tokenizer is chosen with the size, when the amount of text is known."""
    if tree["model"].get("size") is not None:
        tree["data"].setdefault("tokenizer", None)


def check_auto_size(config: Config) -> None:
    """Raise ValueError if other keys contradict model.size."""
    if config.model.size is None:
        return
    if config.train.max_minutes is None:
        raise ValueError("model.size=auto needs train.max_minutes; set it")
    if config.run.init_from is not None:
        raise ValueError(
            "model.size=auto cannot be combined with run.init_from; remove one of them"
        )
