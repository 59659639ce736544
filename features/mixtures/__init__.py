"""Mixtures: several sources with weights."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="mixtures")
