"""Sampling from models that do not see everything: the same text with a cache and without, or a
plain refusal."""

import pytest
import torch
from conftest import random_model
from installed import if_installed

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.chat.conversation import Conversation
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


@pytest.mark.parametrize(
    "attention",
    ["(token(97) & window(8)) | window(4)", "topk(4) & window(16)", "retrieve(4, 2)", "prefix(3)"],
)
def test_batching_does_not_change_the_text(attention):
    model, prompts = make(attention), ["abcab", "ab" * 4, "cab"]
    assert not model.config.is_unbounded
    plain = texts(model, prompts, use_cache=False)
    assert texts(model, prompts) == plain
    for options in if_installed("speculation", {"speculate": 4}):
        assert texts(model, prompts, **options) == plain


def test_dynamic_rope_ends_a_text_at_the_original_length_with_a_cache():
    model = make(rope_scaling={"type": "dynamic", "factor": 2, "original_max_seq_len": 20})
    (cached,) = Generator(model, TOKENIZER).generate(["abc"], PARAMS)
    (uncached,) = Generator(model, TOKENIZER, use_cache=False).generate(["abc"], PARAMS)
    assert (len(cached.token_ids), len(uncached.token_ids)) == (17, 30)
    assert cached.token_ids == uncached.token_ids[:17]
    assert cached.finish_reason == "length"


def test_tokens_in_the_bidirectional_prefix_are_not_scored():
    model, text = make("prefix(8)", vocab_size=257), "the old cat sat on the mat"
    ids = TOKENIZER.encode(text)
    tokens = torch.tensor([[TOKENIZER.bos_id, *ids]])
    with torch.no_grad():
        nats, count = model(tokens[:, :-1], targets=tokens[:, 1:])
    score = Generator(model, TOKENIZER).score(text, n_top=1)
    assert score.token_ids == ids[7:]
    assert len(score.logprobs) == len(score.top_logprobs) == count == len(ids) - 7
    assert score.n_bytes == len(ids) - 7
    assert score.nats == pytest.approx(nats.item(), rel=1e-5)
    with pytest.raises(UserError, match="inside the model's bidirectional prefix"):
        Generator(model, TOKENIZER).score(text[:7])
    assert len(Generator(model, TOKENIZER).score(text[:8]).logprobs) == 1


@pytest.mark.parametrize("prefix", [1, 20, 40, 48])
def test_long_texts_with_a_prefix_are_scored(prefix):
    score = Generator(make(f"prefix({prefix})"), TOKENIZER).score("abcdefg" * 30)
    assert len(score.logprobs) == 210 - max(0, prefix - 1)


def test_a_prefix_longer_than_the_prefill_chunk(monkeypatch):
    monkeypatch.setattr("thinker.generation.decoders.decoder.PREFILL_CHUNK", 8)
    model, prompts = make("prefix(20)"), ["abcdefg" * 4]
    assert texts(model, prompts) == texts(model, prompts, use_cache=False)
    with pytest.raises(UserError, match="bidirectional prefix needs at least 20"):
        texts(model, ["abc"])


def test_undo_to_before_the_prefix():
    conversation = Conversation(Generator(make("prefix(8)"), TOKENIZER))
    params = SamplingParams(max_new_tokens=4, seed=1)
    first = "".join(conversation.reply("abcdefghij", params))
    conversation.undo()
    assert "".join(conversation.reply("abcdefghij", params)) == first


@pytest.mark.parametrize("options", [{}, *if_installed("speculation", {"speculate": 3})])
def test_a_conversation_continues_beyond_a_window_as_wide_as_the_context(options):
    model = make("window(48)")
    conversation = Conversation(Generator(model, TOKENIZER, **options))
    said = "".join("".join(conversation.reply(text, PARAMS)) for text in ("abc", "de", "fgh"))
    assert len(conversation.tokens) > 96
    fresh = Conversation(Generator(model, TOKENIZER))
    assert "".join("".join(fresh.reply(text, PARAMS)) for text in ("abc", "de", "fgh")) == said


def test_a_window_wider_than_the_context_is_bounded():
    assert make("window(48)").config.is_unbounded
    assert not make("window(49)").config.is_unbounded
    assert not make("window(40) | global(9)").config.is_unbounded
    with pytest.raises(UserError, match="the model's context is 48"):
        Generator(make("window(49)"), TOKENIZER).generate(["a" * 60])
