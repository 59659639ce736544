"""Count the memory of tensors while operations run."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class LiveTensorMeter(TorchDispatchMode):
    """Counts the bytes of all live tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.now = 0
        self.peak = 0
        self.is_paused = False
        self.storages = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.is_paused:
            for tensor in tree_iter(out):
                if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                    self.count(tensor)
        return out

    def count(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until it is freed, unless another tensor shares it."""
        storage = tensor.untyped_storage()
        if storage not in self.storages:
            self.storages[storage] = True
            self.add(storage.nbytes())
            weakref.finalize(storage, self.add, -storage.nbytes())

    def add(self, n_bytes: int) -> None:
        """Count bytes that are allocated, or freed if negative."""
        self.now += n_bytes
        self.peak = max(self.peak, self.now)

    @contextlib.contextmanager
    def paused(self, is_paused: bool = True) -> Iterator[None]:
        """Context in which new tensors do not count; with False, one in which they do."""
        before = self.is_paused
        self.is_paused = is_paused
        try:
            yield
        finally:
            self.is_paused = before

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile() runs although the meter is active."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The same, for versions of torch that ask this."""
        return True
