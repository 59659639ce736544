"""Mixtures: several sources with weights."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="mixtures",
    keys={"data": "thinker.features.mixtures.keys:MixtureKeys"},
    complete_config="thinker.features.mixtures.keys:leave_source_open",
    check_config="thinker.features.mixtures.keys:check_mixture",
    corpus="thinker.features.mixtures.sources_option:prepare_corpus",
    find_corpus="thinker.features.mixtures.sources_option:find_corpus",
    dataset="thinker.features.mixtures.sources_option:make_dataset",
    evaluator="thinker.features.mixtures.sources_option:make_evaluator",
    describe_data="thinker.features.mixtures.sources_option:describe_data",
    describe_evaluation="thinker.features.mixtures.sources_option:describe_evaluation",
    comparable_losses="thinker.features.mixtures.sources_option:comparable_losses",
    objective="thinker.features.mixtures.sources_option:with_source_losses",
    fixed_keys={
        "data.sources": "thinker.features.mixtures.resume_rules:sources_reason",
        "train.max_steps": "thinker.features.mixtures.resume_rules:max_steps_reason",
    },
)
