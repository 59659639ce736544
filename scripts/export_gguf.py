"""A trained model as a GGUF file for llama.cpp: python scripts/export_gguf.py RUN OUT.gguf."""

import os

from thinker.runtime.cli import ArgumentParser, output_file
from thinker.runtime.errors import UserError, run_command


def main() -> int:
    """Load, write, verify, and only then move the file into place. Returns the exit status."""
    parser = ArgumentParser(description="Write a GGUF file, read it back, and compare with llama.cpp if installed.")
    parser.add_argument("path", metavar="RUN", help="a run directory, a checkpoint in it, or a Hugging Face folder")
    parser.add_argument("out", metavar="OUT", type=output_file, help="the file to write, such as model.gguf")
    parser.add_argument("--checkpoint", default="latest", help="of a run directory: latest, best, a step or a name")
    parser.add_argument("--dtype", choices=["f16", "f32"], default="f16", help="of the matrices (default f16)")
    arguments = parser.parse_args()
    from thinker.interop import load
    from thinker.interop.gguf import write_gguf
    from thinker.interop.verify_export import verify_gguf

    out = arguments.out
    if os.path.lexists(out):
        raise UserError(f"{out} exists already; give a new file")
    model, tokenizer = load(arguments.path, checkpoint=arguments.checkpoint)
    if tokenizer is None:
        raise UserError(f"{arguments.path} has no tokenizer, which a GGUF file needs")
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        write_gguf(model, tokenizer, temporary, arguments.dtype, out.stem)
        compared = verify_gguf(model, tokenizer, temporary, exact=arguments.dtype == "f32")
        temporary.rename(out)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{out}: {out.stat().st_size:,} bytes, read back as it was written", compared, sep="\n")
    return 0


if __name__ == "__main__":
    run_command(main)
