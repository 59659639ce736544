"""EleutherAI's harness gives a Thinker what it gives the same model through hf_results own adapter
for transformers."""

import json
import math

import pytest
import torch
from conftest import random_model

from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
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
             ("The dog", " sat on the mat, and"),
             ("x" * 70, " and the cat"), ("The", SAMPLE[:150]), ("a", "b")]  # fmt: skip
    our_results = ours.loglikelihood(requests("loglikelihood", pairs))
    hf_results = hf.loglikelihood(requests("loglikelihood", pairs))
    for (nats, greedy), (known, known_greedy) in zip(our_results, hf_results, strict=True):
        assert nats == pytest.approx(known, abs=1e-4)
        assert greedy == known_greedy
    likeliest = ours.generate_until(
        requests("generate_until", [("The dog", {"until": [], "max_gen_toks": 3})])
    )
    assert ours.loglikelihood(requests("loglikelihood", [("The dog", likeliest[0])]))[0][1] in (
        True,
        False,
    )


def test_loglikelihood_rolling(models):
    ours, hf = models
    texts = [(SAMPLE[:400],), ("cat",), (SAMPLE[:60],)]
    our_results = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    hf_results = hf.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    assert our_results == pytest.approx(hf_results, abs=1e-3)


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
