"""Model card with architecture, training data and losses."""

from pathlib import Path
from typing import Any

import yaml

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.model import Thinker
from thinker.runtime.reading import read_text
from thinker.runtime.yaml_files import read_yaml

ROWS = {  # keys of metrics.jsonl
    "step": "steps",
    "tokens": "tokens",
    "train_loss": "training loss (nats per token)",
    "val_loss": "validation loss (nats per token)",
    "val_bits_per_byte": "validation bits per byte",
    "entropy_floor": "entropy floor (nats per token)",
}
CARD = """---
{metadata}---

# {name}

{about}

{example}
{training}## Verification

Checked against transformers when this folder was written: {verification}.
"""
EXAMPLE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder of this file
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{code}
```
"""
CONTINUE_TEXT = """inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64, do_sample=True)[0]))"""
ANSWER_MESSAGE = """messages = [{{"role": "user", "content": "Who are you?"}}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
inputs = tokenizer({text}, add_special_tokens=False, return_tensors="pt")
new = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(new, skip_special_tokens=True))"""


def model_card(
    model: Thinker,
    tokenizer: Tokenizer | None,
    run: Path | None,
    step: int,
    name: str,
    verification: str,
    base: Path | None = None,
    adapter: str = "",
) -> str:
    """Create README.md of an exported model, in Markdown after the metadata that the hub reads.

    Shows the config of the run directory `run`, the losses at `step`, when the weights were saved,
    and the checks against transformers, `verification`.
    base: the base model, for an adapter; `adapter`: its rank and size.
    """
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["thinker"],
    }
    about = _architecture(model)
    if base is not None:
        # AutoModelForCausalLM of transformers opens adapters, too, with peft.
        metadata["library_name"] = "peft"
        metadata["base_model"] = str(base)
        about = (
            f"A LoRA adapter ({adapter}), trained with Thinker for the model in `{base}`. "
            f"Together they form:\n\n{about}"
        )
    return CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        name=name,
        about=about,
        example=_example(tokenizer),
        training=_training(run, step),
        verification=verification,
    )


def _architecture(model: Thinker) -> str:
    config = model.config
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"A decoder-only language model of {n_parameters:,} parameters, trained with Thinker: "
        f"{config.n_layers} layers of width {config.d_model}, {config.n_heads} query and "
        f"{config.n_kv_heads} KV heads of width {config.head_dim}, context {config.max_seq_len}, "
        f"vocabulary {config.vocab_size:,}."
    )


def _example(tokenizer: Tokenizer | None) -> str:
    """Runnable Python code that samples from the model."""
    code = CONTINUE_TEXT
    if tokenizer is not None and tokenizer.chat_template is not None:
        text = "text"
        if tokenizer.bos_prefix:  # which add_special_tokens=False leaves out
            text = f'"{tokenizer.bos_token}" + text'
        code = ANSWER_MESSAGE.format(text=text)
    return EXAMPLE.format(code=code)


def _training(run: Path | None, step: int) -> str:
    """Training data, losses at a step, and the config; empty without a config."""
    if run is None or not (run / "config.yaml").is_file():
        return ""
    config = read_text(run / "config.yaml").strip()
    data = read_yaml(run / "config.yaml").get("data")
    if not isinstance(data, dict):
        data = {}
    source = " ".join(str(data[key]) for key in ("source", "path", "config") if data.get(key))
    lines = ["## Training", "", f"Text: `{source}`; tokenizer: `{data.get('tokenizer')}`.", ""]
    lines += _table_of_losses(run, step)
    lines += ["Config:", "", "```yaml", config, "```", "", ""]
    return "\n".join(lines)


def _table_of_losses(run: Path, step: int) -> list[str]:
    """The last value of each metric up to this step; empty if there are none."""
    values: dict[str, Any] = {}
    for line in RunDirectory(run).read_metrics():
        if line.get("step", 0) <= step:
            values.update(line)
    rows = []
    for key, words in ROWS.items():
        if key in values:
            number = values[key]
            text = f"{number:,}" if isinstance(number, int) else f"{number:.4f}"
            rows.append(f"| {words} | {text} |")
    if not rows:
        return []
    return [f"| at step {step:,} | |", "|---|---|", *rows, ""]
