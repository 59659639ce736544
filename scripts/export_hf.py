"""A trained model as a Hugging Face folder: python scripts/export_hf.py RUN OUT."""

import os
import shutil
from pathlib import Path

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError, run_command


def main() -> int:
    """Load, write, verify, and only then move the folder into place. Returns the exit status."""
    parser = ArgumentParser(description="Write a folder that transformers loads, and check that it computes the same.")
    parser.add_argument("path", metavar="RUN", help="a run directory, such as runs/quickstart, or a checkpoint in it")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    parser.add_argument("--checkpoint", default="latest", help="of a run directory: latest, best, a step or a name")
    parser.add_argument("--adapter", action="store_true", help="write only a run's LoRA adapter, as a peft folder")
    parser.add_argument("--shard-gigabytes", type=float, default=5.0, help="largest file of weights (default 5)")
    arguments = parser.parse_args()
    if not 0 < arguments.shard_gigabytes < 1e6:
        raise UserError(f"--shard-gigabytes is {arguments.shard_gigabytes}; it must be a positive number")
    from thinker.data import tokenizer_conversion
    from thinker.interop import huggingface, load
    from thinker.interop.hf_config import hf_model_type
    from thinker.interop.load import find_checkpoint, find_run_directory
    from thinker.interop.model_card import model_card
    from thinker.interop.peft_adapter import save_adapter
    from thinker.interop.verify_export import verify_hf_export
    from thinker.runtime.reading import read_json, read_yaml

    out, path = Path(os.path.abspath(arguments.out)), Path(arguments.path)
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; give a new or an empty folder")
    model, tokenizer = load(path, checkpoint=arguments.checkpoint)
    model_type, run = hf_model_type(model.config), find_run_directory(path)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        base, adapter = None, ""
        if arguments.adapter:
            settings = None if run is None else read_yaml(run / "config.yaml").get("run")
            base = Path(str(settings.get("init_from") if isinstance(settings, dict) else None))
            if not huggingface.is_hf_folder(base):
                problem = f"run.init_from is {base}, which is not a Hugging Face folder"
                raise UserError(f"--adapter needs a run that started from one: {problem}; export without --adapter")
            adapter = save_adapter(find_checkpoint(path, arguments.checkpoint), model.config, base.resolve(), temporary)
        else:
            huggingface.save_pretrained(model, tokenizer, temporary, int(arguments.shard_gigabytes * 2**30))
        if tokenizer is not None:
            tokenizer_conversion.write(tokenizer, temporary, model.config.max_seq_len)
        compared = verify_hf_export(model, tokenizer, temporary, base=base)
        state = {} if run is None else read_json(find_checkpoint(path, arguments.checkpoint) / "state.json")
        card = model_card(model, tokenizer, run, state.get("step", 0), out.name, compared, base, adapter)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    size = f"an adapter ({adapter}) for" if adapter else "a"
    print(f"{arguments.out}: {size} {model_type} of {sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"verified with transformers: {compared}")
    return 0


if __name__ == "__main__":
    run_command(main)
