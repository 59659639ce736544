"""Kinds of models, requests and checks that tests of continuous batches share."""

import itertools
import math

import pytest
import torch
from conftest import random_model
from installed import if_installed

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.batching.batch_rows import PooledRows
from thinker.generation.batching.continuous_batch import ContinuousBatch

TOKENIZER = make_tokenizer("byte", [])
NO_END = {TOKENIZER.bos_id: -math.inf}
KINDS = {  # model config, options of the Generator
    "gqa": ({"n_heads": 4, "n_kv_heads": 2}, {}),
    "int8": ({}, {"bits": 8}),
    "bf16": ({}, {"dtype": "bf16"}),
    "softcap": ({"attn_logit_softcap": 5.0}, {}),
    "torch": ({}, {"compile": False}),
    "packed": ({"n_heads": 4, "n_kv_heads": 2}, {"compile": False}),  # on a CPU, too
    "packed alibi": ({"positions": "alibi"}, {"compile": False}),
    "packed sinks": ({"attention_sinks": True, "qk_norm": False}, {"compile": False}),
    "int8 cache": ({"n_heads": 4, "n_kv_heads": 2}, {"cache_bits": 8}),
    "int4 cache": ({"head_dim": 16}, {"cache_bits": 4}),
    "int4 cache, torch": ({"head_dim": 16}, {"cache_bits": 4, "compile": False}),
    "window": ({"attention": "window(8) | global(2)"}, {}),
    "windows in some layers": ({"attention": ["full", "window(6)"]}, {}),
    "linear": ({"attention": "linear(16)"}, {}),
    "alibi": ({"positions": "alibi"}, {}),
    "relative": ({"positions": "relative"}, {}),
    "packed relative": ({"positions": "relative"}, {"compile": False}),
    "learned": ({"positions": "learned"}, {}),
    "token shift": ({"token_shift": True}, {}),
    "value embeddings": ({"value_embeddings": True}, {}),
    "embedding of pairs": ({"bigram_rows": 199}, {}),
    "prefix": ({"attention": "prefix(4)"}, {}),
    "unbounded": ({"attention": "window(8)"}, {}),
}
PROMPTS = [
    "", "a", "You are a helpful model. Hi!", "You are a helpful model. Who is it?", "é漢 " * 6, "x" * 60, "ab" * 70,
]  # fmt: skip


def make_generator(kind="gqa", **options):
    config, how = KINDS[kind]
    model = random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=160, **config)
    return prepared(Generator(model, TOKENIZER, **how, **options), kind)


def prepared(generator, kind):
    """With packed reads and steps of several tokens as on a GPU, if the kind says so."""
    if kind.startswith("packed"):
        generator.decoder.packs_rows = True
        generator.decoder.steps_per_read = 8
    return generator


def random_params(numbers, seed):
    """Any settings, each of which some requests leave out."""
    choices = {
        "max_new_tokens": [1, 2, 7, 30], "temperature": [0.0, 0.7, 1.0], "top_k": [None, 5], "top_p": [None, 0.8],
        "min_p": [None, 0.05], "repetition_penalty": [1.0, 1.3], "presence_penalty": [0.0, 0.5], "logprobs": [0, 3],
        "frequency_penalty": [0.0, 0.5], "logit_bias": [(), {97: 3.0}], "stop": [(), ("a", "bc")],
        "regex": [None, None, None, *if_installed("structured_output", "[ab]{3,20}")],
    }  # fmt: skip
    is_plain = numbers.random() < 0.4  # so that steps of several tokens are tested, too
    names = ["max_new_tokens", "temperature"] if is_plain else choices
    return SamplingParams(seed=seed, **{name: numbers.choice(choices[name]) for name in names})


def new_sequence(generator, prompt, params):
    tokens = generator.encode(prompt)
    return generator.new_sequence(0, Completion(prompt), params, tokens)


def run_batch(generator, requests, numbers, max_rows=4, n_removed=0):
    """Add requests (prompt, params) at random times, remove some; returns the sequences and the
    joined pieces."""
    batch = ContinuousBatch(generator, max_rows)
    sequences, pieces, sampled = [], {}, {}
    removed, waiting = [], list(requests)
    while waiting or not batch.is_idle:
        for _ in range(numbers.choice([0, 1, 1, 3])):
            if waiting:
                sequences.append(new_sequence(generator, *waiting.pop(0)))
                batch.add(sequences[-1])
        if len(removed) < n_removed and sequences and numbers.random() < 0.2:
            removed.append(numbers.choice(sequences))
            batch.remove(removed[-1])
        for progress in batch.step():
            assert progress.error is None
            key = id(progress.sequence)
            pieces[key] = pieces.get(key, "") + progress.text
            sampled.setdefault(key, []).extend(progress.sampled)
        assert len(batch.running) <= max_rows
    if isinstance(batch.rows, PooledRows):
        assert sorted(batch.rows.free) == list(range(max_rows))
    else:
        assert batch.rows.joined == []
        assert batch.rows.cache is None
    kept = [one for one in sequences if not any(one is other for other in removed)]
    for sequence in kept:
        assert pieces[id(sequence)] == sequence.completion.text
        assert [token for token, *_ in sampled[id(sequence)]] == sequence.completion.token_ids
    return kept


def check_equal(generator, sequences):
    """Each text is the one that generate() gives alone.

    In bf16 without kernels for any number of rows, the last bits of a product depend on the number
    of rows, and so may a sampled token: there, texts are compared up to the first such token.
    """
    may_differ = generator.model.dtype == torch.bfloat16 and not generator.is_batch_invariant
    for sequence in sequences:
        (known,) = generator.generate([sequence.completion.prompt], [sequence.params])
        found = sequence.completion
        if may_differ:
            pairs = zip(found.token_ids, known.token_ids)
            n_equal = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            assert found.logprobs[:n_equal] == pytest.approx(known.logprobs[:n_equal], abs=0.1)
            continue
        assert found.text == known.text
        assert found.token_ids == known.token_ids
        assert (found.finish_reason, found.n_slides) == (known.finish_reason, known.n_slides)
        if generator.is_batch_invariant:
            assert found.logprobs == known.logprobs
            assert found.top_logprobs == known.top_logprobs
        else:
            assert found.logprobs == pytest.approx(known.logprobs, abs=1e-4)


def check_on_gpu(kind, numbers, **more):
    """Run random requests on a GPU. `more`: options of the Generator."""
    config, options = KINDS[kind]
    model = random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=160, **config).cuda()
    generator = Generator(model, TOKENIZER, **options, **more)
    prompts = PROMPTS[2:] if kind == "prefix" else PROMPTS  # which needs a few tokens
    requests = [(numbers.choice(prompts), random_params(numbers, index)) for index in range(14)]
    sequences = run_batch(generator, requests, numbers, 8, n_removed=3)
    if (
        kind != "bf16"
    ):  # the last bits of a product depend on the number of rows, and so may a sampled token
        check_equal(generator, sequences)
