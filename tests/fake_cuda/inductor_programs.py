"""The programs that Inductor writes for a GPU, run on fake tensors: its kernels do nothing, and its
buffers take memory.

Needs no Triton: of each kernel there is only the call.
"""

import contextlib
import weakref

import fake_cuda
import torch
import torch._inductor.codegen.triton as triton_code
import torch._inductor.config
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from thinker.model.kernels import flex_attention, linear_cross_entropy
from thinker.training.optim import muon

COMPILED_ONCE = (flex_attention._compiled, linear_cross_entropy._compiled, muon._compiled)


class PeakCounter(TorchDispatchMode):
    """The bytes of the storages that operations have made and that are still alive, at most."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                self.see(tensor)
        return out

    def see(self, tensor):
        """Count a tensor, unless its storage counts already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, key)
            self.peak = max(self.peak, sum(self.sizes.values()))

    @classmethod
    def is_infra_mode(cls):
        """Compiled code runs although the mode is active."""
        return True

    ignore_compile_internals = is_infra_mode


def _write_call(kernel, name, *args, **options):
    arguments = ", ".join(map(str, kernel.args.python_argdefs()[1]))
    V.graph.wrapper_code.writeline(f"fused({arguments})")


@contextlib.contextmanager
def inductor_programs(monkeypatch):
    """Context in which torch.compile() makes such programs. Yields their texts."""
    texts, compile_ = [], torch.compile
    for name, value in {
        "codegen_kernel": lambda kernel, name=None: "",
        "call_kernel": _write_call,
    }.items():
        monkeypatch.setattr(triton_code.TritonKernel, name, value)
    monkeypatch.setattr(triton_code.TritonScheduling, "define_kernel", lambda *args: "fused")
    for module in (scheduler, compile_fx):
        monkeypatch.setattr(module, "has_triton", lambda *args: True, raising=False)
    worker = CudaInterface.Worker
    monkeypatch.setattr(
        worker, "get_device_properties", staticmethod(lambda device=None: fake_cuda.GPU)
    )
    monkeypatch.setattr(worker, "current_device", staticmethod(lambda: 0))
    monkeypatch.setattr(
        torch.cuda, "_get_device_properties", lambda device: fake_cuda.GPU, raising=False
    )

    def lower(graph, inputs, **options):
        with _disable_current_modes():
            texts.append(_lower(graph, inputs, **options))
        return _runnable(texts[-1])

    def backend(graph, inputs):
        return compile_fx.compile_fx(graph, inputs, inner_compile=lower)

    def compile(function, **options):
        return compile_(function, **options, backend=backend)

    monkeypatch.setattr(torch, "compile", compile)
    settings = {
        "compile_threads": 1,
        "fx_graph_cache": False,
        "joint_graph_constant_folding": False,
    }
    torch._dynamo.reset()
    for compiled in COMPILED_ONCE:
        compiled.cache_clear()
    with torch._inductor.config.patch(settings):
        yield texts
    for compiled in COMPILED_ONCE:
        compiled.cache_clear()
    torch._dynamo.reset()


def _lower(graph, inputs, **options):
    """The text of Inductor's program for a graph."""
    is_inference = options.get("is_inference", False)
    compile_fx.view_to_reshape(graph)
    compile_fx.record_original_output_strides(graph)
    fake_mode = compile_fx.fake_tensor_prop(graph, inputs)
    with V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
        compile_fx._recursive_post_grad_passes(graph, is_inference=is_inference)
        lowering = GraphLowering(
            graph,
            example_inputs=inputs,
            is_inference=is_inference,
            is_backward=options.get("is_backward", False),
        )
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            wrapper, _ = lowering.codegen()
    return getattr(wrapper, "value", str(wrapper))


def _nothing(*args, **options):
    pass


class _Nothing:
    def __getattr__(self, name):
        return _nothing


def _empty(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def _reinterpret(tensor, size, stride, offset=0):
    return tensor.as_strided(size, stride, offset)


def _runnable(text):
    """The function of a program."""
    names = {
        "torch": torch,
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "extern_kernels": _Nothing(),
        "async_compile": _Nothing(),
        "fused": _nothing,
        "assert_size_stride": _nothing,
        "assert_alignment": _nothing,
        "get_raw_stream": _nothing,
        "reinterpret_tensor": _reinterpret,
        "empty_strided_cuda": _empty,
        "device_guard": contextlib.nullcontext,
    }
    guard = "with torch.cuda._DeviceGuard(0):"
    body = text[text.index("class Runner:") : text.index("\nrecursively_apply_fns =")]
    body = body.replace(guard, "with device_guard():").replace("torch.cuda.set_device(0)", "pass")
    exec(body, names)
    call = names["call"]

    def run(args):
        return list(call(args))

    run._boxed_call = True
    return run
