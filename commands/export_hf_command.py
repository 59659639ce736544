"""The command `thinker export hf`: a Hugging Face folder."""

import os
import shutil
from pathlib import Path

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError


def main() -> int:
    """Write to a temporary folder, verify it, then rename it. Returns the exit status."""
    examples = "runs/quickstart my-model", "runs/finetune my-adapter --adapter"
    description = (
        "Export a model as a Hugging Face folder, and verify that transformers "
        "computes the same logits."
    )
    parser = ArgumentParser(description=description, examples=examples)
    parser.add_model("path", "RUN")
    parser.add_argument("out", metavar="OUT", type=Path, help="output folder, new or empty")
    parser.add_argument(
        "--adapter", action="store_true", help="export only the LoRA adapter, in PEFT format"
    )
    parser.add_argument(
        "--shard-gigabytes", type=float, default=5.0, help="maximum size of a weight file, in GiB"
    )
    arguments = parser.parse_args()
    if not 0 < arguments.shard_gigabytes < 1e6:
        raise UserError(
            f"--shard-gigabytes is {arguments.shard_gigabytes}; use a positive number, such as 5"
        )
    from thinker.data.tokenizers import tokenizer_conversion
    from thinker.interop import load
    from thinker.interop.find import find_checkpoint, find_run_directory, is_hf_folder
    from thinker.interop.hf_config import hf_model_type
    from thinker.interop.huggingface import save_pretrained
    from thinker.interop.model_card import model_card
    from thinker.interop.peft_adapter import save_adapter
    from thinker.interop.verify_export import verify_hf_export
    from thinker.runtime.reading import read_json
    from thinker.runtime.yaml_files import read_yaml

    out, path = Path(os.path.abspath(arguments.out)), Path(arguments.path)
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT {out} already exists; give a new or empty folder")
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
            if not is_hf_folder(base):
                problem = f"run.init_from is {base}"
                raise UserError(
                    f"--adapter needs a run that starts from a Hugging Face folder, but "
                    f"{problem}; remove --adapter"
                )
            adapter = save_adapter(
                find_checkpoint(path, arguments.checkpoint), model.config, base.resolve(), temporary
            )
        else:
            save_pretrained(model, tokenizer, temporary, int(arguments.shard_gigabytes * 2**30))
        if tokenizer is not None:
            tokenizer_conversion.write(
                tokenizer, temporary, model.config.max_seq_len, model.config.vocab_size
            )
        compared = verify_hf_export(model, tokenizer, temporary, base=base)
        state = (
            {}
            if run is None
            else read_json(find_checkpoint(path, arguments.checkpoint) / "state.json")
        )
        card = model_card(
            model, tokenizer, run, state.get("step", 0), out.name, compared, base, adapter
        )
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    kind, n_parameters = (
        f"adapter ({adapter}) for " if adapter else "",
        sum(p.numel() for p in model.parameters()),
    )
    print(f"wrote {arguments.out}: {kind}{model_type}, {n_parameters:,} parameters")
    print(f"verified with transformers: {compared}")
    return 0
