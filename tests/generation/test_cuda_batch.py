"""A continuous batch on a GPU gives the texts of generate()."""

import random

import pytest
import torch
from conftest import random_model
from test_continuous_batch import KINDS, PROMPTS, TOKENIZER, check_equal, random_params, run_batch

from thinker.features.monitoring.monitor import Monitor
from thinker.generation import Generator

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("is_monitored", [False, True], ids=["plain", "monitored"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_gpu_equal_those_of_generate(kind, is_monitored):
    numbers = random.Random(f"{kind} {is_monitored}")
    config, options = KINDS[kind]
    model = random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=160, **config).cuda()
    generator = Generator(model, TOKENIZER, monitor=Monitor() if is_monitored else None, **options)
    prompts = PROMPTS[2:] if kind == "prefix" else PROMPTS  # which needs a few tokens
    requests = [(numbers.choice(prompts), random_params(numbers, index)) for index in range(14)]
    sequences = run_batch(generator, requests, numbers, 8, n_removed=3)
    if (
        kind != "bf16"
    ):  # the last bits of a product depend on the number of rows, and so may a sampled token
        check_equal(generator, sequences)
