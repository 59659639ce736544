"""Cases of tests that need a feature: tests outside of tests/features/ pass without any feature."""

from collections.abc import Iterable
from typing import TypeVar

import pytest

from thinker.runtime.registry import features

Case = TypeVar("Case")
NAMES = {feature.name for feature in features()}
# Those that shared pages link to.
KNOWN = {
    "auto_size",
    "cleaning",
    "distillation",
    "early_exit",
    "eval_suites",
    "ladder",
    "mixtures",
    "monitoring",
    "ollama",
    "preferences",
    "pruning",
    "quantization_study",
    "retrieval",
    "rewards",
    "run_report",
    "speculation",
    "streams",
    "structured_output",
    "sweeps",
}
# What shared configs, pages and commands need, by a part of their text.
NEEDED = {
    "any-text.yaml": "auto_size",
    "configs/mixture.yaml": "mixtures",
    "configs/heal.yaml": "distillation",
    "configs/dpo.yaml": "preferences",
    "train.dpo": "preferences",
    "configs/grpo.yaml": "rewards",
    "train.grpo": "rewards",
    "train.exact": "rewards",
    "--verifier": "rewards",
    "model.size": "auto_size",
    "data.sources": "mixtures",
    "data.clean": "cleaning",
    "buffer_tokens": "streams",
    "train.distill": "distillation",
    "train.prune": "pruning",
    "train.log_attention_every": "monitoring",
    "train.log_grad_norms": "monitoring",
    "train.eval_suite": "eval_suites",
    "--suite": "eval_suites",
}


def missing_feature(text: str) -> str:
    """A feature that a command, a config or a key needs and that has been deleted, or ""."""
    for part, feature in NEEDED.items():
        if part in text and feature not in NAMES:
            return feature
    return ""


def if_installed(feature: str, *cases: Case) -> Iterable[Case]:
    """The cases, or none if the feature has been deleted."""
    return cases if feature in NAMES else ()


def needs(feature: str) -> pytest.MarkDecorator:
    """A mark for a test that is skipped if the feature has been deleted."""
    return pytest.mark.skipif(feature not in NAMES, reason=f"needs the feature {feature}")
