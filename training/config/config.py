"""Config: everything that the user may set, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import Field, model_validator

from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.registry import offers
from thinker.training.config import sections
from thinker.training.config.data_section import DEFAULT_SEQ_LEN, DataConfig
from thinker.training.config.types import ConfigSection, nested_section
from thinker.training.settings.settings import Settings, TrainSettings  # noqa: F401 (moved)

ARCHITECTURE = {field.name for field in dataclasses.fields(ThinkerConfig)}
DEFAULT_TOKENIZER = "bpe:4096"


class Config(ConfigSection):
    """A validated config: the user's values, and defaults for the rest. Raises if keys contradict
    each other."""

    run: sections.RunConfig = sections.RunConfig()
    model: sections.ModelConfig = sections.ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    train: sections.TrainConfig = sections.TrainConfig()
    tracking: sections.TrackingConfig = sections.TrackingConfig()
    extensions: list[str] = Field(default=[])
    """Modules of yours to import, such as `[my_module]`, which register names
    (docs/guides/change-the-model.md)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, tree: Any) -> Any:
        """Fill in defaults that depend on other keys."""
        filled = dict(tree)
        for name in config_sections():
            section = tree.get(name, {})
            if not isinstance(section, dict):
                return tree  # validation reports the error
            filled[name] = dict(section)
        tree = filled
        run, model, data, optimizer = (tree[name] for name in ("run", "model", "data", "optimizer"))
        for key in ("source", "tokenizer"):
            if data.get(key, "") is None:
                del data[key]
        for complete in offers("complete_config"):
            complete(tree)  # a feature may set a key to None, and then it stays open
        data.setdefault("source", "tales")
        max_seq_len = model.get("max_seq_len")
        if isinstance(max_seq_len, int) and 2 <= max_seq_len < DEFAULT_SEQ_LEN:
            data.setdefault("seq_len", max_seq_len)
        if run.get("init_from") is not None:
            optimizer.setdefault("name", "adamw")
        else:
            data.setdefault("tokenizer", DEFAULT_TOKENIZER)
        return tree

    @model_validator(mode="after")
    def _check_consistency(self) -> Config:
        self._check_combinations()
        for check in offers("check_config"):
            check(self)
        self._check_unread_keys()
        self._check_lengths()
        return self

    def _check_combinations(self) -> None:
        """Raise ValueError for keys that need each other or exclude each other."""
        train = self.train
        is_muon = self.optimizer.name == "muon"
        if train.lora_rank is not None and (self.run.init_from is None or is_muon):
            raise ValueError(
                "train.lora_rank needs run.init_from and optimizer.name=adamw; set both"
            )
        if train.max_steps is None and train.max_minutes is None:
            raise ValueError("the run has no end; set train.max_steps or train.max_minutes")
        if train.async_save is True and train.save_sharded is True:
            raise ValueError(
                "train.async_save cannot be combined with train.save_sharded=true; remove one "
                "of them"
            )
        if train.deterministic and train.max_minutes is not None:
            raise ValueError(
                "train.deterministic cannot be combined with train.max_minutes; use train.max_steps"
            )
        if train.deterministic and train.micro_batch_size == "auto":
            raise ValueError(
                "train.deterministic cannot be combined with train.micro_batch_size=auto; set "
                "a number"
            )

    def _check_unread_keys(self) -> None:
        """Raise ValueError for a key that is set but never read."""
        data = self.data
        optimizer = self.optimizer
        train = self.train
        has_lora = train.lora_rank is not None
        saves = train.save_every is not None
        evaluates = train.eval_every is not None
        decays = train.schedule == "wsd"
        is_muon = optimizer.name == "muon"
        is_cautious = optimizer.cautious_weight_decay
        is_contiguous = data.packing == "contiguous"
        has_head = not self.model.tie_embeddings
        decay = "optimizer.cautious_weight_decay"
        momentum_warmup = "optimizer.momentum_warmup_steps"
        rules = [  # key, value, whether it is read, what reads it
            ("train.lora_alpha", train.lora_alpha, has_lora, "train.lora_rank"),
            ("train.keep_every", train.keep_every, saves, "train.save_every"),
            ("train.decay_fraction", train.decay_fraction, decays, "train.schedule=wsd"),
            ("optimizer.momentum", optimizer.momentum, is_muon, "optimizer.name=muon"),
            (momentum_warmup, optimizer.momentum_warmup_steps, is_muon, "optimizer.name=muon"),
            (decay, is_cautious, is_muon, "optimizer.name=muon"),
            (decay, is_cautious, optimizer.weight_decay > 0, "optimizer.weight_decay"),
            ("data.shift_windows", data.shift_windows, is_contiguous, "data.packing=contiguous"),
            ("train.patience", train.patience, evaluates, "train.eval_every"),
            ("optimizer.head_lr", optimizer.head_lr, has_head, "model.tie_embeddings=false"),
        ]
        for key, value, is_read, reader in rules:
            is_set = value is not None and value is not False and value != ""
            if is_set and not is_read:
                raise ValueError(f"{key} has no effect without {reader}; remove it")

    def _check_lengths(self) -> None:
        """Raise ValueError if the architecture, the sequences and document masking do not fit
        together."""
        model = self.model
        data = self.data
        if model.max_seq_len is not None and data.seq_len > model.max_seq_len:
            raise ValueError(
                f"data.seq_len ({data.seq_len}) is longer than model.max_seq_len "
                f"({model.max_seq_len})"
            )
        # Raises UserError if values of the architecture contradict each other.
        architecture = self.thinker_config(vocab_size=1)
        prefix = architecture.prefix
        if data.document_masking and prefix:
            raise ValueError(
                "data.document_masking cannot be combined with a prefix in model.attention; "
                "remove one"
            )
        if prefix > data.seq_len:
            raise ValueError(
                f"data.seq_len ({data.seq_len}) is shorter than the prefix of {prefix} "
                f"tokens; raise it"
            )
        if data.document_masking and architecture.max_cached_len < data.seq_len:
            raise ValueError(
                "data.document_masking cannot be combined with dynamic model.rope_scaling; "
                "remove one"
            )

    def thinker_config(self, vocab_size: int) -> ThinkerConfig:
        """The architecture for a tokenizer of this size. Raises UserError if model.vocab_size is
        too small for it."""
        values = self.model.model_dump(include=ARCHITECTURE)
        values["max_seq_len"] = values["max_seq_len"] or self.data.seq_len
        given = values["vocab_size"] or vocab_size
        if given < vocab_size:
            raise UserError(
                f"model.vocab_size ({given}) is smaller than the tokenizer's ({vocab_size}); "
                f"remove it"
            )
        values["vocab_size"] = given
        return ThinkerConfig(**values)


def config_sections() -> dict[str, type[ConfigSection]]:
    """The sections of a config by name."""
    sections = {}
    for name, field in Config.model_fields.items():
        section, _ = nested_section(field)
        if section is not None:
            sections[name] = section
    return sections
