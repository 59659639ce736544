"""A GGUF file: the values of its header, and its tensors in fp32."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinker.checkpoint import CorruptCheckpoint
from thinker.data.tokenizers.tokenizer import MAX_VOCAB
from thinker.runtime.errors import UserError, install_command

# The types that are read, by their names in gguf.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0")
# What gguf's reader raises for files that are cut off, or of another kind.
DAMAGED = (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError)


@cache
def _reader_class() -> type:
    """gguf's reader with a check of lengths. Without it, an invented length in a file would keep
    the reader busy, and fill the memory, for hours."""
    try:
        import gguf
    except ImportError as error:
        remedy = f"run {install_command('gguf')}"
        raise UserError(f"reading a GGUF file needs the gguf package; {remedy}") from error

    class BoundedReader(gguf.GGUFReader):
        """A reader that raises ValueError where the file ends too early."""

        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
        ) -> np.ndarray:
            n_bytes = int(count) * np.dtype(dtype).itemsize
            if n_bytes > len(self.data) - int(offset):
                raise ValueError("it ends too early")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            length = int(self._get(orig_offs + 4, np.uint64)[0])
            if length > MAX_VOCAB:
                raise ValueError(f"a list has {length} values (maximum: {MAX_VOCAB})")
            kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            start = orig_offs + 12
            # The base class makes several arrays per item, which takes seconds for a vocabulary.
            if self.byte_order == "I" and kind in self.gguf_scalar_to_np:
                values = self._get(start, self.gguf_scalar_to_np[kind], length)
                return 12 + values.nbytes, [values], [0], [raw_type, kind]
            if self.byte_order == "I" and kind == gguf.GGUFValueType.STRING:
                strings, n_bytes = self._get_strings(start, length)
                return 12 + n_bytes, strings, list(range(length)), [raw_type, kind]
            return super()._get_field_parts(orig_offs, raw_type)

        def _get_strings(self, start: int, length: int) -> tuple[list[memoryview], int]:
            """The bytes of strings, each behind its length in 8 bytes, and their size in all."""
            view = memoryview(self.data)
            strings = []
            place = start
            for _ in range(length):
                first = place + 8
                place = first + int.from_bytes(view[first - 8 : first], sys.byteorder)
                if place > len(view):
                    raise ValueError("it ends too early")
                strings.append(view[first:place])
            return strings, place - start

    return BoundedReader


class GgufFile:
    """The header and the tensors of a file. It implements TensorFiles.

    fields: the values of the header, by their names.
    """

    def __init__(self, path: Path) -> None:
        """Raises UserError without the gguf package, CorruptCheckpoint for a damaged file."""
        self.path = path
        reader_class = _reader_class()
        try:
            reader = reader_class(path)
            self.fields = {name: _value(field) for name, field in reader.fields.items()}
        except DAMAGED as error:
            reason = str(error).strip().partition("\n")[0]
            raise CorruptCheckpoint(f"{path} cannot be read as a GGUF file: {reason}") from error
        if reader.byte_order != "I":
            raise UserError(f"{path} was written for processors of the other byte order")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._check_types()

    def _check_types(self) -> None:
        for name, tensor in self._tensors.items():
            kind = tensor.tensor_type.name
            if kind not in TYPES:
                raise UserError(
                    f"{self.path}: tensor {name} is of type {kind}; those that are read: "
                    f"{', '.join(TYPES)}"
                )

    def shapes(self) -> dict[str, list[int]]:
        """The shape of each tensor, as torch has it."""
        return {name: tensor.shape.tolist()[::-1] for name, tensor in self._tensors.items()}

    def names(self) -> set[str]:
        """As TensorFiles.names()."""
        return set(self._tensors)

    def place(self, name: str) -> str:
        """As TensorFiles.place()."""
        return str(self.path)

    def form(self, name: str) -> tuple[str, list[int]]:
        """As TensorFiles.form(). All types are read in fp32."""
        return "F32", self._tensors[name].shape.tolist()[::-1]

    def read(self, name: str) -> Tensor:
        """As TensorFiles.read()."""
        import gguf

        stored = self._tensors[name]
        # Not through the reader's map of the file, whose pages would stay in memory.
        mapped = stored.data
        data = np.fromfile(self.path, mapped.dtype, mapped.size, offset=int(stored.data_offset))
        values = gguf.quants.dequantize(data.reshape(mapped.shape), stored.tensor_type)
        shape = stored.shape.tolist()[::-1]
        return torch.from_numpy(np.ascontiguousarray(values).reshape(shape))


def _value(field: Any) -> Any:
    """The value of a field. An f32 number becomes the float with its shortest decimal form."""
    import gguf

    value = field.contents()
    if field.types == [gguf.GGUFValueType.FLOAT32]:
        return float(str(np.float32(value)))
    return value
