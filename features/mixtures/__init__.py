"""Mixtures: several sources with weights."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="mixtures",
    keys={"data": "thinker.features.mixtures.keys:MixtureKeys"},
    complete_config="thinker.features.mixtures.keys:leave_source_open",
    check_config="thinker.features.mixtures.keys:check_mixture",
)
