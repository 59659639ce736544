"""Distillation: learn from a teacher."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="distillation")
