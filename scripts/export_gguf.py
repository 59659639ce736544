"""Export a model as a GGUF file for llama.cpp: python scripts/export_gguf.py RUN OUT.gguf."""

import os

from thinker.runtime.cli import ArgumentParser, output_file
from thinker.runtime.errors import UserError, run_command


def main() -> int:
    """Write to a temporary file, verify it, then rename it. Returns the exit status."""
    examples = "runs/quickstart my-model.gguf", "runs/quickstart my-model.gguf --dtype f32 --checkpoint best"
    description = "Export a model as a GGUF file for llama.cpp, and verify it (with llama.cpp if installed)."
    parser = ArgumentParser(description=description, examples=examples)
    parser.add_model("path", "RUN")
    parser.add_argument("out", metavar="OUT", type=output_file, help="GGUF file to write")
    parser.add_argument("--dtype", choices=["f16", "f32"], default="f16", help="data type of the weight matrices")
    arguments = parser.parse_args()
    from thinker.interop import load
    from thinker.interop.gguf import write_gguf
    from thinker.interop.verify_export import verify_gguf

    out = arguments.out
    if os.path.lexists(out):
        raise UserError(f"OUT {out} already exists; give a new file name")
    model, tokenizer = load(arguments.path, checkpoint=arguments.checkpoint)
    if tokenizer is None:
        raise UserError(f"{arguments.path} has no tokenizer, which a GGUF file needs; use a model saved with one")
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        write_gguf(model, tokenizer, temporary, arguments.dtype, out.stem)
        compared = verify_gguf(model, tokenizer, temporary, exact=arguments.dtype == "f32")
        temporary.rename(out)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"wrote {out}: {out.stat().st_size:,} bytes, verified by reading it back", compared, sep="\n")
    return 0


if __name__ == "__main__":
    run_command(main)
