"""The API through lm-eval's local-completions: log-likelihoods and generation by token ids."""

import pytest
import torch
from conftest import run_script

from thinker.generation import Generator, SamplingParams
from thinker.interop import load

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity", reason="needs lm_eval[api]")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS = [
    ("Line 7: the", " cat sat on the mat"),
    ("Line 7: the", " dog"),
    ("é漢", " mat number 3."),
    ("", "Line 3"),
    ("the cat sat " * 5 + "the cat sat", " on"),
]
TEXTS = ["Line 7: the cat sat on the mat number 3.\n", "é漢", "the cat " * 60]


@pytest.fixture(scope="module")
def exported(served_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "served"
    done = run_script("scripts/export_hf.py", served_run, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(params=[1, 4], ids=["one by one", "batches of 4"])
def harness(request, server, exported):
    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(exported),
        model="served",
        batch_size=request.param,
        max_length=160,
    )


@pytest.fixture(scope="module")
def plain(served_run):
    """A function to ln P of each token after the BOS token, and the likeliest tokens there."""
    model, tokenizer = load(served_run)

    @torch.no_grad()
    def score(tokens):
        logits = model(torch.tensor([[tokenizer.bos_id, *tokens]]))[0, :-1, : tokenizer.vocab_size]
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return chosen, logprobs.argmax(-1)

    return tokenizer, score


def ask(kind, *arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=pair, idx=index)
        for index, pair in enumerate(arguments)
    ]


def test_loglikelihoods(harness, plain):
    tokenizer, score = plain
    # Contexts whose likeliest next token is a text that is tokenized alike after them.
    pairs = list(PAIRS)
    for context in ("Line 7:", "the cat", "Line 3: mat", "n", "e", "the ", "cat sat on"):
        tokens = tokenizer.encode(context)
        best = int(score([*tokens, 0])[1][-1])
        text = tokenizer.decode([best])
        if tokenizer.encode(context + text) == [*tokens, best] and not context.endswith(" "):
            pairs.append((context, text))
    assert len(pairs) > len(PAIRS)
    got = harness.loglikelihood(ask("loglikelihood", *pairs))
    assert any(is_greedy for _, is_greedy in got)
    for (context, continuation), (value, is_greedy) in zip(pairs, got, strict=True):
        tokens = tokenizer.encode(context + continuation)
        n_context = len(tokenizer.encode(context))
        chosen, best = score(tokens)
        assert value == pytest.approx(chosen[n_context:].sum().item(), abs=1e-4)
        assert is_greedy == (best[n_context:].tolist() == tokens[n_context:])


def test_rolling_loglikelihoods(harness, plain):
    tokenizer, score = plain
    got = harness.loglikelihood_rolling(ask("loglikelihood_rolling", *[(text,) for text in TEXTS]))
    for text, value in zip(TEXTS, got, strict=True):
        tokens = tokenizer.encode(text)
        if len(tokens) < 158:  # else lm-eval scores windows
            assert value == pytest.approx(score(tokens)[0].sum().item(), abs=1e-4)
        assert value < 0


def test_generation_without_bos_tokens(harness, served_run):
    """lm-eval tokenizes prompts without special tokens."""
    generator = Generator(*load(served_run), slide=True)
    options = {"until": ["\n"], "max_gen_toks": 20, "do_sample": False}
    prompts = ["Line 7: the", "the cat"]
    got = harness.generate_until(ask("generate_until", *[(one, options) for one in prompts]))
    params = SamplingParams(20, 0.0, stop=("\n",))
    assert got == [generator.generate(prompt, params)[0].text for prompt in prompts]
