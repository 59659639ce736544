"""The compiled step on the CPU: the same tokens, one compilation whatever the lengths."""

import shutil

import pytest
import torch

from thinker.data.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.compiled_decode import CompiledThinker
from thinker.generation.inference_model import prepare_for_inference

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
TOKENIZER = make_tokenizer("byte", [])


def test_compiled_equals_plain_at_every_length_with_one_compilation(random_model, stress):
    model = random_model(n_layers=2 if stress else 1, max_seq_len=128)
    snapshot = prepare_for_inference(model)
    compiled, kinds = CompiledThinker(snapshot), torch._dynamo.utils.counters["stats"]
    before = kinds["unique_graphs"]
    for prompt, room in ((3, 20), (17, 40), (40, 100)):
        tokens = torch.randint(0, 61, (1, prompt + 9), generator=torch.Generator().manual_seed(prompt))
        caches = [snapshot.new_cache(1, room + 10) for _ in range(2)]
        for cache in caches:
            snapshot(tokens[:, :prompt], cache=cache)
        for at in range(prompt, prompt + 9):
            with torch.no_grad():
                plain = snapshot(tokens[:, at : at + 1], cache=caches[0])
                fast = compiled(tokens[:, at : at + 1], cache=caches[1])
            torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)
        for one, other in zip(caches[0].layers, caches[1].layers):
            torch.testing.assert_close(one.keys, other.keys, rtol=0, atol=1e-5)
    assert kinds["unique_graphs"] - before == 1


@pytest.mark.stress
def test_a_compiled_generator_gives_the_same_text_also_in_batches_and_int8(random_model):
    model = random_model(vocab_size=264, max_seq_len=64, n_layers=2)
    params = SamplingParams(max_new_tokens=20, seed=4)
    for how in ({}, {"int8": True}):
        plain = Generator(model, TOKENIZER, **how)
        compiled = Generator(model, TOKENIZER, compile=True, **how)
        for prompts in (["The cat"], ["The cat", "a", "The cat"]):
            known = [completion.token_ids for completion in plain.generate(prompts, params)]
            assert [completion.token_ids for completion in compiled.generate(prompts, params)] == known
