"""export_huggingface(): a model as a folder for transformers, verified."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from thinker.data.tokenizers import tokenizer_conversion
from thinker.interop.find import find_checkpoint, find_run_directory, is_hf_folder
from thinker.interop.hf_config import hf_model_type
from thinker.interop.huggingface import save_pretrained
from thinker.interop.load import load
from thinker.interop.model_card import model_card
from thinker.interop.peft_adapter import save_adapter
from thinker.interop.verify_export import verify_hf_export
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json
from thinker.runtime.yaml_files import read_yaml


@dataclass(frozen=True)
class HuggingFaceExport:
    """A folder that was written."""

    folder: Path
    model_type: str  # of transformers, such as qwen3
    n_parameters: int
    compared: str  # what transformers computed equally
    adapter: str  # the base of a LoRA adapter; "" for a whole model


def export_huggingface(
    path: str | Path,
    out: str | Path,
    *,
    checkpoint: str | int = "latest",
    adapter: bool = False,
    shard_gigabytes: float = 5.0,
) -> HuggingFaceExport:
    """Write a model as a Hugging Face folder, and verify that transformers computes the same.

    Args:
        path: a run directory, a checkpoint or a Hugging Face folder.
        out: a new or empty folder. It appears complete and verified, or not at all.
        adapter: write only the LoRA adapter of a run that started from a Hugging Face folder.
        shard_gigabytes: maximum size of a weight file, in GiB.

    Raises UserError if there is such a folder or transformers is missing, RunError if transformers
    computes something else.
    """
    path = Path(path)
    folder = Path(os.path.abspath(out))
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"OUT {folder} already exists; give a new or empty folder")
    model, tokenizer = load(path, checkpoint=checkpoint)
    model_type = hf_model_type(model.config)
    run = find_run_directory(path)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        base = None
        written = ""
        if adapter:
            base = _base_folder(run)
            weights = find_checkpoint(path, checkpoint)
            written = save_adapter(weights, model.config, base.resolve(), temporary)
        else:
            save_pretrained(model, tokenizer, temporary, int(shard_gigabytes * 2**30))
        if tokenizer is not None:
            config = model.config
            tokenizer_conversion.write(tokenizer, temporary, config.max_seq_len, config.vocab_size)
        compared = verify_hf_export(model, tokenizer, temporary, base=base)
        step = 0
        if run is not None:
            step = read_json(find_checkpoint(path, checkpoint) / "state.json").get("step", 0)
        card = model_card(model, tokenizer, run, step, folder.name, compared, base, written)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return HuggingFaceExport(folder, model_type, n_parameters, compared, written)


def _base_folder(run: Path | None) -> Path:
    """The Hugging Face folder that a run started from. Raises UserError if it did not."""
    settings = None
    if run is not None:
        settings = read_yaml(run / "config.yaml").get("run")
    base = None
    if isinstance(settings, dict):
        base = settings.get("init_from")
    folder = Path(str(base))
    if not is_hf_folder(folder):
        raise UserError(
            f"--adapter needs a run that starts from a Hugging Face folder, but run.init_from is "
            f"{base}; remove --adapter"
        )
    return folder
