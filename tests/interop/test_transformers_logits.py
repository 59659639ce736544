"""The same random weights give the same logits as transformers' own models."""

import pytest
import torch

from thinker.benchmarks.baselines import to_transformers
from thinker.interop.huggingface import to_hf_name
from thinker.model import Thinker, ThinkerConfig

pytest.importorskip("transformers")


def random_model(**kwargs):
    """Unlike a fresh one, nothing in it is zero or one: every parameter must matter."""
    torch.manual_seed(0)
    model = Thinker(
        ThinkerConfig(vocab_size=101, d_model=48, n_layers=3, n_heads=4, max_seq_len=64, **kwargs)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.2 if parameter.dim() == 1 else 0, 0.3)
    return model.eval()


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "shape", [{}, {"head_dim": 20, "rope_theta": 500.0, "norm_eps": 1e-3}], ids=["plain", "odd"]
)
def test_logits_equal(qk_norm, n_kv_heads, tied, shape):
    model = random_model(qk_norm=qk_norm, n_kv_heads=n_kv_heads, tie_embeddings=tied, **shape)
    tokens = torch.randint(0, 101, (2, 40))
    with torch.no_grad():
        ours, theirs = model(tokens), to_transformers(model)(tokens).logits
    assert theirs.std() > 0.5  # logits worth comparing
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_gradients_equal(qk_norm):
    model = random_model(qk_norm=qk_norm, n_kv_heads=2)
    other = to_transformers(model)
    tokens = torch.randint(0, 101, (2, 17))
    loss_sum, count = model(tokens[:, :-1], targets=tokens[:, 1:])
    (loss_sum / count).backward()
    loss = other(tokens, labels=tokens).loss
    loss.backward()
    torch.testing.assert_close(loss_sum / count, loss, rtol=1e-6, atol=0)
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        twin = theirs[to_hf_name(name)]
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-4, atol=1e-6)
