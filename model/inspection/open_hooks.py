"""Which models are being recorded or patched. Whoever copies or replaces a model asks here."""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

# The number of open record() and patch() contexts of each model.
_n_open: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def has_open_hooks(model: nn.Module) -> bool:
    """Whether any activation of the model is being recorded or patched."""
    return model in _n_open


@contextmanager
def counted_as_open(model: nn.Module) -> Iterator[None]:
    """Context in which the model has open hooks."""
    _n_open[model] = _n_open.get(model, 0) + 1
    try:
        yield
    finally:
        _n_open[model] -= 1
        if not _n_open[model]:
            del _n_open[model]
