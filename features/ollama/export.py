"""What the feature adds to scripts/export_gguf.py: a Modelfile beside the GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thinker.runtime.cli import ArgumentParser

if TYPE_CHECKING:
    from thinker.data.tokenizers.tokenizer import Tokenizer
    from thinker.model import Thinker


class ModelfileBesideGguf:
    """A file that the command writes beside the GGUF file."""

    name = "Modelfile"
    purpose = "for ollama create"

    def __init__(self, parser: ArgumentParser) -> None:
        """Say in the help that the command writes it."""
        parser.description += " Writes a Modelfile for Ollama beside it."

    def path(self, gguf: Path) -> Path:
        """Where the file belongs."""
        return gguf.with_suffix(".Modelfile")

    def content(self, gguf: Path, model: Thinker, tokenizer: Tokenizer) -> str:
        """The text of the file."""
        from thinker.features.ollama.modelfile import modelfile

        return modelfile(tokenizer, gguf.name, model.config.max_seq_len)
