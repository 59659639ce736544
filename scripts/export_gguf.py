"""Export a model as a GGUF file for llama.cpp: python scripts/export_gguf.py RUN OUT.gguf."""

from thinker.commands.export_gguf_command import main
from thinker.runtime.errors import run_command

if __name__ == "__main__":
    run_command(main)
