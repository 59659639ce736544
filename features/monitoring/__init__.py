"""Monitoring: figures of attention during training and generation."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="monitoring")
