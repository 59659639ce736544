"""Configs, and the settings that a config resolves to."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from thinker.features.distillation.keys import check_distillation, teacher_path
from thinker.features.pruning.keys import check_pruning
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.training.config import sections
from thinker.training.config.data_section import DEFAULT_SEQ_LEN, DataConfig
from thinker.training.config.types import ConfigSection, Positive


class Config(ConfigSection):
    """A validated config: the user's values, and defaults for the rest. Raises if keys contradict each other."""

    run: sections.RunConfig = sections.RunConfig()
    model: sections.ModelConfig = sections.ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    train: sections.TrainConfig = sections.TrainConfig()
    tracking: sections.TrackingConfig = sections.TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, tree: Any) -> Any:
        """Fill in defaults that depend on other keys."""
        run, model, data, optimizer = (
            tree.get(name, {}) for name in ("run", "model", "data", "optimizer")
        )
        if not all(isinstance(section, dict) for section in (run, model, data, optimizer)):
            return tree  # validation reports the error
        if data.get("source") is None and data.get("sources") is None:
            data = {**data, "source": "tales"}
        max_seq_len = model.get("max_seq_len")
        if isinstance(max_seq_len, int) and 2 <= max_seq_len < DEFAULT_SEQ_LEN:
            data = {"seq_len": max_seq_len, **data}
        if run.get("init_from") is not None:
            optimizer = {"name": "adamw", **optimizer}
        elif data.get("tokenizer") is None and model.get("size") is None:
            data = {**data, "tokenizer": teacher_path(tree) or "bpe:4096"}
        return {**tree, "data": data, "optimizer": optimizer}

    @model_validator(mode="after")
    def _check_consistency(self) -> "Config":
        run, model, data, optimizer, train = (
            self.run,
            self.model,
            self.data,
            self.optimizer,
            self.train,
        )
        if train.lora_rank is not None and (run.init_from is None or optimizer.name == "muon"):
            raise ValueError(
                "train.lora_rank needs run.init_from and optimizer.name=adamw; set both"
            )
        if model.size == "auto" and train.max_minutes is None:
            raise ValueError("model.size=auto needs train.max_minutes; set it")
        if model.size == "auto" and run.init_from is not None:
            raise ValueError(
                "model.size=auto cannot be combined with run.init_from; remove one of them"
            )
        if train.max_steps is None and train.max_minutes is None:
            raise ValueError("the run has no end; set train.max_steps or train.max_minutes")
        if train.max_steps is None and any(
            len(source.weights) > 1 for source in data.sources or ()
        ):
            raise ValueError(
                "data.sources has weights that change, which need train.max_steps; set it"
            )
        if train.async_save and train.save_sharded is True:
            raise ValueError(
                "train.async_save cannot be combined with train.save_sharded=true; remove one of them"
            )
        check_distillation(train, model, data)
        check_pruning(train, model)
        is_cautious = optimizer.cautious_weight_decay or None
        has_samples = (
            "sample_every" in train.model_fields_set
        )  # null turns samples off and leaves the prompt unused
        for key, value, is_read, reader in (
            ("train.lora_alpha", train.lora_alpha, train.lora_rank is not None, "train.lora_rank"),
            (
                "train.keep_every",
                train.keep_every,
                train.save_every is not None,
                "train.save_every",
            ),
            ("train.sample_prompt", train.sample_prompt, has_samples, "train.sample_every"),
            (
                "train.decay_fraction",
                train.decay_fraction,
                train.schedule == "wsd",
                "train.schedule=wsd",
            ),
            (
                "optimizer.momentum",
                optimizer.momentum,
                optimizer.name == "muon",
                "optimizer.name=muon",
            ),
            (
                "optimizer.cautious_weight_decay",
                is_cautious,
                optimizer.name == "muon",
                "optimizer.name=muon",
            ),
            (
                "optimizer.cautious_weight_decay",
                is_cautious,
                optimizer.weight_decay > 0,
                "optimizer.weight_decay",
            ),
            (
                "data.shift_windows",
                data.shift_windows or None,
                data.packing == "contiguous",
                "data.packing=contiguous",
            ),
            ("train.patience", train.patience, train.eval_every is not None, "train.eval_every"),
            (
                "optimizer.head_lr",
                optimizer.head_lr,
                not model.tie_embeddings,
                "model.tie_embeddings=false",
            ),
        ):
            if value not in (None, "") and not is_read:
                raise ValueError(f"{key} has no effect without {reader}; remove it")
        if train.deterministic and train.max_minutes is not None:
            raise ValueError(
                "train.deterministic cannot be combined with train.max_minutes; use train.max_steps"
            )
        if train.deterministic and train.micro_batch_size == "auto":
            raise ValueError(
                "train.deterministic cannot be combined with train.micro_batch_size=auto; set a number"
            )
        if model.max_seq_len is not None and data.seq_len > model.max_seq_len:
            raise ValueError(
                f"data.seq_len ({data.seq_len}) is longer than model.max_seq_len ({model.max_seq_len})"
            )
        model_config = self.thinker_config(
            vocab_size=1
        )  # raises UserError if its values contradict each other
        if data.document_masking and model_config.prefix:
            raise ValueError(
                "data.document_masking cannot be combined with a prefix in model.attention; remove one"
            )
        if (prefix := model_config.prefix) > data.seq_len:
            raise ValueError(
                f"data.seq_len ({data.seq_len}) is shorter than the prefix of {prefix} tokens; raise it"
            )
        if data.document_masking and model_config.max_cached_len < data.seq_len:
            raise ValueError(
                "data.document_masking cannot be combined with dynamic model.rope_scaling; remove one"
            )
        return self

    def thinker_config(self, vocab_size: int) -> ThinkerConfig:
        """The architecture for a tokenizer of this size. Raises UserError if model.vocab_size is too small for it."""
        values = self.model.model_dump(exclude={"size"})
        values["max_seq_len"] = values["max_seq_len"] or self.data.seq_len
        values["vocab_size"] = values["vocab_size"] or vocab_size
        if values["vocab_size"] < vocab_size:
            given = values["vocab_size"]
            raise UserError(
                f"model.vocab_size ({given}) is smaller than the tokenizer's ({vocab_size}); remove it"
            )
        return ThinkerConfig(**values)


class TrainSettings(sections.TrainConfig):
    """The section `train` without "auto" values."""

    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool
    micro_batch_size: Positive
    save_sharded: bool


class Settings(ConfigSection):
    """A config resolved for this machine and data, without "auto" or missing values. Saved with the run."""

    run: sections.RunConfig
    model: Annotated[
        ThinkerConfig,
        BeforeValidator(lambda v: ThinkerConfig.from_dict(v) if isinstance(v, dict) else v),
    ]
    data: DataConfig
    optimizer: sections.OptimizerConfig
    train: TrainSettings
    tracking: sections.TrackingConfig

    def with_train(self, **changes: Any) -> "Settings":
        """Return a copy with these values changed in the section `train`."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})
