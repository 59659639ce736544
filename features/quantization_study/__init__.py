"""The cost of few bits, matrix by matrix."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="quantization_study")
