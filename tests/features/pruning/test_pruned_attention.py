"""Attention of a pruned model: heads that were removed count for nothing."""

import pytest
import torch

from thinker.features.pruning import pruning
from thinker.interpretability import attribution, flow

pytestmark = pytest.mark.usefixtures("one_thread")


def test_gradient_times_attention_of_a_pruned_model(random_model):
    tokens = torch.randint(0, 61, (14,), generator=torch.Generator().manual_seed(1))
    left = pruning.prune(random_model(n_kv_heads=4), [(0, 3)])
    found = attribution.gradient_times_attention(left, tokens, 3, 7)
    assert found.isnan().flatten(2).all(2).tolist() == [[False] * 3 + [True], [False] * 4]


def test_heads_that_a_layer_does_not_have_count_for_nothing(random_model):
    left = pruning.prune(random_model(n_kv_heads=4), [(0, 1), (0, 2)])
    weights = left.attention_weights(torch.arange(9)[None])[:, 0]
    rows = flow.with_residual(weights)
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(2, 9))
    torch.testing.assert_close(rows[0], (weights[0, :2].mean(dim=0) + torch.eye(9)) / 2)
