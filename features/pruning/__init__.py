"""Pruning: remove heads, neurons and weights."""

from thinker.runtime.registry import Command, Feature

FEATURE = Feature(
    name="pruning",
    keys={"train": "thinker.features.pruning.keys:PruneKeys"},
    check_config="thinker.features.pruning.keys:check_pruning",
    commands={
        "prune": Command(
            "thinker.features.pruning.command:main",
            "remove heads, neurons, layers and weights from a model",
            "Change and export models",
        )
    },
    callbacks="thinker.features.pruning.callbacks:pruning_callbacks",
    fixed_keys={"train.prune": ""},
    python_api=("thinker.features.pruning.pruning",),
)
