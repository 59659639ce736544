"""Pruning: remove heads, neurons, layers or single weights, during training or after it."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="pruning",
    keys={"train": "thinker.features.pruning.keys:PruneKeys"},
    check_config="thinker.features.pruning.keys:check_pruning",
    commands={"prune": "thinker.features.pruning.command:main"},
)
