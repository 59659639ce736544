"""What forked processes measure of their own memory; see fork_server.run_ranks."""

import ctypes

import torch

from thinker.model import Thinker, ThinkerConfig
from thinker.training.config.load import validate_config
from thinker.training.metrics import MemoryMeter
from thinker.training.reports.plan import time_steps
from thinker.training.settings.resolve import resolve_settings

CPU = torch.device("cpu")
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def return_freed_memory_at_once():
    """As MALLOC_MMAP_THRESHOLD_=65536 does for a new process, so that only tensors count."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        assert libc.mallopt(M_MMAP_THRESHOLD, 65536) == 1


def peak_of_two_steps(dist, tree, shape):
    """The bytes that two training steps take at most."""
    return_freed_memory_at_once()
    settings = resolve_settings(validate_config(tree), ThinkerConfig(**shape), CPU)
    # Loads libraries, starts threads, and lets the library of matrix products take what it keeps.
    time_steps(settings, CPU, 1)
    meter = MemoryMeter(CPU)
    time_steps(settings, CPU, 1)
    return meter.peak()


@torch.no_grad()
def peak_of_mapping_a_layer(dist, attention, length):
    """The bytes that recording a layer's attention weights takes at most, and those of the
    weights."""
    return_freed_memory_at_once()
    shape = {
        "vocab_size": 64,
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 8,
        "n_kv_heads": 2,
        "max_seq_len": length,
    }
    model = Thinker(ThinkerConfig(**shape, attention=attention)).eval()
    tokens = torch.randint(64, (1, length))
    with model.record("blocks.3.attention.weights"):
        model(tokens[:, :300])  # what the first pass of a process takes for itself
    meter = MemoryMeter(CPU)
    with model.record("blocks.2.attention.weights") as seen:
        model(tokens)
    return meter.peak(), seen["blocks.2.attention.weights"].nbytes
