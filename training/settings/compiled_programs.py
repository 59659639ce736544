"""The memory of compiled blocks, counted from the graphs that torch.compile would lower.

A program stores what a library computes (matrix products, attention), what a library reads, and
its results. The compiler fuses the other operations into kernels that read and write only these
buffers, so their intermediate results take no memory.
"""

import operator
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from thinker.training.settings.tensor_meter import LiveTensorMeter

aten = torch.ops.aten

# Operations, beside those that torch tags as pointwise, that become part of a kernel.
FUSED = {
    torch.ops.prims.convert_element_type,
    torch.ops.prims.iota,
    aten.amax,
    aten.any,
    aten.arange,
    aten.bernoulli,
    aten.cat,
    aten.clone,
    aten.constant_pad_nd,
    aten.embedding,
    aten.full,
    aten.full_like,
    aten.gather,
    aten.index,
    aten.mean,
    aten.rand,
    aten.repeat,
    aten.scalar_tensor,
    aten.sum,
    aten.zeros_like,
}
UNDECLARED_VIEWS = {aten._unsafe_view, aten._reshape_alias}  # their schemas do not say so


class CountedPrograms:
    """Stands in for the compiler: blocks run as programs that compute nothing and take memory.

    The graphs are those of AOTAutograd with Inductor's decompositions. The partitioner of
    torch.compile decides what the forward pass keeps, and what the backward pass computes again.
    """

    def __init__(self, meter: LiveTensorMeter) -> None:
        self.meter = meter
        self.n_runs = 0

    def compile_blocks(self, blocks: nn.ModuleList) -> None:
        """Replace the forward pass of each block, in place."""
        # Imported here because they take seconds.
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        backend = aot_autograd(
            fw_compiler=self._program,
            bw_compiler=self._program,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        torch._dynamo.config.recompile_limit = 256  # as in compile_blocks() of training/step.py
        functions: dict[Callable, Callable] = {}
        for block in blocks:
            function = block.forward.__func__
            if function not in functions:
                functions[function] = _with_own_code(function)
            forward = types.MethodType(functions[function], block)
            compiled = torch.compile(forward, backend=backend, dynamic=False)
            block.forward = partial(self._call, compiled)

    def _call(self, compiled: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call a compiled block. What the compiler does to trace it is not counted."""
        n_before = self.n_runs
        with self.meter.paused():
            out = compiled(*args)
        assert self.n_runs > n_before, "torch.compile did not compile the block"
        return out

    def _program(self, graph: GraphModule, inputs: list[Any]) -> Callable[[list], list]:
        """What runs instead of a graph."""
        program = Program(graph)

        def run(args: list) -> list:
            self.n_runs += 1
            return program.run(args, self.meter)

        run._boxed_call = True  # it empties its list of arguments
        return run


def _with_own_code(function: Callable) -> Callable:
    """A copy of a function whose compiled programs torch keeps apart from those of the original."""
    copy = types.FunctionType(
        function.__code__.replace(co_name="counted"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Program:
    """What a graph allocates and frees, in order."""

    def __init__(self, graph: GraphModule) -> None:
        nodes = list(graph.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        (outputs,) = nodes[-1].args
        self.outputs = list(outputs)
        self.results = {
            buffer_of(node) for node in self.outputs if isinstance(node, Node) and is_tensor(node)
        }
        self.buffers = self.results | set(self.inputs)
        for node in nodes:
            if is_library_call(node):
                self.buffers |= {node, *map(buffer_of, node.all_input_nodes), *items_of(node)}
        self.events = self._plan(nodes)

    def _plan(self, nodes: list[Node]) -> list[tuple[str, Any]]:
        """("add", bytes), or ("drop", the number of an input that is not needed any more)."""
        reads = self._buffers_read(nodes)
        last_use: dict[Node, Node] = {}
        for node in nodes:
            if node in self.buffers:
                last_use[node] = node
                for buffer in reads[node]:
                    last_use[buffer] = node
        unused: dict[Node, list[Node]] = {node: [] for node in nodes}
        for buffer, node in last_use.items():
            if buffer not in self.results:
                unused[node].append(buffer)

        events: list[tuple[str, Any]] = []
        for node in nodes:
            if node not in self.buffers:
                continue
            freed = unused[node]
            if is_library_call(node):
                size = n_bytes(node) + sum(map(n_bytes, items_of(node)))
                events.append(("add", size))
            elif node.op == "call_function" and node.target is not operator.getitem:
                size = n_bytes(node)
                # A fused kernel writes its result in place of an input of the same size.
                for buffer in freed:
                    if buffer.op != "placeholder" and n_bytes(buffer) == size:
                        freed.remove(buffer)
                        events.append(("add", -size))
                        break
                events.append(("add", size))
            for buffer in freed:
                if buffer.op == "placeholder":
                    events.append(("drop", self.inputs.index(buffer)))
                else:
                    events.append(("add", -n_bytes(buffer)))
        return events

    def _buffers_read(self, nodes: list[Node]) -> dict[Node, set[Node]]:
        """The buffers that computing each node reads, through views and what is fused."""
        reads: dict[Node, set[Node]] = {}
        for node in nodes:
            found: set[Node] = set()
            for source in map(buffer_of, node.all_input_nodes):
                found |= {source} if source in self.buffers else reads[source]
            reads[node] = found
        return reads

    def run(self, args: list, meter: LiveTensorMeter) -> list:
        """Take the memory of the program. Returns outputs without contents, and empties `args`."""
        values = list(args)
        args.clear()
        for kind, value in self.events:
            if kind == "add":
                meter.add(value)
            else:
                values[value] = None
        with meter.paused():
            made = dict(zip(self.inputs, values))
            for buffer in self.results - set(self.inputs):
                made[buffer] = empty_like(buffer)
            outputs = [_view(made, node) for node in self.outputs]
        for buffer in self.results - set(self.inputs):
            meter.add(-n_bytes(buffer))  # from now on counted as a tensor
            meter.count(made[buffer])
        return outputs


def _view(made: dict[Node, Tensor], node: Node | None) -> Any:
    """The value of an output."""
    if not isinstance(node, Node) or not is_tensor(node):
        return node
    base = made[buffer_of(node)]
    value = node.meta["val"]
    if base.dtype != value.dtype or base.numel() == 0:
        return empty_like(node)
    return base.as_strided(value.shape, value.stride(), value.storage_offset())


def empty_like(node: Node) -> Tensor:
    """A tensor with the shape, strides, type and device of a node's value."""
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def n_bytes(node: Node) -> int:
    """Bytes of the value of a node, on any device; 0 if it is no tensor."""
    if not is_tensor(node):
        return 0
    return node.meta["val"].untyped_storage().nbytes()


def is_tensor(node: Node) -> bool:
    """Whether the value of a node is one tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def is_library_call(node: Node) -> bool:
    """Whether a node is not part of a fused kernel."""
    if node.op != "call_function" or is_view(node):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem
    is_pointwise = torch.Tag.pointwise in node.target.tags
    return not is_pointwise and node.target.overloadpacket not in FUSED


def items_of(node: Node) -> list[Node]:
    """The results of a library call that returns several."""
    return [user for user in node.users if user.target is operator.getitem]


def is_view(node: Node) -> bool:
    """Whether the value of a node shares the memory of its first input."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.overloadpacket in UNDECLARED_VIEWS:
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns)


def buffer_of(node: Node) -> Node:
    """The node whose memory the value of a node shares: itself if it is no view."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
