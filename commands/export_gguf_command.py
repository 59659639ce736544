"""The command `thinker export gguf`: a file for llama.cpp."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from thinker.data.text.files.whole_text import read_text_or_stdin
from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError
from thinker.runtime.files import output_file
from thinker.runtime.registry import offers_by_name

if TYPE_CHECKING:
    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.model import Thinker

# As in interop.gguf_quantization, which imports torch.
DTYPES = ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


class FileBeside(Protocol):
    """A file that a feature writes beside the GGUF file. It is created with the parser."""

    name: str  # what the file is
    purpose: str

    def path(self, gguf: Path) -> Path:
        """Where the file belongs."""

    def content(self, gguf: Path, model: Thinker, tokenizer: Tokenizer) -> str:
        """The text of the file."""


def main() -> int:
    """Write to a temporary file, verify it, then rename it. Returns the exit status."""
    examples = (
        "runs/quickstart my-model.gguf",
        "runs/quickstart my-model.gguf --dtype q4_0 --score story.txt",
    )
    description = (
        "Export a model as a GGUF file for llama.cpp, and verify it (with llama.cpp if installed)."
    )
    parser = ArgumentParser(description=description, examples=examples)
    parser.add_model("path", "RUN")
    parser.add_argument("out", metavar="OUT", type=output_file, help="GGUF file to write")
    dtype_help = (
        "data type of the weight matrices; "
        "q8_0 to q4_0 have 8 to 4 bits and a scale for each 32 weights"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="f16", help=dtype_help)
    score_help = (
        "print bits per byte of the text in FILE (UTF-8), "
        "with the full weights and with those of the file"
    )
    parser.add_argument("--score", metavar="FILE", type=Path, help=score_help)
    beside: list[FileBeside] = []
    for create in offers_by_name("arguments", "export_gguf"):
        beside.append(create(parser))
    arguments = parser.parse_args()
    out = arguments.out
    _check_new(out, beside)
    text = None
    if arguments.score is not None:
        text = read_text_or_stdin(str(arguments.score))
        if not text:
            raise UserError(f"--score {arguments.score} is empty; use a file with text")

    from thinker.interop import load
    from thinker.interop.gguf import write_gguf
    from thinker.interop.gguf_quantization import compare_scores
    from thinker.interop.verify_gguf import verify_gguf
    from thinker.runtime.files import atomic_write

    model, tokenizer = load(arguments.path, checkpoint=arguments.checkpoint)
    if tokenizer is None:
        raise UserError(
            f"{arguments.path} has no tokenizer, which a GGUF file needs; "
            "use a model saved with one"
        )
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        write_gguf(model, tokenizer, temporary, arguments.dtype, out.stem)
        compared = [verify_gguf(model, tokenizer, temporary, arguments.dtype)]
        if text is not None:
            compared.append(compare_scores(model, tokenizer, arguments.dtype, text))
        contents = [file.content(out, model, tokenizer) for file in beside]
        temporary.rename(out)
    finally:
        temporary.unlink(missing_ok=True)
    for file, content in zip(beside, contents):
        atomic_write(file.path(out), content)
    print(f"wrote {out}: {out.stat().st_size:,} bytes, verified by reading it back")
    for line in compared:
        print(line)
    for file in beside:
        print(f"wrote {file.path(out)}, {file.purpose}")
    return 0


def _check_new(out: Path, beside: list[FileBeside]) -> None:
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
