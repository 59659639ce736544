"""The tensors in the files of a folder, by name: safetensors, or .bin files of torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from thinker.checkpoint import CorruptCheckpoint, open_safetensors, read_json
from thinker.runtime.errors import UserError

INDEX = "model.safetensors.index.json"  # of several files
SINGLE_FILE = "model.safetensors"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_FILE = "pytorch_model.bin"
DTYPES = ("F32", "BF16", "F16")
TORCH_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorFiles(Protocol):
    """Named tensors in files."""

    def names(self) -> set[str]:
        """All names."""

    def place(self, name: str) -> str:
        """The file of a tensor, for messages."""

    def form(self, name: str) -> tuple[str, list[int]]:
        """The dtype of a tensor, such as BF16, and its shape."""

    def read(self, name: str) -> Tensor:
        """A tensor in fp32. It may be mapped: changes do not reach the file."""


class SafetensorsFiles:
    """Tensors in files of safetensors."""

    def __init__(self, files: dict[str, Path], stack: ExitStack) -> None:
        """files: the file of each tensor. stack: closes them."""
        self.files = files
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def names(self) -> set[str]:
        """As TensorFiles.names()."""
        return set(self.files)

    def place(self, name: str) -> str:
        """As TensorFiles.place()."""
        return str(self.files[name])

    def form(self, name: str) -> tuple[str, list[int]]:
        """As TensorFiles.form()."""
        stored = self._file(name).get_slice(name)
        return stored.get_dtype(), stored.get_shape()

    def read(self, name: str) -> Tensor:
        """As TensorFiles.read()."""
        tensor = self._file(name).get_tensor(name)
        if tensor.dtype != torch.float32 or sys.platform == "win32":
            return tensor.to(torch.float32, copy=True)
        # Mapped, so that a large model is there at once: pages are read when they are used, and
        # copied when they are changed. Windows would not let anyone delete the file.
        return with_own_storage(tensor)

    def _file(self, name: str) -> Any:
        path = self.files[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(open_safetensors(path))
        return self._open[path]


def with_own_storage(tensor: Tensor) -> Tensor:
    """The same memory, in a storage that is not larger: a deep copy copies the whole storage."""
    return torch.from_numpy(tensor.numpy())


class TorchFiles:
    """Tensors in .bin files, read by torch's loader for weights, which runs no code of a file."""

    def __init__(self, files: list[Path]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.files: dict[str, Path] = {}
        for path in files:
            for name, tensor in _load_weights(path).items():
                self.tensors[name] = tensor
                self.files[name] = path

    def names(self) -> set[str]:
        """As TensorFiles.names()."""
        return set(self.tensors)

    def place(self, name: str) -> str:
        """As TensorFiles.place()."""
        return str(self.files[name])

    def form(self, name: str) -> tuple[str, list[int]]:
        """As TensorFiles.form()."""
        tensor = self.tensors[name]
        return TORCH_DTYPES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)

    def read(self, name: str) -> Tensor:
        """As TensorFiles.read()."""
        return self.tensors[name].to(torch.float32, copy=True)


def _load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .bin file, mapped into memory where the file allows it."""
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of torch before 1.6 cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a damaged or malicious file
        raise UserError(
            f"{path} is damaged, or more than weights, which could run code; convert it to "
            "safetensors"
        ) from error
    is_mapping = isinstance(content, dict)
    if not is_mapping or not all(isinstance(each, Tensor) for each in content.values()):
        raise UserError(f"{path} does not contain named tensors")
    return content


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFiles]:
    """Context with the tensors of a folder.

    As in transformers, safetensors take precedence, and a single file over an index. Raises
    CorruptCheckpoint if there are none.
    """
    with ExitStack() as stack:
        yield _find_files(folder, stack)


def _find_files(folder: Path, stack: ExitStack) -> TensorFiles:
    single = folder / SINGLE_FILE
    if single.is_file():
        with open_safetensors(single) as file:
            names = list(file.keys())
        return SafetensorsFiles(dict.fromkeys(names, single), stack)
    if (folder / INDEX).is_file():
        return SafetensorsFiles(_read_index(folder, INDEX, "safetensors"), stack)
    if (folder / TORCH_FILE).is_file():
        return TorchFiles([folder / TORCH_FILE])
    if (folder / TORCH_INDEX).is_file():
        files = _read_index(folder, TORCH_INDEX, "bin")
        return TorchFiles(sorted(set(files.values())))
    raise CorruptCheckpoint(
        f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX} nor {TORCH_FILE}"
    )


def _read_index(folder: Path, name: str, ending: str) -> dict[str, Path]:
    """The file of each tensor, by an index."""
    index = folder / name
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptCheckpoint(f"{index} lists no tensor files")
    files = {}
    for tensor, file in weight_map.items():
        # A plain name: no path leads out of the folder.
        if not re.fullmatch(rf"[\w.-]+\.{ending}", str(file)):
            raise CorruptCheckpoint(f"{index} lists no tensor files")
        files[tensor] = folder / file
    return files
