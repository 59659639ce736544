"""LM heads with a bias, a scale or a soft cap: the plain model's texts in every form, and in few bits all matrices are."""

import pytest
import torch
from conftest import random_model

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.native.compiler import has_compiler
from thinker.native.quantization import quantize

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = make_tokenizer("byte", [])
HEADS = [
    {"head_bias": True},
    {"logit_scale": 0.3},
    {"logit_softcap": 1.0},
    {"head_bias": True, "logit_scale": 2.0, "logit_softcap": 3.0},
]
COMPILES = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")),
]


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("compile", COMPILES)
def test_texts_are_those_of_the_model(head, is_tied, compile):
    model = random_model(vocab_size=264, tie_embeddings=is_tied, **head)
    params = SamplingParams(20, temperature=0, logprobs=1)
    (found,) = Generator(model, TOKENIZER, compile=compile).generate("abc", params)
    tokens = [*TOKENIZER.bos_prefix, *b"abc"]
    with torch.no_grad():
        logits = model(torch.tensor([[*tokens, *found.token_ids]]))[0, len(tokens) - 1 : -1]
    known = logits[:, : TOKENIZER.vocab_size].log_softmax(-1)
    assert known.argmax(-1).tolist() == found.token_ids
    assert found.logprobs == pytest.approx(known.amax(-1).tolist(), abs=1e-4)


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_the_head_is_in_few_bits_too(head, is_tied, bits):
    model = random_model(vocab_size=264, tie_embeddings=is_tied, **head)
    x = torch.randn(1, 5, 32)
    exact, rounded = model.lm_head(x), fuse_for_inference(model, bits=bits).lm_head(x)
    assert (exact - rounded).abs().max() > 1e-4
    model.lm_head.weight = torch.nn.Parameter(quantize(model.lm_head.weight, bits).dequantize())
    torch.testing.assert_close(rounded, model.lm_head(x), rtol=0, atol=1e-5)


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
def test_a_model_that_the_kernels_do_not_know_says_so():
    gpt2 = {
        "positions": "learned",
        "norm": "layernorm",
        "mlp": "ungated",
        "activation": "gelu_tanh",
    }
    generator = Generator(random_model(vocab_size=264, **gpt2), TOKENIZER)
    assert generator.kernel_problem == (
        "they do not know learned positions, norm LayerNorm, MLP UngatedMLP"
    )
    assert Generator(random_model(vocab_size=264), TOKENIZER).kernel_problem == ""
