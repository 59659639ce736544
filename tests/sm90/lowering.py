"""Inductor's lowering for an H200 without one: Triton compiles each kernel for sm_90, and nothing
runs."""

import contextlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER"] = os.environ[
    "TORCHINDUCTOR_USE_STATIC_TRITON_LAUNCHER"
] = "0"
sys.path.insert(0, str(Path(__file__).parents[1] / "fake_cuda"))

import fake_cuda
import torch
import torch._inductor.config
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Launcher:
    """What starts a compiled kernel; no test does."""

    def __init__(self, source, metadata):
        pass


class Driver(DriverBase):
    """What Triton asks of a driver before it runs a kernel."""

    launcher_cls = Launcher

    def __init__(self):
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (0, 0, 32, 0, 1024),
            get_device_properties=lambda device: {
                "max_shared_mem": fake_cuda.GPU.shared_memory_per_block_optin
            },
        )

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, name):
        return name

    def get_current_target(self):
        return GPUTarget(
            "cuda", fake_cuda.GPU.major * 10 + fake_cuda.GPU.minor, fake_cuda.GPU.warp_size
        )

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_benchmarker(self):
        return None


triton.runtime.driver.set_active(Driver())
triton_helpers.set_driver_to_gpu = lambda: None  # it would look for the library of a real driver
torch.cuda._get_device_properties = lambda device: fake_cuda.GPU
torch.cuda.is_current_stream_capturing = lambda: False
CudaInterface.Worker.get_device_properties = staticmethod(lambda device=None: fake_cuda.GPU)
CudaInterface.Worker.current_device = staticmethod(lambda: 0)
torch._inductor.config.compile_threads = 1
torch._inductor.config.fx_graph_cache = False
torch._inductor.config.joint_graph_constant_folding = (
    False  # it would compute constants on the device
)


class Lowering:
    """A backend of torch.compile that lowers every graph and then computes it on fake tensors.

    It appends to `programs` what each is made of: Triton's kernels, calls of libraries, and the
    bytes that it moves.
    """

    def __init__(self, programs, options):
        self.programs, self.options = programs, options

    def __call__(self, graph, inputs):
        return compile_fx(graph, inputs, inner_compile=self._lower, config_patches=self.options)

    def _lower(self, graph, inputs, **arguments):
        with self._recorded():
            compile_fx_inner(graph, inputs, **arguments)

        def call(values):
            return list(graph(*values))

        call._boxed_call = True
        return call

    @contextlib.contextmanager
    def _recorded(self):
        codegen = GraphLowering.codegen

        def record(lowering):
            out = codegen(lowering)
            n_bytes, _, _ = lowering.count_bytes()
            text = getattr(out[0], "value", str(out[0]))
            program = {
                "is_backward": lowering.is_backward,
                "n_bytes": n_bytes,
                "n_products": text.count("extern_kernels."),
            }
            self.programs.append(
                SimpleNamespace(**program, kernels=re.findall(r"def (triton_\w+)", text), text=text)
            )
            return out

        GraphLowering.codegen = record
        try:
            yield
        finally:
            GraphLowering.codegen = codegen
