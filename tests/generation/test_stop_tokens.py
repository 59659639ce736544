"""Stop strings that are names of special tokens, which have no text."""

import pytest
from conftest import random_model
from metaspace_tokenizer import metaspace_tokenizer

from thinker.generation import Generator, SamplingParams
from thinker.generation.batching.continuous_batch import ContinuousBatch
from thinker.generation.sequence import Completion


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """Its tokenizer has the special tokens <unk>, <s> and </s>, of which </s> ends texts."""
    tokenizer = metaspace_tokenizer(tmp_path_factory.mktemp("a") / "b", {"▁the": -1.0}, True)
    model = random_model(vocab_size=tokenizer.vocab_size, max_seq_len=64)
    return Generator(model, tokenizer)


@pytest.mark.parametrize("stop", [["<s>"], ["never", "<s>"]])
@pytest.mark.parametrize("seed", [0, 3])
def test_the_name_of_a_special_token_ends_the_text_there(generator, stop, seed):
    start = generator.tokenizer.special_tokens["<s>"]
    end = generator.tokenizer.special_tokens["</s>"]
    # The token is likely, but others come first.
    bias = {end: -1e9, start: 6.0}
    known = SamplingParams(40, logit_bias=bias, seed=seed)
    free = generator.generate("the", known)[0]
    assert free.finish_reason == "length"
    n_tokens = free.token_ids.index(start) + 1
    params = SamplingParams(40, logit_bias=bias, seed=seed, stop=stop)
    completion = generator.generate("the", params)[0]
    prompt = generator.encode("the")
    sequence = generator.new_sequence(0, Completion("the"), params, prompt)
    batch = ContinuousBatch(generator, 2)
    batch.add(sequence)
    while not batch.is_idle:
        batch.step()
    for one in (completion, sequence.completion):
        assert one.token_ids == free.token_ids[:n_tokens]
        assert one.finish_reason == "stop"
        assert one.text == generator.tokenizer.decode(free.token_ids[:n_tokens])


def test_a_name_that_is_none_is_only_text(generator):
    start = generator.tokenizer.special_tokens["<s>"]
    params = SamplingParams(4, logit_bias={start: 1e9}, stop=["<s", "<S>"])
    (completion,) = generator.generate("the", params)
    assert (completion.token_ids, completion.finish_reason) == ([start] * 4, "length")
