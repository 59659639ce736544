"""Rollout and maximum flow: the worked example, two layers by hand, conservation."""

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_heads import causal

from thinker.interpretability import flow
from thinker.runtime.errors import UserError

EXAMPLE = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "attention_examples.json").read_text()
)["three_tokens"]


def test_three_tokens():
    weights = causal(torch.tensor(EXAMPLE["scores"]).float()).expand(2, 1, 3, 3)
    known = EXAMPLE["causal_unscaled"]
    torch.testing.assert_close(
        flow.rollout(weights)[-1], torch.tensor(known["rollout_two_layers"]), rtol=0, atol=6e-5
    )
    found = flow.max_flow(weights)
    torch.testing.assert_close(found, torch.tensor(known["max_flow_two_layers"]), rtol=0, atol=6e-5)
    torch.testing.assert_close(flow.max_flow(weights, position=-1), found[-1])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 6), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_any_attention(layers, n_heads, length, seed):
    torch.manual_seed(seed)
    weights = causal(2 * torch.randn(layers, n_heads, length, length))
    rolled = flow.rollout(weights)
    assert rolled.shape == (layers, length, length)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(layers, length))
    known = torch.eye(length)
    for layer in flow.with_residual(weights):
        known = layer @ known
    torch.testing.assert_close(rolled[-1], known)
    flows = flow.max_flow(weights)
    assert (flows <= 1 + 1e-6).all()  # no more than a position passes on
    assert (flows.triu(1) == 0).all()
    if layers == 2:
        second, first = flow.with_residual(weights).flip(0)
        by_hand = torch.minimum(second[:, :, None], first[None]).sum(dim=1)
        torch.testing.assert_close(flows, by_hand, rtol=0, atol=1e-5)


def test_maximum_flow_without_networkx_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(UserError, match=r"pip install '.\[inspect\]'"):
        flow.max_flow(torch.eye(3).expand(1, 1, 3, 3))
