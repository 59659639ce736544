"""Export a model as a Hugging Face folder: python scripts/export_hf.py RUN OUT."""

from thinker.commands.export_hf_command import main
from thinker.runtime.errors import run_command

if __name__ == "__main__":
    run_command(main)
