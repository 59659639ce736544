"""Preferences: a model learns which of two answers is better."""

from thinker.data.text.sources import SOURCES, SourceKind
from thinker.runtime.registry import Feature

SOURCES.register(
    "preferences",
    SourceKind(
        "thinker.features.preferences.pairs:open_pairs",
        ("path", "config", "split", "streaming", "allow_special_tokens"),
        "a JSONL or Parquet file, or a dataset, with the columns chosen and rejected",
        has_conversations=True,
        is_read_alone=True,
    ),
)

FEATURE = Feature(
    name="preferences",
    keys={"train": "thinker.features.preferences.keys:PreferenceKeys"},
    complete_config="thinker.features.preferences.keys:complete_config",
    check_config="thinker.features.preferences.keys:check_preferences",
    objective="thinker.features.preferences.dpo_option:make_objective",
    dataset="thinker.features.preferences.dpo_option:make_dataset",
    evaluator="thinker.features.preferences.dpo_option:make_evaluator",
    describe_evaluation="thinker.features.preferences.dpo_option:describe_evaluation",
    comparable_losses="thinker.features.preferences.dpo_option:comparable_losses",
    describe_data="thinker.features.preferences.dpo_option:describe_data",
    fixed_keys={"train.dpo": ""},
    python_api=("thinker.features.preferences.dpo:DPOLoss,PairLosses,dpo_loss",),
)
