"""The distribution that is drawn from, and the drawing."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from thinker.generation.sampler import SamplingParams, distribution, draw
from thinker.runtime.errors import UserError

INF = math.inf
LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


def reference(logits, params, seen=None, counts=None):
    """One row's probabilities step by step, as distribution() documents them, on plain lists of floats."""
    size = len(logits)
    seen, counts = seen or [False] * size, counts or [0] * size
    scores = list(logits)
    for token in range(size):
        if seen[token] and scores[token] > 0:
            scores[token] /= params.repetition_penalty
        elif seen[token]:
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
        kept, together = [], 0.0
        for token in order:
            if together >= params.top_p - 1e-12:  # less than that is rounding
                break
            kept.append(token)
            together += probs[token]
        probs = _renormalised(probs, kept)
    if params.min_p is not None:
        least = params.min_p * max(probs) - 1e-12
        probs = _renormalised(probs, [token for token in order if probs[token] >= least])
    return probs


def _renormalised(probs, kept):
    total = sum(probs[token] for token in kept)
    return [prob / total if token in kept else 0.0 for token, prob in enumerate(probs)]


def support(**params):
    exact = LOGITS.exp().round(decimals=3).double().log()  # so that the borders lie where the cases below say
    probs = distribution(exact, SamplingParams(**params))
    assert probs.sum().item() == pytest.approx(1)
    return probs[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("params", "kept"),
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
def test_support(params, kept):
    assert support(**params) == kept


def test_values():
    close = torch.testing.assert_close
    close(distribution(LOGITS, SamplingParams()), LOGITS.exp())
    close(distribution(LOGITS, SamplingParams(top_k=2)), torch.tensor([[2 / 3, 1 / 3, 0, 0]]))
    close(distribution(LOGITS, SamplingParams(temperature=0.5)), (LOGITS.exp() ** 2) / (LOGITS.exp() ** 2).sum())
    seen = torch.tensor([[False, True, False, False]])
    known = torch.tensor([[0.5, 0.25**2, 0.125, 0.125]])  # a negative logit is multiplied by the penalty
    close(distribution(LOGITS, SamplingParams(repetition_penalty=2.0), seen), known / known.sum())
    positive = distribution(LOGITS + 3, SamplingParams(repetition_penalty=2.0), seen)  # a positive one is divided
    close(positive, (LOGITS + 3).where(~seen, (LOGITS + 3) / 2).softmax(-1))


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=30),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 50.0]),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.001, 1),
    min_p=st.none() | st.floats(0, 1),
)
@settings(max_examples=200, deadline=None)
def test_a_filter_never_removes_everything_nor_the_likeliest(logits, temperature, top_k, top_p, min_p):
    logits = torch.tensor([logits])
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = distribution(logits, params)
    assert probs.sum().item() == pytest.approx(1, abs=1e-5)
    assert probs[0, logits[0].argmax()] > 0
    assert (probs > 0).sum() <= (top_k or math.inf)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-20])
def test_a_tiny_temperature_is_nearly_greedy(temperature):
    probs = distribution(torch.tensor([[1.0, 3.0, 2.0, -1e30]]), SamplingParams(temperature=temperature, top_p=0.9))
    assert probs.tolist() == [[0, 1, 0, 0]]


def test_top_p_counts_exactly():
    wide = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1))
    assert (distribution(wide, SamplingParams(top_p=1.0)) > 0).all()
    equal = torch.zeros(1, 16)
    for n in (1, 4, 8, 12):  # a sum that reaches top_p exactly is enough
        assert (distribution(equal, SamplingParams(top_p=n / 16)) > 0).sum() == n
    assert (distribution(torch.zeros(1, 10), SamplingParams(top_p=0.6)) > 0).sum() == 6  # 7 by sums in fp32
    for size in range(2, 60):  # whatever the rounding of n / size and of the sum
        for n in range(1, size):
            assert (distribution(torch.zeros(1, size), SamplingParams(top_p=n / size)) > 0).sum() == n


TOKENS = [2.0, 1.5, 1.5, 1.0, 0.5, 0.0, -0.5, -0.5, -1.0, -3.0, -INF, 1.5]  # ties, both signs, one that is nothing
SEEN = [False, True, False, True, False, True, True, False, False, False, True, True]
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


@pytest.mark.parametrize("chosen", SINGLE_PROCESS + TOGETHER, ids=str)
def test_draws_follow_the_reference(chosen):
    params, n = SamplingParams(**chosen), 200_000
    expected = torch.tensor(reference(TOKENS, params, SEEN, COUNTS), dtype=torch.float64)
    probs = distribution(torch.tensor([TOKENS]), params, torch.tensor([SEEN]), torch.tensor([COUNTS]))
    torch.testing.assert_close(probs[0].double(), expected, atol=1e-6, rtol=0)
    assert ((probs[0] > 0) == (expected > 0)).all()
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    drawn = draw(probs.expand(n, -1), uniforms).bincount(minlength=len(TOKENS))
    assert (drawn[expected == 0] == 0).all()
    assert p_value(drawn, n * expected) > 1e-4


def p_value(drawn, expected):
    """Pearson's chi-square test; what is expected fewer than 5 times shares one bin."""
    rare = (expected > 0) & (expected < 5)
    common = expected >= 5
    drawn = torch.cat([drawn[common], drawn[rare].sum()[None]]) if rare.any() else drawn[common]
    expected = torch.cat([expected[common], expected[rare].sum()[None]]) if rare.any() else expected[common]
    if len(expected) == 1:
        return 1.0
    chi2 = ((drawn - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), chi2 / 2).item()


def test_draws_follow_given_probabilities():
    probs, n = torch.tensor([0.5, 0.2, 0.0, 0.25, 0.05]), 100_000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = draw(probs.expand(n, -1), uniforms).bincount(minlength=5)
    assert drawn[2] == 0
    assert p_value(drawn, n * probs.double()) > 1e-4


def test_the_p_value_is_right_and_finds_a_wrong_distribution():
    expected = torch.tensor([100.0, 100, 100], dtype=torch.float64)
    observed = torch.tensor([110, 100, 90])  # chi2 = 2 with 2 degrees of freedom: exp(-1)
    assert p_value(observed, expected) == pytest.approx(math.exp(-1))
    assert p_value(torch.tensor([160, 80, 60]), expected) < 1e-4


ROW = st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 4.0]), min_size=6, max_size=6)
BATCH = st.tuples(
    st.lists(ROW, min_size=1, max_size=5),
    st.integers(0, 2**31),  # seeds what was seen, what was counted and which tokens stand for nothing
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
    seen = torch.rand(logits.shape, generator=random) < 0.5
    counts = torch.randint(0, 3, logits.shape, generator=random) * seen
    return logits.masked_fill(nothing, -INF), seen, counts


@given(batch=BATCH, params=PARAMS)
@settings(max_examples=300, deadline=None)
def test_every_row_equals_the_reference(batch, params):
    logits, seen, counts = _tensors(batch)
    probs = distribution(logits, params, seen, counts)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.double().sum(-1), torch.ones(len(probs)).double(), atol=1e-6, rtol=0)
    for row, *own in zip(probs, logits.tolist(), seen.tolist(), counts.tolist()):
        expected = torch.tensor(reference(own[0], params, *own[1:]), dtype=torch.float64)
        assert ((row > 0) == (expected > 0)).all()
        torch.testing.assert_close(row.double(), expected, atol=1e-6, rtol=0)
    if params.temperature == 0:
        assert (probs.sort(-1).values == torch.eye(probs.shape[1])[-1]).all()


@given(batch=BATCH, params=PARAMS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(batch, params, data):
    tensors = _tensors(batch)
    together = distribution(tensors[0], params, *tensors[1:])
    for i in range(len(together)):
        alone = [tensor[i : i + 1] for tensor in tensors]
        assert torch.equal(distribution(alone[0], params, *alone[1:]), together[i : i + 1])
    order = data.draw(st.permutations(range(len(together))))
    shuffled = [tensor[order] for tensor in tensors]
    assert torch.equal(distribution(shuffled[0], params, *shuffled[1:]), together[order])


@pytest.mark.parametrize("chosen", [{}, {"top_k": 40_000}, {"top_p": 0.9999}, {"top_k": 40_000, "min_p": 1e-6}])
def test_a_wide_row_does_not_depend_on_its_neighbours(chosen):
    logits = 3 * torch.randn(3, 50_304, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(**chosen)
    together = distribution(logits, params)
    assert all(torch.equal(distribution(logits[i : i + 1], params), together[i : i + 1]) for i in range(3))


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_transformers(seed):
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(4, 50, generator=random, dtype=torch.float64)
    text = torch.randint(0, 50, (4, 15), generator=random)
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter_(1, text, True)
    penalty, temperature, top_p, min_p = torch.rand(4, generator=random, dtype=torch.float64).tolist()
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
        theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        theirs.TemperatureLogitsWarper(params.temperature),
        theirs.TopKLogitsWarper(top_k),
        theirs.TopPLogitsWarper(top_p),
        theirs.MinPLogitsWarper(params.min_p),
    ):
        scores = processor(text, scores)
    torch.testing.assert_close(distribution(logits, params, seen).double(), scores.softmax(-1), atol=1e-5, rtol=0)


def test_presence_is_taken_once_and_frequency_every_time():
    counts = torch.tensor([[0, 1, 3, 0]])
    presence = distribution(LOGITS, SamplingParams(presence_penalty=1.5), counts=counts)
    frequency = distribution(LOGITS, SamplingParams(frequency_penalty=1.5), counts=counts.float())
    torch.testing.assert_close(presence, (LOGITS - torch.tensor([0, 1.5, 1.5, 0])).softmax(-1))
    torch.testing.assert_close(frequency, (LOGITS - torch.tensor([0, 1.5, 4.5, 0])).softmax(-1))
    for chosen in ({"presence_penalty": 1.5}, {"frequency_penalty": 1.5}, {"repetition_penalty": 1.5}):
        assert torch.equal(distribution(LOGITS, SamplingParams(**chosen)), distribution(LOGITS, SamplingParams()))


EXTREMES = [
    {"temperature": 0},
    {"temperature": 1e-30},
    {"temperature": 5e-324},
    {"temperature": 1e30},
    {"temperature": 1.7e308},
    {"repetition_penalty": 1.7e308},
    {"repetition_penalty": 5e-324},
    {"presence_penalty": 1.7e308},
    {"presence_penalty": -1.7e308},
    {"frequency_penalty": 1.7e308},
    {"frequency_penalty": -1.7e308},
    {"logit_bias": {0: 1.7e308, 1: -1.7e308, 4: 1.7e308}},
    {"logit_bias": {3: -INF, 4: -1.0}},
    {"repetition_penalty": 1.7e308, "presence_penalty": -1.7e308, "frequency_penalty": 1.7e308, "temperature": 1e-300},
]


@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize("chosen", EXTREMES, ids=str)
@pytest.mark.parametrize("used", [False, True])
def test_extremes_give_no_nan_and_nothing_to_an_infinitely_unlikely_token(chosen, filters, used):
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[1.0, -2.0, 0.0, 3.0, -INF], [largest, -largest, 1e-45, largest, -INF]])
    seen = torch.full_like(logits, used, dtype=torch.bool)
    probs = distribution(logits, SamplingParams(**chosen, **filters), seen, seen * 3)
    assert (probs >= 0).all()
    torch.testing.assert_close(probs.double().sum(-1), torch.ones(2).double(), atol=1e-6, rtol=0)
    assert (probs[:, 4] == 0).all()


def test_temperature_at_both_ends():
    logits = torch.tensor([[1.0, 3.0, 3.0, -INF]])
    assert distribution(logits, SamplingParams(temperature=1e-30)).tolist() == [[0, 0.5, 0.5, 0]]
    assert distribution(logits, SamplingParams(temperature=0)).tolist() == [[0, 1, 0, 0]]
    flat = distribution(logits, SamplingParams(temperature=1e30))
    torch.testing.assert_close(flat, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0]]))


def test_the_arguments_stay_as_they_are():
    logits, seen, counts = torch.randn(2, 5).double(), torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 5)
    before = [tensor.clone() for tensor in (logits, seen, counts)]
    everything = {"repetition_penalty": 2.0, "presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {1: -INF}}
    for filters in ({}, {"top_k": 2, "top_p": 0.5, "min_p": 0.5}, {"temperature": 0}):
        for penalties in ({}, everything):
            distribution(logits, SamplingParams(**penalties, **filters), seen, counts)
    assert all(torch.equal(*pair) for pair in zip(before, (logits, seen, counts)))


def test_a_bias_that_fits_no_model():
    with pytest.raises(UserError, match=r"logit_bias.* 4;.* 4$"):
        distribution(LOGITS, SamplingParams(logit_bias={4: 1.0}))
    nothing = torch.tensor([[0.0, -INF], [0.0, 1.0]])  # the first row has one token to ban
    for temperature in (0, 1):
        for logits, banned in ((LOGITS, range(4)), (nothing, [0])):
            params = SamplingParams(logit_bias=dict.fromkeys(banned, -INF), temperature=temperature)
            with pytest.raises(UserError, match="logit_bias bans every token"):
                distribution(logits, params)


def test_draw_at_the_borders():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    last = 1 - 2**-53
    assert [draw(probs, torch.tensor([u], dtype=torch.float64)).item() for u in (0.0, 0.49, 0.5, last)] == [1, 1, 3, 3]
    thirds = torch.full((1, 3), 1 / 3)
    assert draw(thirds, torch.tensor([last], dtype=torch.float64)).item() == 2


NUMBERS = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in ("stop", "logit_bias")]
WHOLE = ["max_new_tokens", "top_k", "seed", "logprobs"]


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: value} for name in NUMBERS for value in ("a", "1", True, False, [1], math.nan, INF, -INF)),
        *({name: None} for name in NUMBERS if name not in ("top_k", "top_p", "min_p")),
        *({name: value} for name in WHOLE for value in (2.5, 2.0, -1)),
        *({name: 0} for name in ("max_new_tokens", "top_k", "top_p", "repetition_penalty")),
        *({name: 10**400} for name in NUMBERS if name not in WHOLE),
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
    ids=lambda wrong: str(wrong)[:60],
)
def test_values_out_of_range_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(UserError) as refusal:
        SamplingParams(**wrong)
    message = str(refusal.value)
    assert message.startswith(name)
    assert "\n" not in message
    assert ";" in message  # what is wrong; what would be right
    assert name == "logit_bias" or repr(value) in message


def test_tuples_from_a_dict_and_a_list():
    params = SamplingParams(logit_bias={7: 1, 3: -INF}, stop=["b", "a"])
    assert params.logit_bias == ((3, -INF), (7, 1.0))
    assert params.stop == ("b", "a")
    assert params == SamplingParams(logit_bias=[(7, 1.0), [3, -INF]], stop=("b", "a"))
    assert hash(params) == hash(SamplingParams(**dataclasses.asdict(params)))


@given(
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([3, 50, 10**6]),
    scale=st.sampled_from([0.01, 3.0, 30.0]),
    settings_of=st.sampled_from([{"top_k": 7}, {"top_p": 0.7}, {"top_p": 0.9999}, {"top_k": 300, "top_p": 0.5}]),
)
@settings(max_examples=60, deadline=None)
def test_a_large_vocabulary_is_ranked_as_if_all_of_it_were_sorted(seed, levels, scale, settings_of):
    """With few levels there are ties everywhere, also across every border; small scales need more than a few tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (3, 5000), generator=generator).float() / levels * scale
    params = SamplingParams(**settings_of)
    probs = distribution(logits, params)
    for row, known in zip(probs, logits.double()):
        order = sorted(range(5000), key=lambda token: (-known[token].item(), token))[: params.top_k or 5000]
        weights = known[order].softmax(-1)
        if params.top_p is not None:
            weights = weights * (weights.cumsum(-1) - weights < params.top_p * (1 - 1e-12))
        expected = torch.zeros(5000, dtype=torch.float64)
        expected[order] = weights / weights.sum()
        torch.testing.assert_close(row.double(), expected, rtol=1e-6, atol=1e-9)
        assert torch.equal(row > 0, expected.float() > 0)
