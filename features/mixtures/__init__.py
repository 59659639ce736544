"""Mixtures of several sources."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="mixtures",
    keys={"data": "thinker.features.mixtures.keys:MixtureKeys"},
    complete_config="thinker.features.mixtures.keys:leave_source_open",
    check_config="thinker.features.mixtures.keys:check_mixture",
    objective="thinker.features.mixtures.source_losses:with_source_losses",
    fixed_keys={
        "data.sources": "thinker.features.mixtures.resume_rules:sources_reason",
        "train.max_steps": "thinker.features.mixtures.resume_rules:max_steps_reason",
    },
)
