"""Every key of a config: its type, its default and, in the text below it, its meaning.

docs/reference/config.md and configs/schema.json are generated from this file (training/config_docs.py).
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from thinker.model.config import MAX_SIZE

DEFAULT_SEQ_LEN = 256
MAX_COUNT = 2**53  # what every format holds exactly
Positive = Annotated[int, Field(ge=1, lt=MAX_COUNT)]
Natural = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Rate = Annotated[float, Field(gt=0, le=1e38)]  # what fp32 can hold
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]


class ConfigSection(BaseModel):
    """A part of a config: frozen, without unknown keys."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_bool_and_nul(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, str) and re.search("[\\0\ud800-\udfff]", value):
                raise ValueError(f"{name} is {value!r}; it must be UTF-8 text without NUL")
            if isinstance(value, bool) and field is not None and "bool" not in str(field.annotation):
                choices = " or ".join(choice for choice in get_args(field.annotation) if isinstance(choice, str))
                wanted = f"it must be {choices or 'a number or text'}"
                raise ValueError(f"{name} is {value} (YAML reads on, off, yes and no so); {wanted}")
        return values


class RunConfig(ConfigSection):
    """Where the run is stored, its seed, and the model it starts from."""

    dir: PathText | None = None
    """The run directory. null: `runs/` and the config file's name."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Seed of the weights, the data order and dropout."""
    init_from: Annotated[PathText, AfterValidator(lambda path: str(Path(path)))] | None = None
    """Start from the weights and tokenizer of this run, checkpoint or Hugging Face folder. null: random weights."""


class ModelConfig(ConfigSection):
    """The architecture, in ThinkerConfig's names. Keys left at null follow from the others."""

    vocab_size: Size | None = None
    """Number of token ids. null: the tokenizer's size."""
    d_model: Size = 256
    """Width of the residual stream."""
    n_layers: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Number of transformer blocks."""
    n_heads: Size = 4
    """Number of query heads per layer."""
    n_kv_heads: Size | None = None
    """Number of KV heads per layer; 1 is multi-query attention. null: n_heads."""
    head_dim: Size | None = None
    """Width of a head. null: d_model / n_heads."""
    d_ff: Size | None = None
    """Hidden width of the MLP. null: 8/3 of d_model, rounded up to a multiple of 64."""
    max_seq_len: Size | None = None
    """Longest sequence in tokens, when sampling too. null: data.seq_len."""
    rope_theta: float = 10000.0
    """Base of RoPE's frequencies."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    qk_norm: bool = True
    """RMSNorm on queries and keys before RoPE, as in Qwen3. false: as in LLaMA."""
    tie_embeddings: bool = False
    """The language-model head shares the embedding's weight."""
    dropout: float = 0.0
    """Dropout probability on the embedding and on the outputs of attention and MLP."""
    init: Literal["fan_in", "normal"] = "fan_in"
    """How weights are initialized. normal: every matrix with a standard deviation of 0.02, as in GPT-2."""
    head_init_std: float = 0.0
    """Standard deviation of the head's initial weights. Above 0 a model learns to copy sooner, and the rest later."""
    attention: str | list[str] = "full"
    """The attention pattern of all layers, a list with one pattern per layer, or letters such as LLLG."""
    window: Size | None = None
    """Number of keys that layers with the letter L attend to."""
    positions: Literal["rope", "alibi", "learned", "sinusoidal", "none"] = "rope"
    """How positions are encoded."""
    rope_scaling: dict[str, Any] | None = None
    """RoPE scaling, such as `{type: yarn, factor: 4, original_max_seq_len: 256}`. null: none."""
    attn_logit_softcap: float | None = None
    """Soft cap on the attention scores. null: none."""
    attention_sinks: bool = False
    """A learned score per head for attending to nothing."""
    attention_bias: bool = False
    """Biases on queries, keys and values, as in Qwen2."""
    no_rope_layers: list[int] | None = None
    """Layers, counted from 0, without RoPE. null: none."""
    n_kv_heads_per_layer: list[int] | None = None
    """Number of KV heads of each layer, where some have fewer than n_kv_heads. null: n_kv_heads everywhere."""


class DataConfig(ConfigSection):
    """What is read, how it becomes tokens, and how the tokens become sequences."""

    source: str = "tales"
    """Where text comes from: tales, text, jsonl, parquet, hub, pysource or repeated_random (README.md)."""
    path: str | None = None
    """File, folder, glob or hub dataset of the source."""
    config: str | None = None
    """Configuration of a hub dataset."""
    split: str | None = None
    """Split of a hub dataset. null: train."""
    column: str | None = None
    """Text column of a jsonl, parquet or hub source. null: text or, in rows without one, messages."""
    streaming: bool | None = None
    """Stream a hub dataset instead of downloading it first. null: true."""
    tokenizer: PathText | None = None
    """Tokenizer specification or path. null: bpe:4096, or the tokenizer of run.init_from."""
    seq_len: Annotated[int, Field(ge=2, le=MAX_SIZE)] = DEFAULT_SEQ_LEN
    """Tokens per sequence. Where it is left out, a shorter model.max_seq_len or context of run.init_from counts."""
    packing: Literal["contiguous", "documents"] = "contiguous"
    """contiguous: cut the token stream every seq_len tokens. documents: pack whole documents, pad the rest."""
    assistant_only_loss: bool = False
    """In conversations, learn only what the assistant says."""
    chat_template: PathText | None = None
    """A Jinja file with the chat template. null: the tokenizer's own."""
    document_masking: bool = False
    """Tokens attend only within their own document, and positions restart at each document."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Fraction of the documents that are held out for validation. Not read with val_tokens."""
    val_tokens: PathText | None = None
    """Validate on the documents of this file of GPT-2 tokens (docs/guides/gpu.md) instead, and do not train on them."""
    max_documents: Positive | None = None
    """Read at most this many documents; not for a single text file. null: all."""
    num_workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Threads that prepare batches ahead of time. 0: each batch is made when it is needed."""
    cache_dir: PathText = ".cache"
    """Folder of the tokenized corpora."""


class OptimizerConfig(ConfigSection):
    """AdamW for everything, or Muon for the matrices and AdamW for the embedding and the norm weights.

    Learning rates at null follow the rules in training/optimizers.py; the numbers below are for 16 and more sequences
    per step.
    """

    name: Literal["muon", "adamw"] = "muon"
    """The optimizer. With run.init_from the default is adamw."""
    lr: Rate | None = None
    """Peak learning rate of the blocks' matrices. null: 0.04 with muon, 1 / d_model with adamw."""
    embedding_lr: Rate | None = None
    """Peak learning rate of the embedding. null: 0.3 with muon, lr with adamw."""
    head_lr: Rate | None = None
    """Peak learning rate of an untied head. null: 0.05 with muon, lr with adamw."""
    norm_lr: Rate | None = None
    """Peak learning rate of the norm weights. null: 0.01 with muon, lr with adamw."""
    betas: tuple[Beta, Beta] = (0.8, 0.95)
    """AdamW's decay rates of the first and second moments."""
    eps: Rate = 1e-10
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0, le=1e38)] = 0.0
    """Decoupled weight decay, on matrices only."""
    momentum: Beta | None = None
    """Muon's momentum. null: 0.95 with muon; adamw has none."""


class TrainConfig(ConfigSection):
    """How long, in which batches, on which device, and when to evaluate and save."""

    max_steps: Positive | None = None
    """Stop after this many optimizer steps. null: no limit."""
    max_minutes: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Stop after this many minutes of training, without evaluations but with pauses (Ctrl-Z). null: no limit."""
    batch_size: Size = 16
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: Size | Literal["auto"] | None = None
    """Sequences per forward pass. null: all of a rank's sequences. auto: as many as fit into memory."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """How several ranks share the work. auto: ddp, or fsdp where the whole model does not fit on one."""
    dist_timeout_s: Annotated[float, Field(gt=0, le=1e8)] = 600.0
    """Seconds that one rank waits for another."""
    lora_rank: Size | None = None
    """Train LoRA adapters of this rank and nothing else; needs run.init_from. null: train all weights."""
    lora_alpha: Rate | None = None
    """The adapters' output is scaled by alpha / rank. null: twice the rank."""
    checkpoint_every_n_blocks: Positive | None = None
    """Activation checkpointing: recompute the activations of every n-th block in the backward pass. null: none."""
    offload_activations: bool = False
    """Keep activations in host memory until the backward pass; on a CUDA GPU only."""
    warmup_steps: Natural = 10
    """Steps of linear learning-rate warmup."""
    schedule: Literal["wsd", "cosine"] = "wsd"
    """Learning-rate schedule after the warmup: warmup-stable-decay, or cosine."""
    decay_fraction: Fraction | None = None
    """Last fraction of a wsd run, in which the learning rate falls linearly. null: 0.6."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end, as a fraction of its peak."""
    grad_clip: Rate | None = 1.0
    """Clip the gradients to this global norm. null: do not clip."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: the GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the activations; weights are always fp32. auto: the fastest that trains well on this device."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the blocks with torch.compile. auto: where the planned run is long enough to pay for it."""
    log_every: Positive = 1
    """Steps per line of training metrics."""
    eval_every: Positive | None = 250
    """Steps between evaluations. null: only at the end."""
    eval_sequences: Positive | None = None
    """Evaluate on this many sequences of the validation set. null: on all."""
    save_every: Positive | None = 500
    """Steps between checkpoints. null: only at the end."""
    keep_last: Positive = 2
    """Number of checkpoints to keep; the best one is kept as well."""
    keep_every: Positive | None = None
    """Never remove checkpoints whose step is a multiple of this. null: none."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy of the state."""
    save_sharded: bool | Literal["auto"] = "auto"
    """Write one file per rank. auto: where several ranks share weights of more than 8 GB."""
    max_nonfinite_steps: Natural = 0
    """Skip up to this many steps whose loss or gradient is not finite; one more ends the run."""
    deterministic: bool = False
    """The same config gives the same bits every time on the same machine."""
    sample_every: Positive | None = None
    """Steps between printed samples. null: none."""
    sample_prompt: str = ""
    """Prompt of the printed samples."""


class TrackingConfig(ConfigSection):
    """Weights & Biases, in addition to metrics.jsonl."""

    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Whether and how metrics are sent to Weights & Biases."""
    project: str = "thinker"
    """The project in Weights & Biases."""
    name: str | None = None
    """The run's name in Weights & Biases. null: the run directory's name."""
