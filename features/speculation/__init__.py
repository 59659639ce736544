"""Speculative decoding: drafts that are verified in one pass."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="speculation",
    generator_options=("speculate", "draft"),
    drafter="thinker.features.speculation.speculation:make_drafting",
    arguments={"generate": "thinker.features.speculation.flags:SpeculationFlags"},
)
