"""Retrieval: a window that also attends to the best blocks that left it."""

from thinker.runtime.registry import Command, Feature

FEATURE = Feature(
    name="retrieval",
    generator_options=("retrieve", "retrieve_block"),
    cache="thinker.features.retrieval.retrieval_caches:make_caches",
    commands={
        "needle": Command(
            "thinker.features.retrieval.command:main",
            "ask for facts in long texts, with a window and retrieval",
            "Evaluate and understand",
        )
    },
    arguments={"generate": "thinker.features.retrieval.flags:RetrievalFlags"},
)
