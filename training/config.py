"""Configs: read from YAML, overridden on the command line, validated; and the settings that a config resolves to."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ValidationError, model_validator

from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.reading import Loader, read_yaml
from thinker.training import config_sections as sections
from thinker.training.config_types import ConfigSection, Positive
from thinker.training.source_config import CleanConfig, MixedSource

LIST = "a list of two numbers, such as [0.8, 0.95]"
EXPECTED = {  # what a value must be, by the start of pydantic's error type
    "bool_": "true or false", "int_": "an integer", "float_": "a number", "finite_": "a finite number",
    "string_pattern": "letters, digits, dots, _ and -", "string_": "text", "literal_": "{expected}",
    "list_": "a list", "tuple_": LIST, "too_": LIST, "missing": LIST,
    "model_": "a mapping of keys to values", "dict_": "a mapping of keys to values",
    "greater_than_equal": "at least {ge:.16g}", "greater_than": "more than {gt:.16g}",
    "less_than_equal": "at most {le:.16g}", "less_than": "less than {lt:.16g}",
}  # fmt: skip
NESTED = {("data", "sources"): (4, MixedSource), ("data", "clean"): (3, CleanConfig)}  # parts of a location, the model


class Config(ConfigSection):
    """A validated config: the user's values, and defaults for the rest. Raises if keys contradict each other."""

    run: sections.RunConfig = sections.RunConfig()
    model: sections.ModelConfig = sections.ModelConfig()
    data: sections.DataConfig = sections.DataConfig()
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    train: sections.TrainConfig = sections.TrainConfig()
    tracking: sections.TrackingConfig = sections.TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, tree: Any) -> Any:
        """Fill in defaults that depend on other keys."""
        run, model, data, optimizer = (tree.get(name, {}) for name in ("run", "model", "data", "optimizer"))
        if not all(isinstance(section, dict) for section in (run, model, data, optimizer)):
            return tree  # validation reports the error
        if data.get("source") is None and data.get("sources") is None:
            data = {**data, "source": "tales"}
        max_seq_len = model.get("max_seq_len")
        if isinstance(max_seq_len, int) and 2 <= max_seq_len < sections.DEFAULT_SEQ_LEN:
            data = {"seq_len": max_seq_len, **data}
        if run.get("init_from") is not None:
            optimizer = {"name": "adamw", **optimizer}
        elif data.get("tokenizer") is None and model.get("size") is None:
            data = {**data, "tokenizer": "bpe:4096"}
        return {**tree, "data": data, "optimizer": optimizer}

    @model_validator(mode="after")
    def _check_consistency(self) -> "Config":
        run, model, data, optimizer, train = self.run, self.model, self.data, self.optimizer, self.train
        if train.lora_rank is not None and (run.init_from is None or optimizer.name == "muon"):
            raise ValueError("train.lora_rank needs run.init_from and optimizer.name=adamw; set both")
        if model.size == "auto" and train.max_minutes is None:
            raise ValueError("model.size=auto needs train.max_minutes; set it")
        if model.size == "auto" and run.init_from is not None:
            raise ValueError("model.size=auto cannot be combined with run.init_from; remove one of them")
        if train.max_steps is None and train.max_minutes is None:
            raise ValueError("the run has no end; set train.max_steps or train.max_minutes")
        if train.max_steps is None and any(len(source.weights) > 1 for source in data.sources or ()):
            raise ValueError("data.sources has weights that change, which need train.max_steps; set it")
        if train.async_save and train.save_sharded is True:
            raise ValueError("train.async_save cannot be combined with train.save_sharded=true; remove one of them")
        is_cautious = optimizer.cautious_weight_decay or None
        has_samples = "sample_every" in train.model_fields_set  # null turns samples off and leaves the prompt unused
        for key, value, is_read, reader in (
            ("train.lora_alpha", train.lora_alpha, train.lora_rank is not None, "train.lora_rank"),
            ("train.keep_every", train.keep_every, train.save_every is not None, "train.save_every"),
            ("train.sample_prompt", train.sample_prompt, has_samples, "train.sample_every"),
            ("train.decay_fraction", train.decay_fraction, train.schedule == "wsd", "train.schedule=wsd"),
            ("optimizer.momentum", optimizer.momentum, optimizer.name == "muon", "optimizer.name=muon"),
            ("optimizer.cautious_weight_decay", is_cautious, optimizer.name == "muon", "optimizer.name=muon"),
            ("optimizer.cautious_weight_decay", is_cautious, optimizer.weight_decay > 0, "optimizer.weight_decay"),
            ("data.shift_windows", data.shift_windows or None, data.packing == "contiguous", "data.packing=contiguous"),
            ("train.patience", train.patience, train.eval_every is not None, "train.eval_every"),
            ("optimizer.head_lr", optimizer.head_lr, not model.tie_embeddings, "model.tie_embeddings=false"),
        ):
            if value not in (None, "") and not is_read:
                raise ValueError(f"{key} has no effect without {reader}; remove it")
        if train.deterministic and train.max_minutes is not None:
            raise ValueError("train.deterministic cannot be combined with train.max_minutes; use train.max_steps")
        if train.deterministic and train.micro_batch_size == "auto":
            raise ValueError("train.deterministic cannot be combined with train.micro_batch_size=auto; set a number")
        if model.max_seq_len is not None and data.seq_len > model.max_seq_len:
            raise ValueError(f"data.seq_len ({data.seq_len}) is longer than model.max_seq_len ({model.max_seq_len})")
        model_config = self.thinker_config(vocab_size=1)  # raises UserError if its values contradict each other
        if data.document_masking and model_config.prefix:
            raise ValueError("data.document_masking cannot be combined with a prefix in model.attention; remove one")
        if (prefix := model_config.prefix) > data.seq_len:
            raise ValueError(f"data.seq_len ({data.seq_len}) is shorter than the prefix of {prefix} tokens; raise it")
        if data.document_masking and model_config.max_cached_len < data.seq_len:
            raise ValueError("data.document_masking cannot be combined with dynamic model.rope_scaling; remove one")
        return self

    def thinker_config(self, vocab_size: int) -> ThinkerConfig:
        """The architecture for a tokenizer of this size. Raises UserError if model.vocab_size is too small for it."""
        values = self.model.model_dump(exclude={"size"})
        values["max_seq_len"] = values["max_seq_len"] or self.data.seq_len
        values["vocab_size"] = values["vocab_size"] or vocab_size
        if values["vocab_size"] < vocab_size:
            given = values["vocab_size"]
            raise UserError(f"model.vocab_size ({given}) is smaller than the tokenizer's ({vocab_size}); remove it")
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
    model: Annotated[ThinkerConfig, BeforeValidator(lambda v: ThinkerConfig.from_dict(v) if isinstance(v, dict) else v)]
    data: sections.DataConfig
    optimizer: sections.OptimizerConfig
    train: TrainSettings
    tracking: sections.TrackingConfig

    def with_train(self, **changes: Any) -> "Settings":
        """Return a copy with these values changed in the section `train`."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})


def load_config(path: str | Path, overrides: list[str]) -> Config:
    """Read a config from YAML and apply overrides "section.key=value". Raises UserError that names the wrong key."""
    path = Path(path)
    if not path.exists():
        available = ", ".join(sorted(str(p) for p in Path("configs").glob("*.yaml")))
        raise UserError(f"config {path} does not exist (available: {available or 'none in configs/'})")
    tree = read_yaml(path)
    tree = {name: {} if section is None else section for name, section in tree.items()}  # empty sections
    for override in overrides:
        name, equals, text = override.partition("=")
        section, _, key = name.strip().partition(".")
        if not (equals and key and text.strip()):
            raise UserError(f"{override!r} is not an override; write section.key=value, such as train.max_steps=100")
        values = tree.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"{path}: {section} is {values!r}; it must be a mapping of keys to values")
        if section == "data" and (match := re.fullmatch(r"sources\.(\d+)\.(\w+)", key)):
            values, key = _source(values.get("sources"), int(match[1]), override), match[2]
        elif section == "data" and key.startswith("clean.") and isinstance(values.get("clean") or {}, dict):
            values["clean"] = values.get("clean") or {}
            values, key = values["clean"], key.partition(".")[2]
        try:
            value = yaml.load(text, Loader)
        except (yaml.YAMLError, ValueError, RecursionError):
            value = text
        is_text = not isinstance(value, bool | int | float | list | dict | None) and text.strip()[0] not in "'\""
        values[key] = text.strip() if is_text else value  # all of it, as YAML drops " #2"
    run = tree.setdefault("run", {})
    if isinstance(run, dict) and run.get("dir") is None:
        run["dir"] = str(Path("runs") / path.stem)
    return validate_config(tree)


def _source(sources: Any, index: int, override: str) -> dict[str, Any]:
    """The source of a mixture that an override changes. Raises UserError if there is none."""
    sources = sources if isinstance(sources, list) else []
    if index >= len(sources) or not isinstance(sources[index], dict):
        raise UserError(f"{override}: the config has {len(sources)} data.sources, numbered from 0")
    return sources[index]


def check_run_folder(path: str | Path, config: Config, overrides: list[str]) -> None:
    """Raise UserError if the config belongs to a run that was copied or moved, unless run.dir is overridden."""
    folder = Path(path).resolve().parent
    is_given = any(override.strip().startswith("run.dir") for override in overrides)
    if (folder / "checkpoints").is_dir() and not is_given and Path(config.run.dir).resolve() != folder:
        raise UserError(f"{path} is not in its run.dir ({config.run.dir}); if the run was moved, add run.dir={folder}")


def validate_config(tree: dict[str, Any]) -> Config:
    """Make a Config from plain dictionaries. Raises UserError that names the first wrong key."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first, path = error.errors()[0], error.errors()[0]["loc"]
        size, nested = NESTED.get(path[:2], (2, None))
        location = path[:size]  # a section, its key; a source, its key
        name = ".".join(map(str, location))
        if first["type"] in ("extra_forbidden", "invalid_key"):
            section = Config.model_fields[location[0]].annotation if len(location) > 1 else Config
            names = list((section if nested is None or len(location) < size else nested).model_fields)
            *outer, key = map(str, location)
            hint = did_you_mean(key, names, ".".join([*outer, "{}"])) or f"; use one of {', '.join(names)}"
            raise UserError(f"unknown config key {name}{hint}") from error
        if first["type"] == "value_error":  # of a whole config, or of a part: then its message starts with the key
            raise UserError(f"{name}{'.' if name else ''}{first['ctx']['error']}") from error
        if first["type"] == "missing" and len(location) == 4:
            raise UserError(f"{name} is missing; set it, for example to jsonl") from error
        index = [part for part in path[len(location) :] if isinstance(part, int) and first["type"] != "missing"]
        name += "".join(f"[{i}]" for i in index)
        expected = []  # several if the key's type is a union
        for each in (each for each in error.errors() if each["loc"][: len(location)] == location):
            form = next((form for kinds, form in EXPECTED.items() if each["type"].startswith(kinds)), "another value")
            expected.append(form.format(**each.get("ctx", {})).replace("'", ""))
        *others, last = dict.fromkeys(expected)
        wanted = " or ".join([*(text.replace(" or ", ", ") for text in others), last])
        shown = {"None": "null", "True": "true", "False": "false"}.get(repr(first["input"]), repr(first["input"]))
        raise UserError(f"{name} is {shown}; it must be {wanted}") from error
