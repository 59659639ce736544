"""Export a model as a GGUF file for llama.cpp and Ollama: python scripts/export_gguf.py RUN OUT.gguf."""

import os
from pathlib import Path

from thinker.runtime.cli import ArgumentParser, output_file
from thinker.runtime.errors import UserError, run_command
from thinker.runtime.files import atomic_write
from thinker.runtime.reading import read_text

DTYPES = (
    "f32",
    "f16",
    "q8_0",
    "q5_1",
    "q5_0",
    "q4_1",
    "q4_0",
)  # as in interop.gguf_quantization, which imports torch


def main() -> int:
    """Write to a temporary file, verify it, then rename it. Returns the exit status."""
    examples = (
        "runs/quickstart my-model.gguf",
        "runs/quickstart my-model.gguf --dtype q4_0 --score story.txt",
    )
    description = (
        "Export a model as a GGUF file for llama.cpp, and verify it (with llama.cpp if installed)."
    )
    parser = ArgumentParser(
        description=f"{description} Writes a Modelfile for Ollama beside it.", examples=examples
    )
    parser.add_model("path", "RUN")
    parser.add_argument("out", metavar="OUT", type=output_file, help="GGUF file to write")
    dtype_help = "data type of the weight matrices; q8_0 to q4_0 have 8 to 4 bits and a scale for each 32 weights"
    parser.add_argument("--dtype", choices=DTYPES, default="f16", help=dtype_help)
    score_help = "print bits per byte of the text in FILE (UTF-8), with the full weights and with those of the file"
    parser.add_argument("--score", metavar="FILE", type=Path, help=score_help)
    arguments = parser.parse_args()
    from thinker.features.ollama.ollama import modelfile
    from thinker.interop import load
    from thinker.interop.gguf import write_gguf
    from thinker.interop.gguf_quantization import compare_scores
    from thinker.interop.verify_gguf import verify_gguf

    out, beside = arguments.out, arguments.out.with_suffix(".Modelfile")
    for path in (out, beside):
        if os.path.lexists(path):
            raise UserError(
                f"{'OUT ' if path == out else ''}{path} already exists; give a new file name"
            )
    if out == beside:
        raise UserError(f"OUT {out} has the name of the Modelfile; give a name that ends in .gguf")
    text = None if arguments.score is None else read_text(arguments.score)
    if text == "":
        raise UserError(f"--score {arguments.score} is empty; use a file with text")
    model, tokenizer = load(arguments.path, checkpoint=arguments.checkpoint)
    if tokenizer is None:
        raise UserError(
            f"{arguments.path} has no tokenizer, which a GGUF file needs; use a model saved with one"
        )
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        write_gguf(model, tokenizer, temporary, arguments.dtype, out.stem)
        compared = [verify_gguf(model, tokenizer, temporary, arguments.dtype)]
        if text is not None:
            compared.append(compare_scores(model, tokenizer, arguments.dtype, text))
        for_ollama = modelfile(tokenizer, out.name, model.config.max_seq_len)
        temporary.rename(out)
        atomic_write(beside, for_ollama)
    finally:
        temporary.unlink(missing_ok=True)
    print(
        f"wrote {out}: {out.stat().st_size:,} bytes, verified by reading it back",
        *compared,
        sep="\n",
    )
    print(f"wrote {beside}, for ollama create")
    return 0


if __name__ == "__main__":
    run_command(main)
