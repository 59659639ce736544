"""Sampling probabilities, the sampling itself, and the checks of its parameters."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from installed import if_installed

from thinker.generation.sampler import SamplingParams, distribution, sample_from_probs
from thinker.runtime.errors import UserError

INF = math.inf
LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


def reference(logits, params, in_text=None, counts=None):
    """One row's probabilities step by step, as distribution() documents them, on plain lists of
    floats."""
    size = len(logits)
    in_text, counts = in_text or [False] * size, counts or [0] * size
    scores = list(logits)
    for token in range(size):
        if in_text[token] and scores[token] > 0:
            scores[token] /= params.repetition_penalty
        elif in_text[token]:
            scores[token] *= params.repetition_penalty
    for token in range(size):
        if counts[token] > 0:
            scores[token] -= params.presence_penalty
        scores[token] -= params.frequency_penalty * counts[token]
    for token, bias in params.logit_bias:
        scores[token] += bias
    order = sorted(range(size), key=lambda token: (-scores[token], token))
    if params.temperature == 0:
        return [float(token == order[0]) for token in range(size)]
    scores = [score / params.temperature for score in scores]
    weights = [math.exp(score - scores[order[0]]) for score in scores]
    probs = [weight / sum(weights) for weight in weights]
    if params.top_k is not None:
        probs = _renormalised(probs, order[: params.top_k])
    if params.top_p is not None:
        expected_tokens, total_prob = [], 0.0
        for token in order:
            if total_prob >= params.top_p - 1e-12:  # less than that is rounding
                break
            expected_tokens.append(token)
            total_prob += probs[token]
        probs = _renormalised(probs, expected_tokens)
    if params.min_p is not None:
        least = params.min_p * max(probs) - 1e-12
        probs = _renormalised(probs, [token for token in order if probs[token] >= least])
    return probs


def _renormalised(probs, expected_tokens):
    total = sum(probs[token] for token in expected_tokens)
    return [prob / total if token in expected_tokens else 0.0 for token, prob in enumerate(probs)]


def support(**params):
    exact = (
        LOGITS.exp().round(decimals=3).double().log()
    )  # so that the thresholds lie where the cases below expect them
    probs = distribution(exact, SamplingParams(**params))
    assert probs.sum().item() == pytest.approx(1)
    return probs[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("params", "expected_tokens"),
    [
        ({}, [0, 1, 2, 3]),
        ({"temperature": 0}, [0]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),  # tokens 2 and 3 are tied: the lower id comes first
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.4}, [0]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"min_p": 0.3}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.0}, [0, 1, 2, 3]),
        ({"top_k": 3, "min_p": 0.3}, [0, 1]),
        ({"top_k": 2, "top_p": 0.99}, [0, 1]),
        ({"top_p": 0.875}, [0, 1, 2]),  # reached exactly, inside the tie
        ({"top_p": 0.88}, [0, 1, 2, 3]),
        ({"top_p": 1e-300}, [0]),
        ({"min_p": 0.25}, [0, 1, 2, 3]),  # both of the tied, whose share it is
        ({"min_p": 0.26}, [0, 1]),
        ({"top_k": 2, "top_p": 0.66}, [0]),  # of the two that are left, the first has 2/3
        ({"top_k": 2, "top_p": 0.67}, [0, 1]),
        ({"temperature": 0.5, "top_p": 0.7}, [0]),  # squared, the first has 0.25 / 0.34375 = 0.727
        ({"temperature": 0.5, "min_p": 0.25}, [0, 1]),
        ({"logit_bias": {0: -INF}, "top_k": 2}, [1, 2]),
        ({"logit_bias": {3: 1.0}, "top_k": 2}, [0, 3]),
        ({"logit_bias": {0: -INF}, "temperature": 0}, [1]),
        ({"logit_bias": {0: -INF, 1: -INF}, "temperature": 0}, [2]),
        ({"logit_bias": {0: -INF, 1: -INF}, "top_p": 0.5}, [2]),
        ({"logit_bias": {0: -INF, 1: -INF}, "top_p": 0.6}, [2, 3]),
        ({"logit_bias": {0: -INF, 1: -INF}, "min_p": 1}, [2, 3]),
    ],
)
def test_tokens_with_nonzero_probability(params, expected_tokens):
    assert support(**params) == expected_tokens


def test_probabilities_by_hand():
    close = torch.testing.assert_close
    close(distribution(LOGITS, SamplingParams()), LOGITS.exp())
    close(distribution(LOGITS, SamplingParams(top_k=2)), torch.tensor([[2 / 3, 1 / 3, 0, 0]]))
    close(
        distribution(LOGITS, SamplingParams(temperature=0.5)),
        (LOGITS.exp() ** 2) / (LOGITS.exp() ** 2).sum(),
    )
    in_text = torch.tensor([[False, True, False, False]])
    known = torch.tensor(
        [[0.5, 0.25**2, 0.125, 0.125]]
    )  # a negative logit is multiplied by the penalty
    close(
        distribution(LOGITS, SamplingParams(repetition_penalty=2.0), in_text), known / known.sum()
    )
    positive = distribution(
        LOGITS + 3, SamplingParams(repetition_penalty=2.0), in_text
    )  # a positive one is divided
    close(positive, (LOGITS + 3).where(~in_text, (LOGITS + 3) / 2).softmax(-1))


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=30),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 50.0]),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.001, 1),
    min_p=st.none() | st.floats(0, 1),
)
@settings(max_examples=examples(200), deadline=None)
def test_filters_always_keep_the_likeliest_token(logits, temperature, top_k, top_p, min_p):
    logits = torch.tensor([logits])
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = distribution(logits, params)
    assert probs.sum().item() == pytest.approx(1, abs=1e-5)
    assert probs[0, logits[0].argmax()] > 0
    assert (probs > 0).sum() <= (top_k or math.inf)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-45, 1e-38, 1e-20])
def test_tiny_temperatures_are_nearly_greedy(temperature):
    probs = distribution(
        torch.tensor([[1.0, 3.0, 2.0, -1e30]]), SamplingParams(temperature=temperature, top_p=0.9)
    )
    assert probs.tolist() == [[0, 1, 0, 0]]


def test_top_p_sums_exactly():
    wide = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1))
    assert (distribution(wide, SamplingParams(top_p=1.0)) > 0).all()
    equal = torch.zeros(1, 16)
    for n in (1, 4, 8, 12):  # a sum that reaches top_p exactly is enough
        assert (distribution(equal, SamplingParams(top_p=n / 16)) > 0).sum() == n
    assert (
        distribution(torch.zeros(1, 10), SamplingParams(top_p=0.6)) > 0
    ).sum() == 6  # 7 by sums in fp32
    for size in range(2, 60):  # whatever the rounding of n / size and of the sum
        for n in range(1, size):
            assert (
                distribution(torch.zeros(1, size), SamplingParams(top_p=n / size)) > 0
            ).sum() == n


TOKENS = [
    2.0,
    1.5,
    1.5,
    1.0,
    0.5,
    0.0,
    -0.5,
    -0.5,
    -1.0,
    -3.0,
    -INF,
    1.5,
]  # ties, both signs, one that is nothing
IN_TEXT = [False, True, False, True, False, True, True, False, False, False, True, True]
COUNTS = [0, 1, 0, 3, 0, 0, 2, 0, 0, 0, 1, 1]
BIAS = {0: -0.7, 4: 1.3, 5: -INF, 10: 5.0}
SINGLE_PROCESS = [
    {},
    {"temperature": 0},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 0.8},
    {"presence_penalty": -0.8},
    {"frequency_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"logit_bias": BIAS},
]
TOGETHER = [
    {"top_k": 6, "top_p": 0.8},
    {"top_k": 5, "min_p": 0.4},
    {"top_p": 0.9, "min_p": 0.2},
    {"temperature": 1.8, "top_k": 7, "top_p": 0.75, "min_p": 0.5},
    {"temperature": 0.5, "top_p": 0.8},
    {"temperature": 3.0, "min_p": 0.6},
    {"repetition_penalty": 1.4, "presence_penalty": 0.9, "temperature": 1.5},
    {"repetition_penalty": 1.4, "logit_bias": {1: 1.0, 3: -2.0, 6: 2.0}, "top_k": 4},
    {"presence_penalty": 0.3, "frequency_penalty": 0.4, "top_p": 0.8},
    {"repetition_penalty": 2.0, "frequency_penalty": 0.3, "logit_bias": BIAS, "temperature": 0},
    {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": BIAS,
        "temperature": 1.4,
        "top_k": 8,
        "top_p": 0.85,
        "min_p": 0.25,
    },
]


@pytest.mark.parametrize("options", SINGLE_PROCESS + TOGETHER, ids=str)
def test_samples_follow_the_reference(options):
    params, n = SamplingParams(**options), 200_000
    expected = torch.tensor(reference(TOKENS, params, IN_TEXT, COUNTS), dtype=torch.float64)
    probs = distribution(
        torch.tensor([TOKENS]), params, torch.tensor([IN_TEXT]), torch.tensor([COUNTS])
    )
    torch.testing.assert_close(probs[0].double(), expected, atol=1e-6, rtol=0)
    assert ((probs[0] > 0) == (expected > 0)).all()
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    sampled = sample_from_probs(probs.expand(n, -1), uniforms).bincount(minlength=len(TOKENS))
    assert (sampled[expected == 0] == 0).all()
    assert p_value(sampled, n * expected) > 1e-4


def p_value(sampled, expected):
    """Pearson's chi-square test; what is expected fewer than 5 times shares one bin."""
    rare = (expected > 0) & (expected < 5)
    common = expected >= 5
    sampled = (
        torch.cat([sampled[common], sampled[rare].sum()[None]]) if rare.any() else sampled[common]
    )
    expected = (
        torch.cat([expected[common], expected[rare].sum()[None]])
        if rare.any()
        else expected[common]
    )
    if len(expected) == 1:
        return 1.0
    chi2 = ((sampled - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(
        torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), chi2 / 2
    ).item()


def test_samples_follow_the_probabilities():
    probs, n = torch.tensor([0.5, 0.2, 0.0, 0.25, 0.05]), 100_000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampled = sample_from_probs(probs.expand(n, -1), uniforms).bincount(minlength=5)
    assert sampled[2] == 0
    assert p_value(sampled, n * probs.double()) > 1e-4


def test_p_value_detects_a_wrong_distribution():
    expected = torch.tensor([100.0, 100, 100], dtype=torch.float64)
    observed = torch.tensor([110, 100, 90])  # chi2 = 2 with 2 degrees of freedom: exp(-1)
    assert p_value(observed, expected) == pytest.approx(math.exp(-1))
    assert p_value(torch.tensor([160, 80, 60]), expected) < 1e-4


ROW = st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 4.0]), min_size=6, max_size=6)
BATCH = st.tuples(
    st.lists(ROW, min_size=1, max_size=5),
    st.integers(0, 2**31),  # seeds the tokens in the text, their counts and the logits of -inf
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.5, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 8),
    top_p=st.none() | st.floats(0.001, 1),
    min_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 4), st.sampled_from([-INF, -1.0, 0.5]), max_size=4),
)


def _tensors(batch):
    rows, seed = batch
    random = torch.Generator().manual_seed(seed)
    logits = torch.tensor(rows)
    nothing = torch.rand(logits.shape, generator=random) < 0.1
    nothing[:, -1] = False
    in_text = torch.rand(logits.shape, generator=random) < 0.5
    counts = torch.randint(0, 3, logits.shape, generator=random) * in_text
    return logits.masked_fill(nothing, -INF), in_text, counts


@given(batch=BATCH, params=PARAMS)
@settings(max_examples=examples(300), deadline=None)
def test_every_row_equals_the_reference(batch, params):
    logits, in_text, counts = _tensors(batch)
    probs = distribution(logits, params, in_text, counts)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(
        probs.double().sum(-1), torch.ones(len(probs)).double(), atol=1e-6, rtol=0
    )
    for row, *row_inputs in zip(probs, logits.tolist(), in_text.tolist(), counts.tolist()):
        expected = torch.tensor(
            reference(row_inputs[0], params, *row_inputs[1:]), dtype=torch.float64
        )
        assert ((row > 0) == (expected > 0)).all()
        torch.testing.assert_close(row.double(), expected, atol=1e-6, rtol=0)
    if params.temperature == 0:
        assert (probs.sort(-1).values == torch.eye(probs.shape[1])[-1]).all()


@given(batch=BATCH, params=PARAMS, data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_rows_are_independent(batch, params, data):
    tensors = _tensors(batch)
    total_prob = distribution(tensors[0], params, *tensors[1:])
    for i in range(len(total_prob)):
        alone = [tensor[i : i + 1] for tensor in tensors]
        assert torch.equal(distribution(alone[0], params, *alone[1:]), total_prob[i : i + 1])
    order = data.draw(st.permutations(range(len(total_prob))))
    shuffled = [tensor[order] for tensor in tensors]
    assert torch.equal(distribution(shuffled[0], params, *shuffled[1:]), total_prob[order])


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 40_000}, {"top_p": 0.9999}, {"top_k": 40_000, "min_p": 1e-6}]
)
def test_rows_of_a_large_vocabulary_are_independent(options):
    logits = 3 * torch.randn(3, 50_304, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(**options)
    total_prob = distribution(logits, params)
    assert all(
        torch.equal(distribution(logits[i : i + 1], params), total_prob[i : i + 1])
        for i in range(3)
    )


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_transformers(seed):
    from transformers.generation import logits_process

    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(4, 50, generator=random, dtype=torch.float64)
    text = torch.randint(0, 50, (4, 15), generator=random)
    in_text = torch.zeros(4, 50, dtype=torch.bool).scatter_(1, text, True)
    penalty, temperature, top_p, min_p = torch.rand(
        4, generator=random, dtype=torch.float64
    ).tolist()
    top_k = int(torch.randint(1, 50, (1,), generator=random))
    params = SamplingParams(
        repetition_penalty=0.5 + penalty,
        temperature=0.2 + 2 * temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p / 4,  # higher, it would hide what the others do
    )
    scores = logits
    for processor in (
        logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        logits_process.TemperatureLogitsWarper(params.temperature),
        logits_process.TopKLogitsWarper(top_k),
        logits_process.TopPLogitsWarper(top_p),
        logits_process.MinPLogitsWarper(params.min_p),
    ):
        scores = processor(text, scores)
    torch.testing.assert_close(
        distribution(logits, params, in_text).double(), scores.softmax(-1), atol=1e-5, rtol=0
    )


def test_presence_and_frequency_penalties():
    counts = torch.tensor([[0, 1, 3, 0]])
    presence = distribution(LOGITS, SamplingParams(presence_penalty=1.5), counts=counts)
    frequency = distribution(LOGITS, SamplingParams(frequency_penalty=1.5), counts=counts.float())
    torch.testing.assert_close(presence, (LOGITS - torch.tensor([0, 1.5, 1.5, 0])).softmax(-1))
    torch.testing.assert_close(frequency, (LOGITS - torch.tensor([0, 1.5, 4.5, 0])).softmax(-1))
    for options in (
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.5},
    ):
        assert torch.equal(
            distribution(LOGITS, SamplingParams(**options)), distribution(LOGITS, SamplingParams())
        )


EXTREMES = [
    {"temperature": 0},
    {"temperature": 1e-30},
    {"temperature": 5e-324},
    {"temperature": 1e30},
    {"temperature": 1e100},
    {"repetition_penalty": 1e100},
    {"repetition_penalty": 1e-100},
    {"presence_penalty": 1e100},
    {"presence_penalty": -1e100},
    {"frequency_penalty": 1e100},
    {"frequency_penalty": -1e100},
    {"logit_bias": {0: 1e100, 1: -1e100, 4: 1e100}},
    {"logit_bias": {3: -INF, 4: -1.0}},
    {
        "repetition_penalty": 1e100,
        "presence_penalty": -1e100,
        "frequency_penalty": 1e100,
        "temperature": 1e-300,
    },
]


@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize("options", EXTREMES, ids=str)
@pytest.mark.parametrize("used", [False, True])
def test_extreme_parameters_give_valid_probabilities(options, filters, used):
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[1.0, -2.0, 0.0, 3.0, -INF], [largest, -largest, 1e-45, largest, -INF]])
    in_text = torch.full_like(logits, used, dtype=torch.bool)
    probs = distribution(logits, SamplingParams(**options, **filters), in_text, in_text * 3)
    assert (probs >= 0).all()
    torch.testing.assert_close(probs.double().sum(-1), torch.ones(2).double(), atol=1e-6, rtol=0)
    assert (probs[:, 4] == 0).all()


def test_tiny_and_huge_temperatures():
    logits = torch.tensor([[1.0, 3.0, 3.0, -INF]])
    assert distribution(logits, SamplingParams(temperature=1e-30)).tolist() == [[0, 0.5, 0.5, 0]]
    assert distribution(logits, SamplingParams(temperature=0)).tolist() == [[0, 1, 0, 0]]
    flat = distribution(logits, SamplingParams(temperature=1e30))
    torch.testing.assert_close(flat, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0]]))


def test_arguments_are_not_modified():
    logits, in_text, counts = (
        torch.randn(2, 5).double(),
        torch.ones(2, 5, dtype=torch.bool),
        torch.ones(2, 5),
    )
    before = [tensor.clone() for tensor in (logits, in_text, counts)]
    everything = {
        "repetition_penalty": 2.0,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "logit_bias": {1: -INF},
    }
    for filters in ({}, {"top_k": 2, "top_p": 0.5, "min_p": 0.5}, {"temperature": 0}):
        for penalties in ({}, everything):
            distribution(logits, SamplingParams(**penalties, **filters), in_text, counts)
    assert all(torch.equal(*pair) for pair in zip(before, (logits, in_text, counts)))


def test_invalid_logit_bias_raises():
    for temperature in (0, 1):
        params = SamplingParams(logit_bias=dict.fromkeys(range(4), -INF), temperature=temperature)
        with pytest.raises(UserError, match="logit_bias bans every token"):
            distribution(LOGITS, params)


def test_sample_from_probs_at_the_boundaries():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    last = 1 - 2**-53
    assert [
        sample_from_probs(probs, torch.tensor([u], dtype=torch.float64)).item()
        for u in (0.0, 0.49, 0.5, last)
    ] == [1, 1, 3, 3]
    thirds = torch.full((1, 3), 1 / 3)
    assert sample_from_probs(thirds, torch.tensor([last], dtype=torch.float64)).item() == 2


TEXTS = ("stop", "logit_bias", "json_schema", "regex")
NUMBERS = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in TEXTS]
WHOLE = ["max_new_tokens", "top_k", "seed", "logprobs"]


@pytest.mark.parametrize(
    "invalid",
    [
        *(
            {name: value}
            for name in NUMBERS
            for value in ("a", "1", True, False, [1], math.nan, INF, -INF)
        ),
        *({name: None} for name in NUMBERS if name not in ("top_k", "top_p", "min_p")),
        *({name: value} for name in WHOLE for value in (2.5, 2.0, -1)),
        *({name: 0} for name in ("max_new_tokens", "top_k", "top_p", "repetition_penalty")),
        *({name: 10**400} for name in NUMBERS if name not in WHOLE),
        *(
            {"json_schema": value}
            for value in if_installed(
                "structured_output", "a", "1", False, [1], math.nan, INF, 10**400
            )
        ),
        *({"regex": value} for value in ("", True, [1], 1)),
        {"temperature": -1},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": -1},
        {"stop": ("",)},
        {"stop": ["a", ""]},
        {"stop": "end"},
        {"stop": ""},
        {"stop": None},
        {"stop": [1]},
        {"stop": 3},
        {"logit_bias": None},
        {"logit_bias": 3},
        {"logit_bias": "ab"},
        {"logit_bias": [1]},
        {"logit_bias": [(1, 2, 3)]},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {"1": 0.0}},
        {"logit_bias": {True: 0.0}},
        {"logit_bias": {1.0: 0.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: INF}},
        {"logit_bias": {1: "a"}},
        {"logit_bias": {1: None}},
        {"logit_bias": {1: True}},
        {"logit_bias": {1: 10**400}},
        {"logit_bias": ((1, 0.0), (2, 0.0), (1, 0.0))},
    ],
    ids=lambda invalid: str(invalid)[:60],
)
def test_invalid_values_raise(invalid):
    ((name, value),) = invalid.items()
    with pytest.raises(UserError) as refusal:
        SamplingParams(**invalid)
    message = str(refusal.value)
    assert message.startswith(name)
    assert "\n" not in message
    assert ";" in message  # names the mistake and the correct values
    assert name == "logit_bias" or repr(value) in message


SHAPING = {
    "temperature": 0.5,
    "top_k": 9,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.125,
    "logit_bias": {3: 1.0},
}
NOT_SHAPING = {"max_new_tokens": 7, "logprobs": 2, "seed": 5, "stop": ["end"]}
CONSTRAINTS = ({"json_schema": True}, {"regex": "a+"})


@pytest.mark.parametrize("constraint", [{}, *if_installed("structured_output", *CONSTRAINTS)])
def test_copies_equal_new_params(constraint):
    """with_seed() and sampling_key() do not check the fields again, but equal what does."""
    fields = {**SHAPING, **NOT_SHAPING, **constraint}
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {*SHAPING, *NOT_SHAPING, "json_schema", "regex"}
    params = SamplingParams(**fields)
    changed = params.with_seed(np.int64(8))
    assert changed == SamplingParams(**{**fields, "seed": 8})
    assert type(changed.seed) is int
    assert params == SamplingParams(**fields)
    assert params.sampling_key() == SamplingParams(**SHAPING)
    with pytest.raises(UserError, match="seed is -1"):
        params.with_seed(-1)


def test_logit_bias_and_stop_become_tuples():
    params = SamplingParams(logit_bias={7: 1, 3: -INF}, stop=["b", "a"])
    assert params.logit_bias == ((3, -INF), (7, 1.0))
    assert params.stop == ("b", "a")
    assert params == SamplingParams(logit_bias=[(7, 1.0), [3, -INF]], stop=("b", "a"))
    assert hash(params) == hash(SamplingParams(**dataclasses.asdict(params)))


@given(
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([3, 50, 10**6]),
    scale=st.sampled_from([0.01, 3.0, 30.0]),
    settings_of=st.sampled_from(
        [{"top_k": 7}, {"top_p": 0.7}, {"top_p": 0.9999}, {"top_k": 300, "top_p": 0.5}]
    ),
)
@settings(max_examples=examples(25), deadline=None)
def test_ranking_of_a_large_vocabulary_equals_a_full_sort(seed, levels, scale, settings_of):
    """With few levels there are ties everywhere, also across every border; small scales need more
    than a few tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (3, 5000), generator=generator).float() / levels * scale
    params = SamplingParams(**settings_of)
    probs = distribution(logits, params)
    for row, known in zip(probs, logits.double()):
        order = sorted(range(5000), key=lambda token: (-known[token].item(), token))[
            : params.top_k or 5000
        ]
        weights = known[order].softmax(-1)
        if params.top_p is not None:
            weights = weights * (weights.cumsum(-1) - weights < params.top_p * (1 - 1e-12))
        expected = torch.zeros(5000, dtype=torch.float64)
        expected[order] = weights / weights.sum()
        torch.testing.assert_close(row.double(), expected, rtol=1e-6, atol=1e-9)
        assert torch.equal(row > 0, expected.float() > 0)
