"""The engine on real models: batches, seeds, limits, reasons to end."""

import pytest
import torch

from data.tokenizer import make_tokenizer
from errors import UserError
from generation import Completion, Generator, SamplingParams
from model import Thinker, ThinkerConfig

TOKENIZER = make_tokenizer("byte", [])


@pytest.fixture(scope="module")
def thinker():
    torch.manual_seed(1)
    thinker = Thinker(ThinkerConfig(vocab_size=264, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=48))
    with torch.no_grad():
        for parameter in thinker.parameters():
            parameter.normal_(0.3 if parameter.dim() == 1 else 0, 0.4)
    return thinker.eval()


PROMPTS = ["", "a", "Once upon", "the quick brown fox jumps over", "é漢"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ragged_batch_gives_what_each_row_gives_alone(thinker, temperature):
    generator = Generator(thinker, TOKENIZER)
    together = generator.generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=temperature, seed=5))
    for index, (prompt, row) in enumerate(zip(PROMPTS, together)):
        params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=5 + index)
        assert generator.generate([prompt], params)[0].token_ids == row.token_ids


def test_cached_equals_uncached(thinker):
    params = SamplingParams(max_new_tokens=15, seed=3, repetition_penalty=1.2, top_k=50)
    cached = Generator(thinker, TOKENIZER).generate(PROMPTS, params)
    uncached = Generator(thinker, TOKENIZER, use_cache=False).generate(PROMPTS, params)
    assert [c.token_ids for c in cached] == [c.token_ids for c in uncached]
    for a, b in zip(cached, uncached):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_logprobs_equal_a_teacher_forced_pass(thinker):
    completion = Generator(thinker, TOKENIZER).generate(["Hello"], SamplingParams(max_new_tokens=20, seed=2))[0]
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode("Hello"), *completion.token_ids]
    with torch.no_grad():
        logits = thinker(torch.tensor([ids]))[0, :, : TOKENIZER.vocab_size]
    known = logits.log_softmax(-1)[range(5, len(ids) - 1), completion.token_ids]
    assert completion.logprobs == pytest.approx(known.tolist(), abs=1e-4)


def test_greedy_takes_the_likeliest(thinker):
    completion = Generator(thinker, TOKENIZER).generate(["Hello"], SamplingParams(max_new_tokens=8, temperature=0))[0]
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode("Hello")]
    for token in completion.token_ids:
        with torch.no_grad():
            assert thinker(torch.tensor([ids]))[0, -1, : TOKENIZER.vocab_size].argmax().item() == token
        ids.append(token)


def test_streaming_equals_generate_and_leaves_the_model_as_it_was(thinker):
    generator, params = Generator(thinker, TOKENIZER), SamplingParams(max_new_tokens=30, seed=9)
    thinker.train()
    pieces = list(generator.stream("The", params))
    assert thinker.training
    thinker.eval()
    assert len(pieces) > 3
    assert "".join(pieces) == generator.generate(["The"], params)[0].text
    completion = Completion("The")
    assert "".join(generator.stream_into(completion, params)) == completion.text


def test_same_seed_same_text_other_seed_other_text(thinker):
    generator = Generator(thinker, TOKENIZER)
    texts = [generator.generate(["x"], SamplingParams(max_new_tokens=20, seed=seed))[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_ids_without_meaning_are_never_drawn(thinker):
    completions = Generator(thinker, TOKENIZER).generate(["a"] * 20, SamplingParams(max_new_tokens=40, temperature=3.0))
    assert all(token < TOKENIZER.vocab_size for c in completions for token in c.token_ids)


def always(thinker, token):
    """A copy that says nothing but `token`."""
    copy = Thinker(thinker.config).eval()
    copy.load_state_dict(thinker.state_dict())
    with torch.no_grad():
        copy.norm.weight.zero_()
        copy.norm.weight[0] = 1
        copy.head.weight.zero_()
        for block in copy.blocks:
            block.attention.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        copy.embedding.weight[:, 0] = 5.0
        copy.head.weight[token, 0] = 100.0
    return copy


def test_finish_reasons(thinker):
    at_end = Generator(always(thinker, TOKENIZER.eos_id), TOKENIZER).generate(["ab"])[0]
    assert (at_end.finish_reason, at_end.text, at_end.token_ids) == ("stop", "", [TOKENIZER.eos_id])
    z = Generator(always(thinker, ord("z")), TOKENIZER)
    limited = z.generate(["ab"], SamplingParams(max_new_tokens=5))[0]
    assert (limited.finish_reason, limited.text) == ("length", "zzzzz")
    stopped = z.generate(["ab"], SamplingParams(stop=("zzz",)))[0]
    assert (stopped.finish_reason, stopped.text, len(stopped.token_ids)) == ("stop", "", 3)
    full = z.generate(["ab"], SamplingParams(max_new_tokens=1000))[0]
    assert (full.finish_reason, len(full.token_ids)) == ("length", 48 + 1 - 3)  # the last token is never fed


def test_a_finished_row_leaves_the_others_alone(thinker):
    generator = Generator(thinker, TOKENIZER)
    prompts = ["q" * 45, "a", "b" * 30]  # the context ends for each at another time
    together = generator.generate(prompts, SamplingParams(max_new_tokens=40, seed=1))
    assert [len(c.token_ids) for c in together][::2] == [3, 18]
    for index, row in enumerate(together):
        alone = generator.generate([prompts[index]], SamplingParams(max_new_tokens=40, seed=1 + index))[0]
        assert alone.token_ids == row.token_ids


def test_a_prompt_that_fills_the_context_is_refused(thinker):
    with pytest.raises(UserError, match="49 tokens and the model's context is 48; shorten it to at most 48"):
        Generator(thinker, TOKENIZER).generate(["a" * 48])
    assert len(Generator(thinker, TOKENIZER).generate(["a" * 47])[0].token_ids) == 1
    assert Generator(thinker, TOKENIZER).generate([]) == []
