"""Tokenizers in older files than tokenizer.json, which transformers converts: vocab.json with
merges.txt (GPT-2, OPT), and tokenizer.model of SentencePiece (Llama 2, Gemma)."""

import importlib
import json
from pathlib import Path
from typing import Any

from thinker.runtime.errors import UserError, install_command

SENTENCEPIECE_FILE = "tokenizer.model"
FILES = (["vocab.json", "merges.txt"], [SENTENCEPIECE_FILE])  # each is a whole tokenizer
PACKAGES = ("sentencepiece", "google.protobuf")  # with which transformers reads tokenizer.model


def find_older_files(folder: Path) -> list[str]:
    """The names of the files of a tokenizer that has no tokenizer.json, or []."""
    if (folder / "tokenizer.json").is_file():
        return []
    for names in FILES:
        if all((folder / name).is_file() for name in names):
            return names
    return []


def convert(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tokenizer.json and tokenizer_config.json as transformers makes them.

    Raises UserError if a package is missing, or transformers cannot convert the files.
    """
    names = find_older_files(folder)
    what = f"{folder} has no tokenizer.json, and converting its {' and '.join(names)}"
    needed = ["transformers"]
    if SENTENCEPIECE_FILE in names:
        needed += PACKAGES
    for package in needed:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UserError(
                f"{what} needs {package.removeprefix('google.')}; run {install_command('hf')}"
            ) from error
    import transformers

    transformers.utils.logging.set_verbosity_error()
    try:
        converted = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        content = json.loads(converted.backend_tokenizer.to_str())
    except Exception as error:  # transformers and its libraries raise errors of many kinds
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{what} fails: {reason}") from error
    config = dict(converted.special_tokens_map)
    # An export pads on the same side.
    config["padding_side"] = converted.padding_side
    template = converted.chat_template
    if isinstance(template, dict):  # by name
        template = template.get("default")
    config["chat_template"] = template
    return content, config
