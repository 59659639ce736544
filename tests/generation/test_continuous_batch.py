"""A text of a continuous batch is the text of generate(), whatever its neighbours, timing and
settings."""

import math
import random

import pytest
import torch
from batch_cases import (
    KINDS,
    NO_END,
    PROMPTS,
    TOKENIZER,
    check_equal,
    make_generator,
    new_sequence,
    prepared,
    random_params,
    run_batch,
)
from conftest import examples, random_model
from installed import if_installed
from pairwise import pairwise

from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.batching import batch_rows
from thinker.generation.batching.batch_rows import JoinedRows, PooledRows
from thinker.generation.batching.continuous_batch import ContinuousBatch
from thinker.generation.decoders import native_decoder, plain_decoder
from thinker.generation.mixed_bits import matrix_names
from thinker.generation.prompt_scores import PromptScores
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", range(examples(9)))
@pytest.mark.parametrize("kind", KINDS)
def test_texts_equal_those_of_generate(kind, seed):
    numbers = random.Random(f"{kind} {seed}")
    generator = make_generator(kind)
    prompts = PROMPTS[2:] if kind == "prefix" else PROMPTS  # which needs a few tokens
    requests = [(numbers.choice(prompts), random_params(numbers, index)) for index in range(14)]
    check_equal(
        generator, run_batch(generator, requests, numbers, numbers.choice([1, 3, 8]), n_removed=3)
    )


MIXED = dict.fromkeys(matrix_names(2), 4) | {"lm_head": 8}
OPTIONS = {
    "bits": [None, 8, 4, MIXED],
    "dtype": ["fp32", "bf16"],
    "compile": [None, False],
    "slide": [False, True],
    "cache_bits": [None, 8, 4],
    "attention": ["full", ["full", "window(8) | global(2)"]],
}


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=str)
def test_the_product_of_options(case):
    options = {name: value for name, value in case.items() if name != "attention"}
    model = random_model(
        1, 0.3, 0.4, vocab_size=264, max_seq_len=64, head_dim=16, attention=case["attention"]
    )
    generator, numbers = Generator(model, TOKENIZER, **options), random.Random(str(case))
    requests = [(numbers.choice(PROMPTS[:5]), random_params(numbers, index)) for index in range(10)]
    requests.append(("ab", SamplingParams(90, seed=1, logit_bias=NO_END)))  # beyond the context
    sequences = run_batch(generator, requests, numbers)
    assert len(sequences) == len(requests)
    is_exact = case["dtype"] == "fp32" and case["bits"] is None and case["cache_bits"] is None
    if generator.is_batch_invariant or is_exact:  # else rounding depends on the number of rows
        check_equal(generator, sequences)


def test_both_kinds_of_rows_are_tested():
    assert type(ContinuousBatch(make_generator("torch"), 2).rows) is JoinedRows
    assert type(ContinuousBatch(make_generator("packed"), 2).rows) is PooledRows
    generator = make_generator()
    if generator.is_batch_invariant:
        assert type(ContinuousBatch(generator, 2).rows) is PooledRows


@pytest.mark.parametrize("kind", ["gqa", "int4 cache", "torch"])
def test_joined_rows_sample_several_tokens_at_once(monkeypatch, kind):
    monkeypatch.setattr(native_decoder, "MAX_SECONDS", 1e9)  # however slow this machine is
    generator = make_generator(kind)
    monkeypatch.setattr(generator.decoder, "steps_per_read", 8)  # as on a GPU
    batch = ContinuousBatch(generator, 3)
    batch.rows = JoinedRows(generator, 3)
    long = new_sequence(generator, "ab" * 50, SamplingParams(40, seed=1))
    short = new_sequence(generator, "a", SamplingParams(60, seed=2, temperature=0.7))
    short.index = 1
    for sequence in (long, short):
        batch.add(sequence)
    n_together = []
    orders = set()
    while not batch.is_idle:
        steps = batch.step()
        if len(steps) == 2:
            n_together += [len(progress.sampled) for progress in steps]
        for rows in (batch.running, batch.rows.joined):
            orders.add(tuple(row.sequence.index for row in rows))
    assert max(n_together) > 1
    assert {(0, 1), (1, 0)} <= orders  # the long prompt came first, and joined last
    check_equal(generator, [long, short])


def test_rows_of_one_cache_sample_several_tokens_at_once(monkeypatch):
    monkeypatch.setattr(plain_decoder, "MAX_SECONDS", 1e9)  # however slow this machine is
    generator = make_generator("packed")
    batch = ContinuousBatch(generator, 5)
    sequences = []
    n_together = set()
    for seed, n_new in enumerate([8, 50, 40]):
        sequences.append(new_sequence(generator, "ab" * seed, SamplingParams(n_new, seed=seed)))
        batch.add(sequences[-1])
    while not batch.is_idle:
        n_together |= {len(progress.sampled) for progress in batch.step()}
    assert 8 in n_together
    check_equal(generator, sequences)


@pytest.mark.parametrize("kind", ["gqa", "torch", "packed", "window"])
def test_texts_slide(kind):
    generator = make_generator(kind, slide=True)
    requests = [
        (prompt, SamplingParams(250, seed=seed, logit_bias=NO_END))
        for seed, prompt in enumerate(PROMPTS[2:])
    ]
    sequences = run_batch(generator, requests, random.Random(1))
    if kind != "window":  # which ends with the context
        assert all(sequence.completion.n_slides > 1 for sequence in sequences)
    check_equal(generator, sequences)


def count_read(monkeypatch, batch):
    """A list of (row, number of tokens) of every reading."""
    reads, read = [], batch.rows.read

    def counted(chosen):
        reads.append([(row, len(tokens)) for row, tokens in chosen])
        return read(chosen)

    monkeypatch.setattr(batch.rows, "read", counted)
    return reads


def finish(batch):
    while not batch.is_idle:
        batch.step()


@pytest.mark.parametrize("kind", ["gqa", "torch", "packed", "window", "prefix"])
def test_shared_prefixes_are_not_read_again(monkeypatch, kind):
    generator = make_generator(kind)
    system, params = "You are a helpful model. " * 3, SamplingParams(5, seed=3, logit_bias=NO_END)
    batch = ContinuousBatch(generator, 3)
    reads = count_read(monkeypatch, batch)
    first = new_sequence(generator, system + "Hi!", params)
    batch.add(first)
    finish(batch)
    del reads[:]
    # Another chat with the same system message, and the next turn of the first chat.
    other = new_sequence(generator, system + "Who are you?", params)
    turn = generator.new_sequence(
        0, Completion(""), params, [*first.tokens, *TOKENIZER.encode(" And now?")]
    )
    for sequence in (other, turn):
        batch.add(sequence)
    finish(batch)
    n_read = sum(n for step in reads for _, n in step)
    if kind != "window":  # which has forgotten the beginning
        assert n_read <= len("Who are you?") + len(" And now?") + 1 + 2 * 5
        assert other.n_shared == 1 + len(system)
        assert turn.n_shared == len(first.tokens) - 1  # the last token was sampled, but not read
    for sequence in (other, turn):
        known = Completion("")
        for _ in generator.stream_batch(
            [known], [params], [sequence.tokens[: sequence.completion.prompt_tokens]]
        ):
            pass
        assert sequence.completion.token_ids == known.token_ids


@pytest.mark.parametrize("kind", [*KINDS, "rows of one cache"])
def test_prompts_are_scored(kind):
    """As a plain pass scores them, whatever was read before and is read beside them."""
    if kind in KINDS:
        generator = make_generator(kind)
    else:  # also where the last bits depend on the batch
        generator = make_generator()
        if generator.kernel_problem:
            pytest.skip(generator.kernel_problem)
        generator.decoder.is_batch_invariant = True
    texts = [
        "x" * 130,
        "You are a helpful model. Hi!",
        "You are a helpful model. Who is it?",
        "abcd",
    ]
    batch = ContinuousBatch(generator, 2)
    batch.add(new_sequence(generator, texts[1], SamplingParams(3)))
    finish(batch)  # its keys could be shared
    sequences = []
    for text in texts:
        sequence = new_sequence(generator, text, SamplingParams(3))
        n_ids, n_visible = TOKENIZER.vocab_size, generator.config.prefix
        sequence.prompt_scores = PromptScores(sequence.tokens, 2, n_ids, n_visible)
        batch.add(sequence)
        batch.add(new_sequence(generator, text, SamplingParams(3)))
        sequences.append((sequence, list(sequence.tokens)))
    finish(batch)
    tolerance = 1e-4
    if generator.model.dtype == torch.bfloat16 or "cache" in kind:
        tolerance = 0.25  # both are rounded
    for sequence, tokens in sequences:
        scores = sequence.prompt_scores
        assert scores.is_complete
        first = max(1, generator.config.prefix)
        assert scores.logprobs[:first] == [None] * first
        assert scores.top_logprobs[:first] == [{}] * first
        with torch.no_grad():
            logits = generator.model(torch.tensor([tokens]))[0, :, : TOKENIZER.vocab_size]
        logprobs = logits.float().log_softmax(-1)[:-1]
        known = logprobs.gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()
        assert scores.logprobs[first:] == pytest.approx(known[first - 1 :], abs=tolerance)
        best = logprobs.topk(2).values[first - 1 :]
        found = torch.tensor([list(top.values()) for top in scores.top_logprobs[first:]])
        torch.testing.assert_close(found, best, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["gqa", "packed"])
def test_equal_prompts_that_come_together_are_read_once(monkeypatch, kind):
    generator = make_generator(kind)
    if kind == "gqa" and not generator.is_batch_invariant:
        pytest.skip("needs AVX-512")
    batch = ContinuousBatch(generator, 6)
    reads = count_read(monkeypatch, batch)
    prompt = "ab" * 60
    sequences = [
        new_sequence(generator, prompt, SamplingParams(3, seed=seed, logit_bias=NO_END))
        for seed in range(4)
    ]
    for sequence in sequences:
        batch.add(sequence)
    finish(batch)
    assert sum(n for step in reads for _, n in step) <= 121 + 3 * 1 + 4 * 3
    check_equal(generator, sequences)


def test_of_two_equal_sequences_the_right_one_is_removed():
    generator = make_generator()
    batch = ContinuousBatch(generator, 1)
    params = SamplingParams(5, logit_bias=NO_END)
    first, second, third = (new_sequence(generator, "the same", params) for _ in range(3))
    for sequence in (first, second, third):
        batch.add(sequence)
    batch.step()
    batch.remove(third)
    assert [progress.sequence for progress in batch.step()] == [first]
    finish(batch)
    assert (len(second.completion.token_ids), len(third.completion.token_ids)) == (5, 0)


def test_a_removed_prompt_does_not_hold_up_those_that_wait_for_it():
    generator = make_generator()
    batch = ContinuousBatch(generator, 6)
    first, second = (
        new_sequence(generator, "ab" * 70, SamplingParams(4, seed=seed)) for seed in range(2)
    )
    batch.add(first)
    batch.add(second)
    batch.step()
    batch.remove(first)
    finish(batch)
    assert first.completion.token_ids == []
    check_equal(generator, [second])


@pytest.mark.parametrize("kind", ["gqa", "torch", "packed"])
def test_a_short_prompt_waits_two_steps_at_most_for_a_long_one(kind):
    """The first token of a short prompt, in steps: alone, and while others decode and a long prompt
    is read."""
    generator = make_generator(kind)
    params = SamplingParams(20, logit_bias=NO_END)

    def steps_to_first_token(batch, prompt):
        sequence = new_sequence(generator, prompt, params)
        batch.add(sequence)
        n_steps = 0
        while not sequence.completion.token_ids:
            batch.step()
            n_steps += 1
        return n_steps

    for n in (1, 20, 40, generator.decoder.tokens_per_step):
        alone = steps_to_first_token(ContinuousBatch(generator, 8), "z" * n)
        batch = ContinuousBatch(generator, 8)
        for text in ("a", "b", "c"):
            steps_to_first_token(batch, text)
        batch.add(new_sequence(generator, "long" * 35, params))
        batch.step()
        assert any(row.n_unread > 1 for row in batch.running)
        assert steps_to_first_token(batch, "z" * n) <= alone + 2


def test_a_long_prompt_advances_while_short_ones_come():
    generator = make_generator()
    batch = ContinuousBatch(generator, 8)
    long = new_sequence(generator, "long" * 35, SamplingParams(4))
    batch.add(long)
    for step in range(12):
        for seed in range(2):
            batch.add(
                new_sequence(generator, f"{step} {seed} " + "y" * 40, SamplingParams(1, seed=seed))
            )
        batch.step()
    assert long.completion.token_ids


def test_a_sequence_that_fails_takes_no_other_with_it():
    generator = make_generator()
    batch = ContinuousBatch(generator, 3)
    params = SamplingParams(8, seed=1, logit_bias=NO_END)
    good, bad = (new_sequence(generator, prompt, params) for prompt in ("good", "bad"))
    extend = bad.extend

    def failing(sampled):
        if len(bad.completion.token_ids) == 3:
            raise UserError("as if its logits were not finite")
        return extend(sampled)

    bad.extend = failing
    batch.add(good)
    batch.add(bad)
    errors = []
    while not batch.is_idle:
        errors += [progress for progress in batch.step() if progress.error is not None]
    (error,) = errors
    assert error.sequence is bad
    assert error.has_ended
    check_equal(generator, [good])


def generator_with_nan(kind):
    """A Generator that reads NaN from one token, and this token."""
    token, dimension = TOKENIZER.encode("!")[0], 3
    model = random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=160)
    with torch.no_grad():
        model.embedding.weight[:, dimension] = 0
        model.embedding.weight[token, dimension] = 1e6
        for block in model.blocks:
            block.attention.o_proj.weight[dimension] = 0
            block.mlp.down_proj.weight[dimension] = 0
            block.attention_norm.weight[dimension] = 1
            block.attention.v_proj.weight[:, dimension] = 3e38
    return prepared(Generator(model, TOKENIZER, **KINDS[kind][1]), kind), token


@pytest.mark.parametrize("kind", ["gqa", "torch", "packed"])
def test_keys_of_a_failed_text_are_not_shared(kind):
    """The keys and values of one token are NaN, which reaches even a text that gives them the
    weight 0."""
    generator, token = generator_with_nan(kind)
    batch, params = (
        ContinuousBatch(generator, 2),
        SamplingParams(8, seed=1, logit_bias=NO_END | {token: -math.inf}),
    )
    bad, good = (
        new_sequence(generator, "the text!", params),
        new_sequence(generator, "the text", params),
    )
    batch.add(bad)
    (progress,) = [progress for _ in range(3) for progress in batch.step()]
    assert "non-finite" in str(progress.error)
    batch.add(good)
    finish(batch)
    check_equal(generator, [good])


@pytest.mark.parametrize("kind", ["gqa", "torch", "packed"])
@pytest.mark.parametrize("has_other", [False, True])
def test_keys_of_a_removed_text_reach_no_other(monkeypatch, kind, has_other):
    """It leaves NaN in its row, unseen, before it has been read to its end."""
    monkeypatch.setattr(batch_rows, "LEAST_SHARED", 1)
    generator, token = generator_with_nan(kind)
    batch = ContinuousBatch(generator, 1 + has_other)
    batch.rows.tokens_per_step = 64
    bias = NO_END | {token: -math.inf}
    texts = []
    if has_other:  # as many positions are read of each row as of the longest
        texts.append(new_sequence(generator, "x" * 60, SamplingParams(40, logit_bias=bias)))
        batch.add(texts[0])
        batch.step()
    params = SamplingParams(8, seed=1, logit_bias=bias)
    bad = new_sequence(generator, "y" * 20 + "!" + "y" * 100, params)
    batch.add(bad)
    batch.step()
    assert batch.running[-1].sequence is bad
    assert batch.running[-1].n_unread > 1
    batch.remove(bad)
    texts.append(new_sequence(generator, "the text", params))
    batch.add(texts[-1])
    finish(batch)
    check_equal(generator, texts)


@pytest.mark.parametrize("kind", ["gqa", "packed", "prefix", "window"])
@pytest.mark.parametrize("max_rows", [1, 3])
def test_a_warm_up_reads_and_samples_and_leaves_nothing(monkeypatch, kind, max_rows):
    generator = make_generator(kind)
    batch = ContinuousBatch(generator, max_rows)
    sampled = []
    sample = batch.rows.sample

    def counted(rows, logits, max_steps):
        sampled.append(len(rows))
        return sample(rows, logits, max_steps)

    monkeypatch.setattr(batch.rows, "sample", counted)
    batch.warm_up()
    assert set(sampled) == {1, max_rows} | ({2} if max_rows == 3 else set())
    assert batch.is_idle
    if isinstance(batch.rows, PooledRows):
        assert batch.rows.texts == [[]] * max_rows
        assert batch.rows.cache.lengths == [0] * max_rows
    else:
        assert batch.rows.kept == []
    sequence = new_sequence(generator, "the text", SamplingParams(9, seed=1))
    batch.add(sequence)
    finish(batch)
    check_equal(generator, [sequence])


@pytest.mark.parametrize("max_seq_len", [1, 2, 3])
def test_a_short_context_can_be_warmed_up(max_seq_len):
    model = random_model(vocab_size=264, max_seq_len=max_seq_len)
    ContinuousBatch(Generator(model, TOKENIZER), 2).warm_up()


def test_refuses_what_it_does_not_support():
    model = random_model(vocab_size=264, max_seq_len=64)
    refused = [{"window": 8}, {"use_cache": False}, *if_installed("speculation", {"speculate": 2})]
    for options in refused:
        with pytest.raises(UserError, match="continuous batching"):
            ContinuousBatch(Generator(model, TOKENIZER, **options), 2)
    with pytest.raises(UserError, match="memory"):
        ContinuousBatch(Generator(model, TOKENIZER), 10**7)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gqa", "packed"])
def test_memory_is_taken_at_the_start(kind):
    generator = make_generator(kind)
    if kind == "gqa" and not generator.is_batch_invariant:
        pytest.skip("needs AVX-512")
    batch = ContinuousBatch(generator, 3)
    addresses = [layer.keys.data_ptr() for layer in batch.rows.cache.layers]
    for seed in range(8):
        batch.add(new_sequence(generator, "ab" * 30, SamplingParams(20, seed=seed)))
    finish(batch)
    assert [layer.keys.data_ptr() for layer in batch.rows.cache.layers] == addresses
