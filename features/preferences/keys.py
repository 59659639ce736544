"""Keys of train.dpo, and what they cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinker.training.config.types import ConfigSection, Rate

if TYPE_CHECKING:
    from thinker.training.config.config import Config

SOURCE = "preferences"


class DPOConfig(ConfigSection):
    """Direct preference optimization (features/preferences/guide.md)."""

    beta: Rate = 0.1
    """How strongly the model is held to the probabilities that it started with. The reward of an
    answer is beta times the log-ratio to them."""


class PreferenceKeys(ConfigSection):
    """Keys of the section `train`."""

    dpo: DPOConfig | None = None
    """Learn from pairs of answers, such as `{beta: 0.1}` with data.source=preferences
    (features/preferences/guide.md). null: from text."""


def complete_config(tree: dict[str, Any]) -> None:
    """A window has whole pairs, as many as fit."""
    if tree["train"].get("dpo") is not None:
        tree["data"].setdefault("packing", "best_fit")


def check_preferences(config: Config) -> None:
    """Raise ValueError if other keys contradict train.dpo or data.source=preferences."""
    data, train = config.data, config.train
    has_pairs = SOURCE in [source.source for source in data.text_sources()]
    if train.dpo is None:
        if has_pairs:
            raise ValueError(
                f"data.source={SOURCE} needs train.dpo, which says how pairs are compared; set "
                "train.dpo.beta=0.1"
            )
        return
    if data.source != SOURCE:
        raise ValueError(f"train.dpo needs pairs of answers; set data.source={SOURCE}")
    source = data.text_sources()[0]
    conflicts = {
        "data.buffer_tokens": getattr(source, "buffer_tokens", None) is not None,
        "data.clean": getattr(data, "clean", None) is not None,
        "data.val_tokens": data.val_tokens is not None,
        "train.prune": getattr(train, "prune", None) is not None,
        "train.micro_batch_size=auto": train.micro_batch_size == "auto",
        "data.assistant_only_loss=true": data.assistant_only_loss,
        "data.shift_windows=true": data.shift_windows,
        "train.patience": train.patience is not None,
        f"data.packing={data.packing}": data.packing != "best_fit",
        "data.document_masking=true": data.document_masking,
        "train.distill": getattr(train, "distill", None) is not None,
    }
    for key, is_set in conflicts.items():
        if is_set:
            raise ValueError(f"train.dpo cannot be combined with {key}; remove it")
