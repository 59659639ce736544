"""Save a model and its tokenizer in a folder that load() and all commands open."""

from __future__ import annotations

from pathlib import Path

from thinker import checkpoint
from thinker.checkpoint.format import MANIFEST
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.model import Thinker
from thinker.runtime.errors import UserError
from thinker.runtime.extensions import imported_extensions


def save(model: Thinker, tokenizer: Tokenizer | None, path: str | Path) -> None:
    """Write the weights, the architecture, the tokenizer and the names of imported extensions.

    The folder appears complete or not at all. If it holds a saved model, that is replaced. Raises
    UserError if it holds anything else.
    """
    folder = Path(path)
    is_empty = not folder.exists() or not any(folder.iterdir())
    if not is_empty and not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} is not empty; save the model in a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(folder, model, {"extensions": imported_extensions()})
    if tokenizer is not None:
        tokenizer.save(folder)
