"""export_gguf(): a model as a file for llama.cpp, verified."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from thinker.interop.gguf.gguf_quantization import compare_scores, describe_fallbacks
from thinker.interop.gguf.verify_gguf import verify_gguf
from thinker.interop.gguf.write_gguf import write_gguf
from thinker.interop.load import load
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write

if TYPE_CHECKING:
    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.model import Thinker


class FileBeside(Protocol):
    """A file that a feature writes beside the GGUF file."""

    name: str  # what the file is
    purpose: str

    def path(self, gguf: Path) -> Path:
        """Where the file belongs."""

    def content(self, gguf: Path, model: Thinker, tokenizer: Tokenizer) -> str:
        """The text of the file."""


@dataclass(frozen=True)
class GgufExport:
    """A file that was written."""

    file: Path
    n_bytes: int
    compared: list[str]  # lines about what was compared
    fallbacks: str | None  # which matrices have another data type, and why


def export_gguf(
    path: str | Path,
    out: str | Path,
    *,
    dtype: str = "f16",
    checkpoint: str | int = "latest",
    score: str | None = None,
    beside: Sequence[FileBeside] = (),
) -> GgufExport:
    """Write a model as a GGUF file, and verify it, with llama.cpp if that is installed.

    Args:
        path: a run directory, a checkpoint, a Hugging Face folder or a GGUF file.
        out: a new file. It appears complete and verified, or not at all.
        dtype: of the weight matrices: f32, f16, q8_0, q6_k, q5_k_m, q5_1, q5_0, q4_k_m, q4_1 or
            q4_0.
        score: a text. Compare its bits per byte with the full weights and with those of the file.
        beside: further files, such as a Modelfile.

    Raises UserError if there is such a file, RunError if the file computes something else.
    """
    out = Path(out)
    _check_new(out, beside)
    model, tokenizer = load(path, checkpoint=checkpoint)
    if tokenizer is None:
        raise UserError(
            f"{path} has no tokenizer, which a GGUF file needs; use a model saved with one"
        )
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        write_gguf(model, tokenizer, temporary, dtype, out.stem)
        compared = [verify_gguf(model, tokenizer, temporary, dtype)]
        if score is not None:
            compared.append(compare_scores(model, tokenizer, dtype, score))
        contents = [file.content(out, model, tokenizer) for file in beside]
        temporary.rename(out)
    finally:
        temporary.unlink(missing_ok=True)
    for file, content in zip(beside, contents):
        atomic_write(file.path(out), content)
    return GgufExport(out, out.stat().st_size, compared, describe_fallbacks(model, dtype))


def _check_new(out: Path, beside: Sequence[FileBeside]) -> None:
    """Raise UserError if a file exists, or two have one name."""
    if os.path.lexists(out):
        raise UserError(f"OUT {out} already exists; give a new file name")
    for file in beside:
        path = file.path(out)
        if path == out:
            raise UserError(
                f"OUT {out} has the name of the {file.name}; give a name that ends in .gguf"
            )
        if os.path.lexists(path):
            raise UserError(f"{path} already exists; give a new file name")
