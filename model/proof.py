"""Evidence that a faster form of a module computes the same as the module itself.

An edit of the model must take effect, so a faster form proves itself before it is used. The proof
runs on a *twin*: a model of the same config with the same layers, heads and context, but narrow,
which takes little time. Its weights are random, because many matrices of a new model are zero and
would hide a difference.
"""

import contextlib
import dataclasses
import inspect
import json
import math
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from thinker.model.transformer import Thinker, new_block

SEED = 0
# Width of the residual stream and the MLP of a twin, to which the rest of the real width by this
# number is added.
WIDTH = 32
PERIOD = 4099  # numbers after which Noise repeats
MAX_POSITIONS = 256  # to compare; in a longer context the first and the last half as many
MAX_BLOCK = 1 << 24  # parameters of a block that is compared in its real shape

# Of the logits of passes that compute the same in another order, relative to the largest. In bf16,
# those of 24 layers that each add as much as the embedding are rounded by up to 0.04.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.08, torch.float16: 0.03}
TF32_TOLERANCE = 0.01  # if products round factors in fp32 to 10 bits

Tensors = Tensor | tuple[Tensor, ...]
T = TypeVar("T")
_kept: dict[tuple[Hashable, ...], Any] = {}


def code_of_model() -> tuple[Callable, ...]:
    """All functions of model/ as they are now, so that a proof can be kept until one of them is
    replaced."""
    package = __name__.rpartition(".")[0]
    names = [name for name in sys.modules if name.startswith(package)]
    found: list[Callable] = []
    for name in sorted(names):
        for value in vars(sys.modules[name]).values():
            if inspect.isfunction(value):
                found.append(value)
            elif inspect.isclass(value) and value.__module__ == name:
                found += [each for each in vars(value).values() if inspect.isfunction(each)]
    return tuple(found)


def kept(key: tuple[Hashable, ...], model: Thinker, prove: Callable[[], T]) -> T:
    """The result of a proof, which is kept as long as config, mode and code of the model are the
    same."""
    config = json.dumps(model.config.to_dict(), sort_keys=True)
    key = (*key, config, model.training, str(model.device))
    known = _kept.get((*key, code_of_model()))
    if known is None:
        known = prove()
        # The proof may have loaded more code of the model.
        _kept[(*key, code_of_model())] = known
    return known


class Noise:
    """Normal numbers that repeat after a prime number of elements, which is faster than drawing
    all."""

    def __init__(self) -> None:
        self.numbers = _numbers()
        self.start = 0

    def __call__(self, shape: Sequence[int]) -> Tensor:
        """The next numbers in a tensor, in fp32."""
        size = math.prod(shape)
        start = self.start
        self.start = (start + size) % PERIOD
        if size <= PERIOD:
            return self.numbers[start : start + size].view(*shape).clone()
        period = self.numbers[start : start + PERIOD]
        n_periods = -(-size // PERIOD)
        return period.repeat(n_periods)[:size].view(*shape)


@cache
def _numbers() -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(2 * PERIOD, generator=generator, dtype=torch.float32)


@contextlib.contextmanager
def own_random_numbers() -> Iterator[Noise]:
    """Context that leaves torch's generators as they are, whatever a module draws. Yields numbers
    for weights."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        # Not torch.manual_seed(), which would seed a GPU that is not in use yet, too.
        torch.default_generator.manual_seed(SEED)
        yield Noise()


def is_fake(model: Thinker) -> bool:
    """Whether the weights have no values, as in estimates of memory: then there is nothing to
    compare."""
    return isinstance(model.embedding.weight, FakeTensor)


def narrow_twin(model: Thinker, noise: Noise) -> Thinker:
    """A model with the layers, heads and context of another, but narrow, with random weights, in
    the same mode."""
    config = model.config
    last_token = max((token for pattern in config.patterns for token in pattern.tokens), default=0)
    narrow = dataclasses.replace(
        config,
        d_model=WIDTH + config.d_model % WIDTH,
        d_ff=WIDTH + config.d_ff % WIDTH,
        vocab_size=min(config.vocab_size, last_token + WIDTH + 1),
    )
    twin = Thinker(narrow).float().train(model.training)
    randomize(twin, noise)
    return twin


def real_block(model: Thinker, noise: Noise) -> nn.Module | None:
    """A block in the real shape with random weights, or None if that would take long."""
    with torch.device("meta"):
        block = new_block(model.config, model.config.patterns[0], 0)
    if sum(parameter.numel() for parameter in block.parameters()) > MAX_BLOCK:
        return None
    block = block.to_empty(device="cpu").float()
    randomize(block, noise)
    return block.to(model.device).train(model.training)


@torch.no_grad()
def randomize(module: nn.Module, noise: Noise) -> None:
    """Set all parameters to random numbers of the size that activations keep, none of them
    constant."""
    for parameter in module.parameters():
        values = noise(parameter.shape)
        if parameter.dim() == 1:
            parameter.copy_(1 + 0.3 * values)
        else:
            parameter.copy_(values * parameter.shape[-1] ** -0.5)


def positions_to_compare(max_seq_len: int) -> Tensor:
    """The first and the last positions of the context."""
    if max_seq_len <= MAX_POSITIONS:
        return torch.arange(max_seq_len)
    half = MAX_POSITIONS // 2
    return torch.cat((torch.arange(half), torch.arange(max_seq_len - half, max_seq_len)))


def agree(
    plain: Callable[[Tensor], Tensors],
    fast: Callable[[Tensor], Tensors],
    x: Tensor,
    parameters: Sequence[Tensor] | None,
    tolerance: float,
) -> bool:
    """Whether two functions of x have the same outputs and, with parameters, gradients of x and of
    them.

    The largest difference of each tensor may be `tolerance` times its largest value.
    """
    known = _results(plain, x, parameters)
    found = _results(fast, x, parameters)
    if len(known) != len(found):
        return False
    return all(is_near(ours, theirs, tolerance) for ours, theirs in zip(found, known))


def _results(
    function: Callable[[Tensor], Tensors], x: Tensor, parameters: Sequence[Tensor] | None
) -> list[Tensor | None]:
    """The outputs and, with parameters, gradients of x and of them."""
    with torch.set_grad_enabled(parameters is not None):
        x = x.detach().requires_grad_(parameters is not None)
        outputs = function(x)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        if parameters is None:
            return list(outputs)
        noise = Noise()  # the same for both functions
        y_grads = [noise(y.shape).to(y) for y in outputs]
        grads = torch.autograd.grad(outputs, [x, *parameters], y_grads, allow_unused=True)
        return [*outputs, *grads]


def is_near(ours: Tensor | None, known: Tensor | None, tolerance: float) -> bool:
    """Whether two tensors differ by at most `tolerance` times the largest value. False for NaN."""
    if ours is None or known is None:
        return ours is known
    if ours.shape != known.shape or ours.dtype != known.dtype:
        return False
    difference = (ours.float() - known.float()).abs().amax()
    return bool(difference <= tolerance * known.float().abs().amax())


def has_near_logits(model: Thinker, found: Tensor, known: Tensor) -> bool:
    """Whether another form of the model computes its logits, up to rounding."""
    tolerance = TOLERANCES.get(model.dtype, 1e-4)
    is_fp32_on_a_gpu = model.dtype == torch.float32 and model.device.type == "cuda"
    if is_fp32_on_a_gpu and torch.backends.cuda.matmul.allow_tf32:
        tolerance = TF32_TOLERANCE
    return is_near(found.float(), known.float(), tolerance)


def where_defined(kind: type) -> str:
    """Such as "model/transformer.py:MLP"."""
    root = Path(__file__).parents[1]
    path = Path(inspect.getfile(kind))
    shown = path.name
    if path.is_relative_to(root):
        shown = path.relative_to(root).as_posix()
    return f"{shown}:{kind.__name__}"


def describe_difference(kinds: Collection[type], task: str) -> str:
    """One line that says which modules have no faster form; `task`: "training" or "inference"."""
    names = " and ".join(sorted(where_defined(kind) for kind in kinds))
    if len(kinds) == 1:
        return f"{names} computes something else than the kernel; {task} runs it as written"
    return f"{names} compute something else than the kernels; {task} runs them as written"
