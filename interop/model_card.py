"""A model card: what a model is, what it was trained on and how well, for people who find its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.tokenizer import Tokenizer
from thinker.model import Thinker


def model_card(
    model: Thinker,
    tokenizer: Tokenizer | None,
    run: Path | None,
    name: str,
    verification: str,
    base: Path | None = None,
    adapter: str = "",
) -> str:
    """README.md of an exported model, in Markdown under the keys that the hub reads.

    Args:
        run: its run directory, whose config and losses the card shows, if it has one.
        verification: what was compared with transformers.
        base: the model that it is an adapter for, if it is one; `adapter`: its rank and size.
    """
    config = model.config
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    head = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["thinker"]}
    if base is not None:  # AutoModelForCausalLM opens both, by way of peft
        head |= {"library_name": "peft", "base_model": str(base)}
    config_file = run / "config.yaml" if run else None
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {name}", ""]
    if base is not None:
        lines += [f"A LoRA adapter ({adapter}), trained with Thinker for the model in `{base}`. Both together:", ""]
    lines += [
        f"A decoder-only language model of {n_parameters:,} parameters, trained with Thinker: {config.n_layers} layers "
        f"of width {config.d_model}, {config.n_heads} query and {config.n_kv_heads} KV heads of width "
        f"{config.head_dim}, context {config.max_seq_len}, vocabulary {config.vocab_size:,}.",
        "",
        *_example(tokenizer),
    ]
    if config_file is not None and config_file.is_file():
        lines += _training(RunDirectory(run), config_file.read_text(encoding="utf-8"))
    lines += ["## Checked", "", f"Against transformers, when this folder was written: {verification}.", ""]
    return "\n".join(lines)


def _example(tokenizer: Tokenizer | None) -> list[str]:
    """How to sample from it, in Python that runs as it stands."""
    start = "" if tokenizer is None or not tokenizer.bos_prefix else tokenizer.bos_token
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "."  # where this file lies',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        "model = AutoModelForCausalLM.from_pretrained(folder)",
    ]
    if tokenizer is not None and tokenizer.chat_template is not None:
        begun = f'"{start}" + text' if start else "text"
        lines += [
            'messages = [{"role": "user", "content": "Who are you?"}]',
            "text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)",
            f'inputs = tokenizer({begun}, add_special_tokens=False, return_tensors="pt")',
            'new = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]',
            "print(tokenizer.decode(new, skip_special_tokens=True))",
        ]
    else:
        lines += [
            f'inputs = tokenizer("{start}Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64, do_sample=True)[0]))",
        ]
    lines += ["```", ""]
    if start:
        lines += [f"Every text that it read began with `{start}`, which the tokenizer does not add by itself.", ""]
    return lines


def _training(run: RunDirectory, config: str) -> list[str]:
    """What it read, how it ended, and the config."""
    data = (yaml.safe_load(config) or {}).get("data", {})
    source = " ".join(str(data[key]) for key in ("source", "path", "config") if data.get(key))
    lines = ["## Training", "", f"Text: `{source}`; tokenizer: `{data.get('tokenizer')}`.", ""]
    losses: dict[str, Any] = {}
    for line in run.read_metrics():
        losses |= {key: line[key] for key in line if key in ROWS}
    rows = [f"| {ROWS[key]} | {losses[key]:{FORMATS.get(key, '.4f')}} |" for key in ROWS if key in losses]
    if rows:
        lines += ["| at the end | |", "|---|---|", *rows, ""]
    return [*lines, "The config:", "", "```yaml", config.strip(), "```", ""]


ROWS = {
    "step": "steps",
    "tokens": "tokens",
    "train_loss": "training loss (nats per token)",
    "val_loss": "validation loss (nats per token)",
    "val_bits_per_byte": "validation bits per byte",
    "entropy_floor": "entropy floor (nats per token)",
}
FORMATS = {"step": ",", "tokens": ","}
