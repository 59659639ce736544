"""Distillation: learn from a teacher."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="distillation",
    keys={"train": "thinker.features.distillation.keys:DistillKeys"},
    complete_config="thinker.features.distillation.keys:complete_config",
    check_config="thinker.features.distillation.keys:check_distillation",
)
