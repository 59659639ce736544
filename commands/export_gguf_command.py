"""The command `thinker export gguf`: a file for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thinker.data.text.files.whole_text import read_text_or_stdin
from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError
from thinker.runtime.files import output_file
from thinker.runtime.registry import offers_by_name

if TYPE_CHECKING:
    from thinker.interop.gguf.export_gguf import FileBeside

# As in interop.gguf.gguf_quantization, which imports torch.
DTYPES = ("f32", "f16", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_k_m", "q4_1", "q4_0")


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
        "the others have 8 to 4 bits per weight and scales for groups of weights"
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
    text = None
    if arguments.score is not None:
        text = read_text_or_stdin(str(arguments.score))
        if not text:
            raise UserError(f"--score {arguments.score} is empty; use a file with text")

    from thinker.interop.gguf.export_gguf import export_gguf

    export = export_gguf(
        arguments.path,
        arguments.out,
        dtype=arguments.dtype,
        checkpoint=arguments.checkpoint,
        score=text,
        beside=beside,
    )
    print(f"wrote {export.file}: {export.n_bytes:,} bytes, verified by reading it back")
    if export.fallbacks is not None:
        print(export.fallbacks)
    for line in export.compared:
        print(line)
    for file in beside:
        print(f"wrote {file.path(export.file)}, {file.purpose}")
    return 0
