"""A config: what the user wrote, as a checked tree, with overrides section.key=value from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, model_validator

from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError, did_you_mean
from thinker.training.config_sections import (
    ConfigSection,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrackingConfig,
    TrainConfig,
)

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


class Config(ConfigSection):
    """What the user wrote: every section with its defaults. Keys that contradict each other are refused."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, tree: Any) -> Any:
        """The two defaults that depend on run.init_from."""
        sections = {name: (tree or {}).get(name, {}) for name in ("run", "data", "optimizer")}
        if not all(isinstance(section, dict) for section in sections.values()):
            return tree  # validation says what is wrong
        data, optimizer = dict(sections["data"]), dict(sections["optimizer"])
        if sections["run"].get("init_from") is not None:
            optimizer.setdefault("name", "adamw")
        elif data.get("tokenizer") is None:
            data["tokenizer"] = "bpe:4096"
        return {**tree, "data": data, "optimizer": optimizer}

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        train, optimizer, run = self.train, self.optimizer, self.run
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
    run = tree.setdefault("run", {})
    if isinstance(run, dict) and run.get("dir") is None:
        run["dir"] = str(Path("runs") / path.stem)
    return validate_config(tree)


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
