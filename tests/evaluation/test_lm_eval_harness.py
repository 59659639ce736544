"""EleutherAI's harness gives a Thinker what it gives the same model through its own adapter for
transformers, and what transformers computes token by token."""

import json
import math

import pytest
import torch
from conftest import random_model

from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator
from thinker.interop.huggingface import save_pretrained
from thinker.runtime.errors import UserError

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
from thinker.evaluation.lm_eval_harness import ThinkerLM, run_tasks, sampling_params

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLE = (
    "Once upon a time there was a naïve cat. It sat on the mat, and the dog sat on the cat. " * 20
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same model through both adapters."""
    from lm_eval.models.huggingface import HFLM

    tokenizer = make_tokenizer("bpe:300", [SAMPLE])
    model = random_model(vocab_size=tokenizer.vocab_size, max_seq_len=48)
    folder = tmp_path_factory.mktemp("hf")
    save_pretrained(model, tokenizer, folder)
    tokenizer_conversion.write(tokenizer, folder, 48)
    hf = HFLM(
        str(folder), device="cpu", dtype="float32", batch_size=4, max_length=48, add_bos_token=True
    )
    return ThinkerLM(model, tokenizer, batch_size=3), hf


def requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [
        Instance(kind, {}, arguments_of_request, index)
        for index, arguments_of_request in enumerate(arguments)
    ]


def test_tokens_equal_the_hf_adapters(models):
    ours, hf = models
    for text in ["Once upon", "", " a", "<|bos|>cat", "naïve  "]:
        assert ours.tok_encode(text) == hf.tok_encode(text)
        assert ours.tok_encode(text, add_special_tokens=False) == hf.tok_encode(
            text, add_special_tokens=False
        )
    assert (ours.prefix_token_id, ours.eot_token_id) == (hf.prefix_token_id, hf.eot_token_id)


def test_loglikelihood(models):
    ours, hf = models
    pairs = [("Once upon a", " time"), ("Once upon a ", "time there was"), ("", "cat"),
             ("The dog", " sat on the mat, and"), ("The", " cat sat" * 9), ("a", "b")]  # fmt: skip
    our_results = ours.loglikelihood(requests("loglikelihood", pairs))
    hf_results = hf.loglikelihood(requests("loglikelihood", pairs))
    for (nats, greedy), (known, known_greedy) in zip(our_results, hf_results, strict=True):
        assert nats == pytest.approx(known, abs=1e-4)
        assert greedy == known_greedy


@torch.no_grad()
def nats_and_greedy(hf, ids, start, max_length=48):
    """ln P of ids[start:], one token at a time, and whether each is the likeliest.

    The context of a token is all before it, or else at least the last 7/8 of max_length tokens.
    """
    stride = max_length // 8
    nats = 0.0
    is_greedy = True
    for i in range(start, len(ids)):
        first = stride * math.ceil(max(0, i - max_length) / stride)
        assert max_length - stride < i - first <= max_length or first == 0
        logits = hf.model(torch.tensor([ids[first:i]])).logits[0, -1].float()
        nats += logits.log_softmax(-1)[ids[i]].item()
        is_greedy &= int(logits.argmax()) == ids[i]
    return nats, is_greedy


SPANS = [("sat on th", "e mat"), ("Onc", "e"), ("The do", "g sat"), ("Once up", "on a time")]


def test_a_token_that_spans_context_and_continuation(models):
    """ln P(whole) - ln P(context)."""
    ours, hf = models
    results = ours.loglikelihood(requests("loglikelihood", SPANS))
    n_spans = 0
    for (context, continuation), (nats, is_greedy) in zip(SPANS, results, strict=True):
        before, whole = hf.tok_encode(context), hf.tok_encode(context + continuation)
        n_spans += whole[: len(before)] != before
        expected = nats_and_greedy(hf, whole, 1)[0] - nats_and_greedy(hf, before, 1)[0]
        assert nats == pytest.approx(expected, abs=1e-4)
        n_shared = next(i for i, id in enumerate(whole) if before[i : i + 1] != [id])
        assert is_greedy == nats_and_greedy(hf, whole, n_shared)[1]
    assert n_spans >= 3


def test_choices_that_span_rank_as_whole_texts(models):
    ours, hf = models
    context = "The cat sat on th"
    choices = ["e mat", "e", "at", "ere was", "x", "e dog sat"]
    results = ours.loglikelihood(requests("loglikelihood", [(context, c) for c in choices]))
    wholes = [nats_and_greedy(hf, hf.tok_encode(context + c), 1)[0] for c in choices]
    order = sorted(range(len(choices)), key=lambda i: wholes[i])
    assert sorted(range(len(choices)), key=lambda i: results[i][0]) == order


@torch.no_grad()
def test_is_greedy_of_a_token_that_spans(models):
    """The likeliest token after a text, cut in its middle."""
    ours, hf = models
    n_found = 0
    for n in range(1, 120):
        text = SAMPLE[:n]
        ids = hf.tok_encode(text)[-40:]
        logits = hf.model(torch.tensor([hf.tok_encode(text)])).logits[0, -1]
        likeliest = hf.tokenizer.decode(int(logits.argmax()))
        whole = text + likeliest
        is_one_token = hf.tok_encode(whole)[-41:-1] == ids
        if n > 40 or len(likeliest) < 2 or not is_one_token:
            continue
        for i in range(1, len(likeliest)):
            pair = (text + likeliest[:i], likeliest[i:])
            if pair[0] != pair[0].rstrip():
                continue
            n_found += hf.tok_encode(pair[0])[:-1] != hf.tok_encode(whole)[:-1]
            assert ours.loglikelihood(requests("loglikelihood", [pair]))[0][1] is True
            other = (pair[0], pair[1] + "zq")
            assert ours.loglikelihood(requests("loglikelihood", [other]))[0][1] is False
    assert n_found


def test_a_long_continuation_is_scored_whole(models):
    """Each prefix of it is likelier, by what its own tokens cost."""
    ours, hf = models
    words = SAMPLE.split(" ")[:150]
    pairs = [("The", "".join(" " + word for word in words[:n])) for n in range(10, 150, 10)]
    pairs.append(("x" * 70, " and the cat"))
    pairs.append((SAMPLE[:600].rsplit(" ", 1)[0], " and the cat" * 20))
    lengths = [len(hf.tok_encode("".join(pair))) for pair in pairs]
    assert lengths[0] < 48 < lengths[6]
    assert lengths[13] > 140
    results = ours.loglikelihood(requests("loglikelihood", pairs))
    for (context, continuation), (nats, _) in zip(pairs, results, strict=True):
        start = len(hf.tok_encode(context))
        expected, _ = nats_and_greedy(hf, hf.tok_encode(context + continuation), start)
        assert nats == pytest.approx(expected, abs=1e-3)
    nats = [result[0] for result in results[:-2]]
    assert nats == sorted(nats, reverse=True)


def test_texts_without_context_score_as_score_text(models):
    """Also with ids that only pad the model's vocabulary."""
    tokenizer = models[0].tokenizer
    model = random_model(vocab_size=tokenizer.vocab_size + 30, max_seq_len=48)
    ours = ThinkerLM(model, tokenizer)
    for text in ["cat", " The dog sat on the mat", SAMPLE[:60]]:
        expected = -Generator(model, tokenizer).score(text).nats
        scored = ours.loglikelihood(requests("loglikelihood", [("", text)]))[0][0]
        rolled = ours.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]))[0]
        assert scored == pytest.approx(expected, abs=1e-4)
        assert rolled == pytest.approx(expected, abs=1e-4)


def test_contexts_and_continuations_without_tokens(models):
    ours, hf = models
    empty = [("The cat", ""), ("The cat ", ""), ("", "")]
    assert ours.loglikelihood(requests("loglikelihood", empty)) == [(0.0, True)] * 3
    doubled = ours.loglikelihood(requests("loglikelihood", [("", "<|bos|>")]))[0][0]
    bos = hf.prefix_token_id
    assert doubled == pytest.approx(nats_and_greedy(hf, [bos, bos], 1)[0], abs=1e-4)
    scored = ours.loglikelihood(requests("loglikelihood", [("  ", "cat"), ("", "  cat")]))
    assert scored[0] == scored[1]
    expected = nats_and_greedy(hf, hf.tok_encode("  cat"), 1)
    assert scored[0][0] == pytest.approx(expected[0], abs=1e-4)


def test_without_a_bos_token_a_text_that_begins_in_the_continuation_follows_the_prefix_token():
    base = make_tokenizer("bpe:300", [SAMPLE])
    tokens = [base.token_bytes(i) or None for i in range(base.vocab_size)]
    named = {"<|bos|>": base.bos_id}
    tokenizer = Tokenizer("hf", tokens, named, pattern=base.pattern, add_bos=False)
    model = random_model(vocab_size=tokenizer.vocab_size, max_seq_len=48)
    ours = ThinkerLM(model, tokenizer)
    whole, context = tokenizer.encode(" the"), tokenizer.encode(" t")
    assert len(whole) == len(context) == 1
    assert whole != context
    pairs = [(" t", "he"), ("  ", "the")]
    spanning, blank = ours.loglikelihood(requests("loglikelihood", pairs))
    logprobs = model(torch.tensor([[tokenizer.bos_id]]))[0, -1].log_softmax(-1)
    expected = (logprobs[whole[0]] - logprobs[context[0]]).item()
    assert spanning[0] == pytest.approx(expected, abs=1e-4)
    text = ours.loglikelihood(requests("loglikelihood", [("", "  the")]))[0]
    assert blank == pytest.approx(text, abs=1e-4)


def test_a_continuation_that_the_tokenizer_drops_is_an_error(tmp_path):
    folder = tmp_path
    tokenizer_conversion.write(make_tokenizer("byte", []), folder, 48)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "~"}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = tokenizer_conversion.read(folder)
    ours = ThinkerLM(random_model(vocab_size=tokenizer.vocab_size), tokenizer)
    with pytest.raises(UserError, match="no token to the continuation '~'"):
        ours.loglikelihood(requests("loglikelihood", [("a", "~")]))


def test_tokens_of_a_bidirectional_prefix_cannot_be_scored(models):
    tokenizer = models[0].tokenizer
    model = random_model(vocab_size=tokenizer.vocab_size, attention="prefix(4)")
    ours = ThinkerLM(model, tokenizer)
    message = "bidirectional prefix of 4 tokens"
    with pytest.raises(UserError, match=message):
        ours.loglikelihood(requests("loglikelihood", [("", "The dog sat on the mat")]))
    with pytest.raises(UserError, match=message):
        ours.loglikelihood_rolling(requests("loglikelihood_rolling", [("The dog sat",)]))
    pair = ("The dog sat on", " the mat")
    ids = ours.tok_encode("".join(pair))
    start = len(ours.tok_encode(pair[0]))
    logprobs = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    expected = sum(logprobs[i - 1, ids[i]].item() for i in range(start, len(ids)))
    scored = ours.loglikelihood(requests("loglikelihood", [pair]))[0][0]
    assert scored == pytest.approx(expected, abs=1e-4)


def test_loglikelihood_rolling(models):
    """The harness's own adapter without a BOS token of its own: with one, it counts ln P of a BOS
    token after a BOS token."""
    ours, hf = models
    texts = [(SAMPLE[:400],), ("cat",), (SAMPLE[:60],)]
    our_results = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    hf.add_bos_token = False
    hf_results = hf.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    hf.add_bos_token = True
    assert our_results == pytest.approx(hf_results, abs=1e-3)
    known, _ = nats_and_greedy(hf, hf.tok_encode("cat"), 1)
    assert our_results[1] == pytest.approx(known, abs=1e-4)


def test_generate_until(models):
    ours, hf = models
    greedy = [("Once upon a", {"until": ["zzz"], "max_gen_toks": 20}),
              ("The dog sat", {"until": [" "], "max_gen_toks": 12}),
              (SAMPLE[:300], {"until": [], "max_gen_toks": 10, "temperature": 0.0})]  # fmt: skip
    our_results = ours.generate_until(requests("generate_until", greedy))
    assert our_results == hf.generate_until(requests("generate_until", greedy))
    assert any(our_results)


def test_sampling_params_of_a_task():
    params = sampling_params(
        {"until": "\n", "max_gen_toks": 7, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    )
    assert (params.stop, params.max_new_tokens, params.temperature, params.top_p) == (
        ("\n",),
        7,
        0.5,
        0.9,
    )
    assert (
        sampling_params({"until": ["a", ""], "do_sample": False, "temperature": 0.7}).temperature
        == 0
    )
    with pytest.raises(UserError, match="num_beams"):
        sampling_params({"until": [], "num_beams": 4})


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""


def test_tasks_on_local_files(models, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # no git repository
    ours = models[0]
    rows = [{"question": f"The {a} sat on the", "answer": i % 2, "choices": [" mat", " dog"],
             "text": SAMPLE[i * 9 :][:120]}
            for i, a in enumerate(["cat", "dog", "mat", "time", "cat and the dog"])]  # fmt: skip
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    choice = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'
    rolling = "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]"
    for name, kind, more in [
        ("two_words", "multiple_choice", choice),
        ("stories", "loglikelihood_rolling", rolling),
    ]:
        text = TASK.format(name=name, kind=kind, data=data, more=more)
        if kind == "loglikelihood_rolling":
            text = text.replace("{{question}}", "").replace("{{answer}}", "{{text}}")
        (tmp_path / f"{name}.yaml").write_text(text)
    results = run_tasks(ours.model, ours.tokenizer, ["two_words", "stories"], include=tmp_path)
    assert results.keys() == {"two_words", "stories"}
    assert "git" not in capfd.readouterr().err
    predictions = []
    for row in rows:
        scores = ours.loglikelihood(
            requests("x", [(row["question"], choice) for choice in row["choices"]])
        )
        predictions.append(int(scores[1] > scores[0]))
    assert results["two_words"]["acc"] == sum(
        p == row["answer"] for p, row in zip(predictions, rows)
    ) / len(rows)
    nats = -sum(ours.loglikelihood_rolling(requests("x", [(row["text"],) for row in rows])))
    n_bytes = sum(len(row["text"].encode()) for row in rows)
    assert results["stories"]["bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2))
    assert "acc_stderr" in results["two_words"]
    limited = run_tasks(
        ours.model, ours.tokenizer, ["two_words"], include=tmp_path, limit=2, n_shots=0
    )
    assert limited["two_words"]["acc"] in (0.0, 0.5, 1.0)
    assert limited["two_words"]["questions"] == 2
    assert results["two_words"].keys() == {"acc", "acc_stderr", "questions"}
    with pytest.raises(UserError, match="the harness cannot run two_words: "):
        run_tasks(ours.model, ours.tokenizer, ["two_words"], include=tmp_path, n_shots=99)
    data.rename(tmp_path / "gone.jsonl")
    with pytest.raises(UserError, match="the harness cannot run stories: "):
        run_tasks(ours.model, ours.tokenizer, ["stories"], include=tmp_path)


@pytest.mark.stress  # to know all of its tasks the harness reads thousands of files
def test_unknown_task_is_rejected(models):
    with pytest.raises(UserError, match="has no task hellaswga; did you mean hellaswag"):
        run_tasks(models[0].model, models[0].tokenizer, ["hellaswga"])


def test_the_model_has_no_gradients(models):
    assert not any(parameter.grad is not None for parameter in models[0].model.parameters())
    assert isinstance(models[0].model.lm_head.weight, torch.nn.Parameter)


def test_prefix_and_eot_tokens():
    """As in the harness's own adapter: what begins a text by the tokenizer's own file, or else what
    ends one there."""
    base = make_tokenizer("byte", [])
    tokens = [base.token_bytes(i) for i in range(256)] + [None, None]
    model = random_model(vocab_size=258)
    for named, known in [
        ({"bos_token": "<s>", "eos_token": "</s>"}, (256, 257)),
        ({"eos_token": "</s>"}, (257, 257)),
    ]:
        tokenizer = Tokenizer(
            "hf", tokens, {"<s>": 256, "</s>": 257}, "<s>", eos_ids=[256], special_tokens_map=named
        )
        adapter = ThinkerLM(model, tokenizer)
        assert (adapter.prefix_token_id, adapter.eot_token_id) == known
