"""A continuous batch on a GPU gives the texts of generate()."""

import random

import pytest
import torch
from batch_cases import KINDS, check_on_gpu
from conftest import random_model

from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.generation.decoders.packed_read import new_reader

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_gpu_equal_those_of_generate(kind):
    check_on_gpu(kind, random.Random(f"{kind} False"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n_kv_heads", [1, 4])
def test_packed_reads_prove_themselves_on_a_gpu(dtype, n_kv_heads):
    model = random_model(1, 0.3, 0.4, vocab_size=264, n_heads=4, n_kv_heads=n_kv_heads).cuda()
    reader, problem = new_reader(fuse_for_inference(model, dtype))
    assert problem == ""
    has_flash = torch.cuda.get_device_capability() >= (8, 0)
    assert reader.has_varlen == (has_flash and dtype != torch.float32)
