"""Suites: accuracies with fixed settings, on minimal pairs and tasks that people know."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="eval_suites",
    keys={"train": "thinker.features.eval_suites.keys:EvalSuiteKeys"},
    check_config="thinker.features.eval_suites.keys:check_eval_suite",
    callbacks="thinker.features.eval_suites.suite_log:suite_logs",
    arguments={"eval": "thinker.features.eval_suites.flags:SuiteFlags"},
    python_api=(
        "thinker.features.eval_suites.minimal_pairs:"
        "MinimalPair,PairScores,read_pairs,score_pairs,score_texts",
        "thinker.features.eval_suites.tales_pairs:tales_pairs",
    ),
)
