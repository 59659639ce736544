"""Sweeps: train a grid of settings with several seeds, and compare runs."""

from thinker.runtime.registry import Command, Feature

FEATURE = Feature(
    name="sweeps",
    commands={
        "sweep": Command(
            "thinker.features.sweeps.sweep_command:main",
            "train a grid of values with several seeds, and compare them",
            "Train",
        ),
        "compare": Command(
            "thinker.features.sweeps.compare_command:main",
            "compare runs, grouped by seed: losses, intervals, keys that differ",
            "Evaluate and understand",
        ),
    },
)
