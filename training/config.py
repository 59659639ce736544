"""A config: the YAML file as a checked tree, with overrides section.key=value from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError, did_you_mean

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, le=1e38)]  # what fp32 can hold
Share = Annotated[float, Field(ge=0, le=1)]


# What pydantic calls these types of input would puzzle a reader of configs.
WORDING = {
    "int_": "it must be a whole number",
    "float_": "it must be a number",
    "bool_": "it must be true or false",
    "tuple_type": "it must be a list of two numbers, such as [0.8, 0.95]",
    "string_type": "it must be text",
}


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is there twice is a mistake, not the last one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class Section(BaseModel):
    """A part of a config. Keys that it does not know are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and "bool" not in str(field.annotation):
                choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
                wanted = " or ".join(choices) if choices else "a number or text"
                raise ValueError(f"{name} is {value} (YAML reads on, off, yes and no so); it must be {wanted}")
        return values


class RunSection(Section):
    """Where the run lives, and its seed."""

    dir: str | None = None  # null: runs/ and the config's name
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1  # of weights, data order and dropout
    init_from: str | None = None  # a run, checkpoint or Hugging Face folder to begin with; null: anew


class ModelSection(Section):
    """The shape, with ThinkerConfig's names. Null follows from the other keys, vocab_size from the tokenizer."""

    vocab_size: Positive | None = None
    d_model: Positive = 256
    n_layers: Positive = 4
    n_heads: Positive = 4
    n_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    d_ff: Positive | None = None
    max_seq_len: Positive | None = None  # null: data.seq_len
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
    tie_embeddings: bool = False
    dropout: float = 0.0
    init: Literal["fan_in", "normal"] = "fan_in"  # normal: every matrix with deviation 0.02, as GPT-2
    head_init_std: float = 0.0  # above 0, copying is learned sooner, other things later: docs/experiments.md
    attention: str | list[str] = "full"  # a pattern for all layers, a list of them, or letters such as LLLG
    window: Positive | None = None  # keys that layers L see
    positions: Literal["rope", "alibi", "learned", "sinusoidal", "none"] = "rope"
    rope_scaling: dict[str, Any] | None = None  # such as {type: yarn, factor: 4, original_max_seq_len: 256}
    attn_logit_softcap: float | None = None  # of attention's scores; null: none
    attention_sinks: bool = False
    attention_bias: bool = False  # of queries, keys and values
    no_rope_layers: list[int] | None = None  # layers, from 0, that do not rotate
    n_kv_heads_per_layer: list[int] | None = None  # of each layer, where some have fewer than n_kv_heads


class DataSection(Section):
    """What is read, how it becomes tokens, and how they are cut into windows."""

    source: str = "tales"
    path: str | None = None
    config: str | None = None  # of a hub dataset
    split: str | None = None  # of a hub dataset; null: train
    column: str | None = None  # of jsonl, parquet and hub; null: text
    streaming: bool | None = None  # of a hub dataset; null: yes
    tokenizer: str | None = None  # null: bpe:4096, or that of run.init_from
    seq_len: Annotated[int, Field(ge=2)] = 256
    packing: Literal["contiguous", "documents"] = "contiguous"
    assistant_only_loss: bool = False  # of conversations, learn only what the assistant says
    chat_template: str | None = None  # a Jinja file; null: the tokenizer's own
    document_masking: bool = False  # no token sees across a document's border, and positions begin anew there
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    max_documents: Positive | None = None
    num_workers: Annotated[int, Field(ge=0, le=64)] = 1  # threads that make batches ahead; 0: made when they are needed
    cache_dir: str = ".cache"


class OptimizerSection(Section):
    """AdamW for everything, or Muon for the matrices and AdamW for embedding and norm weights."""

    name: Literal["muon", "adamw"] = "muon"  # adamw with run.init_from, unless given
    # Null: by the rule of training/optimizers.py; the numbers are for 16 sequences a step and more.
    lr: Rate | None = None  # of the blocks' matrices; null: 0.04 with muon, 1 / d_model with adamw
    embedding_lr: Rate | None = None  # null: 0.3 with muon, lr with adamw
    head_lr: Rate | None = None  # null: 0.05 with muon, lr with adamw
    norm_lr: Rate | None = None  # of the norms; null: 0.01 with muon, lr with adamw
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.8, 0.95)
    eps: Rate = 1e-10
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # on matrices only
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None  # muon only; null: 0.95


class TrainSection(Section):
    """How long, how much at a time, on what, and what is written when."""

    max_steps: Positive | None = None
    max_minutes: Annotated[float, Field(gt=0)] | None = None  # of training, evaluation left out
    batch_size: Positive = 16  # sequences an optimizer step, over all ranks
    micro_batch_size: Positive | Literal["auto"] | None = None  # sequences at once; null: a rank's all; auto: what fits
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # of several ranks; auto: fsdp where one has no room for a whole
    dist_timeout_s: Rate = 600.0  # that one rank waits for another
    lora_rank: Positive | None = None  # train adapters of so many columns, and nothing else; null: all weights
    lora_alpha: Rate | None = None  # an adapter counts alpha / rank times; null: twice the rank
    checkpoint_every_n_blocks: Positive | None = (
        None  # 1: every block's activations are computed again, 2: every other's
    )
    offload_activations: bool = False  # kept in the host's memory until the backward pass; on a GPU
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    schedule: Literal["wsd", "cosine"] = "wsd"
    decay_fraction: Share | None = None  # the last part of a wsd run, in which lr falls linearly; null: 0.6
    min_lr_ratio: Share = 0.0  # of the peak, at the end
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0  # of the gradient's global norm; null: none
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: bool | Literal["auto"] = "auto"  # auto: where the planned run is long enough to pay for it
    log_every: Positive = 1
    eval_every: Positive | None = 250  # steps; null: at the end only
    eval_sequences: Positive | None = None  # of the validation set, the first so many; null: all
    save_every: Positive | None = 500  # steps; null: at the end only
    keep_last: Positive = 2  # checkpoints; the best one is kept beside them
    keep_every: Positive | None = None  # steps: checkpoints at their multiples are never removed; null: none
    async_save: bool = False  # written from a copy of the state, while training goes on
    save_sharded: bool | Literal["auto"] = "auto"  # one file a rank; auto: where the weights take more than 8 GB
    max_nonfinite_steps: Annotated[int, Field(ge=0)] = 0  # so many may have a loss or gradient that is not finite
    deterministic: bool = False  # the same config twice gives the same bits, on the same machine
    sample_every: Positive | None = None  # steps; null: no samples while training
    sample_prompt: str = ""


class TrackingSection(Section):
    """Weights & Biases, beside the metrics.jsonl that is always written."""

    wandb: Literal["disabled", "offline", "online"] = "disabled"
    project: str = "thinker"
    name: str | None = None  # null: the run directory's name


class Config(Section):
    """The whole tree; what contradicts itself is refused."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        train, optimizer, run = self.train, self.optimizer, self.run
        if run.init_from is None:
            self.data.tokenizer = self.data.tokenizer or "bpe:4096"
        elif "name" not in optimizer.model_fields_set:
            optimizer.name = "adamw"
        if train.lora_rank is not None and (run.init_from is None or optimizer.name == "muon"):
            raise ValueError("train.lora_rank goes with run.init_from and optimizer.name=adamw")
        if train.lora_alpha is not None and train.lora_rank is None:
            raise ValueError("train.lora_alpha is read with train.lora_rank only; leave it out")
        if train.max_steps is None and train.max_minutes is None:
            raise ValueError("train.max_steps or train.max_minutes must say when to stop")
        if isinstance(train.micro_batch_size, int) and train.batch_size % train.micro_batch_size:
            divisors = [d for d in range(1, train.batch_size + 1) if train.batch_size % d == 0]
            raise ValueError(
                f"train.batch_size ({train.batch_size}) must be a multiple of train.micro_batch_size "
                f"({train.micro_batch_size}); possible: {', '.join(map(str, divisors))}"
            )
        if train.async_save and train.save_sharded is True:
            raise ValueError("train.async_save writes whole files; with train.save_sharded=true leave it out")
        if train.schedule == "cosine" and train.decay_fraction is not None:
            raise ValueError(
                "train.decay_fraction is read by the schedule wsd only; with cosine write train.decay_fraction=null"
            )
        if optimizer.name == "adamw" and optimizer.momentum is not None:
            raise ValueError("optimizer.momentum is read by muon only; with adamw write optimizer.momentum=null")
        if self.model.tie_embeddings and optimizer.head_lr is not None:
            raise ValueError(
                "optimizer.head_lr is read by a head of its own only; with model.tie_embeddings=true write "
                "optimizer.embedding_lr instead"
            )
        if train.deterministic and train.max_minutes is not None:
            raise ValueError("train.deterministic needs train.max_minutes=null: no two runs take the same time")
        if train.deterministic and train.micro_batch_size == "auto":
            raise ValueError("train.deterministic needs a train.micro_batch_size: what is free differs from run to run")
        if self.data.document_masking and self.thinker_config(vocab_size=1).prefix:
            raise ValueError(
                "a prefix is given at the beginning of each window; it does not go with data.document_masking"
            )
        max_seq_len = self.model.max_seq_len or self.data.seq_len
        if self.data.seq_len > max_seq_len:
            raise ValueError(
                f"data.seq_len ({self.data.seq_len}) is longer than model.max_seq_len ({max_seq_len}); "
                "raise the second or lower the first"
            )
        config = self.thinker_config(vocab_size=1)  # refuses what does not fit together
        if config.prefix > self.data.seq_len:
            raise ValueError(
                f"model.attention reads {config.prefix} tokens both ways, which leaves none of data.seq_len "
                f"({self.data.seq_len}) to predict; shorten the prefix"
            )
        if self.data.document_masking and config.max_cached_len < self.data.seq_len:
            raise ValueError(
                "model.rope_scaling of type dynamic turns by a window's length; data.document_masking puts several "
                "texts into one"
            )
        return self

    def thinker_config(self, vocab_size: int) -> ThinkerConfig:
        """The model's shape for a tokenizer of that size. Raises UserError where the two do not fit."""
        values = self.model.model_dump()
        values["max_seq_len"] = values["max_seq_len"] or self.data.seq_len
        if (values["vocab_size"] or vocab_size) < vocab_size:
            raise UserError(
                f"model.vocab_size ({values['vocab_size']}) is smaller than the tokenizer's ({vocab_size}); "
                "leave it out, and it follows from the tokenizer"
            )
        values["vocab_size"] = values["vocab_size"] or vocab_size
        return ThinkerConfig(**values)


def load_config(path: str | Path, overrides: list[str]) -> Config:
    """The config in a YAML file, with overrides such as "train.max_steps=100" on top.

    Raises UserError, one line naming the key, where anything does not fit.
    """
    path = Path(path)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError as error:
        there = ", ".join(sorted(str(p) for p in Path("configs").glob("*.yaml")))
        raise UserError(f"there is no config {path}" + (f"; there are: {there}" if there else "")) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a config: {getattr(error, 'strerror', error)}") from error
    except RecursionError as error:
        raise UserError(f"{path} is no config: it is nested too deeply") from error
    except ValueError as error:  # a date or number that cannot be
        raise UserError(f"{path} is no config: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path} is no YAML{line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    if not isinstance(tree or {}, dict):
        raise UserError(f"{path} is no config: it must hold the sections {', '.join(Config.model_fields)}")
    tree = tree or {}
    for name, section in list(tree.items()):
        if section is None:  # a section whose keys are all commented out
            tree[name] = {}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        dotted = dotted.strip()
        section, dot, key = dotted.partition(".")
        if not (equals and dot and key):
            raise UserError(f"{override!r} is no override; write section.key=value, such as train.max_steps=100")
        _check_name(section, list(Config.model_fields), dotted)
        if not isinstance(tree.setdefault(section, {}), dict):
            raise UserError(f"{path}: {section} must hold keys, not {tree[section]!r}")
        try:
            tree[section][key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            tree[section][key] = text
    config = validate_config(tree)
    if config.run.dir is None:
        config.run.dir = str(Path("runs") / path.stem)
    return config


def validate_config(tree: dict[str, Any]) -> Config:
    """A Config from plain dictionaries. Raises UserError that names the first key that is wrong."""
    for section, keys in tree.items():
        _check_name(section, list(Config.model_fields), section)
        for key in keys if isinstance(keys, dict) else ():
            _check_name(key, list(Config.model_fields[section].annotation.model_fields), f"{section}.{key}")
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][:2] if isinstance(part, str))
        message = ", or ".join(_wording(each) for each in error.errors() if each["loc"][:2] == first["loc"][:2])
        message = message.replace(", or it must be", ", or")
        raise UserError(
            f"{where} is {first['input']!r}; {message}"
            if where and first["type"] != "value_error"
            else f"{where + ': ' if where else ''}{message}"
        ) from error


def _wording(error: Any) -> str:
    """What would be right, in words for readers of configs."""
    known = next((text for kind, text in WORDING.items() if error["type"].startswith(kind)), None)
    return known or error["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")


def _check_name(name: Any, known: list[str], dotted: Any) -> None:
    if name not in known:
        form = str(dotted).replace(str(name), "{}", 1)
        hint = did_you_mean(str(name), known, form) or f"; there are: {', '.join(known)}"
        raise UserError(f"the config has no key {dotted}{hint}")
