"""The cost of few bits, matrix by matrix."""

from thinker.runtime.registry import Command, Feature

FEATURE = Feature(
    name="quantization_study",
    commands={
        "sensitivity": Command(
            "thinker.features.quantization_study.command:main",
            "measure what few bits cost each part of a model",
            "Evaluate and understand",
        )
    },
)
