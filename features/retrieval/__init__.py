"""Retrieval: a window that also attends to the best blocks that left it."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="retrieval",
    generator_options=("retrieve", "retrieve_block"),
    cache="thinker.features.retrieval.retrieval_caches:make_caches",
    commands={"needle": "thinker.features.retrieval.command:main"},
    arguments={"generate": "thinker.features.retrieval.flags:RetrievalFlags"},
)
