"""Minimal pairs are scored as transformers and lm-eval score them, and read from files."""

import json
import sys

import pytest
import torch
from conftest import random_model

from thinker import interop
from thinker.commands import eval_command
from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.evaluation.wilson import wilson_interval
from thinker.features.eval_suites.accuracy import share_of_items
from thinker.features.eval_suites.minimal_pairs import (
    MinimalPair,
    PairScores,
    read_pairs,
    score_pairs,
    score_texts,
)
from thinker.features.eval_suites.tales_pairs import tales_pairs
from thinker.interop.huggingface import save_pretrained
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = tales_pairs(2)


@pytest.fixture(scope="module")
def model_and_tokenizer():
    """With random weights."""
    texts = [pair.good for pair in PAIRS]
    tokenizer = make_tokenizer("bpe:400", texts)
    return random_model(vocab_size=tokenizer.vocab_size, max_seq_len=400), tokenizer


@pytest.fixture(scope="module")
def exported(model_and_tokenizer, tmp_path_factory):
    model, tokenizer = model_and_tokenizer
    folder = tmp_path_factory.mktemp("hf")
    save_pretrained(model, tokenizer, folder)
    tokenizer_conversion.write(tokenizer, folder, 400)
    return folder


def test_a_text_may_have_separators_of_lines(tmp_path):
    """JSON allows them in a string; only a newline ends a line of the file."""
    path = tmp_path / "pairs.jsonl"
    texts = {"good": "Ada\u2028ran\x85home.\u2029", "bad": "Ada ran tree."}
    path.write_text(json.dumps(texts, ensure_ascii=False) + "\r\n", encoding="utf-8")
    (pair,) = read_pairs(path)
    assert (pair.good, pair.bad) == (texts["good"], texts["bad"])


def test_scores_equal_those_of_transformers(model_and_tokenizer, exported):
    """One sentence at a time, without padding, from the exported folder alone."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    encode = transformers.AutoTokenizer.from_pretrained(exported)
    scores = score_pairs(*model_and_tokenizer, PAIRS)
    for ours, texts in ((scores.good, 0), (scores.bad, 1)):
        for pair, nats in zip(PAIRS, ours.tolist(), strict=True):
            ids = [encode.bos_token_id, *encode(pair[texts], add_special_tokens=False).input_ids]
            tokens = torch.tensor([ids])
            with torch.no_grad():
                # The mean loss over the tokens after the first.
                loss = theirs(tokens, labels=tokens).loss
            assert nats == pytest.approx(-loss.item() * (len(ids) - 1), abs=2e-3)
            with torch.no_grad():
                logprobs = theirs(tokens).logits[0, :-1].log_softmax(-1)
            known = logprobs.gather(1, tokens[0, 1:, None]).double().sum().item()
            assert nats == pytest.approx(known, abs=1e-4)


TASK = """
task: local_pairs
dataset_path: json
dataset_kwargs: {{data_files: {{train: {data}}}}}
validation_split: train
output_type: multiple_choice
doc_to_text: ""
doc_to_target: 0
doc_to_choice: "{{{{[sentence_good, sentence_bad]}}}}"
num_fewshot: 0
{more}
metric_list: [{{metric: acc}}]
"""


@pytest.mark.parametrize("space", ["", " "])
def test_accuracy_equals_that_of_lm_eval(model_and_tokenizer, space, tmp_path):
    """By BLiMP's task. It puts a space before each sentence, unless a task has no delimiter."""
    pytest.importorskip("lm_eval")
    from thinker.evaluation.lm_eval_harness import run_tasks

    data = tmp_path / "pairs.jsonl"
    rows = []
    for pair in PAIRS:
        rows.append({"sentence_good": pair.good, "sentence_bad": pair.bad, "UID": "x"})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = f'target_delimiter: "{space}"'
    (tmp_path / "local_pairs.yaml").write_text(TASK.format(data=data, more=more))
    model, tokenizer = model_and_tokenizer
    known = run_tasks(model, tokenizer, ["local_pairs"], include=tmp_path)["local_pairs"]
    pairs = read_pairs(data)
    assert [pair.phenomenon for pair in pairs] == ["x"] * len(PAIRS)
    spaced = [MinimalPair(space + pair.good, space + pair.bad, "x") for pair in pairs]
    (ours,) = score_pairs(model, tokenizer, spaced).accuracies()
    assert 0 < ours.accuracy < 1
    assert (ours.accuracy, ours.n_items) == (pytest.approx(known["acc"]), known["questions"])


def test_one_batch_or_many_and_any_order(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    texts = [pair.good for pair in PAIRS]
    model.train()
    nats = score_texts(model, tokenizer, texts)
    assert model.training
    model.eval()
    for text, known in list(zip(texts, nats.tolist()))[::7]:
        assert score_texts(model, tokenizer, [text]).item() == pytest.approx(known, abs=1e-4)
    assert score_texts(model, tokenizer, texts[::-1]).tolist() == pytest.approx(
        nats.tolist()[::-1], abs=1e-4
    )


def test_ties_count_half():
    pairs = [MinimalPair("a", "b", "x"), MinimalPair("c", "d", "y"), MinimalPair("e", "f", "y")]
    good, bad = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -1.0, -4.0])
    x, y, everything = PairScores(pairs, good, bad).accuracies()
    assert (x.name, x.accuracy, x.n_items) == ("x", 0.5, 1)
    assert (y.name, y.accuracy, y.n_items) == ("y", 0.5, 2)
    assert (everything.name, everything.accuracy) == ("all phenomena", 0.5)
    assert {row.chance for row in (x, y, everything)} == {0.5}


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize(("n_right", "n"), [(0, 5), (1, 3), (50, 100), (99, 100), (7, 7)])
def test_wilson_interval_equals_scipys(n_right, n, confidence):
    from scipy.stats import binomtest

    known = binomtest(n_right, n).proportion_ci(confidence, method="wilson")
    assert wilson_interval(n_right / n, n, confidence) == pytest.approx((known.low, known.high))
    row = share_of_items("x", n_right, n, 0.5, confidence)
    assert (row.accuracy, row.low) == (n_right / n, pytest.approx(known.low))


def test_files_of_pairs(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"good": "a b", "bad": "b a", "phenomenon": "order"}\n\n'
                    '{"good": "c", "bad": "d"}\n')  # fmt: skip
    assert read_pairs(file) == [MinimalPair("a b", "b a", "order"), MinimalPair("c", "d", "mine")]
    blimp = {"sentence_good": "e", "sentence_bad": "f", "UID": "wh_island", "pairID": "0"}
    (tmp_path / "wh_island.jsonl").write_text(json.dumps(blimp) + "\n")
    assert read_pairs(tmp_path)[-1] == MinimalPair("e", "f", "wh_island")
    assert len(read_pairs(tmp_path)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no pairs"),
        ("no json", "line 1: not a JSON object"),
        ("[1]", "line 1: not a JSON object"),
        ('{"good": "a"}', "line 1: bad is not a text"),
        ('{"good": "", "bad": "b"}', "line 1: good is not a text"),
        ('{"good": "a", "bad": "b", "phenomenon": 3}', "phenomenon is not a text"),
        ('{"good": "a", "bad": "b"}\n{"good": "a", "bad": "a"}', "line 2: both sentences are equ"),
    ],
)
def test_mistakes_in_files(tmp_path, text, message):
    file = tmp_path / "pairs.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_pairs(file)
    with pytest.raises(UserError, match="has no .*jsonl file"):
        read_pairs(tmp_path.parent)


def test_sentences_that_a_model_cannot_score(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    long = MinimalPair("ab " * 400, "ba " * 400, "x")
    with pytest.raises(UserError, match="but the model reads 400"):
        score_pairs(model, tokenizer, [long])
    bidirectional = random_model(vocab_size=tokenizer.vocab_size, attention="prefix(4)")
    with pytest.raises(UserError, match="bidirectional prefix"):
        score_pairs(bidirectional, tokenizer, PAIRS[:1])


@pytest.fixture
def run(model_and_tokenizer, tmp_path, monkeypatch, capsys):
    """`thinker eval` on the model, in this process; its output."""
    folder = tmp_path / "model"
    interop.save(*model_and_tokenizer, folder)

    def evaluate(*arguments):
        line = ["thinker eval", str(folder), "--device", "cpu", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", line)
        assert eval_command.main() == 0
        return capsys.readouterr().out

    return evaluate


def test_the_command(run, tmp_path):
    output = run("--suite", "tales-pairs", "--limit", 2)
    assert "suite  tales-pairs" in output
    assert "version  1" in output
    rows = [line for line in output.splitlines() if line.startswith(("recall_", "all phen"))]
    assert len(rows) == 12
    assert rows[-1].split()[-2:] == ["0.500", "32"]
    values = json.loads(run("--suite", "tales-pairs", "--limit", 2, "--json"))
    assert (values["suite"], values["limit"], values["confidence"]) == ("tales-pairs", 2, 0.95)
    assert len(values["items"]) == 32
    n_right = sum(item["good_nats"] > item["bad_nats"] for item in values["items"])
    assert values["accuracies"][-1]["accuracy"] == pytest.approx(n_right / 32)
    file = tmp_path / "pairs.jsonl"
    rows = [{**item} for item in values["items"]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert json.loads(run("--pairs", file, "--json"))["accuracies"] == values["accuracies"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--suite", "tales-pairs", "--pairs", "x"], "use one of them"),
        (["--suite", "tales-pairs", "--shots", "3"], "--shots"),
        (["--pairs", "gone.jsonl", "--tasks", "hellaswag"], "--tasks"),
        (["--pairs", "gone.jsonl"], "does not exist"),
        (["--suite", "tales"], "tales-pairs"),
        (["--suite", "tales-pairs", "--confidence", "2"], "--confidence"),
    ],
)
def test_flags_without_effect(run, flags, message):
    with pytest.raises(UserError, match=message):
        run(*flags)
