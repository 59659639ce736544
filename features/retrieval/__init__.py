"""Retrieval: a window that also attends to the best blocks that left it."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="retrieval")
