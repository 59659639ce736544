"""A monitor measures what the model computes, changes no text, and reports figures that leave the
known range."""

import math
from types import SimpleNamespace

import pytest
import torch
from batch_cases import KINDS, TOKENIZER
from conftest import random_model
from installed import if_installed, needs

from thinker.features.monitoring import monitor as module
from thinker.features.monitoring.monitor import Monitor, Reference
from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.batching.continuous_batch import ContinuousBatch
from thinker.model.inspection.attention_statistics import figure_names, measure_text
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
HOW = {
    **{name: (config, options, 160) for name, (config, options) in KINDS.items()},
    **dict(if_installed("speculation", ("speculate", ({}, {"speculate": 3}, 160)))),
    "window and sinks": ({}, {"window": 10, "sinks": 2}, 160),
    "slide": ({}, {"slide": True}, 24),
    **dict(if_installed("early_exit", ("early exit", ({}, {"early_exit": 0.02}, 160)))),
    "linear in some layers": ({"attention": ["linear(16)", "full"]}, {"compile": False}, 160),
}
PROMPTS = ["abcd", "abcd", "a longer prompt"]
NO_END = {TOKENIZER.bos_id: -math.inf}


def always():
    return Monitor(max_cost=math.inf)


def make_generator(how, monitor=None):
    config, options, context = HOW[how]
    return Generator(
        random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=context, **config),
        TOKENIZER,
        monitor=monitor,
        **options,
    )


def params(n=14):
    return [
        SamplingParams(max_new_tokens=n, seed=seed, logit_bias=NO_END, temperature=0.8)
        for seed in range(3)
    ]


def assert_measured(monitor, generator, tokens, tolerance):
    """All that was measured is what a pass over the whole text without a cache gives at the same
    position."""
    names = figure_names(len(generator.model.blocks))
    whole = measure_text(generator.model, torch.tensor([tokens]), TOKENIZER.vocab_size)
    n_compared = 0
    for position, values in monitor._newest:
        if position < len(tokens):
            known = dict(zip(names, whole[:, position].tolist()))
            known = {name: value for name, value in known.items() if not math.isnan(value)}
            measured = {
                name: value for name, value in values.items() if not name.endswith("cache_used")
            }
            assert measured == pytest.approx(known, abs=tolerance, rel=tolerance)
            n_compared += 1
    assert n_compared > 5


@pytest.mark.parametrize("how", HOW)
def test_texts_do_not_change(how):
    plain = make_generator(how).generate(PROMPTS, params())
    monitor = always()
    watched = make_generator(how, monitor).generate(PROMPTS, params())
    assert [(one.token_ids, one.logprobs) for one in watched] == [
        (one.token_ids, one.logprobs) for one in plain
    ]
    assert monitor.n_measured > 0
    assert 0 < monitor.figures["token_entropy"] < math.log(264)


@pytest.mark.parametrize("how", ["gqa", "torch", "windows in some layers", "linear", "token shift"])
def test_texts_of_a_continuous_batch_do_not_change(how):
    texts = []
    for monitor in (None, always()):
        generator = make_generator(how, monitor)
        batch, completions = (
            ContinuousBatch(generator, 2),
            [Completion(prompt) for prompt in PROMPTS],
        )
        for index, (completion, each) in enumerate(zip(completions, params())):
            batch.add(
                generator.new_sequence(index, completion, each, generator.encode(completion.prompt))
            )
        while not batch.is_idle:
            batch.step()
        texts.append([(one.token_ids, one.logprobs) for one in completions])
    assert texts[0] == texts[1]
    assert monitor.n_measured > 5


@pytest.mark.parametrize(
    "how", [how for how in HOW if how not in ("window and sinks", "slide", "early exit")]
)
def test_figures_are_those_of_the_whole_text(how):
    """A text of one sequence; as kernels round differently, with a tolerance, which is wide for few
    bits."""
    monitor = always()
    generator = make_generator(how, monitor)
    (completion,) = generator.generate(PROMPTS[2:], params()[2:])
    tokens = [*generator.encode(PROMPTS[2]), *completion.token_ids]
    tolerance = (
        0.3 if "int4" in how else {"bf16": 0.2, "int8": 0.1, "int8 cache": 0.05}.get(how, 2e-3)
    )
    assert_measured(monitor, generator, tokens, tolerance)


@needs("speculation")
def test_rejected_drafts_are_not_measured():
    """The cache still has their keys when a position is measured."""
    monitor, prompt = always(), "abcabcabdabcabcabe"
    generator = make_generator("speculate", monitor)
    (completion,) = generator.generate([prompt], params(40)[:1])
    assert completion.drafted > completion.accepted
    assert_measured(monitor, generator, [*generator.encode(prompt), *completion.token_ids], 2e-3)


def test_figures_in_a_continuous_batch():
    for how in ("gqa", "torch"):
        monitor = always()
        generator = make_generator(how, monitor)
        batch, completion = ContinuousBatch(generator, 3), Completion(PROMPTS[2])
        batch.add(generator.new_sequence(0, completion, params()[0], generator.encode(PROMPTS[2])))
        while not batch.is_idle:
            batch.step()
        assert_measured(
            monitor, generator, [*generator.encode(PROMPTS[2]), *completion.token_ids], 2e-3
        )


def test_cache_use():
    monitor = always()
    generator = make_generator("windows in some layers", monitor)
    (completion,) = generator.generate(PROMPTS[:1], params()[:1])
    position, values = monitor._newest[-1]
    assert (
        position == len(generator.encode("abcd")) + len(completion.token_ids) - 2
    )  # the last one is never read
    assert values["blocks.0.cache_used"] == (position + 1) / 160
    assert values["blocks.1.cache_used"] == 1


def test_the_cost_decides_how_often(monkeypatch):
    """With a clock that only the test moves: 1 tick a token, and 5 for a measurement, of which 1/64
    may be spent."""
    tick, clock, measured = 1 / 1024, SimpleNamespace(now=0.0, n_tokens=0), []
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monitor = Monitor(max_cost=1 / 64)

    def measure(*arguments):
        measured.append(clock.n_tokens)
        clock.now += 5 * tick
        return torch.zeros(7, 1)

    monkeypatch.setattr(module, "measure_text", measure)
    monitor.calibrate(random_model())
    monkeypatch.setattr(monitor, "_measure", measure)
    measured.clear()

    def decode(n, text):
        for _ in range(n):
            clock.n_tokens += 1
            clock.now += tick
            monitor.observe(None, [text], lambda index: None)

    def by_cost():
        return [n for n in measured if n.bit_count() > 1]

    decode(1000, "a text")  # its first token may be the result of a pause
    assert by_cost() == [321, 641, 961]  # each costs 5 ticks, which are 1/64 of 320
    clock.now += 3600  # nobody asks for a text
    decode(281, "another")
    assert by_cost() == [321, 641, 961]
    decode(1, "another")
    assert by_cost() == [321, 641, 961, 1282]  # after 39 tokens of one text and 281 of the other
    assert [n for n in measured if n.bit_count() == 1] == [2**i for i in range(11)]  # whatever


@pytest.mark.parametrize("how", ["gqa", "torch"])  # steps of 16 tokens, and of one
def test_every_text_has_figures_even_if_measuring_may_take_no_time(how):
    """As in `thinker generate --monitor`, where each text has a monitor of its own."""
    for seed in range(10):
        monitor = Monitor(max_cost=0.0)
        one = SamplingParams(max_new_tokens=40, seed=seed, logit_bias=NO_END)
        make_generator(how, monitor).generate([""], one)
        assert monitor.n_measured >= 2
        assert len(monitor.summary()["layers"]) == len(make_generator(how).model.blocks)
        assert monitor.lines()[0].startswith(f"monitor: {monitor.n_measured} positions, token ")
    monitor = Monitor(max_cost=0.0)
    make_generator(how, monitor).generate(["ab"], SamplingParams(max_new_tokens=1, seed=1))
    assert monitor.lines() == ["monitor: no position was measured, as no text had two new tokens"]


@pytest.mark.parametrize("how", ["gqa", "torch"])
@pytest.mark.parametrize("n_tokens", [2, 3, 8, 16, 17])
@pytest.mark.parametrize("n_texts", [1, 3])
def test_a_text_that_ends_in_its_first_step_has_figures(how, n_tokens, n_texts):
    monitor = Monitor(max_cost=0.0)
    short = SamplingParams(max_new_tokens=n_tokens, seed=1)  # a bias allows one token per step
    watched = make_generator(how, monitor).generate(["ab"] * n_texts, short)
    assert monitor.n_measured >= 1
    if n_tokens == 2:
        assert monitor.lines()[0].startswith("monitor: 1 position, ")
    plain = make_generator(how).generate(["ab"] * n_texts, short)
    assert all(len(one.token_ids) == n_tokens for one in watched)
    assert [one.token_ids for one in watched] == [one.token_ids for one in plain]


def test_a_batch_whose_texts_have_all_ended_is_no_error():
    """As on a server whose first requests are short."""
    monitor = Monitor(max_cost=0.0)
    generator = make_generator("gqa", monitor)
    batch = ContinuousBatch(generator, 2)
    for index, n_tokens in enumerate((1, 1, 1, 1, 2, 8, 8, 8, 8)):
        short = SamplingParams(max_new_tokens=n_tokens, seed=index)
        batch.add(generator.new_sequence(index, Completion("ab"), short, generator.encode("ab")))
        while not batch.is_idle:
            batch.step()
    assert monitor.n_measured >= 1


def own_reference(generator, texts, step=1):
    """The figures of these texts, with a deviation that is known."""
    rows = [
        measure_text(generator.model, torch.tensor([ids]), TOKENIZER.vocab_size)[:, 1:]
        for ids in texts
    ]
    means = torch.cat(rows, dim=1).mean(dim=1).tolist()
    stds = torch.cat(rows, dim=1).std(dim=1).tolist()
    names = figure_names(len(generator.model.blocks))
    return Reference(step, {name: ([mean], [std]) for name, mean, std in zip(names, means, stds)})


def test_drift_is_reported_once_with_layer_and_figure():
    generator = make_generator("torch")
    completions = generator.generate(PROMPTS, params(60))
    reference = own_reference(
        generator, [generator.encode(one.prompt) + one.token_ids for one in completions]
    )

    def watched(change):
        lines = []
        monitor = Monitor(reference, max_cost=math.inf, warn=lines.append)
        model = random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=160)
        with torch.no_grad():
            change(model)
        Generator(model, TOKENIZER, monitor=monitor, compile=False).generate(PROMPTS, params(60))
        return monitor, lines

    monitor, lines = watched(lambda model: None)
    assert (lines, monitor.drift, monitor.summary()["drift"]) == ([], [], [])
    for factor, side in ((20, "above"), (0.01, "below")):
        monitor, lines = watched(
            lambda model, by=factor: model.blocks[1].attention.q_norm.weight.mul_(by)
        )
        assert len(lines) == 1
        assert lines[0].startswith("layer 1: ")
        assert "of the validation set" in lines[0]
        drift = monitor.summary()["drift"]
        assert any(
            line.startswith("layer 1: maximum logit") and f" is {side} the " in line
            for line in drift
        )
        assert not any(line.startswith("layer 0") for line in drift)


def test_positions_are_compared_with_their_group():
    reference = Reference(1, {"token_entropy": ([1.0, 2.0, 3.0], [0.1, 0.1, 0.1])})
    for position, value in ((1, 1.0), (2, 2.0), (3, 2.0), (4, 3.0), (1000, 3.0)):
        assert reference.find_drift([(position, {"token_entropy": value})]) == []
        (drift,) = reference.find_drift([(position, {"token_entropy": value - 1})])
        assert (drift.value, drift.low < value < drift.high) == (value - 1, True)
    mixed = [(1, {"token_entropy": 1.0}), (4, {"token_entropy": 3.0})]
    assert reference.find_drift(mixed) == []
    (drift,) = reference.find_drift([*mixed, (4, {"token_entropy": 30.0})])
    assert str(drift).startswith("token entropy 11.3 is above the ")


def test_positions_without_a_figure_do_not_shift_what_is_expected_of_it():
    """A head that chooses nothing at a position has no figure there."""
    reference = Reference(1, {"mine": ([1.0, 100.0], [0.1, 0.1])})
    assert reference.find_drift([(1, {"mine": 1.0}), (2, {})]) == []
    (drift,) = reference.find_drift([(1, {"mine": 9.0}), (2, {})])
    assert drift.low < 1 < drift.high < 9


def test_what_a_monitor_needs():
    with pytest.raises(UserError, match="monitor needs the KV cache"):
        Generator(random_model(1, vocab_size=264), TOKENIZER, use_cache=False, monitor=Monitor())
    with pytest.raises(UserError, match="monitor is True; it must be a Monitor or None"):
        Generator(random_model(1, vocab_size=264), TOKENIZER, monitor=True)


@needs("retrieval")
def test_a_monitor_does_not_measure_retrieved_blocks():
    with pytest.raises(UserError, match="monitor cannot be combined with retrieve"):
        Generator(
            random_model(1, vocab_size=264),
            TOKENIZER,
            window=32,
            retrieve=1,
            retrieve_block=8,
            monitor=Monitor(),
        )
