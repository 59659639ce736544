"""What a pass does on a GPU, recorded from tensors without contents: launches, bytes, and waits for
the device."""

import contextlib
import traceback
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
NO_WORK = {
    torch.ops.prim.device,
    aten.detach,
    aten.alias,
    aten.lift_fresh,
    aten._unsafe_view,
    aten._reshape_alias,
}
INDEXED = {
    aten.gather,
    aten.scatter_add_,
    aten.embedding,
}  # of their first argument they touch a few entries
NOT_LAUNCHED = ALLOCATIONS | NO_WORK


class DeviceTrace(TorchDispatchMode):
    """Records operations on fake CUDA tensors.

    `launches` counts kernels by operation, `bytes_moved` what they read and write (each input and
    output once). `reads` counts, by the function of ours that asks, the values that the host waits
    for: they are answered with `answer`. `uploads` counts copies to the device, `waits` those of
    them that the host waits for.
    """

    def __init__(self, answer=1):
        super().__init__()
        self.launches, self.reads, self.uploads, self.waits = (
            Counter(),
            Counter(),
            Counter(),
            Counter(),
        )
        self.bytes_moved, self.answer, self._is_paused = 0, answer, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if self._is_paused:
            return func(*args, **kwargs)
        if packet is aten._pin_memory:  # which fake tensors lack
            return args[0]
        if packet in (aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal):
            if packet is not aten._local_scalar_dense or args[0].device.type == "cuda":
                self.reads[calling_function()] += 1
            kind = (
                bool
                if packet is not aten._local_scalar_dense or args[0].dtype == torch.bool
                else float
            )
            kind = int if kind is float and not args[0].is_floating_point() else kind
            return kind(self.answer)
        if packet is aten.nonzero:
            self.reads[calling_function()] += 1
            return args[0].new_zeros(max(1, int(self.answer)), args[0].dim(), dtype=torch.int64)
        out = func(*args, **kwargs)
        inputs, outputs = (
            [x for x in tree_iter(part) if isinstance(x, torch.Tensor)]
            for part in ((args, {**kwargs, "out": None}), out)
        )
        devices = {x.device.type for x in (*inputs, *outputs)}
        if packet in (aten._to_copy, aten.copy_) and len(devices) > 1:
            to_device = outputs[0].device.type == "cuda"
            (self.uploads if to_device else self.reads)[calling_function()] += 1
            if to_device and not kwargs.get("non_blocking", args[2] if len(args) > 2 else False):
                self.waits[calling_function()] += 1
        is_view = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in func._schema.returns
        )
        if packet in INDEXED:
            inputs, outputs = (
                [x for x in part if x.shape != args[0].shape] for part in (inputs, outputs)
            )
        if "cuda" in devices and not is_view and packet not in NOT_LAUNCHED:
            self.record(str(packet), inputs, outputs)
            if str(packet).startswith("aten._foreach"):
                self.launches[str(packet)] += n_launches(args) - 1
        return out

    def record(self, name, inputs, outputs):
        """Count one launch that reads and writes these tensors."""
        self.launches[name] += 1
        self.bytes_moved += sum(
            min(x.nbytes, x.untyped_storage().nbytes()) for x in (*inputs, *outputs)
        )

    def fused(self, function):
        """The function as one kernel would run it: its inputs and outputs are all that moves."""

        def call(*args):
            self._is_paused = True
            try:
                out = function(*args)
            finally:
                self._is_paused = False
            tensors = [
                [x for x in tree_iter(part) if isinstance(x, torch.Tensor)] for part in (args, out)
            ]
            self.record(function.__name__, *tensors)
            return out

        return call

    @contextlib.contextmanager
    def part(self):
        """Within it launches and bytes are counted from zero; they are left as they are at its
        end."""
        self.launches, self.bytes_moved = Counter(), 0
        yield self


def n_launches(lists):
    """Kernels that a _foreach function runs: one, or one per tensor if shapes or strides differ
    between its lists."""
    lists = [tensors for tensors in lists if isinstance(tensors, (list, tuple))]
    is_uniform = all(
        len({(x.shape, x.stride()) for x in tensors}) == 1 for tensors in zip(*lists, strict=True)
    )
    return 1 if is_uniform else len(lists[0])


def calling_function():
    """The innermost function of the toolkit on the stack, as "folder/file.py:function"."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename).resolve()
        is_ours = path.is_relative_to(ROOT) and not {"tests", ".venv"} & set(
            path.relative_to(ROOT).parts
        )
        if is_ours and not frame.name.startswith("<"):  # a comprehension
            return f"{path.relative_to(ROOT)}:{frame.name}"
    return "torch"
