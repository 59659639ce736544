"""The keys of a config except those of data (data_section.py) and of features
(features/NAME/keys.py).

Each has its type and default, followed by its description.
scripts/make_reference.py generates docs/reference/config.md and configs/schema.json from these
files.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticKnownError

from thinker.runtime.constants import MAX_SIZE
from thinker.training.callbacks.registry import CALLBACKS
from thinker.training.config.types import (
    Beta,
    ConfigSection,
    Fraction,
    Natural,
    PathText,
    Positive,
    Rate,
    Size,
    with_feature_keys,
)
from thinker.training.optim.registry import OPTIMIZERS
from thinker.training.tracking.trackers import TRACKERS


@with_feature_keys("run")
class RunConfig(ConfigSection):
    """The run directory, the seed, and the model that training starts from."""

    dir: PathText | None = None
    """Run directory. null: `runs/NAME`, where NAME is the config file's name without its
    extension."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Random seed for the weights, the data order and dropout."""
    init_from: Annotated[PathText, AfterValidator(lambda path: str(Path(path)))] | None = None
    """Run directory, checkpoint or Hugging Face folder with the initial weights and tokenizer.
    null: random weights."""


@with_feature_keys("model")
class ModelConfig(ConfigSection):
    """The architecture, with the field names of ThinkerConfig. Keys that are null get the value
    named in their text."""

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
    """Width of each head. null: d_model / n_heads."""
    d_ff: Size | None = None
    """Hidden width of the MLP. null: 8/3 of d_model, rounded up to a multiple of 64."""
    max_seq_len: Size | None = None
    """Context length in tokens, for training and sampling. null: data.seq_len."""
    rope_theta: float = 10000.0
    """Base of the RoPE frequencies."""
    norm_eps: float = 1e-6
    """Epsilon added to the mean square in RMSNorm."""
    qk_norm: bool = True
    """Apply a norm to queries and keys before RoPE, as in Qwen3. false: do not, as in LLaMA."""
    tie_embeddings: bool = False
    """Share one weight between the embedding and the LM head."""
    dropout: float = 0.0
    """Dropout probability on the embedding and on the outputs of attention and MLP."""
    init: Literal["fan_in", "normal"] = "fan_in"
    """Weight initialization. fan_in: scaled by the input width of each matrix. normal: std 0.02, as
    in GPT-2."""
    head_init_std: float = 0.0
    """Std of the LM head's initial weights. Above 0, the model learns to copy sooner and everything
    else later."""
    attention: str | list[str] = "full"
    """A pattern such as full or window(64), a list of patterns, or letters such as LLLG (L:
    model.window, G: full)."""
    window: Size | None = None
    """Number of keys that each query attends to in layers with the letter L."""
    positions: Literal["rope", "alibi", "relative", "learned", "sinusoidal", "none"] = "rope"
    """Position encoding. relative: a learned bias per head and distance."""
    rope_scaling: dict[str, Any] | None = None
    """RoPE scaling for longer contexts, such as `{type: yarn, factor: 4, original_max_seq_len:
    256}`. null: none."""
    attention_temperature: float = 1.0
    """Divide attention scores by this number, in addition to √head_dim. Below 1, attention is
    sharper."""
    attn_logit_softcap: float | None = None
    """Soft cap on attention scores. null: none."""
    attention_sinks: bool = False
    """Give each head a learned score for attending to nothing."""
    attention_bias: bool = False
    """Add biases to queries, keys and values, as in Qwen2."""
    token_shift: bool = False
    """Add to each embedding that of the token before, scaled by a learned weight per channel."""
    value_embeddings: bool = False
    """Add to the values of each layer an embedding of the token. Lowers the loss of short runs, but
    hardly with characters. Cannot be exported."""
    bigram_rows: Natural = 0
    """Rows of a table of pairs of tokens, such as 5 times the vocabulary; 0: none. The row of a
    token and the one before it is added to the embedding. Cannot be exported."""
    no_rope_layers: list[int] | None = None
    """Layers without RoPE, counted from 0. null: none."""
    n_kv_heads_per_layer: list[int] | None = None
    """Number of KV heads in each layer, for models with pruned heads. null: n_kv_heads in every
    layer."""
    mlp: str = "swiglu"
    """MLP of the blocks: swiglu (gated), ungated, or a name that a module in `extensions`
    registers."""
    activation: str = "silu"
    """Activation in the MLP: silu, gelu, gelu_tanh (as in GPT-2), relu, relu2 (squared), or a
    registered name."""
    norm: str = "rmsnorm"
    """Norm of the blocks and of the output: rmsnorm, rmsnorm_one_plus (as in Gemma), layernorm,
    layernorm_no_bias, layernorm_no_weight, or a registered name."""
    block: Literal["pre_norm", "post_norm", "both_norms", "parallel", "parallel_one_norm"] = (
        "pre_norm"
    )
    """Norms before attention and MLP (pre_norm), after (post_norm, OLMo 2), or both (Gemma 2).
    parallel: both read the same input (GPT-NeoX), or through one norm (Phi)."""
    qk_norm_type: Literal[
        "rmsnorm", "rmsnorm_one_plus", "rmsnorm_width", "layernorm", "layernorm_per_head"
    ] = "rmsnorm"
    """Norm of queries and keys: rmsnorm or layernorm of each head, rmsnorm_one_plus (Gemma 3),
    rmsnorm_width over all heads (OLMo 2), layernorm_per_head with weights per head (StableLM)."""
    attention_out_bias: bool = False
    """Add a bias to the output of attention, as in GPT-2."""
    mlp_bias: bool = False
    """Add biases to the matrices of the MLP."""
    head_bias: bool = False
    """Add a bias to the logits, as in Phi."""
    rope_dim: Size | None = None
    """Channels of each head that RoPE rotates, as in GPT-NeoX. null: all."""
    window_rope_theta: float | None = None
    """Base of RoPE in layers without full attention, where RoPE is then not scaled, as in Gemma 3.
    null: the same RoPE in all layers."""
    position_offset: Annotated[int, Field(ge=0, le=MAX_SIZE)] = 0
    """Rows of the table of learned positions before the first one; 2 in OPT."""
    attention_scale: float | None = None
    """Factor on the attention scores. null: 1/√head_dim."""
    embedding_scale: float = 1.0
    """Factor on the embedding; √d_model in Gemma."""
    residual_scale: float = 1.0
    """Factor on what attention and MLP add to the residual stream, as in Granite."""
    logit_scale: float = 1.0
    """Factor on the logits, as in Cohere's models."""
    logit_softcap: float | None = None
    """Soft cap on the logits, as in Gemma 2. null: none."""


def _check_callback(name: str) -> str:
    if name not in CALLBACKS:
        names = [f"'{each}'" for each in CALLBACKS.names()]
        expected = " or ".join([*names, "a name that a module in extensions registers"])
        raise PydanticKnownError("literal_error", {"expected": expected})
    return name


def _check_optimizer(name: str) -> str:
    if name not in OPTIMIZERS:
        names = [f"'{each}'" for each in OPTIMIZERS.names()]
        expected = f"{', '.join(names[:-1])} or {names[-1]}"
        raise PydanticKnownError("literal_error", {"expected": expected})
    return name


# A module of the user may register more names (extensions).
OptimizerName = Annotated[
    str, AfterValidator(_check_optimizer), Field(json_schema_extra={"enum": OPTIMIZERS.names()})
]


@with_feature_keys("optimizer")
class OptimizerConfig(ConfigSection):
    """AdamW for everything, or Muon for the matrices and the LM head, and AdamW for the embedding
    and the norm weights.

    A learning rate left at null follows the rules in training/optim/optimizers.py. The values below
    apply to batches of at least 16 sequences.
    """

    name: OptimizerName = "muon"
    """Optimizer. The default is adamw if run.init_from is set."""
    lr: Rate | None = None
    """Peak learning rate of the matrices in the blocks. null: 0.04 with muon, 1 / d_model with
    adamw; a tenth of these and of the rates below if run.init_from is set, except with LoRA."""
    embedding_lr: Rate | None = None
    """Peak learning rate of the embedding. null: with muon 0.3, or 2 / d_model if it is tied to the
    LM head; with adamw lr."""
    head_lr: Rate | None = None
    """Peak learning rate of an untied LM head. null: 0.05 with muon, lr with adamw."""
    norm_lr: Rate | None = None
    """Peak learning rate of the norm weights and of biases. null: 0.01 with muon, lr with
    adamw."""
    betas: tuple[Beta, Beta] = (0.8, 0.95)
    """Decay rates of AdamW's first and second moments."""
    eps: Rate = 1e-10
    """Epsilon of AdamW."""
    weight_decay: Annotated[float, Field(ge=0, le=1e38)] = 0.0
    """Decoupled weight decay, applied to matrices only."""
    cautious_weight_decay: bool = False
    """Decay a weight only in steps whose update also moves it toward zero (Muon only)."""
    momentum: Beta | None = None
    """Momentum of Muon; not allowed with adamw. null: 0.95."""
    momentum_warmup_steps: Annotated[int, Field(ge=0, le=10**9)] | None = None
    """Steps in which the momentum of Muon rises from 0.9, if it is higher; not allowed with adamw.
    null: 500, or 0 if optimizer.momentum is set."""


@with_feature_keys("train")
class TrainConfig(ConfigSection):
    """Length of the run, batch size, schedule, device and precision, and how often to evaluate and
    save."""

    max_steps: Positive | None = None
    """Number of optimizer steps to train for. null: no limit."""
    max_minutes: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Minutes to train for; counts pauses (Ctrl-Z), but not evaluations. null: no limit."""
    batch_size: Size = 16
    """Sequences per optimizer step, summed over all ranks."""
    micro_batch_size: Size | Literal["auto"] | None = None
    """Sequences per forward pass. null: the whole batch of a rank. auto: as many as fit in
    memory."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Strategy for training on several ranks. auto: ddp, or fsdp if the model does not fit on one
    rank."""
    dist_timeout_s: Annotated[float, Field(gt=0, le=1e8)] = 600.0
    """Seconds that a rank waits for the others before the run fails."""
    lora_rank: Size | None = None
    """Train only LoRA adapters of this rank; needs run.init_from. null: train all weights."""
    lora_alpha: Rate | None = None
    """Scale the output of the LoRA adapters by lora_alpha / lora_rank. null: twice the rank."""
    checkpoint_every_n_blocks: Positive | None = None
    """Save memory: recompute the activations of every n-th block in the backward pass. null:
    recompute none."""
    offload_activations: bool = False
    """Keep activations in host memory until the backward pass (CUDA only)."""
    warmup_steps: Natural = 10
    """Number of steps of linear learning-rate warmup."""
    fit_bigrams: Literal["auto", "off"] = "auto"
    """Before the first step, fit the embedding and the LM head to the counts of all pairs of
    adjacent tokens. auto: if the blocks start without an effect, and it takes at most 3% of the
    FLOPs of max_steps and 3% of max_minutes. off: never."""
    schedule: Literal["wsd", "cosine"] = "wsd"
    """Learning-rate schedule after the warmup: warmup-stable-decay, or cosine."""
    decay_fraction: Fraction | None = None
    """Fraction of a wsd run, at its end, over which the learning rate decays linearly. null:
    0.6."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate, as a fraction of the peak."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Evaluate and save an exponential moving average of the weights with this decay per step.
    null: the weights."""
    patience: Positive | None = None
    """Stop early after this many evaluations in a row without a new lowest validation loss. null:
    never."""
    grad_clip: Rate | None = 1.0
    """Maximum global norm of the gradients. null: do not clip."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device. auto: a GPU if there is one, otherwise the CPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of activations; weights are always fp32. auto: the fastest one that trains well on
    this device."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the blocks with torch.compile. auto: only if it saves time over the whole run."""
    kernels: Literal["auto", "off"] = "auto"
    """Faster forms of modules in training steps. auto: those that compute the same as the model.
    off: none."""
    log_every: Positive = 1
    """Steps between log lines of training metrics."""
    eval_every: Positive | None = 250
    """Steps between evaluations. null: only at the end."""
    eval_sequences: Positive | None = None
    """Number of validation sequences to evaluate on. null: all."""
    save_every: Positive | None = 500
    """Steps between checkpoints. null: only at the end."""
    keep_last: Positive = 2
    """Number of most recent checkpoints to keep, in addition to the best one."""
    keep_every: Positive | None = None
    """Also keep every checkpoint whose step is a multiple of this. null: none."""
    async_save: bool | Literal["auto"] = "auto"
    """Write checkpoints in the background from a copy of the state, while training continues. auto:
    on a single GPU, if the host has memory for the copy."""
    save_sharded: bool | Literal["auto"] = "auto"
    """Write one checkpoint file per rank. auto: if several ranks train more than 8 GB of
    weights."""
    max_nonfinite_steps: Natural = 0
    """Skip up to this many steps with a non-finite loss or gradient; one more ends the run."""
    deterministic: bool = False
    """Make runs bitwise reproducible on the same machine."""
    callbacks: list[Annotated[str, AfterValidator(_check_callback)]] | None = None
    """Names of callbacks that modules in `extensions` register, in the order in which they run.
    null: none."""
    sample_every: Positive | Literal["auto"] | None = "auto"
    """Steps between samples, which are printed and written to samples.jsonl. auto: after each
    eighth of the run; fewer if it has less than 40 steps. null: none."""
    sample_prompt: str = ""
    """Prompt of the samples; with conversations, the message of a user. Without one, samples begin
    with nothing, or with train.grpo or data.assistant_only_loss answer the first question of the
    validation split."""


@with_feature_keys("tracking")
class TrackingConfig(ConfigSection):
    """Where metrics go in addition to metrics.jsonl."""

    trackers: list[str] | None = None
    """Trackers that log the run: tensorboard, csv, trackio, wandb, or names that modules in
    `extensions` register. null: none but that of the key wandb."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases: disabled, offline or online. With wandb among the trackers: online, unless
    this says offline."""
    project: str = "thinker"
    """Project in Weights & Biases and trackio."""
    name: str | None = None
    """Name of the run in Weights & Biases and trackio. null: the name of the run directory."""

    @model_validator(mode="before")
    @classmethod
    def _choose_wandb(cls, values: Any) -> Any:
        """Log online if wandb is among the trackers and its key is not set."""
        if not isinstance(values, dict) or "wandb" not in (values.get("trackers") or ()):
            return values
        if values.get("wandb") == "disabled":
            raise ValueError(
                "trackers has wandb, but tracking.wandb is disabled; set that to online or "
                "offline, or remove wandb from the trackers"
            )
        return {"wandb": "online"} | values

    @model_validator(mode="after")
    def _check_trackers(self) -> "TrackingConfig":
        for name in self.trackers or ():
            if name not in TRACKERS:
                known = ", ".join(TRACKERS.names())
                raise ValueError(
                    f"trackers has {name}, which is no tracker; use {known}, or list "
                    "the module that registers it in extensions"
                )
            if self.trackers.count(name) > 1:
                raise ValueError(f"trackers has {name} twice; remove one")
        return self

    @property
    def names(self) -> list[str]:
        """All trackers of the run."""
        names = list(self.trackers or ())
        if self.wandb != "disabled" and "wandb" not in names:
            names.append("wandb")
        return names
