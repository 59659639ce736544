"""Model card with architecture, training data and losses."""

from pathlib import Path

import yaml

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.model import Thinker
from thinker.runtime.reading import read_text, read_yaml

ROWS = {  # keys of metrics.jsonl
    "step": "steps",
    "tokens": "tokens",
    "train_loss": "training loss (nats per token)",
    "val_loss": "validation loss (nats per token)",
    "val_bits_per_byte": "validation bits per byte",
    "entropy_floor": "entropy floor (nats per token)",
}


def model_card(
    model: Thinker, tokenizer: Tokenizer | None, run: Path | None, step: int, name: str, verification: str,
    base: Path | None = None, adapter: str = "",
) -> str:  # fmt: skip
    """Create README.md of an exported model, in Markdown after the metadata that the hub reads.

    Shows the config of the run directory `run`, the losses at `step`, when the weights were saved, and the checks
    against transformers, `verification`.
    base: the base model, for an adapter; `adapter`: its rank and size.
    """
    config, about = model.config, ""
    head = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["thinker"]}
    if base is not None:  # AutoModelForCausalLM opens both with peft
        head |= {"library_name": "peft", "base_model": str(base)}
        about = f"A LoRA adapter ({adapter}), trained with Thinker for the model in `{base}`. Together they form:\n\n"
    about += (
        f"A decoder-only language model of {sum(parameter.numel() for parameter in model.parameters()):,} parameters, "
        f"trained with Thinker: {config.n_layers} layers of width {config.d_model}, {config.n_heads} query and "
        f"{config.n_kv_heads} KV heads of width {config.head_dim}, context {config.max_seq_len}, vocabulary "
        f"{config.vocab_size:,}."
    )
    return f"""---
{yaml.safe_dump(head, sort_keys=False)}---

# {name}

{about}

{_example(tokenizer)}
{_training(run, step)}## Verification

Checked against transformers when this folder was written: {verification}.
"""


def _example(tokenizer: Tokenizer | None) -> str:
    """Runnable Python code that samples from the model."""
    if tokenizer is not None and tokenizer.chat_template is not None:
        begun = f'"{tokenizer.bos_token}" + text' if tokenizer.bos_prefix else "text"
        code = f"""messages = [{{"role": "user", "content": "Who are you?"}}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
inputs = tokenizer({begun}, add_special_tokens=False, return_tensors="pt")
new = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(new, skip_special_tokens=True))"""
    else:
        code = """inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64, do_sample=True)[0]))"""
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder of this file
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{code}
```
"""


def _training(run: Path | None, step: int) -> str:
    """Training data, losses at a step, and the config; empty without a config."""
    if run is None or not (run / "config.yaml").is_file():
        return ""
    config, tree, losses = read_text(run / "config.yaml"), read_yaml(run / "config.yaml"), {}
    data = tree["data"] if isinstance(tree.get("data"), dict) else {}
    source = " ".join(str(data[key]) for key in ("source", "path", "config") if data.get(key))
    lines = ["## Training", "", f"Text: `{source}`; tokenizer: `{data.get('tokenizer')}`.", ""]
    for line in RunDirectory(run).read_metrics():
        if line.get("step", 0) <= step:
            losses |= {key: line[key] for key in line if key in ROWS}
    if losses:
        values = {key: f"{x:,}" if isinstance(x, int) else f"{x:.4f}" for key, x in losses.items()}
        rows = [f"| {words} | {values[key]} |" for key, words in ROWS.items() if key in values]
        lines += [f"| at step {step:,} | |", "|---|---|", *rows, ""]
    return "\n".join([*lines, "Config:", "", "```yaml", config.strip(), "```", "", ""])
