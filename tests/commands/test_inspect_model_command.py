"""scripts/inspect_model.py as a user runs it: tables, JSON and pictures of what the model computed,
one-line errors."""

import copy
import importlib.util
import itertools
import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, run_script
from installed import if_installed, needs

from thinker import checkpoint, interop
from thinker.data.text import tales
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interpretability import attribution, content_heads, head_reports, heads, reports
from thinker.runtime.errors import RunError, UserError
from thinker.training.data.open_run import sample_sequences, used_token_ids

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
        monkeypatch.setattr(
            sys, "argv", ["inspect_model.py", *map(str, arguments), "--device", "cpu"]
        )
        capsys.readouterr()
        assert module.main() == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def loaded(tiny_run):
    return interop.load(tiny_run)


def test_a_row_number_by_number(command, tiny_run, loaded):
    model, tokenizer = loaded
    found = json.loads(
        command(
            "explain",
            tiny_run,
            "--prompt",
            PROMPT,
            "--layer",
            1,
            "--head",
            1,
            "--query",
            4,
            "--json",
        )
    )
    ids = [tokenizer.bos_id, *tokenizer.encode(PROMPT)]
    weights = model.attention_weights(torch.tensor([ids]))[1, 0, 1, 4]
    assert found["weights"] == pytest.approx(weights.tolist(), abs=1e-6)
    q = torch.tensor(found["q"])
    assert found["scaled"] == pytest.approx(
        [score / math.sqrt(len(q)) for score in found["scores"]]
    )
    seen = torch.tensor(found["scaled"])[:5].softmax(0)
    assert found["weights"][:5] == pytest.approx(seen.tolist(), abs=1e-5)
    assert found["weights"][5:] == [0] * (len(ids) - 5)
    assert found["output"] == pytest.approx(
        (seen @ torch.tensor(found["values"])[:5]).tolist(), abs=1e-5
    )
    assert found["output"] == pytest.approx(found["head_output"], abs=1e-5)
    shown = command("explain", tiny_run, "--prompt", PROMPT, "--query", 4)
    rows = shown.split("\n\n")[1].splitlines()
    assert len(rows) == 1 + len(ids)
    assert [row.split()[4] for row in rows[1:]] == ["yes"] * 5 + ["no"] * (len(ids) - 5)
    assert "<|bos|>" in rows[1]


def test_vectors_in_a_file(command, tmp_path):
    path = tmp_path / "vectors.json"
    path.write_text(
        json.dumps({"q": [[1, 0], [0, 1]], "k": [[1, 0], [0, 1]], "v": [[3, 4], [0, 1]]})
    )
    shown = command("explain", path, "--png", tmp_path / "v.png", "--html", tmp_path / "v.html")
    assert [row.split()[0] for row in shown.split("\n\n")[1].splitlines()] == ["key", "0", "1"]
    assert (tmp_path / "v.png").read_bytes().startswith(b"\x89PNG")
    assert "<table>" in (tmp_path / "v.html").read_text()
    assert json.loads(command("explain", path, "--query", 0, "--json"))["output"] == [3, 4]
    for given, message in ((["--prompt", "ab"], "explain needs a model with --prompt TEXT, or a JSON file"),
                           (["--layer", 1], "--layer, --head and --checkpoint have no effect")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            command("explain", path, *given)


def test_maps_and_flows(command, tiny_run, loaded, tmp_path):
    model, tokenizer = loaded
    tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(PROMPT)]])
    weights = model.attention_weights(tokens)
    head = ("--layer", 1, "--head", 0)
    found = json.loads(command("map", tiny_run, "--prompt", PROMPT, *head, "--json"))
    torch.testing.assert_close(torch.tensor(found["weights"]), weights[1, 0, 0])
    assert "chosen" not in found
    shown = command("map", tiny_run, "--prompt", PROMPT, *head, "--png", tmp_path / "map.png")
    assert "1.00 <|bos|> (0)" in shown
    flows = json.loads(
        command(
            "flow",
            tiny_run,
            "--prompt",
            PROMPT,
            "--position",
            3,
            "--json",
            "--png",
            tmp_path / "f.png",
        )
    )
    assert [sum(row) for row in flows["rollout"]] == pytest.approx([1, 1])
    assert len(flows["max_flow"]) == tokens.shape[1]
    assert all(
        (tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("map.png", "f.png")
    )


def test_scores_of_all_heads(command, tiny_run, loaded, tmp_path):
    model, tokenizer = loaded
    found = json.loads(command("heads", tiny_run, "--json", "--png", tmp_path / "heads.png"))
    ids = used_token_ids(tiny_run, tokenizer, tmp_path)
    weights = model.attention_weights(
        heads.repeated_random_tokens(ids, min(24, model.config.max_seq_len // 2))
    )
    assert torch.tensor(found["induction"]).shape == (2, 2)
    torch.testing.assert_close(
        torch.tensor(found["induction"]), heads.induction(weights).mean(dim=1)
    )
    shown = command("heads", tiny_run, "--prompt", PROMPT)
    assert "measured on  the prompt" in shown
    assert len(shown.strip().split("\n\n")[1].splitlines()) == 1 + 4


def test_random_tokens_are_of_the_run_text_where_there_is_one(command, tiny_run, loaded, tmp_path):
    _, tokenizer = loaded
    ids = used_token_ids(tiny_run, tokenizer, tmp_path)
    assert 10 < len(ids) < tokenizer.vocab_size
    assert tokenizer.bos_id not in ids
    assert set(tokenizer.encode(PROMPT)) & set(ids.tolist())
    assert "random tokens from the run's text" in command("heads", tiny_run)
    shutil.copytree(
        tiny_run / "checkpoints", tmp_path / "alone" / "checkpoints"
    )  # a run that has lost its config
    shutil.copy(tiny_run / "thinker-tokenizer.json", tmp_path / "alone")
    assert "random tokens from the whole vocabulary" in command("heads", tmp_path / "alone")


def test_what_a_prediction_is_made_of(command, tiny_run, loaded, tmp_path):
    model, tokenizer = loaded
    tokens = torch.tensor([tokenizer.bos_id, *tokenizer.encode(PROMPT)])
    given = ["--prompt", PROMPT, "--contrast-token", "e"]
    found = json.loads(
        command("attribute", tiny_run, *given, "--json", "--png", tmp_path / "a.png")
    )
    logits = model(tokens[None])[0, -1]
    (contrast_token,) = tokenizer.encode("e")
    assert found["target"] == logits.argmax().item()
    assert found["logit"] == pytest.approx((logits.max() - logits[contrast_token]).item(), abs=1e-4)
    parts = found["embedding"] + sum(found["mlps"]) + sum(map(sum, found["heads"]))
    assert parts == pytest.approx(found["logit"], abs=1e-4)
    lens = json.loads(command("lens", tiny_run, "--prompt", PROMPT, "--json"))
    assert lens["likeliest"][-1][0]["id"] == logits.argmax().item()
    assert lens["likeliest"][-1][0]["probability"] == pytest.approx(
        logits.softmax(-1).max().item(), abs=1e-5
    )
    assert lens["probability"][-1][-1] == lens["likeliest"][-1][0]["probability"]
    assert lens["top_token"][-1][-1] == lens["likeliest"][-1][0]["token"]
    assert len(lens["tokens"]) == len(lens["top_token"][0]) == min(16, tokens.shape[0])
    assert "embedding" in command("lens", tiny_run, "--prompt", PROMPT)


def test_of_patterns_that_ask_for_tokens_parts_alone_are_told(command, random_model, tmp_path):
    tokenizer = make_tokenizer("byte", [])
    shape = {"vocab_size": tokenizer.vocab_size, "attention": "token(97) | window(3)"}
    checkpoint.save(tmp_path / "m", random_model(**shape), {"step": 0})
    tokenizer.save(tmp_path / "m")
    found = json.loads(
        command(
            "attribute", tmp_path / "m", "--prompt", "abcabc", "--json", "--png", tmp_path / "a.png"
        )
    )
    assert "by_token" not in found
    assert found["embedding"] + sum(found["mlps"]) + sum(map(sum, found["heads"])) == pytest.approx(
        found["logit"], abs=1e-3
    )
    assert "have no gradients" in command("attribute", tmp_path / "m", "--prompt", "abcabc")


def test_attribution_begins_at_the_token_that_begins_texts(command, tiny_run, loaded):
    model, tokenizer = loaded
    found = json.loads(command("attribute", tiny_run, "--prompt", PROMPT, "--json"))
    tokens = reports.Prompt.from_text(model, tokenizer, PROMPT).tokens
    given = attribution.integrated_gradients(
        model, tokens, found["target"], baseline=tokenizer.bos_id
    )
    assert found["by_token"] == pytest.approx(given[0].tolist(), abs=1e-4)
    assert found["by_token"][0] == 0


def test_patching_between_two_prompts(command, tiny_run, loaded, tmp_path):
    model, tokenizer = loaded
    clean, corrupt = "Line 7", "Line 8"
    assert len(tokenizer.encode(clean)) == len(tokenizer.encode(corrupt))
    shown = command(
        "patch",
        tiny_run,
        "--prompt",
        clean,
        "--corrupt",
        corrupt,
        "--png",
        tmp_path / "p.png",
        "--json",
    )
    found = json.loads(shown)
    prompts = [reports.Prompt.from_text(model, tokenizer, text).tokens for text in (clean, corrupt)]
    known = attribution.patch(model, *prompts, found["target"])
    assert found["blocks.0"] == pytest.approx(known["blocks.0"].tolist())
    # The tiny model hardly tells the prompts apart, and the share is a quotient of small differences.
    assert found["blocks.1"][-1] == pytest.approx(1, abs=0.01)
    assert (tmp_path / "p.png").exists()


@pytest.fixture(scope="session")
def four_heads(train_args, tmp_path_factory):
    """A run of as many KV heads as query heads, all of whose checkpoints are kept."""
    folder = tmp_path_factory.mktemp("runs") / "four"
    shape = (
        "model.n_heads=4",
        "model.n_kv_heads=4",
        "train.max_steps=20",
        "train.save_every=5",
        "train.keep_every=5",
    )
    done = run_script(*train_args, f"run.dir={folder}", *shape)
    assert done.returncode == 0, done.stderr
    return folder


def test_scores_over_a_training(command, four_heads, tmp_path):
    found = json.loads(
        command("heads", four_heads, "--over-training", "--json", "--png", tmp_path / "o.png")
    )
    assert found["steps"] == [5, 10, 15, 20]
    for step, row in zip(found["steps"], found["previous"]):
        model, tokenizer = interop.load(four_heads, checkpoint=f"step-{step:08d}")
        random = head_reports.random_repeats(model, used_token_ids(four_heads, tokenizer, tmp_path))
        known = heads.previous_token(model.attention_weights(random)).mean(dim=1)
        assert row == pytest.approx(known.flatten().tolist(), abs=1e-5)
    shown = command("heads", four_heads, "--over-training", "--prompt", PROMPT)
    assert len(shown.strip().split("\n\n")[1].splitlines()) == 5
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("how", ["zero", "mean", "gradient"])
def test_what_heads_are_worth(command, tiny_run, loaded, tmp_path, how):
    text = tmp_path / "text.txt"
    text.write_text("Line 7: the cat sat on the mat and said nothing. " * 40)
    found = json.loads(
        command("heads", tiny_run, "--importance", how, "--text", text, "--texts", 5, "--json")
    )
    model, tokenizer = loaded
    tokens, targets = sample_sequences(model, tokenizer, tiny_run, text, 5, tmp_path)
    if how == "gradient":
        known = heads.importance_by_gradient(model, tokens, targets=targets)
    else:
        known = heads.importance_by_ablation(model, tokens, how, targets=targets)
    assert found["value"] == [pytest.approx(row, abs=1e-5) for row in known.value.tolist()]
    assert found["low"] == [pytest.approx(row, abs=1e-5) for row in known.low.tolist()]
    shown = command(
        "heads", tiny_run, "--importance", how, "--texts", 4, "--png", tmp_path / "i.png"
    )  # its own text
    values = [float(line.split()[2]) for line in shown.strip().split("\n\n")[1].splitlines()[1:]]
    assert len(values) == 4
    assert values == sorted(values, reverse=True)


def test_texts_lie_evenly_and_count_what_follows(loaded, tiny_run, tmp_path):
    model, tokenizer = loaded
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i % 26) for i in range(4000)))
    tokens, targets = sample_sequences(model, tokenizer, tiny_run, text, 4, tmp_path)
    is_read = targets[:, 1:] >= 0  # the last token of the text is a target alone
    assert torch.equal(tokens[:, 1:][is_read], targets[:, :-1][is_read])
    assert tokens.shape == (4, model.config.max_seq_len)
    text.write_text("short")
    with pytest.raises(UserError, match="use a text of at least 16"):
        sample_sequences(model, tokenizer, tiny_run, text, 4, tmp_path)


def test_a_run_that_masks_documents_counts_the_first_of_each_sequence(
    train_args, run_script, tmp_path
):
    """The others would attend to it, as they never did in training."""
    masked = ["data.source=repeated_random", "data.tokenizer=char", "data.path=null",
              "data.max_documents=100", "data.val_fraction=0.5", "data.document_masking=true",
              "data.seq_len=256", "train.max_steps=1"]  # fmt: skip
    done = run_script(*train_args, *masked, f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    model, tokenizer = interop.load(tmp_path / "run")
    tokens, targets = sample_sequences(model, tokenizer, tmp_path / "run", None, 4, tmp_path)
    n_started = (tokens == tokenizer.bos_id).cumsum(dim=1)
    is_first = n_started == n_started[:, :1]
    assert not is_first.all()
    assert (targets[~is_first] == -1).all()
    assert (targets[is_first] >= 0).any(dim=-1).all()


def test_what_is_given_is_no_target(random_model, tiny_run, tmp_path):
    tokenizer, text = make_tokenizer("byte", []), tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 30)
    model = random_model(vocab_size=tokenizer.vocab_size, attention="prefix(5)")
    _, targets = sample_sequences(model, tokenizer, tiny_run, text, 3, tmp_path)
    assert (targets[:, :4] == -1).all()
    assert (targets[:-1, 4:] >= 0).all()  # the last window is padded


def test_two_steps_of_a_run(command, four_heads, tmp_path):
    given = (
        "compare",
        four_heads,
        "--checkpoint",
        "step-00000005",
        "--other-checkpoint",
        "step-00000020",
    )
    found = json.loads(command(*given, "--prompt", PROMPT, "--json", "--png", tmp_path / "c.png"))
    models = [interop.load(four_heads, checkpoint=name) for name in given[3::2]]
    tokens = reports.Prompt.from_text(*models[0], PROMPT).tokens[None]
    weights = [model.attention_weights(tokens) for model, _ in models]
    apart = heads.pairwise_js_divergence(torch.stack([w[1, :, 2] for w in weights], dim=1))[0, 0, 1]
    assert found["js_divergence"][1][2] == pytest.approx(apart.item(), abs=1e-6)
    assert found["distance"][1][0] == pytest.approx(
        heads.mean_distance(weights[1][0, 0]).tolist(), abs=1e-5
    )
    logs = [model(tokens).log_softmax(-1) for model, _ in models]
    known = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item()
    assert found["kl_divergence"] == pytest.approx(known, abs=1e-5)
    itself = command("compare", four_heads, "--other", four_heads)
    assert "= 0.0000 nats per token; same top token at 100.0%" in itself


def test_without_a_tokenizer_what_needs_none(command, tiny_run, loaded, tmp_path):
    shutil.copytree(next((tiny_run / "checkpoints").glob("step-*")), tmp_path / "step-00000040")
    assert "random tokens from the whole vocabulary" in command("heads", tmp_path / "step-00000040")
    with pytest.raises(UserError, match="has no tokenizer, so it cannot read text"):
        command("map", tmp_path / "step-00000040", "--prompt", "ab")


def test_numbers_that_are_none_end_in_one_line(command, loaded, tmp_path):
    model, tokenizer = copy.deepcopy(loaded[0]), loaded[1]
    with torch.no_grad():
        model.blocks[0].mlp.up_proj.weight.fill_(torch.nan)
    checkpoint.save(tmp_path / "nan", model, {"step": 0})
    tokenizer.save(tmp_path / "nan")
    for name in ("lens", "attribute"):
        with pytest.raises(RunError, match="blocks.0.mlp.up_proj.weight has non-finite weights"):
            command(name, tmp_path / "nan", "--prompt", "ab")


@needs("pruning")
def test_a_pruned_model_that_cannot_be_written(command, four_heads):
    with pytest.raises(FileNotFoundError, match="/proc"):
        command("prune", four_heads, "--groups", "0.1", "--texts", "4", "--out", "/proc/pruned")


def test_models_with_other_heads_are_compared_by_what_they_predict(
    command, four_heads, tiny_run, tmp_path
):
    for given in (), ("--prompt", PROMPT):
        found = json.loads(command("compare", four_heads, "--other", tiny_run, *given, "--json"))
        assert np.mean(found["by_position"]) == pytest.approx(found["kl_divergence"], abs=1e-5)
        assert found["kl_divergence"] > 0
        assert "js_divergence" not in found
    assert "[4, 4] and [2, 2] per layer" in command(
        "compare", four_heads, "--other", tiny_run, "--png", tmp_path / "c.png"
    )


@needs("pruning")
def test_pruning_for_good(command, four_heads, tmp_path):
    given = (
        "prune",
        four_heads,
        "--groups",
        "0.1,1.0,1.2",
        "--texts",
        "6",
        "--out",
        tmp_path / "pruned",
    )
    found = json.loads(
        command(*given, "--json", tmp_path / "p.json") and (tmp_path / "p.json").read_text()
    )
    assert found["pruned"] == [[0, 1], [1, 0], [1, 2]]
    left, tokenizer = interop.load(tmp_path / "pruned")
    whole, _ = interop.load(four_heads)
    assert left.config.n_kv_heads_per_layer == [3, 2]
    tokens = torch.tensor([tokenizer.encode(PROMPT)])
    with whole.patch(
        {f"blocks.{at}": "zero" for at in ("0.attention.heads.1", "1.attention.heads.[02]")}
    ):
        torch.testing.assert_close(left(tokens), whole(tokens), rtol=0, atol=1e-4)
    assert (
        found["parameters"][1] == sum(p.numel() for p in left.parameters()) < found["parameters"][0]
    )
    tokens, targets = sample_sequences(whole, tokenizer, four_heads, None, 6, tmp_path)
    known = [heads.losses(model, tokens[3:], targets[3:]).mean().item() for model in (whole, left)]
    assert [found["loss_before"], found["loss_after"]] == pytest.approx(known, abs=1e-5)
    again = command("heads", tmp_path / "pruned")  # it can be looked into as any other
    assert len(again.strip().split("\n\n")[1].splitlines()) == 1 + 5
    shown = command(
        "prune", four_heads, "--count", "3", "--texts", "4", "--png", tmp_path / "p.png"
    )
    assert [line.split()[2] for line in shown.strip().split("\n\n")[1].splitlines()[1:4]] == [
        "pruned"
    ] * 3


def test_what_heads_attend_to_in_tales(command, random_model, tmp_path):
    tokenizer = make_tokenizer(
        "bpe:600", [tales.generate_story(0, index).text for index in range(50)]
    )
    model = random_model(vocab_size=tokenizer.vocab_size, max_seq_len=256)
    checkpoint.save(tmp_path / "model", model, {"step": 0})
    tokenizer.save(tmp_path / "model")
    files = (
        "--png",
        tmp_path / "c.png",
        "--html",
        tmp_path / "c.html",
        "--json",
        tmp_path / "c.json",
    )
    shown = command("content", tmp_path / "model", "--stories", 3, *files)
    assert "3 of tales (outside a run directory" in shown
    assert [row.split()[0] for row in shown.split("\n\n")[1].splitlines()[1:]] == [
        f"{n}.{h}" for n in (0, 1) for h in range(4)
    ]
    found = json.loads((tmp_path / "c.json").read_text())
    stories = content_heads.make_stories(model, tokenizer, 3)
    known = content_heads.score_content(model.attention_weights, stories).relations["next fact"]
    torch.testing.assert_close(
        torch.tensor(found["next fact"]["score"]), known.score, atol=1e-5, rtol=0
    )
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "<table>" in (tmp_path / "c.html").read_text()


def without_head(model, layer, head):
    """A copy of a model in which the output of a head is multiplied by zero."""
    model = copy.deepcopy(model)
    o_proj = model.blocks[layer].attention.o_proj
    with torch.no_grad():
        o_proj.weight.unflatten(1, (2, -1))[:, head] = 0  # (C, H, D)
    return model


@torch.no_grad()
def test_a_map_chooses_the_head_that_the_prediction_needs(command, tiny_run, loaded, tmp_path):
    prompts = [PROMPT, "Line 12: the", "the", "Line 1: the dog and", "7 8 9", "cat cat"]
    chosen = set()
    for prompt in prompts:
        model, tokenizer = loaded
        tokens = reports.Prompt.from_text(model, tokenizer, prompt).tokens[None]
        token = int(model(tokens)[0, -1].argmax())
        expected = {}
        for layer, head in itertools.product((0, 1), (0, 1)):
            changed = without_head(model, layer, head)
            expected[layer, head] = changed(tokens)[0, -1].softmax(0)[token].item()
        best = min(expected, key=expected.get)
        chosen.add(best)
        found = json.loads(command("map", tiny_run, "--prompt", prompt, "--json"))
        assert (found["layer"], found["head"]) == best
        label = reports.token_label(tokenizer, token)
        before = model(tokens)[0, -1].softmax(0)[token].item()
        assert found["chosen"] == (
            f"the likeliest next token ‘{label}’ needs this head most: its probability goes from "
            f"{before:.3g} to {expected[best]:.3g} without it"
        )
        for layer in (0, 1):  # one of the flags limits the choice
            some = command("map", tiny_run, "--prompt", prompt, "--layer", layer, "--json")
            head = min((0, 1), key=lambda head, layer=layer: expected[layer, head])
            assert (json.loads(some)["layer"], json.loads(some)["head"]) == (layer, head)
            assert f" most of those in layer {layer}: its" in json.loads(some)["chosen"]
    assert len(chosen) > 1  # it depends on the prompt
    page = tmp_path / "page.html"
    assert "chosen  the likeliest" in command("map", tiny_run, "--prompt", prompt, "--html", page)
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', page.read_text())[1])
    assert (facts["start"]["layer"], facts["start"]["head"]) == best


@pytest.mark.parametrize(
    ("given", "start"),
    [
        (("map", "--layer", "1", "--head", "1"), {"layer": 1, "head": 1, "view": "attention"}),
        (("attribute", "--position", "3"), {"position": 3, "view": "attribution"}),
        (("lens", "--position", "-2"), {"view": "lens"}),
        (("heads",), {"layer": 0, "head": 0}),
        (("patch", "--corrupt", PROMPT.replace("7", "8")), {"view": "attention"}),
    ],
)
def test_a_page_begins_where_the_command_looked(command, tiny_run, loaded, tmp_path, given, start):
    command(given[0], tiny_run, *given[1:], "--prompt", PROMPT, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', text)[1])
    n_tokens = len(reports.Prompt.from_text(*loaded, PROMPT).tokens)
    assert len(facts["labels"]) == n_tokens
    start = start | ({"position": n_tokens - 2} if "-2" in given else {})
    assert {name: facts["start"][name] for name in start} == start


def test_a_page_of_a_report_alone(command, tiny_run, tmp_path):
    command("heads", tiny_run, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert 'id="facts"' not in text
    assert text.count("<tr>") == 1 + 4


def test_tokens_that_people_can_read(loaded):
    tokenizer = make_tokenizer("byte", [])
    assert [reports.token_label(tokenizer, i) for i in (65, 32, 10, 0xC3, tokenizer.bos_id)] == [
        "A",
        "·",
        "\\n",
        "\\xc3",
        "<|bos|>",
    ]


def test_a_mistake_is_one_line_and_status_2(run_script, tiny_run):
    done = run_script(INSPECT, "map", tiny_run)
    assert (done.returncode, done.stderr) == (
        2,
        "error: the following arguments are required: --prompt (--help lists all flags)\n",
    )
    without = run_script(INSPECT)
    assert without.returncode == 2
    assert without.stderr.startswith(
        "error: the following arguments are required: COMMAND; use one"
    )
    assert "explain, map, heads" in without.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lens", "--prompt", "ab", "--layer", "1"], "unrecognized arguments: --layer 1"),
        (["map", "--prompt", "ab", "--layer", "2"], "--layer is 2; use 0 to 1"),
        (["map", "--prompt", "ab", "--head", "-1"], "--head is -1"),
        (["explain", "--prompt", "ab", "--query", "99"], "--query is 99"),
        (["explain"], "explain needs a model with --prompt"),
        (["map", "--prompt", ""], "the prompt has 1 token.s. including BOS; use 2 to"),
        (["map", "--prompt", "x" * 999], "the prompt has"),
        (
            ["attribute", "--prompt", "ab", "--target", "xyzw,xyzw"],
            "tokens \\(.*\\); give a single token",
        ),
        (["attribute", "--prompt", "ab", "--target", "a", "--contrast-token", "a"], "are both 'a'"),
        (["patch", "--prompt", "ab"], "--corrupt"),
        (["patch", "--prompt", "ab", "--corrupt", "x7y7z"], "use prompts of equal length"),
        (["lens", "--prompt", "ab", "--count", "1"], "unrecognized arguments: --count 1"),
        (
            ["heads", "--json", "nowhere/x.json"],
            "cannot write nowhere/x.json: its folder does not exist",
        ),
        (
            ["heads", "--prompt", "ab", "--importance", "zero"],
            "--prompt has no effect with --importance",
        ),
        (["heads", "--texts", "4"], "--text and --texts have no effect without --importance"),
        (["heads", "--importance", "zero", "--texts", "1"], "--texts is 1; use at least 2"),
        (
            ["heads", "--importance", "zero", "--over-training"],
            "--over-training: not allowed with argument --importance",
        ),
        (
            ["heads", "--over-training", "--checkpoint", "best"],
            "--checkpoint has no effect with --over-training",
        ),
        (
            ["content"],
            "content needs a model trained on tales, and .* was trained on data.source=text",
        ),
        (["content", "--prompt", "ab"], "unrecognized arguments: --prompt ab"),
        (["compare"], "compare needs a second model"),
        (["compare", "--other-checkpoint", "step-7"], "has no checkpoint step-7"),
        (["compare", "--other", "nowhere"], "nowhere does not exist"),
        (["prune"], "one of the arguments --count --groups is required"),
        (
            ["prune", "--count", "1", "--groups", "0.0"],
            "argument --groups: not allowed with argument --count",
        ),
        (
            ["prune", "--groups", "0-1"],
            "--groups 0-1 is not a list of LAYER.KV_HEAD, such as 0.1,2.3",
        ),
        (["prune", "--groups", "0.0,1.0,00.0"], "--groups 0.0,1.0,00.0 lists a head twice"),
        *if_installed(
            "pruning",
            (["prune", "--groups", "0.0"], "layer 0 would have no heads left"),
            (
                ["prune", "--count", "1"],
                "cannot remove 1 KV heads, since every layer keeps at least one; no layer has more",
            ),
            (["prune", "--count", "1", "--texts", "2"], "2 texts are too few"),
        ),
        (["map", "--prompt", "ab", "--json", "nowhere/x"], "its folder does not exist"),
        (["prune", "--count", "1", "--out", "."], "--out . already exists; give a new folder"),
        (["heads", "--png", "."], "cannot write .: it is a folder"),
        (
            ["heads", "--png", "same", "--html", "same", "--json", "b"],
            "two outputs go to the same file: same, same, b",
        ),
        (["heads", "--png", "x.svg"], "cannot write plot x.svg: plots are PNG files"),
        (["heads", "--json", "/nowhere/x"], "cannot write /nowhere/x: its folder"),
        (["map", "--prompt", "ab", "--png", "nowhere/x.png"], "cannot write nowhere/x.png"),
    ],
)
def test_mistakes(command, tiny_run, arguments, message):
    with pytest.raises(UserError, match=message):
        command(arguments[0], tiny_run, *arguments[1:])
