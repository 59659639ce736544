"""Weights of a Hugging Face folder stay in its file until they change."""

import copy
import hashlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import random_model

from thinker.interop import load
from thinker.interop.huggingface import save_pretrained

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    """Of a model whose matrices are stored as they are, and fused: with its weights."""

    def make(model_type):
        out = tmp_path / model_type
        out.mkdir()
        model = random_model(qk_norm=False, n_kv_heads=2)
        save_pretrained(model, None, out, model_type=model_type)
        return out, model

    return make


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_changes_do_not_reach_the_file_and_the_folder_may_go(folder, model_type):
    path, original = folder(model_type)
    before = hashlib.sha256((path / FILE).read_bytes()).digest()
    model, _ = load(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert hashlib.sha256((path / FILE).read_bytes()).digest() == before
    again, _ = load(path)
    shutil.rmtree(path)
    for name, tensor in original.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
        assert torch.equal(model.state_dict()[name], tensor + 1)


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_a_copy_of_a_part_is_not_larger_than_the_part(folder, model_type):
    path, _ = folder(model_type)
    model, _ = load(path)
    for parameter in copy.deepcopy(model.blocks[0]).parameters():
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_the_weights_are_mapped(folder, model_type):
    """Also the parts of a fused matrix."""
    path, _ = folder(model_type)
    model, _ = load(path)
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path / FILE)):
            start, end = line.split()[0].split("-")
            ranges.append(range(int(start, 16), int(end, 16)))
    for name, parameter in model.named_parameters():
        assert any(parameter.data_ptr() in each for each in ranges), name
