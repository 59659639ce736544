"""The command `thinker export hf`: a Hugging Face folder."""

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
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="architecture of transformers, such as llama (default: that of the folder from which "
        "training started, or the first that can express the model)",
    )
    arguments = parser.parse_args()
    if not 0 < arguments.shard_gigabytes < 1e6:
        raise UserError(
            f"--shard-gigabytes is {arguments.shard_gigabytes}; use a positive number, such as 5"
        )
    from thinker.interop.export_huggingface import export_huggingface

    export = export_huggingface(
        arguments.path,
        arguments.out,
        checkpoint=arguments.checkpoint,
        adapter=arguments.adapter,
        shard_gigabytes=arguments.shard_gigabytes,
        model_type=arguments.model_type,
    )
    kind = export.model_type
    if export.adapter:
        kind = f"adapter ({export.adapter}) for {kind}"
    print(f"wrote {arguments.out}: {kind}, {export.n_parameters:,} parameters")
    print(f"verified with transformers: {export.compared}")
    return 0
