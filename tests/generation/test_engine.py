"""The engine on real models: batches, seeds, limits, reasons to end."""

import math
import random
from itertools import pairwise

import pytest
import torch
from conftest import examples, random_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from installed import if_installed

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.caches.sink_cache import SinkCache
from thinker.generation.chat.conversation import Conversation
from thinker.generation.sampler import distribution, sample_from_probs
from thinker.model import Thinker
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = make_tokenizer("byte", [])

# The same examples every time: rows of a batch differ from rows alone in their last bits, and one
# draw in a million stands so near to a border that it could fall on either side.
SAME_EXAMPLES = {
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}

PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 10),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 4, 300]),
    top_p=st.sampled_from([None, 0.3, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    logit_bias=st.sampled_from(
        [(), {97: 50.0, 98: 50.0, 256: 48.0}, {0xC3: 9.0, 0xA9: 9.0, 97: -math.inf}]
    ),
    seed=st.integers(0, 1000),
    stop=st.sampled_from([(), ("ab",), ("é", "\ufffd"), ("bb", "aba")]),
)


@st.composite
def batches(draw_from):
    """Up to 8 prompts of 0 to 30 tokens, often the same more than once, each with its own
    parameters."""
    short, long = st.text("ab é漢", max_size=10), st.text("ab", min_size=11, max_size=30)
    pool = draw_from(st.lists(short | long, min_size=1, max_size=5))
    prompts = draw_from(st.lists(st.sampled_from(pool), min_size=1, max_size=8))
    return prompts, [draw_from(PARAMS) for _ in prompts]


@pytest.fixture(scope="module")
def model():
    return random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=48)


PROMPTS = ["", "a", "Once upon", "the quick brown fox jumps over", "é漢"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ragged_batch_equals_single_prompts(model, temperature):
    generator = Generator(model, TOKENIZER)
    together = generator.generate(
        PROMPTS, SamplingParams(max_new_tokens=12, temperature=temperature, seed=5)
    )
    for index, (prompt, row) in enumerate(zip(PROMPTS, together)):
        params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=5 + index)
        assert generator.generate([prompt], params)[0].token_ids == row.token_ids


def test_cached_equals_uncached(model):
    params = SamplingParams(max_new_tokens=15, seed=3, repetition_penalty=1.2, top_k=50)
    cached = Generator(model, TOKENIZER).generate(PROMPTS, params)
    uncached = Generator(model, TOKENIZER, use_cache=False).generate(PROMPTS, params)
    assert [c.token_ids for c in cached] == [c.token_ids for c in uncached]
    for a, b in zip(cached, uncached):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_logprobs_equal_a_teacher_forced_pass(model):
    completion = Generator(model, TOKENIZER).generate(
        ["Hello"], SamplingParams(max_new_tokens=20, seed=2)
    )[0]
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode("Hello"), *completion.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0, :, : TOKENIZER.vocab_size]
    known = logits.log_softmax(-1)[range(5, len(ids) - 1), completion.token_ids]
    assert completion.logprobs == pytest.approx(known.tolist(), abs=1e-4)


def test_greedy_samples_the_likeliest_token(model):
    completion = Generator(model, TOKENIZER).generate(
        ["Hello"], SamplingParams(max_new_tokens=8, temperature=0)
    )[0]
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode("Hello")]
    for token in completion.token_ids:
        with torch.no_grad():
            assert (
                model(torch.tensor([ids]))[0, -1, : TOKENIZER.vocab_size].argmax().item() == token
            )
        ids.append(token)


def test_streaming_equals_generate_and_does_not_change_the_model(model):
    generator, params = Generator(model, TOKENIZER), SamplingParams(max_new_tokens=30, seed=9)
    model.train()
    pieces = list(generator.stream("The", params))
    assert model.training
    model.eval()
    assert len(pieces) > 1
    assert "".join(pieces) == generator.generate(["The"], params)[0].text
    completion = Completion("The")
    assert (
        "".join(piece for _, piece in generator.stream_batch([completion], params))
        == completion.text
    )


def test_the_seed_determines_the_text(model):
    generator = Generator(model, TOKENIZER)
    texts = [
        generator.generate(["x"], SamplingParams(max_new_tokens=20, seed=seed))[0].text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_padding_ids_are_never_sampled(model):
    completions = Generator(model, TOKENIZER).generate(
        ["a"] * 20, SamplingParams(max_new_tokens=40, temperature=3.0)
    )
    assert all(token < TOKENIZER.vocab_size for c in completions for token in c.token_ids)


def always(model, token):
    """A copy that says nothing but `token`."""
    copy = Thinker(model.config).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        copy.norm.weight.zero_()
        copy.norm.weight[0] = 1
        copy.lm_head.weight.zero_()
        for block in copy.blocks:
            block.attention.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        copy.embedding.weight[:, 0] = 5.0
        copy.lm_head.weight[token, 0] = 100.0
    return copy


def test_finish_reasons(model):
    at_end = Generator(always(model, TOKENIZER.eos_id), TOKENIZER).generate(["ab"])[0]
    assert (at_end.finish_reason, at_end.text, at_end.token_ids) == ("stop", "", [TOKENIZER.eos_id])
    z = Generator(always(model, ord("z")), TOKENIZER)
    limited = z.generate(["ab"], SamplingParams(max_new_tokens=5))[0]
    assert (limited.finish_reason, limited.text) == ("length", "zzzzz")
    stopped = z.generate(["ab"], SamplingParams(stop=("zzz",)))[0]
    assert (stopped.finish_reason, stopped.text, len(stopped.token_ids)) == ("stop", "", 3)
    full = z.generate(["ab"], SamplingParams(max_new_tokens=1000))[0]
    assert (full.finish_reason, len(full.token_ids)) == (
        "length",
        48 + 1 - 3,
    )  # the last token is never fed


def test_a_finished_sequence_does_not_change_the_others(model):
    generator = Generator(model, TOKENIZER)
    prompts = ["q" * 45, "a", "b" * 30]  # the context ends for each at another time
    together = generator.generate(prompts, SamplingParams(max_new_tokens=40, seed=1))
    assert [len(c.token_ids) for c in together][::2] == [3, 18]
    for index, row in enumerate(together):
        alone = generator.generate(
            [prompts[index]], SamplingParams(max_new_tokens=40, seed=1 + index)
        )[0]
        assert alone.token_ids == row.token_ids


def test_a_prompt_longer_than_the_context_raises(model):
    with pytest.raises(
        UserError, match="49 tokens, but the model's context is 48; shorten it to at most 48"
    ):
        Generator(model, TOKENIZER).generate(["a" * 48])
    assert len(Generator(model, TOKENIZER).generate(["a" * 47])[0].token_ids) == 1
    assert Generator(model, TOKENIZER).generate([]) == []


@settings(max_examples=examples(25), **SAME_EXAMPLES)
@given(batch=batches())
def test_any_batch_equals_single_prompts_and_uncached_decoding(model, batch):
    prompts, params = batch
    generator = Generator(model, TOKENIZER)
    together = generator.generate(prompts, params)
    alone = [generator.generate([prompt], [own])[0] for prompt, own in zip(prompts, params)]
    uncached = Generator(model, TOKENIZER, use_cache=False).generate(prompts, params)
    for row, *others in zip(together, alone, uncached):
        for other in others:
            assert (row.token_ids, row.text, row.finish_reason) == (
                other.token_ids,
                other.text,
                other.finish_reason,
            )
            assert row.prompt_tokens == other.prompt_tokens == 1 + len(row.prompt.encode())
            assert row.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def generate_and_record_shapes(generator, prompts, params):
    """The completions, and the (rows, positions) of every pass on the way to them."""
    shapes = []
    hook = generator.model.register_forward_pre_hook(
        lambda module, args: shapes.append(tuple(args[0].shape))
    )
    try:
        return generator.generate(prompts, params), shapes
    finally:
        hook.remove()


def test_prefill_reads_equal_prompts_once_and_equal_lengths_together(model):
    generator, params = (
        Generator(model, TOKENIZER, compile=False),
        SamplingParams(max_new_tokens=4, seed=3),
    )
    completions, shapes = generate_and_record_shapes(generator, ["Hello"] * 5, params)
    assert shapes == [(1, 6), (5, 1), (5, 1), (5, 1)]
    assert len({tuple(c.token_ids) for c in completions}) == 5  # each sample draws by its own seed
    _, shapes = generate_and_record_shapes(generator, ["abc", "Hello", "xyz", "abc", ""], params)
    assert shapes == [(1, 1), (2, 4), (1, 6), (5, 1), (5, 1), (5, 1)]


def reference_loop(model, prompt, params, penalize_prompt=False):
    """What sampling is, one full pass a token; `penalize_prompt` makes the mistake of penalising
    the prompt too."""
    ids, numbers = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)], random.Random(params.seed)
    start = 0 if penalize_prompt else len(ids)
    for _ in range(params.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[:, -1, : TOKENIZER.vocab_size]  # (1, V)
        counts = torch.bincount(
            torch.tensor(ids[start:], dtype=torch.int64), minlength=TOKENIZER.vocab_size
        )
        in_text = torch.bincount(torch.tensor(ids), minlength=TOKENIZER.vocab_size) > 0
        probs = distribution(logits, params, in_text[None], counts[None])
        ids.append(
            sample_from_probs(probs, torch.tensor([numbers.random()], dtype=torch.float64)).item()
        )
    return ids[-params.max_new_tokens :]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_count_generated_tokens_and_only_repetition_the_prompt(model, name, stress):
    prompt, generator = "abacabad", Generator(model, TOKENIZER)
    few = dict.fromkeys(
        b"abcd", 50.0
    )  # so few tokens that all of them come again, in the prompt and after it
    n_different = 0
    n_seeds = 10 if stress else 5
    for seed in range(n_seeds):
        params = SamplingParams(max_new_tokens=10, logit_bias=few, seed=seed, **{name: 2.0})
        sampled = generator.generate([prompt], params)[0].token_ids
        assert sampled == reference_loop(model, prompt, params)
        n_different += (
            sampled
            != generator.generate([prompt], SamplingParams(10, logit_bias=few, seed=seed))[
                0
            ].token_ids
        )
        if name != "repetition_penalty":
            n_different += sampled != reference_loop(model, prompt, params, penalize_prompt=True)
    assert n_different > n_seeds / 2  # else none of it was tested


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("memory", [{}, {"window": 5, "sinks": 2}, {"window": 30}])
def test_prefill_chunk_size_does_not_change_the_text(model, monkeypatch, size, memory):
    params = SamplingParams(max_new_tokens=8, seed=4)
    prompts = [*PROMPTS, "y" * 40]
    whole = Generator(model, TOKENIZER, **memory).generate(prompts, params)
    monkeypatch.setattr("thinker.generation.decoders.decoder.PREFILL_CHUNK", size)
    generator = Generator(model, TOKENIZER, compile=False, **memory)
    pieces, shapes = generate_and_record_shapes(generator, prompts, params)
    assert max(positions for _, positions in shapes) == size
    for a, b in zip(whole, pieces):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_invalid_params_raise(model):
    generator = Generator(model, TOKENIZER)
    with pytest.raises(UserError, match="2 elements for 3 prompts"):
        generator.generate(["a", "b", "c"], [SamplingParams()] * 2)
    with pytest.raises(UserError, match="0 elements for 1 prompts"):
        generator.generate(["a"], [])
    with pytest.raises(UserError, match="logit_bias has the token id 257; use ids from 0 to 256"):
        generator.generate(
            ["a", "b"], [SamplingParams(), SamplingParams(logit_bias={257: 1.0})]
        )  # the model has 264
    assert generator.generate(["a"], SamplingParams(max_new_tokens=3, logit_bias={256: 99.0}))[
        0
    ].token_ids == [256]


def test_what_is_printed_of_it_is_short_and_says_what_it_is(model):
    generator = Generator(model, TOKENIZER, window=8, sinks=2)
    tokenizer = "Tokenizer(byte, 257 ids, BOS '<|bos|>')"
    assert repr(TOKENIZER) == tokenizer
    assert repr(generator).startswith(
        f"Generator({tokenizer}, context of inf tokens, torch.float32 on cpu)"
    )
    (completion,) = generator.generate("hello", SamplingParams(max_new_tokens=40, seed=3))
    assert repr(completion).startswith(
        f"Completion(prompt='hello', text={completion.text!r}, finish_reason="
    )
    assert "logprobs" not in repr(completion)
    score = generator.score("x" * 100)
    assert (
        repr(score)
        == f"Score(100 tokens, 100 bytes: {score.nats:.4f} nats, {score.bits_per_byte:.4f} bits per byte)"
    )


def test_a_string_is_one_prompt(model):
    generator, params = Generator(model, TOKENIZER), SamplingParams(max_new_tokens=5, seed=3)
    (alone,) = generator.generate("hello", params)
    assert alone == generator.generate(["hello"], params)[0]
    assert alone.prompt == "hello"
    assert generator.generate(("hello",), params) == [alone]
    assert "".join(generator.stream("hello", params)) == alone.text


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda generator: generator.generate(b"hello"), "prompts is a bytes; pass a str"),
        (lambda generator: generator.generate(["a", 5]), "prompt 1 is a int"),
        (lambda generator: generator.generate(None), "prompts is a NoneType"),
        (lambda generator: list(generator.stream(["a", "b"])), "the prompt is a list; pass a str"),
        (lambda generator: generator.score(["a"]), "the text is a list"),
        (lambda generator: generator.encode(7), "the prompt is a int"),
        (
            lambda generator: list(Conversation(generator).reply(["a"], SamplingParams())),
            "the text is a list",
        ),
        (lambda generator: generator.generate("a", {"seed": 1}), "params is a dict"),
        (
            lambda generator: generator.generate("a", prompt_tokens=[1, 2]),
            "a list of token ids .* per prompt",
        ),
        (lambda generator: generator.generate("a", prompt_tokens=["ab"]), "a list of token ids"),
        (lambda generator: generator.generate("a", prompt_tokens=[[1.0]]), "a list of token ids"),
        (
            lambda generator: generator.generate(["a", "b"], prompt_tokens=[[1]]),
            "1 lists for 2 prompts",
        ),
        (lambda generator: generator.generate("a", prompt_tokens=[]), "0 lists for 1 prompts"),
        (
            lambda generator: generator.generate("a", prompt_tokens=[[]]),
            "0 tokens; it needs at least 1",
        ),
        (
            lambda generator: generator.generate("a", prompt_tokens=[[5, 99_999]]),
            "99999; use ids from 0 to 256",
        ),
        (lambda generator: generator.generate("a", prompt_tokens=[[-1]]), "id -1"),
        (
            lambda generator: generator.generate("a", prompt_tokens=[[1] * 500]),
            "500 tokens, .* context is 48",
        ),
        (
            lambda generator: generator.generate("a", SamplingParams(stop="ab")),
            "stop is 'ab'; use a list",
        ),
        (
            lambda generator: Generator(generator.model, None),
            "tokenizer is None; pass the model's tokenizer",
        ),
        (
            lambda g: Generator(
                g.model, make_tokenizer("char", ["".join(map(chr, range(200, 600)))])
            ),
            "has 657 ids, more than the m",
        ),
    ],
)
def test_what_is_no_prompt_is_refused_in_one_line(model, misuse, message):
    with pytest.raises(UserError, match=message) as caught:
        misuse(Generator(model, TOKENIZER))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": 2}, "sinks is 2.*with a window"),
        ({"window": 8, "sinks": -1}, "sinks is -1"),
        ({"window": 0}, "window is 0, sinks is 0"),
        ({"window": 49}, "window is 49, sinks is 0.*48"),
        ({"window": 45, "sinks": 4}, "window is 45, sinks is 4.*48"),
        ({"bits": 5}, "bits is 5; use 8 or 4"),
        (
            {"dtype": "fp16", "compile": True},
            "compile is not available: kernels in C support fp32 and bf16",
        ),
        ({"use_cache": False, "window": 8}, "window needs the KV cache"),
        ({"use_cache": False, "compile": True}, "compile needs the KV cache"),
        ({"windo": 8}, "Generator has no option windo; did you mean window"),
        ({"zzz": 8}, "Generator has no option zzz; remove it"),
    ],
)
def test_contradictory_options_raise(model, options, message):
    with pytest.raises(UserError, match=message):
        Generator(model, TOKENIZER, **options)


def test_top_logprobs_equal_a_teacher_forced_pass(model):
    params = [
        SamplingParams(max_new_tokens=20, temperature=t, seed=6, logprobs=n)
        for t, n in [(0, 1), (1, 5), (2, 0)]
    ]
    found = 0
    for completion, own in zip(
        Generator(model, TOKENIZER).generate(["Hello", "Hello", "You"], params), params
    ):
        if not own.logprobs:
            assert completion.top_logprobs == []
            continue
        ids = [TOKENIZER.bos_id, *TOKENIZER.encode(completion.prompt), *completion.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[
                0, -len(completion.token_ids) - 1 : -1, : TOKENIZER.vocab_size
            ]
        values, tokens = logits.log_softmax(-1).topk(own.logprobs)
        assert len(completion.top_logprobs) == len(completion.token_ids)
        for place, top in enumerate(completion.top_logprobs):
            assert list(top) == tokens[place].tolist()
            assert list(top.values()) == pytest.approx(values[place].tolist(), abs=1e-4)
            assert list(top.values()) == sorted(top.values(), reverse=True)
            sampled = completion.token_ids[place]
            if sampled in top:
                found += 1
                assert top[sampled] == completion.logprobs[place]
    assert found > 20  # greedy decoding draws the likeliest, always


def test_padding_ids_are_not_in_top_logprobs(model):
    top = (
        Generator(model, TOKENIZER)
        .generate(["a"], SamplingParams(1, logprobs=1000))[0]
        .top_logprobs[0]
    )
    assert sorted(top) == list(range(TOKENIZER.vocab_size))
    assert math.fsum(map(math.exp, top.values())) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (6, 0), (5, 3), (44, 4)])
def test_with_a_window_texts_grow_beyond_the_context(model, window, sinks):
    generator = Generator(model, TOKENIZER, window=window, sinks=sinks)
    prompts = ["", "Once upon", "é漢", "z" * 70, "the quick brown fox", "abc" * 3]
    bans = {TOKENIZER.eos_id: -math.inf}
    params = [
        SamplingParams(n, logit_bias=bans, seed=n, logprobs=1) for n in (60, 8, 15, 12, 1, 20)
    ]
    for completion, own in zip(generator.generate(prompts, params), params):
        alone = generator.generate([completion.prompt], own)[0]
        assert completion.token_ids == alone.token_ids
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert len(completion.token_ids) == own.max_new_tokens
        # Every token was fed but the last; the BOS token is one more than the prompt's bytes.
        fed = len(completion.prompt.encode()) + own.max_new_tokens
        assert completion.n_evicted == alone.n_evicted == max(0, fed - window - sinks)
        assert completion.logprobs == pytest.approx(
            _through_a_rolling_cache(model, completion, window, sinks), abs=1e-4
        )


def _through_a_rolling_cache(model, completion, window, sinks):
    """The log-probabilities of its tokens when everything is fed one position at a time."""
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode(completion.prompt), *completion.token_ids]
    cache, known = SinkCache(model, 1, window, sinks), []
    for token, following in pairwise(ids):
        logits = model(torch.tensor([[token]]), cache=cache)[0, 0, : TOKENIZER.vocab_size]
        known.append(logits.log_softmax(-1)[following].item())
    return known[-len(completion.token_ids) :]


def test_a_window_that_evicts_nothing_changes_nothing(model):
    params = SamplingParams(max_new_tokens=20, seed=2)
    rolling = Generator(model, TOKENIZER, window=46, sinks=2).generate(PROMPTS[:3], params)
    plain = Generator(model, TOKENIZER).generate(PROMPTS[:3], params)
    assert [c.token_ids for c in rolling] == [c.token_ids for c in plain]
    assert [c.n_evicted for c in rolling + plain] == [0] * 6


@settings(max_examples=examples(50), **SAME_EXAMPLES)
@given(
    batch=batches(),
    options=st.sampled_from(
        [{}, {"window": 7, "sinks": 1}, *if_installed("speculation", {"speculate": 3})]
    ),
)
def test_streamed_pieces_equal_the_decoded_tokens(model, batch, options):
    (prompt, *_), (params, *_) = batch
    generator, completion = Generator(model, TOKENIZER, **options), Completion(prompt)
    pieces = [piece for _, piece in generator.stream_batch([completion], params)]
    decoded = TOKENIZER.decode(completion.token_ids)
    starts = [decoded.index(stop) for stop in params.stop if stop in decoded]
    assert "".join(pieces) == completion.text == decoded[: min(starts, default=len(decoded))]
    assert "" not in pieces
    ended = bool(starts) or completion.token_ids[-1] == TOKENIZER.eos_id
    assert completion.finish_reason == ("stop" if ended else "length")
    assert ended or len(completion.token_ids) == params.max_new_tokens
