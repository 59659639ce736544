"""Structured output: texts that follow a JSON schema or a regular expression."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="structured_output",
    constraint="thinker.features.structured_output.structured_output:SOURCE",
    arguments={"generate": "thinker.features.structured_output.flags:StructuredOutputFlags"},
)
