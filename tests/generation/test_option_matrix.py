"""Every pair of sampling options together: the plain model's text and numbers, or refused in one
line."""

import itertools

import pytest
import torch
from conftest import random_model
from installed import if_installed
from pairwise import pairwise

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.native.compiler import has_compiler
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = make_tokenizer("byte", [])
CONTEXT, N_NEW = 32, 40
OPTIONS = {
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "bits": [None, 8, 4],
    "cache_bits": [None, 8, 4],
    "compile": [False, True],
    "memory": [
        {},
        {"slide": True},
        {"window": 10},
        {"window": 9, "sinks": 3},
        {"use_cache": False},
    ],
    "speculate": [0, *if_installed("speculation", 3)],
    "n_samples": [1, 3],
    "heads": [{"n_kv_heads": 4}, {"n_kv_heads": 2}, {"n_kv_heads": 1}],  # MHA, GQA, MQA
    "sampling": [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9}],
    "prompts": ["equal", "unequal"],
}
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.4}  # of a log-probability
CASES = pairwise(OPTIONS)
# Every combination of the options that choose kernels.
FORMS = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, 8), (torch.float32, 4)]
MODES = [
    ({}, 0),
    ({"window": 10}, 0),
    *if_installed("speculation", ({}, 3)),
]  # plain, window, speculation
KERNEL_CASES = [
    {"dtype": dtype, "bits": bits, "cache_bits": None, "compile": compile, "memory": memory, "speculate": speculate,
     "n_samples": n_samples, "heads": {"n_kv_heads": n_kv_heads}, "sampling": {"temperature": 0.8}, "prompts": prompts}
    for dtype, bits in FORMS for compile in (False, True) for memory, speculate in MODES
    for n_samples, prompts in ((1, "equal"), (2, "unequal")) for n_kv_heads in (4, 2, 1)
]  # fmt: skip


def name_of(case):
    memory = "-".join(f"{name}{value}" for name, value in case["memory"].items()) or "cache"
    flags = "-".join(
        f"{name}{case[name]}" for name in ("bits", "cache_bits", "compile") if case[name]
    )
    numbers = f"speculate{case['speculate']}-{case['n_samples']}-kv{case['heads']['n_kv_heads']}"
    greedy = "greedy" if case["sampling"]["temperature"] == 0 else "sampled"
    return f"{str(case['dtype'])[6:]}-{flags}-{memory}-{numbers}-{greedy}-{case['prompts']}"


def is_refused(case):
    """What contradicts itself, as the documentation says."""
    has_window, has_no_cache = "window" in case["memory"], "use_cache" in case["memory"]
    if case["compile"] and (has_no_cache or case["dtype"] == torch.float16):
        return True
    if case["cache_bits"] is not None and (has_window or has_no_cache):
        return True
    if case["cache_bits"] == 4 and case["speculate"]:
        return True
    return (has_window or has_no_cache) and bool(case["speculate"])


def test_every_pair_of_options_occurs():
    for (one, values), (other, others) in itertools.combinations(OPTIONS.items(), 2):
        for a, b in itertools.product(values, others):
            assert any(case[one] == a and case[other] == b for case in CASES), (one, a, other, b)
    assert len(CASES) <= 30


@torch.no_grad()
def plain_logprobs(plain, case, completion):
    """The log-probabilities (T, V) that each sampled token came from: one pass per token, without a
    batch."""
    tokens, rows = plain.encode(completion.prompt), []
    cache = plain.new_cache(1, CONTEXT) if "window" in case["memory"] else None
    unread, view = tokens, list(tokens)
    for token in completion.token_ids:
        if cache is not None:
            for read in unread:
                logits = plain.model(torch.tensor([[read]]), cache=cache)
            unread = [token]
        else:
            view = view[-(CONTEXT // 2) :] if len(view) > CONTEXT else view
            logits = plain.model(torch.tensor([view]))
            view.append(token)
        rows.append(logits[0, -1, : TOKENIZER.vocab_size].float().log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name_of(case)) for case in CASES + KERNEL_CASES]
)
def test_each_case_is_right_or_refused(case):
    shape = {"vocab_size": 264, "n_heads": 4, "n_layers": 1, "head_dim": 16, "max_seq_len": CONTEXT}
    model = random_model(norm_mean=0.3, **shape, **case["heads"])
    how = {"dtype": case["dtype"], "bits": case["bits"], "cache_bits": case["cache_bits"]}
    if case["dtype"] != torch.float16:
        how["compile"] = case["compile"]
    options = {**how, **case["memory"], "compile": case["compile"]}
    if case["speculate"]:
        options["speculate"] = case["speculate"]
    if is_refused(case):
        with pytest.raises(
            UserError, match="cannot be combined with|needs the KV cache|is not available"
        ) as caught:
            Generator(model, TOKENIZER, **options)
        assert "\n" not in str(caught.value)
        return
    prompts = ["abcabc"] if case["prompts"] == "equal" else ["abcabc", "x"]
    prompts *= case["n_samples"]
    params = SamplingParams(
        N_NEW, seed=3, logit_bias={TOKENIZER.bos_id: -torch.inf}, **case["sampling"]
    )
    found = Generator(model, TOKENIZER, **options).generate(prompts, params)
    plain = Generator(model, TOKENIZER, **how, **case["memory"])
    for index, completion in enumerate(found):
        has_end = not case["memory"] or "use_cache" in case["memory"]
        prompt_len = len(plain.encode(completion.prompt))
        assert len(completion.token_ids) == (
            min(N_NEW, CONTEXT + 1 - prompt_len) if has_end else N_NEW
        )
        known = plain_logprobs(plain, case, completion)
        of_tokens = known[range(len(known)), completion.token_ids]
        tolerance = TOLERANCE[case["dtype"]]
        if case["bits"] is not None:  # a number between two codes may be rounded the other way
            tolerance += 0.02 if case["dtype"] == torch.float32 else 0.1
        tolerance += {None: 0, 8: 0.1, 4: 1.0}[case["cache_bits"]]
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), of_tokens, rtol=0, atol=tolerance
        )
        if case["sampling"]["temperature"] == 0:
            likeliest = known[:, : TOKENIZER.bos_id].amax(dim=1)
            assert (of_tokens >= likeliest - 2 * tolerance).all()
        if (
            case["dtype"] == torch.float32
        ):  # promised: the text of the plain model, whatever the batch and the drafts
            alone = SamplingParams(
                N_NEW, seed=3 + index, logit_bias=dict(params.logit_bias), **case["sampling"]
            )
            assert plain.generate(completion.prompt, alone)[0].token_ids == completion.token_ids
