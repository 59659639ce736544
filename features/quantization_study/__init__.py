"""The cost of few bits, matrix by matrix."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="quantization_study",
    commands={"sensitivity": "thinker.features.quantization_study.command:main"},
)
