"""thinker eval --fineweb: the loss on FineWeb's validation tokens, beside GPT-2's."""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT, random_model, run_script

from thinker import save
from thinker.benchmarks.baselines import to_transformers
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.evaluation import fineweb
from thinker.evaluation.fineweb import compare, fineweb_loss
from thinker.runtime.errors import UserError

BOS = 50256
EVAL = ROOT / "scripts" / "eval.py"


@pytest.fixture(scope="module")
def tokenizer():
    """As large as GPT-2's, with two of its words."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [f"~{number}".encode() for number in range(256, BOS)]
    tokens[15496] = b"Hello"
    tokens[995] = b" world"
    words = r"\s?\w+|\s|[^\s\w]+"
    return Tokenizer("bpe", [*tokens, None], {"<|endoftext|>": BOS}, "<|endoftext|>", words)


@pytest.fixture(scope="module")
def model():
    return random_model(vocab_size=50304, n_layers=1, qk_norm=False)


def write_tokens(path, ids, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())
    return str(path)


@pytest.fixture(scope="module")
def ids():
    """Documents of many lengths, and a cut one."""
    random = np.random.default_rng(0)
    found = []
    for length in (5, 70, 1, 300, 40, 33):
        found += [BOS, *random.integers(0, BOS, length).tolist()]
    return found


@pytest.mark.parametrize(("context", "n_tokens"), [(32, 10**9), (64, 10**9), (32, 200), (16, 163)])
def test_the_loss_is_that_of_transformers(model, tokenizer, ids, tmp_path, context, n_tokens):
    path = write_tokens(tmp_path / "val.bin", ids)
    found = fineweb_loss(model, tokenizer, path, context, n_tokens)
    n_windows = min(n_tokens, len(ids) - 1) // context
    inputs = torch.tensor(ids[: n_windows * context]).view(n_windows, context)
    targets = torch.tensor(ids[1 : n_windows * context + 1])
    with torch.no_grad():
        logits = to_transformers(model)(input_ids=inputs).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
    assert found.nats_per_token.mean == pytest.approx(float(wanted), rel=1e-5)
    assert (found.n_tokens, found.context_length) == (n_windows * context, context)


def test_the_comparison_is_of_the_published_tokens(model, tokenizer, ids, tmp_path, monkeypatch):
    path = write_tokens(tmp_path / "val.bin", ids)
    line = compare(fineweb_loss(model, tokenizer, path, 32))
    assert line == (
        "not compared with GPT-2, whose 3.28 nats per token are of 10,485,760 tokens in "
        "sequences of 1024"
    )
    monkeypatch.setattr(fineweb, "VAL_TOKENS", 448)
    monkeypatch.setattr(fineweb, "CONTEXT", 32)
    loss = fineweb_loss(model, tokenizer, path, 32, 448)
    nats = loss.nats_per_token
    shown = [f"{value - 3.28:+.4f}" for value in (nats.mean, nats.low, nats.high)]
    line = compare(loss)
    assert line.startswith(f"{shown[0]} [{shown[1]}, {shown[2]}] nats per token from 3.28")
    assert "not compared" in compare(fineweb_loss(model, tokenizer, path, 64, 448))


def test_the_command(model, tokenizer, ids, tmp_path):
    save(model, tokenizer, tmp_path / "model")
    path = write_tokens(tmp_path / "val.bin", ids)
    command = (EVAL, tmp_path / "model", "--fineweb", path, "--device", "cpu")
    done = run_script(*command, "--json", "--context", "32,64", "--max-tokens", 256)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    found = [loss["nats_per_token"]["mean"] for loss in values["losses"]]
    wanted = [fineweb_loss(model, tokenizer, path, context, 256) for context in (32, 64)]
    assert found == pytest.approx([loss.nats_per_token.mean for loss in wanted], rel=1e-5)
    assert values["gpt2"] == 3.28
    done = run_script(*command)
    assert "not compared with GPT-2" in done.stdout
    done = run_script(*command, "--source", "tales")
    assert done.returncode == 2
    assert "--source has no effect with --fineweb" in done.stderr


def test_mistakes(model, tokenizer, ids, tmp_path):
    whole = write_tokens(tmp_path / "val.bin", ids)
    cases = {
        "is not a complete token file": write_tokens(tmp_path / "a.bin", ids, count=5),
        "does not match the model's tokenizer": write_tokens(tmp_path / "b.bin", ids[1:]),
        "less than a sequence of 1024": whole,
        "cannot be read": str(tmp_path),
    }
    for message, path in cases.items():
        with pytest.raises(UserError, match=message):
            fineweb_loss(model, tokenizer, path)
    with pytest.raises(UserError, match="needs a model with GPT-2's vocabulary"):
        fineweb_loss(model, make_tokenizer("byte", []), whole)
