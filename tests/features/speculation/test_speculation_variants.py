"""Speculation with models that do not see everything: the same text, or a plain refusal."""

import pytest
from conftest import random_model

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = make_tokenizer("byte", [])
PARAMS = SamplingParams(max_new_tokens=30, seed=2, logit_bias={TOKENIZER.eos_id: -100.0})


def make(attention="full", seed=0, **shape):
    return random_model(
        seed, attention=attention, **{"vocab_size": 264, "max_seq_len": 48, **shape}
    )


def texts(model, prompts, params=PARAMS, **options):
    return [
        one.token_ids for one in Generator(model, TOKENIZER, **options).generate(prompts, params)
    ]


def test_drafts_stay_within_learned_positions():
    model, draft = make(positions="learned"), make(positions="learned", seed=1)
    params = SamplingParams(
        max_new_tokens=40, temperature=1.0, logit_bias={TOKENIZER.eos_id: -100.0}
    )
    prompts = ["ab" * n for n in range(3, 9)]
    plain = texts(model, prompts, params)
    assert texts(model, prompts, params, speculate=8) == plain
    assert texts(model, prompts, params, speculate=8, draft=draft) == plain


def test_speculation_with_unsupported_models_raises():
    for main, draft, says in [
        (make(), make("linear(8)"), "linear"),
        (make("window(8)"), make(), "an unbounded context"),
        (make("window(8)"), make("window(8)", positions="learned"), "an unbounded context"),
        (
            make(),
            make(rope_scaling={"type": "dynamic", "factor": 2, "original_max_seq_len": 20}),
            "context is 20",
        ),
        (make(), make("prefix(9)"), "bidirectional prefix is 9"),
    ]:
        with pytest.raises(UserError, match=says):
            Generator(main, TOKENIZER, speculate=2, draft=draft)
    Generator(make("window(8)"), TOKENIZER, speculate=2, draft=make("window(4)"))
