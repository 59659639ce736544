"""The weights that transformers gives for its own models, and the memory that mapping a layer takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinker import interop

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
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
    config = transformers.AutoConfig.for_model(family, **SHAPE, **FAMILIES[family], pad_token_id=None)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
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
    page = bertviz.head_view(list(weights), [f"token{i}" for i in range(9)], html_action="return").data
    assert "token8" in page
    for layer, head in ((0, 0), (2, 3)):
        assert json.dumps(round(weights[layer, 0, head, 5, 2].item(), 4))[:5] in page


def test_circuitsvis_takes_the_weights_of_a_layer(random_model):
    circuitsvis = pytest.importorskip("circuitsvis")
    weights = random_model().attention_weights(torch.arange(9)[None])
    shown = circuitsvis.attention.attention_patterns(tokens=[f"token{i}" for i in range(9)], attention=weights[1, 0])
    assert "token8" in str(shown)
    assert str(weights[1, 0, 3, 5, 2].item())[:5] in str(shown)


MEASURE = """
import re, sys, torch
sys.path.insert(0, {root!r})
from thinker.model import Thinker, ThinkerConfig
model = Thinker(ThinkerConfig(vocab_size=64, d_model=64, n_layers=4, n_heads=8, n_kv_heads=2, max_seq_len=2048,
                                attention={attention!r})).eval()
tokens = torch.randint(64, (1, 2048))


def peak():  # of this process: ru_maxrss begins with its parent's
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1]) * 1024


with torch.no_grad():
    with model.record("blocks.3.attention.weights"):
        model(tokens[:, :300])  # what the first pass of a process takes for itself
    before = peak()
    with model.record("blocks.2.attention.weights") as seen:
        model(tokens)
    after = peak()
print((after - before) / seen["blocks.2.attention.weights"].nbytes)
"""


@pytest.mark.parametrize("attention", ["full", "window(300)", "heads(window(300), full)", "topk(16)", "linear(32)"])
def test_mapping_a_layer_takes_little_more_than_its_weights(attention):
    code = MEASURE.format(root=str(ROOT), attention=attention)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert 0.9 < float(done.stdout) <= 2.5
