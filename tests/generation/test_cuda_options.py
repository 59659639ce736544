"""Every combination of the options that choose kernels, on a GPU: the plain text, or refused in one
line."""

import itertools

import pytest
import torch
from conftest import random_model
from installed import if_installed

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.runtime.errors import UserError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TOKENIZER = make_tokenizer("byte", [])
FORMS = [("fp32", None), ("bf16", None), ("bf16", 8), ("bf16", 4)]
MODES = [
    {},
    {"window": 10},
    *if_installed("retrieval", {"window": 8, "retrieve": 2, "retrieve_block": 4}),
    *if_installed("speculation", {"speculate": 3}),
]
MODES += [{"cache_bits": 8}, {"cache_bits": 4}, *if_installed("early_exit", {"early_exit": 0.02})]
PROMPTS = [["abcabc"], ["abcabc", "x", "abca"]]  # one, and three of unequal lengths


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("dtype", "bits"), FORMS)
def test_each_combination_is_right_or_refused(dtype, bits, compile, n_kv_heads):
    shape = {"vocab_size": 264, "n_heads": 4, "head_dim": 16, "n_layers": 2, "max_seq_len": 64}
    model = random_model(norm_mean=0.3, n_kv_heads=n_kv_heads, **shape)
    model, how = model.cuda(), {"dtype": dtype, "bits": bits}
    params = SamplingParams(20, seed=3, logit_bias={TOKENIZER.bos_id: -torch.inf})
    for mode, prompts in itertools.product(MODES, PROMPTS):
        options = {**how, **mode, "compile": compile}
        if compile and mode.keys() & {"window", "cache_bits", "early_exit"}:
            with pytest.raises(
                UserError, match="(window|cache_bits|early_exit) cannot be combined with compile"
            ):
                Generator(model, TOKENIZER, **options)
            continue
        found = Generator(model, TOKENIZER, **options).generate(prompts, params)
        plain = Generator(model, TOKENIZER, **how, **({} if "speculate" in mode else mode))
        for index, completion in enumerate(found):
            assert len(completion.token_ids) == 20
            assert all(torch.isfinite(torch.tensor(completion.logprobs)))
            if dtype == "fp32":
                alone = SamplingParams(20, seed=3 + index, logit_bias=dict(params.logit_bias))
                assert plain.generate(prompts[index], alone)[0].token_ids == completion.token_ids
