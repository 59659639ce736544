"""scripts/inspect_model.py as a user runs it: tables, JSON and pictures of what the model computed, one-line errors."""

import importlib.util
import json
import math
import sys

import pytest
import torch
from conftest import ROOT

import storage
from analysis import attribution, heads, reports
from errors import UserError

INSPECT = ROOT / "scripts" / "inspect_model.py"
PROMPT = "Line 7: the cat"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs main() in this process; returns what it printed."""
    spec = importlib.util.spec_from_file_location("inspect_command", INSPECT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["inspect_model.py", *map(str, arguments), "--device", "cpu"])
        capsys.readouterr()
        assert module.main() == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def model(tiny_run):
    return storage.load(tiny_run)


def test_a_row_number_by_number(command, tiny_run, model):
    thinker, tokenizer = model
    found = json.loads(
        command(tiny_run, "explain", "--prompt", PROMPT, "--layer", 1, "--head", 1, "--query", 4, "--json")
    )
    ids = [tokenizer.bos_id, *tokenizer.encode(PROMPT)]
    weights = thinker.attention_weights(torch.tensor([ids]))[1, 0, 1, 4]
    assert found["weights"] == pytest.approx(weights.tolist(), abs=1e-6)
    q = torch.tensor(found["q"])
    assert found["scaled"] == pytest.approx([score / math.sqrt(len(q)) for score in found["scores"]])
    seen = torch.tensor(found["scaled"])[:5].softmax(0)
    assert found["weights"][:5] == pytest.approx(seen.tolist(), abs=1e-5)
    assert found["weights"][5:] == [0] * (len(ids) - 5)
    assert found["output"] == pytest.approx((seen @ torch.tensor(found["values"])[:5]).tolist(), abs=1e-5)
    assert found["output"] == pytest.approx(found["head_output"], abs=1e-5)
    shown = command(tiny_run, "explain", "--prompt", PROMPT, "--query", 4)
    rows = shown.split("\n\n")[1].splitlines()
    assert len(rows) == 1 + len(ids)
    assert [row.split()[4] for row in rows[1:]] == ["yes"] * 5 + ["no"] * (len(ids) - 5)
    assert "<|bos|>" in rows[1]


def test_maps_and_flows(command, tiny_run, model, tmp_path):
    thinker, tokenizer = model
    tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(PROMPT)]])
    weights = thinker.attention_weights(tokens)
    found = json.loads(command(tiny_run, "map", "--prompt", PROMPT, "--layer", 1, "--json"))
    torch.testing.assert_close(torch.tensor(found["weights"]), weights[1, 0, 0])
    shown = command(tiny_run, PROMPT and "map", "--prompt", PROMPT, "--png", tmp_path / "map.png")
    assert "1.00 0 <|bos|>" in shown
    flows = json.loads(
        command(tiny_run, "flow", "--prompt", PROMPT, "--position", 3, "--json", "--png", tmp_path / "f.png")
    )
    assert [sum(row) for row in flows["rollout"]] == pytest.approx([1, 1])
    assert len(flows["max_flow"]) == tokens.shape[1]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("map.png", "f.png"))


def test_scores_of_all_heads(command, tiny_run, model, tmp_path):
    thinker, _ = model
    found = json.loads(command(tiny_run, "heads", "--json", "--png", tmp_path / "heads.png"))
    n = thinker.config.max_seq_len // 2
    weights = thinker.attention_weights(heads.repeated_tokens(thinker.config.vocab_size, min(24, n)))
    assert torch.tensor(found["induction"]).shape == (2, 2)
    torch.testing.assert_close(torch.tensor(found["induction"]), heads.induction(weights).mean(dim=1))
    shown = command(tiny_run, "heads", "--prompt", PROMPT)
    assert "measured on  the prompt" in shown
    assert len(shown.strip().split("\n\n")[1].splitlines()) == 1 + 4


def test_what_a_prediction_is_made_of(command, tiny_run, model, tmp_path):
    thinker, tokenizer = model
    tokens = torch.tensor([tokenizer.bos_id, *tokenizer.encode(PROMPT)])
    given = ["--prompt", PROMPT, "--against", "e"]
    found = json.loads(command(tiny_run, "attribute", *given, "--json", "--png", tmp_path / "a.png"))
    logits = thinker(tokens[None])[0, -1]
    (against,) = tokenizer.encode("e")
    assert found["target"] == logits.argmax().item()
    assert found["y"] == pytest.approx((logits.max() - logits[against]).item(), abs=1e-4)
    parts = found["embedding"] + sum(found["mlps"]) + sum(map(sum, found["heads"]))
    assert parts == pytest.approx(found["y"], abs=1e-4)
    lens = json.loads(command(tiny_run, "lens", "--prompt", PROMPT, "--json"))
    assert lens["top"][-1][0][1] == logits.argmax().item()
    assert lens["top"][-1][0][2] == pytest.approx(logits.softmax(-1).max().item(), abs=1e-5)
    assert "embedding" in command(tiny_run, "lens", "--prompt", PROMPT)


def test_patching_between_two_prompts(command, tiny_run, model, tmp_path):
    thinker, tokenizer = model
    clean, corrupt = "Line 7", "Line 8"
    assert len(tokenizer.encode(clean)) == len(tokenizer.encode(corrupt))
    shown = command(tiny_run, "patch", "--prompt", clean, "--corrupt", corrupt, "--png", tmp_path / "p.png", "--json")
    found = json.loads(shown)
    prompts = [reports.Prompt.read(thinker, tokenizer, text).tokens for text in (clean, corrupt)]
    known = attribution.patch(thinker, *prompts, found["target"])
    assert found["blocks.0"] == pytest.approx(known["blocks.0"].tolist())
    assert found["blocks.1"][-1] == pytest.approx(1, abs=1e-4)
    assert (tmp_path / "p.png").exists()


def test_tokens_that_people_can_read(model):
    from data.make_tokenizer import make_tokenizer

    tokenizer = make_tokenizer("byte", [])
    assert [reports.label(tokenizer, i) for i in (65, 32, 10, 0xC3, tokenizer.bos_id)] == [
        "A",
        "·",
        "\\n",
        "\\xc3",
        "<|bos|>",
    ]


def test_a_mistake_is_one_line_and_status_2(script, tiny_run):
    done = script(INSPECT, tiny_run, "map")
    assert (done.returncode, done.stderr) == (2, "error: map needs a text: --prompt TEXT\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lens", "--prompt", "ab", "--layer", "1"], "--layer does not go with lens"),
        (["map", "--prompt", "ab", "--layer", "2"], "--layer is 2; there are 2"),
        (["map", "--prompt", "ab", "--head", "-1"], "--head is -1"),
        (["explain", "--prompt", "ab", "--query", "99"], "--query is 99"),
        (["map", "--prompt", ""], "the prompt has 1 tokens"),
        (["map", "--prompt", "x" * 999], "the prompt has"),
        (["attribute", "--prompt", "ab", "--target", "xyzw,xyzw"], "tokens of this model; one is wanted"),
        (["patch", "--prompt", "ab"], "--corrupt"),
        (["patch", "--prompt", "ab", "--corrupt", "x7y7z"], "as many tokens"),
        (["lens", "--prompt", "ab", "--png", "x.png"], "no picture of lens"),
        (["map", "--prompt", "ab", "--png", "nowhere/x.png"], "cannot write nowhere/x.png"),
    ],
)
def test_mistakes(command, tiny_run, arguments, message):
    with pytest.raises(UserError, match=message):
        command(tiny_run, *arguments)
