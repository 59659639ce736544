"""Distillation: a model learns from a teacher beside the text."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="distillation",
    keys={"train": "thinker.features.distillation.keys:DistillKeys"},
    complete_config="thinker.features.distillation.keys:complete_config",
    check_config="thinker.features.distillation.keys:check_distillation",
    objective="thinker.features.distillation.distillation:with_teacher",
    fixed_keys={"train.distill": "thinker.features.distillation.distillation:distill_reason"},
)
