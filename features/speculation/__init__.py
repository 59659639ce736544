"""Speculative decoding: drafts that are verified in one pass."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="speculation")
