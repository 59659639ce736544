"""Run the kernels of decode.c on tensors."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from thinker.native.compiler import load_library
from thinker.native.quantization import GROUP, Packed

EMBED, LINEAR, ROTATE, ATTEND = range(4)  # kinds of operations
NO_TRANSFORM, RMS_NORM, SWIGLU = range(3)  # of the input of LINEAR
FORMATS = {torch.float32: 0, torch.bfloat16: 1}
QUANTIZED_FORMATS = {8: 2, 4: 3}  # by bits


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
        self.data, self.format, self.scale, self.newest, self.n_newest = (
            tensor.data_ptr(),
            FORMATS[tensor.dtype],
            0,
            0,
            0,
        )
        self.row, self.head, self.slot, _ = tensor.stride()

    def bind_quantized(self, codes: Tensor, scale: Tensor, newest: Tensor, bits: int) -> None:
        """Refer to codes (B, K, S, D or D / 2), their scale (B, K, S), and unrounded vectors, (B,
        K, n_newest, D)."""
        self.data, self.format, self.scale = (
            codes.data_ptr(),
            QUANTIZED_FORMATS[bits],
            scale.data_ptr(),
        )
        self.row, self.head, self.slot, _ = codes.stride()
        self.scale_row, self.scale_head, _ = scale.stride()
        self.newest, self.newest_format, self.n_newest = (
            newest.data_ptr(),
            FORMATS[newest.dtype],
            newest.shape[2],
        )
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
        self.step, self.n_threads = Step(), torch.get_num_threads()
        self.tensors = {
            "transformed": torch.empty(n_rows, n_in, dtype=torch.float32, device="cpu"),
            "codes": torch.empty(n_rows, n_groups * GROUP, dtype=torch.int8, device="cpu"),
            "scale": torch.empty(n_rows, n_groups, dtype=torch.float32, device="cpu"),
            "offset": torch.empty(n_rows, n_groups, dtype=torch.int32, device="cpu"),
        }
        for name, tensor in self.tensors.items():
            setattr(
                self.step if name == "transformed" else self.step.activations,
                name,
                tensor.data_ptr(),
            )

    def set_scores(self, n_scores: int) -> None:
        """Allocate memory for the attention scores of one tile per thread."""
        if n_scores > self.step.n_scores:
            shape = self.n_threads, TILE_QUERIES, n_scores
            self.tensors["scores"] = torch.empty(shape, dtype=torch.float32, device="cpu")
            self.step.scores, self.step.n_scores = self.tensors["scores"].data_ptr(), n_scores

    def run(self, operations: ctypes.Array, n_rows: int, n_operations: int | None = None) -> None:
        """Run the first operations (default: all) on `n_rows` rows."""
        self.step.n_rows = n_rows
        load_library().run(
            operations, n_operations or len(operations), ctypes.byref(self.step), self.n_threads
        )

    def sample_steps(
        self,
        operations: ctypes.Array,
        visible: Visible,
        logits: Tensor,
        n_ids: int,
        temperatures: list[float],
        uniforms: list[float],
    ) -> tuple[list[int], list[float]]:
        """Sample tokens of each row of logits (B, V), one per step and row in `uniforms`, and run
        the operations between two steps. Returns tokens and log-probabilities, as in sample()."""
        n, n_rows = len(uniforms), len(logits)
        tokens, logprobs, numbers = (c_int64 * n)(), (c_float * n)(), (c_double * n)(*uniforms)
        terms = torch.empty(n_ids + 32, dtype=torch.float64, device="cpu")
        by_row = (c_double * n_rows)(*temperatures)
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
    """The largest number of rows for which the kernels are as fast as torch's matrix products on
    this processor."""
    return load_library().max_rows()


def linear_operation(weight: Tensor | Packed, bias: Tensor | None = None) -> Operation:
    """x weightᵀ + bias, for a contiguous weight (n_out, n_in) in fp32 or bf16, or a packed one;
    bias in fp32."""
    operation = Operation(kind=LINEAR, bias=None if bias is None else bias.data_ptr())
    if isinstance(weight, Packed):
        operation.format, operation.n_in, operation.n_out = (
            QUANTIZED_FORMATS[weight.bits],
            weight.n_in,
            weight.n_out,
        )
        operation.weight, operation.scale = weight.codes.data_ptr(), weight.scale.data_ptr()
    else:
        assert weight.is_contiguous()
        operation.format, operation.weight = FORMATS[weight.dtype], weight.data_ptr()
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
    tokens, logprobs, numbers = (
        (c_int64 * n_rows)(),
        (c_float * n_rows)(),
        (c_double * n_rows)(*uniforms),
    )
    by_row = (c_double * n_rows)(*temperatures)
    terms = torch.empty(n_ids + 32, dtype=torch.float64, device="cpu")
    masked = None if allowed is None else torch.empty(n_ids, dtype=torch.float32, device="cpu")
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
        *(None if tensor is None else tensor.data_ptr() for tensor in (allowed, masked)),
    )
    return list(tokens), list(logprobs)


def linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """x (N, n_in) fp32 -> (N, n_out) fp32; the weight as in linear_operation()."""
    operation = linear_operation(weight, bias)
    x = x.contiguous()
    y = x.new_empty(len(x), operation.n_out)
    operation.x, operation.out = x.data_ptr(), y.data_ptr()
    Workspace(len(x), operation.n_in).run((Operation * 1)(operation), len(x))
    return y
