"""Load a model and its tokenizer from any supported folder or file."""

from pathlib import Path
from typing import get_type_hints

import torch

from thinker.checkpoint.format import STATE, CorruptCheckpoint
from thinker.checkpoint.read_files import read_json
from thinker.checkpoint.weights import load_model
from thinker.data.tokenizers.saved_tokenizer import has_tokenizer, load_tokenizer
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interop.find import find_gguf, find_model, is_adapter_folder, is_hf_folder
from thinker.model import Thinker
from thinker.runtime.checks import check_types, check_weights
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError


def load(
    path: str | Path, device: torch.device | str = "cpu", checkpoint: str | int = "latest"
) -> tuple[Thinker, Tokenizer | None]:
    """Load a model in fp32, ready to sample from, and its tokenizer (None if there is none).

    `path`: a run directory, a checkpoint in it, a Hugging Face folder, the folder of a LoRA adapter
    (peft), or a GGUF file. `device`: may be "auto". `checkpoint`: for a run directory, "latest",
    "best", a step such as 500, or a name.

    Weights of a Hugging Face folder in fp32 may stay mapped, so do not overwrite its files while
    the model is in use. Raises UserError if `path` has no complete model, RunError if a weight is
    not finite.
    """
    check_types(get_type_hints(load), locals())
    device = choose_device(device)
    while True:
        folder = find_model(path, str(checkpoint))
        try:
            model, tokenizer = _read_model(folder)
            break
        except CorruptCheckpoint:
            # Training may just have replaced the latest checkpoint by a newer one.
            if folder.exists():
                raise
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        sizes = f"{tokenizer.vocab_size} ids, but the model has {model.config.vocab_size}"
        raise UserError(f"the tokenizer of {folder} has {sizes}; use the tokenizer of this model")
    check_weights(model.named_parameters(), folder)
    return model.to(device), tokenizer


def _read_model(path: Path) -> tuple[Thinker, Tokenizer | None]:
    """The model at a path, and its tokenizer."""
    # Modules of other formats are imported only if a path has such a format.
    if find_gguf(path) is not None:
        from thinker.interop.gguf.read_gguf import load_gguf

        return load_gguf(path)
    if is_adapter_folder(path):
        from thinker.interop.peft_adapter import load_adapter

        model, base = load_adapter(path)
        return model, _find_tokenizer([path, base])
    if is_hf_folder(path):
        from thinker.interop.huggingface import load_pretrained

        return load_pretrained(path), _find_tokenizer([path])
    _import_extensions(path)
    run = path.resolve().parent.parent
    return load_model(path), _find_tokenizer([path, run])


def _find_tokenizer(folders: list[Path]) -> Tokenizer | None:
    """The tokenizer of the first folder that has one."""
    for folder in folders:
        if has_tokenizer(folder):
            return load_tokenizer(folder)
    return None


def _import_extensions(folder: Path) -> None:
    """Import the modules that registered the names in a model, which its state records."""
    state = read_json(folder / STATE)
    places = [state]
    if isinstance(state.get("settings"), dict):
        places.append(state["settings"])
    recorded = []
    for place in places:
        entries = place.get("extensions")
        if isinstance(entries, list):
            recorded += [entry for entry in entries if isinstance(entry, str)]
    if not recorded:
        return
    from thinker.runtime.extensions import import_extensions

    opened = folder.resolve()
    if opened.parent.name == "checkpoints":
        opened = opened.parent.parent  # the run directory
    import_extensions(recorded, opened=opened)
