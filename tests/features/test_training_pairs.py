"""Callbacks and objectives of several features in one run: it resumes to the bit, as each alone
does."""

import pytest
from training_contract import check_resumes, small_config

from thinker.runtime.registry import features
from thinker.training.run import train

pytestmark = pytest.mark.usefixtures("one_thread")
LAYER_LOG = ["train.log_grad_norms=true", "train.log_attention_every=2"]
WEIGHTS = ["train.prune.weights=0.5", "train.prune.every=1", "train.prune.start=0.1"]
GATES = ["train.prune.heads=0.5", "train.prune.by=gates"]
MIXTURE = ["data.sources=[{source: tales, weight: 2, max_documents: 40}, {source: repeated_random, max_documents: 40}]",
           "data.max_documents=null", "data.source=null"]  # fmt: skip
REWARDS = [
    "run.init_from=TEACHER",
    "train.grpo.rewards=length",
    "train.grpo.prompt_tokens=4",
    "train.grpo.group_size=2",
    "train.grpo.max_new_tokens=8",
    "model.dropout=0",
    "data.tokenizer=null",
    "train.grpo.kl=0.1",
    "train.grpo.updates=2",
]
PAIRS = {  # the features that they need, and overrides
    "pruning, average and logs": ({"pruning", "monitoring"}, [*WEIGHTS, *LAYER_LOG, "train.ema_decay=0.9"]),
    "gates and logs": ({"pruning", "monitoring"}, [*GATES, *LAYER_LOG]),
    "teacher and average": ({"distillation"}, ["train.distill.teacher=TEACHER", "train.ema_decay=0.9"]),
    "teacher and gates": ({"distillation", "pruning"}, ["train.distill.teacher=TEACHER", *GATES]),
    "teacher and mixture": ({"distillation", "mixtures"}, ["train.distill.teacher=TEACHER", *MIXTURE]),
    "rewards, average and logs": ({"rewards", "monitoring"}, [*REWARDS, *LAYER_LOG, "train.ema_decay=0.9"]),
    "exact rewards and logs": ({"rewards", "monitoring"}, [*REWARDS, *LAYER_LOG, "train.exact=true"]),
    "rewards, recomputed blocks": ({"rewards"}, [*REWARDS, "train.checkpoint_every_n_blocks=1"]),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_a_run_with_several_features_resumes_bit_for_bit(pair, tmp_path, monkeypatch):
    needed, overrides = PAIRS[pair]
    if not needed <= {feature.name for feature in features()}:
        pytest.skip("a feature is missing")
    if any("TEACHER" in text for text in overrides):
        teacher = small_config(tmp_path, "teacher", ["train.max_steps=2"])
        assert train(teacher) == 0
    texts = [text.replace("TEACHER", str(tmp_path / "teacher")) for text in overrides]
    check_resumes(tmp_path, monkeypatch, texts)
