"""The products of a step that benchmarks/systems/step_limit.py times are those that a step computes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from thinker.benchmarks.speed.train import SHAPES
from thinker.benchmarks.systems import step_limit
from thinker.interop.hf_config import to_hf_config
from thinker.model import Thinker
from thinker.training.metrics import flops_per_token


@pytest.mark.parametrize("name", SHAPES)
def test_products_add_up_to_the_flops_of_a_step(name):
    """Six per token and weight of a matrix: without attention scores, norms and the embedding."""
    shape = SHAPES[name]
    with torch.device("meta"):
        model = Thinker(shape.model_config())
    n_tokens = shape.batch_size * shape.seq_len
    in_norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    expected = n_tokens * (flops_per_token(model, seq_len=0) - 6 * in_norms)
    assert sum(product.flops for product in step_limit.products(shape)) == expected


@pytest.mark.parametrize("name", ["tiny", "12m"])
def test_products_are_those_that_torch_counts(name):
    """In transformers' model of the same shape, which has plain nn.Linear modules."""
    shape = SHAPES[name]
    config = AutoConfig.for_model(**to_hf_config(shape.model_config(), None))
    model = AutoModelForCausalLM.from_config(config)
    n_counted = 4  # tokens, of which each has as many products as any other
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, n_counted, dtype=torch.int64), use_cache=False).logits.sum().backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    n_tokens = shape.batch_size * shape.seq_len
    listed = sum(product.flops for product in step_limit.products(shape))
    assert listed * n_counted == counted * n_tokens


def test_operands_are_laid_out_as_in_a_step():
    shape = SHAPES["tiny"]
    calls = step_limit.make_products(shape, torch.device("cpu"), "fp32").calls
    for product in step_limit.products(shape):
        assert calls[product.name]().shape == (product.m, product.n)
    assert len(calls) == len(step_limit.products(shape))
    by_pass = {name: [n for n in calls if n.startswith(name)] for name in step_limit.PASSES}
    assert by_pass["forward"] == [
        "forward of q, k, v, o", "forward of gate, up", "forward of down", "forward of head",
    ]  # fmt: skip
