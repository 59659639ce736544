"""The weights that transformers gives for its own models, and the memory that mapping a layer
takes."""

import json

import pytest
import torch
from fork_server import run_ranks
from memory_workers import peak_of_mapping_a_layer

from thinker import interop

transformers = pytest.importorskip("transformers")
SHAPE = {
    "vocab_size": 89, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": {}, "mistral": {"sliding_window": 7}, "qwen2": {}, "qwen3": {"head_dim": 12},
    "smollm3": {"no_rope_layer_interval": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_transformers(tmp_path, family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, **SHAPE, **FAMILIES[family], pad_token_id=None
    )
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0, 0.3)
    theirs.save_pretrained(tmp_path)
    ours, _ = interop.load(tmp_path)
    tokens = torch.randint(89, (2, 30))
    with torch.no_grad():
        known = theirs(tokens, output_attentions=True).attentions
    found = ours.attention_weights(tokens)
    torch.testing.assert_close(found, torch.stack(known), rtol=0, atol=1e-5)


def test_bertviz_takes_the_weights(random_model):
    bertviz = pytest.importorskip("bertviz")
    model = random_model(n_layers=3)
    weights = model.attention_weights(torch.arange(9)[None])  # (layers, 1, H, T, T)
    page = bertviz.head_view(
        list(weights), [f"token{i}" for i in range(9)], html_action="return"
    ).data
    assert "token8" in page
    for layer, head in ((0, 0), (2, 3)):
        assert json.dumps(round(weights[layer, 0, head, 5, 2].item(), 4))[:5] in page


def test_circuitsvis_takes_the_weights_of_a_layer(random_model):
    circuitsvis = pytest.importorskip("circuitsvis")
    weights = random_model().attention_weights(torch.arange(9)[None])
    shown = circuitsvis.attention.attention_patterns(
        tokens=[f"token{i}" for i in range(9)], attention=weights[1, 0]
    )
    assert "token8" in str(shown)
    assert str(weights[1, 0, 3, 5, 2].item())[:5] in str(shown)


@pytest.mark.parametrize(
    "attention",
    [
        "heads(window(300), full)",
        "topk(16)",
        "retrieve(16, 2)",
        "linear(32)",
        *(pytest.param(pattern, marks=pytest.mark.stress) for pattern in ("full", "window(300)")),
    ],
)
def test_mapping_a_layer_takes_little_more_than_its_weights(attention):
    ((peak, weights),) = run_ranks(1, peak_of_mapping_a_layer, attention, 1024)
    assert 0.9 < peak / weights <= 2.5
