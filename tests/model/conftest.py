"""Thinkers whose every parameter matters: a fresh one has zero output projections and would hide mistakes."""

import pytest
import torch

from model import Thinker, ThinkerConfig


@pytest.fixture(scope="session")
def make_thinker():
    def make(seed=0, **kwargs):
        torch.manual_seed(seed)
        shape = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 64}
        thinker = Thinker(ThinkerConfig(**{**shape, **kwargs}))
        with torch.no_grad():
            for parameter in thinker.parameters():
                parameter.normal_(0.5 if parameter.dim() == 1 else 0, 0.3)
        return thinker.eval()

    return make
