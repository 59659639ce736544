"""Predict the loss of a model from smaller copies of it."""

from thinker.runtime.registry import Command, Feature

FEATURE = Feature(
    name="ladder",
    builds_on=("sweeps",),
    commands={
        "ladder": Command(
            "thinker.features.ladder.ladder_command:main",
            "predict the loss of a model from smaller copies of it",
            "Train",
        )
    },
)
