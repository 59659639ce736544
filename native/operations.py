"""Run the kernels of decode.c on tensors."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from thinker.native.compiler import load_library

EMBED, LINEAR, ROTATE, ATTEND = range(4)  # kinds of operations
NO_TRANSFORM, RMS_NORM, SWIGLU = range(3)  # of the input of LINEAR
FORMATS = {torch.float32: 0, torch.bfloat16: 1}
QUANTIZED_FORMATS = {8: 2, 4: 3}  # by bits
GROUP = 32  # inputs of a quantized matrix that share a scale


class Packed(NamedTuple):
    """A quantized matrix in the order in which the kernels read it (native/linear.h)."""

    codes: Tensor  # uint8, (blocks, groups, bytes)
    scale: Tensor  # bf16, (blocks, groups, 16)
    bits: int
    n_in: int
    n_out: int


class Cached(Structure):
    """Keys or values of a cache; see cached.h."""

    _fields_ = [
        ("data", c_void_p),
        *[(name, c_int64) for name in ("format", "row", "head", "slot")],
        ("scale", c_void_p),
        ("scale_row", c_int64),
        ("scale_head", c_int64),
        ("newest", c_void_p),
        *[(name, c_int64) for name in ("newest_format", "newest_row", "newest_head", "n_newest")],
    ]

    def bind(self, tensor: Tensor) -> None:
        """Refer to the memory of a tensor (B, K, S, D), which must outlive the use."""
        self.data = tensor.data_ptr()
        self.format = FORMATS[tensor.dtype]
        self.row, self.head, self.slot, _ = tensor.stride()
        self.scale = 0
        self.newest = 0
        self.n_newest = 0

    def bind_quantized(self, codes: Tensor, scale: Tensor, newest: Tensor, bits: int) -> None:
        """Refer to codes (B, K, S, D or D / 2), their scale (B, K, S), and unrounded vectors.

        `newest`: these vectors, (B, K, n_newest, D).
        """
        self.data = codes.data_ptr()
        self.format = QUANTIZED_FORMATS[bits]
        self.row, self.head, self.slot, _ = codes.stride()
        self.scale = scale.data_ptr()
        self.scale_row, self.scale_head, _ = scale.stride()
        self.newest = newest.data_ptr()
        self.newest_format = FORMATS[newest.dtype]
        self.n_newest = newest.shape[2]
        self.newest_row, self.newest_head, *_ = newest.stride()


TILE_QUERIES = 4  # at most, in attention.h


class Visible(Structure):
    """The slots of new keys, and the slots that each query attends to."""

    _fields_ = [
        ("slots", POINTER(c_int64)),
        ("length", POINTER(c_int64)),
        ("mask", c_void_p),
        *[(name, c_int64) for name in ("is_bool", "row", "head", "slot")],
    ]


class Operation(Structure):
    """One step of a list that the kernels run; see decode.c."""

    _fields_ = [
        *[(name, c_int64) for name in ("kind", "format", "transform", "adds", "n_in", "n_out")],
        *[(name, c_void_p) for name in ("weight", "scale", "bias", "norm")],
        *[(name, c_float) for name in ("eps", "attention_scale", "softcap")],
        *[(name, c_int64) for name in ("H", "K", "D", "rotates")],
        ("sinks", c_void_p),
        ("keys", Cached),
        ("values", Cached),
        ("visible", POINTER(Visible)),
        ("x", c_void_p),
        ("out", c_void_p),
    ]


class Activations(Structure):
    """Work space for quantized activations."""

    _fields_ = [("codes", c_void_p), ("scale", c_void_p), ("offset", c_void_p)]


class Step(Structure):
    """What all operations of a step share; see decode.c."""

    _fields_ = [
        ("n_rows", c_int64),
        *[(name, POINTER(c_int64)) for name in ("tokens", "cache_rows", "positions")],
        *[(name, c_void_p) for name in ("cosines", "sines", "transformed")],
        ("activations", Activations),
        ("scores", c_void_p),
        ("n_scores", c_int64),
    ]


class Workspace:
    """A Step with memory for up to `n_rows` rows whose widths are at most `n_in`."""

    def __init__(self, n_rows: int, n_in: int) -> None:
        n_groups = -(-n_in // GROUP)
        self.step = Step()
        self.n_threads = torch.get_num_threads()
        self.tensors: dict[str, Tensor] = {}  # whose memory the step refers to
        self.step.transformed = self._allocate("transformed", torch.float32, n_rows, n_in)
        activations = self.step.activations
        activations.codes = self._allocate("codes", torch.int8, n_rows, n_groups * GROUP)
        activations.scale = self._allocate("scale", torch.float32, n_rows, n_groups)
        activations.offset = self._allocate("offset", torch.int32, n_rows, n_groups)

    def _allocate(self, name: str, dtype: torch.dtype, *shape: int) -> int:
        """The address of a new tensor."""
        self.tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
        return self.tensors[name].data_ptr()

    def set_scores(self, n_scores: int) -> None:
        """Allocate memory for the attention scores of one tile per thread."""
        if n_scores > self.step.n_scores:
            shape = (self.n_threads, TILE_QUERIES, n_scores)
            self.step.scores = self._allocate("scores", torch.float32, *shape)
            self.step.n_scores = n_scores

    def run(self, operations: ctypes.Array, n_rows: int, n_operations: int | None = None) -> None:
        """Run the first operations (default: all) on `n_rows` rows."""
        if n_operations is None:
            n_operations = len(operations)
        self.step.n_rows = n_rows
        step = ctypes.byref(self.step)
        load_library().run(operations, n_operations, step, self.n_threads)

    def sample_steps(
        self,
        operations: ctypes.Array,
        visible: Visible,
        logits: Tensor,
        n_ids: int,
        temperatures: list[float],
        uniforms: list[float],
    ) -> tuple[list[int], list[float]]:
        """Sample tokens of each row of logits (B, V), one per step and row in `uniforms`.

        Runs the operations between two steps. Returns tokens and log-probabilities, as in sample().
        """
        n = len(uniforms)
        n_rows = len(logits)
        tokens = (c_int64 * n)()
        logprobs = (c_float * n)()
        numbers = (c_double * n)(*uniforms)
        by_row = (c_double * n_rows)(*temperatures)
        terms = torch.empty(n_ids + 32, dtype=torch.float64, device="cpu")
        self.step.n_rows = n_rows
        load_library().sample_steps(
            operations,
            len(operations),
            ctypes.byref(self.step),
            ctypes.byref(visible),
            self.n_threads,
            logits.data_ptr(),
            logits.stride(0),
            n_ids,
            by_row,
            numbers,
            terms.data_ptr(),
            tokens,
            logprobs,
            n // n_rows,
        )
        return list(tokens), list(logprobs)


def max_rows() -> int:
    """Rows up to which the kernels are as fast as torch's matrix products on this processor."""
    return load_library().max_rows()


def linear_operation(weight: Tensor | Packed, bias: Tensor | None = None) -> Operation:
    """x weightᵀ + bias, with the bias in fp32.

    The weight is packed, or contiguous (n_out, n_in) in fp32 or bf16.
    """
    operation = Operation(kind=LINEAR)
    if bias is not None:
        operation.bias = bias.data_ptr()
    if isinstance(weight, Packed):
        operation.format = QUANTIZED_FORMATS[weight.bits]
        operation.weight = weight.codes.data_ptr()
        operation.scale = weight.scale.data_ptr()
        operation.n_out = weight.n_out
        operation.n_in = weight.n_in
        return operation
    assert weight.is_contiguous()
    operation.format = FORMATS[weight.dtype]
    operation.weight = weight.data_ptr()
    operation.n_out, operation.n_in = weight.shape
    return operation


def sample(
    logits: Tensor,
    n_ids: int,
    temperatures: list[float],
    uniforms: list[float],
    allowed: Tensor | None = None,
) -> tuple[list[int], list[float]]:
    """Sample a token from each row of contiguous logits (N, V) in fp32, of which the first `n_ids`
    are valid.

    As generation.sampler.sample() with a temperature per row, without filters and penalties.
    `allowed`: (N, V / 32) int32, a bit for each token that may be sampled; by default, all may.
    Returns tokens and their log-probabilities under the unmodified model.
    """
    n_rows = len(uniforms)
    tokens = (c_int64 * n_rows)()
    logprobs = (c_float * n_rows)()
    numbers = (c_double * n_rows)(*uniforms)
    by_row = (c_double * n_rows)(*temperatures)
    terms = torch.empty(n_ids + 32, dtype=torch.float64, device="cpu")
    masks = [None, None]
    if allowed is not None:
        masked = torch.empty(n_ids, dtype=torch.float32, device="cpu")
        masks = [allowed.data_ptr(), masked.data_ptr()]
    load_library().sample(
        logits.data_ptr(),
        n_rows,
        logits.stride(0),
        n_ids,
        by_row,
        numbers,
        terms.data_ptr(),
        tokens,
        logprobs,
        *masks,
    )
    return list(tokens), list(logprobs)


def log_probs(logits: Tensor, n_ids: int, tokens: list[int]) -> Tensor:
    """ln P of a token after each row of contiguous logits (N, V) in fp32, of which the first
    `n_ids` are valid: (N,) fp32, with the bits that sample() returns for sampled tokens."""
    n_rows = len(tokens)
    assert logits.is_contiguous()
    assert len(logits) == n_rows
    found = torch.empty(n_rows, dtype=torch.float32, device="cpu")
    chosen = (c_int64 * n_rows)(*tokens)
    load_library().log_probs(
        logits.data_ptr(), n_rows, logits.stride(0), n_ids, chosen, found.data_ptr()
    )
    return found


def linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """x (N, n_in) fp32 -> (N, n_out) fp32; the weight as in linear_operation()."""
    operation = linear_operation(weight, bias)
    x = x.contiguous()
    y = x.new_empty(len(x), operation.n_out)
    operation.x, operation.out = x.data_ptr(), y.data_ptr()
    Workspace(len(x), operation.n_in).run((Operation * 1)(operation), len(x))
    return y
