"""Streams: sources that are tokenized while they are trained on."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="streams")
