"""Load the tokenizer of a folder, in our format or in Hugging Face's."""

from pathlib import Path

from thinker.data.tokenizers.older_files import find_older_files
from thinker.data.tokenizers.tokenizer import FILE_NAME, Tokenizer

HF_FILE_NAME = "tokenizer.json"  # as in hf_tokenizer, which few runs need


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder contains a tokenizer in our format or Hugging Face's."""
    folder = Path(folder)
    if (folder / FILE_NAME).is_file() or (folder / HF_FILE_NAME).is_file():
        return True
    return bool(find_older_files(folder))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a saved tokenizer from a run directory, its file, or a Hugging Face folder.

    Raises UserError.
    """
    path = Path(path)
    is_hf = (path / HF_FILE_NAME).is_file() or find_older_files(path)
    if is_hf and not (path / FILE_NAME).is_file():
        from thinker.data.tokenizers import tokenizer_conversion

        return tokenizer_conversion.read(path)
    return Tokenizer.load(path)
