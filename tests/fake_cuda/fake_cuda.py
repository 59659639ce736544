"""CUDA tensors without contents in a CPU build of torch, as if on an H200. Import this before
torch."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
GPU = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=143771 * 2**20,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    L2_cache_size=60 * 2**20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    gcnArchName="",
    is_integrated=False,
)


def build() -> Path:
    """The compiled library; built once per version of torch and of the source."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    key = f"{importlib.metadata.version('torch')} {torch}"  # whose libraries it finds by their path
    digest = hashlib.sha256(SOURCE.read_bytes() + key.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"thinker-fake-cuda-{os.getuid()}-{digest}.so")
    if not library.exists():
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        link = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        partial = library.with_suffix(f".{os.getpid()}")  # another process may build it, too
        command = [
            "g++",
            "-O0",
            "-shared",
            "-fPIC",
            "-std=c++20",
            *include,
            str(SOURCE),
            *link,
            "-o",
            str(partial),
        ]
        subprocess.run(command, check=True)
        partial.replace(library)
    return library


_library = ctypes.CDLL(str(build()))  # before torch, which asks once whether there are CUDA hooks

import torch  # noqa: E402
from torch._dynamo.device_interface import CudaInterface  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402

_library.register_fake_guard()
for module, functions in {
    torch.cuda: {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (GPU.total_memory, GPU.total_memory),
        "memory_reserved": lambda device=None: 0,
        "get_device_name": lambda device=None: GPU.name,
        "get_device_properties": lambda device=None: GPU,
        "get_device_capability": lambda device=None: (GPU.major, GPU.minor),
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    },
    torch.cuda.random: {"_lazy_init": lambda: None},
    CudaInterface: {
        "is_available": staticmethod(lambda: True),
        "current_device": staticmethod(lambda: 0),
        "exchange_device": staticmethod(lambda device: 0),
        "maybe_exchange_device": staticmethod(lambda device: 0),
        "synchronize": staticmethod(lambda device=None: None),
        "get_compute_capability": staticmethod(lambda device=None: 90),
    },
    fake_tensor: {"init_gpu_context": lambda device: None},
}.items():
    for name, function in functions.items():
        assert hasattr(module, name), f"{module} has no {name}"
        setattr(module, name, function)
torch._C._cuda_getMemoryFraction = lambda index: 1.0  # which a CPU build lacks
fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)


@torch.compiler.assume_constant_result
def _allows_cudnn():
    return torch.backends.cuda.cudnn_sdp_enabled()


def scaled_dot_product_attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):  # fmt: skip
    """The kernel that torch would choose on an H200; the choice itself is made by code that a CPU
    build lacks."""
    if attn_mask is None and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, scale=scale
        )[0]
    assert not (attn_mask is not None and _allows_cudnn()), "cuDNN would take the mask"
    assert not (enable_gqa and attn_mask is not None), (
        "grouped heads with a mask fall back to the slow math path"
    )
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(
                ~attn_mask, -torch.inf
            )
        assert attn_mask.dtype == q.dtype
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
