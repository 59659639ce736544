"""Cleaning: drop documents by length, quality and duplication."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="cleaning", keys={"data": "thinker.features.cleaning.keys:CleanKeys"})
