"""Rewards: a model learns from what verifiers say about its own answers."""

from thinker.data.text.sources import SOURCES, SourceKind
from thinker.runtime.registry import Feature

SOURCES.register(
    "prompts",
    SourceKind(
        "thinker.features.rewards.prompt_rows:open_prompts",
        ("path", "config", "split", "streaming", "allow_special_tokens"),
        "a JSONL or Parquet file, or a dataset, with the column prompt",
        has_conversations=True,
    ),
)

FEATURE = Feature(
    name="rewards",
    keys={"train": "thinker.features.rewards.keys:RewardKeys"},
    complete_config="thinker.features.rewards.keys:complete_config",
    check_config="thinker.features.rewards.keys:check_grpo",
    objective="thinker.features.rewards.grpo_option:make_objective",
    dataset="thinker.features.rewards.grpo_option:make_dataset",
    evaluator="thinker.features.rewards.grpo_option:make_evaluator",
    describe_evaluation="thinker.features.rewards.grpo_option:describe_evaluation",
    comparable_losses="thinker.features.rewards.grpo_option:comparable_losses",
    sample_prompt="thinker.features.rewards.grpo_option:sample_prompt",
    describe_data="thinker.features.rewards.grpo_option:describe_data",
    fixed_keys={"train.grpo": "thinker.features.rewards.resume_rules:grpo_reason"},
    python_api=("thinker.features.rewards.verifiers.verifier:Answer",),
    generator_options=("exact",),
    decoder="thinker.features.rewards.exact.exact_decoder:make_decoder",
    arguments={"eval": "thinker.features.rewards.judging.flags:VerifierFlags"},
)
