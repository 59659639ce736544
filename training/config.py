"""A config: what the user wrote, validated, with overrides from the command line; and the settings it resolves to."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ValidationError, model_validator

from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.reading import Loader, read_yaml
from thinker.training import config_sections as sections

EXPECTED = {  # plainer words for pydantic's types of errors
    "int_": "it must be a whole number",
    "float_": "it must be a number",
    "bool_": "it must be true or false",
    "tuple_type": "it must be a list of two numbers, such as [0.8, 0.95]",
    "string_type": "it must be text",
}


class Config(sections.ConfigSection):
    """What the user wrote, and defaults for the rest. Raises where keys contradict each other."""

    run: sections.RunConfig = sections.RunConfig()
    model: sections.ModelConfig = sections.ModelConfig()
    data: sections.DataConfig = sections.DataConfig()
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    train: sections.TrainConfig = sections.TrainConfig()
    tracking: sections.TrackingConfig = sections.TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, tree: Any) -> Any:
        """The defaults that depend on other keys."""
        run, model, data, optimizer = (tree.get(name, {}) for name in ("run", "model", "data", "optimizer"))
        if not all(isinstance(section, dict) for section in (run, model, data, optimizer)):
            return tree  # validation reports it
        max_seq_len = model.get("max_seq_len")
        if isinstance(max_seq_len, int) and 2 <= max_seq_len < sections.DEFAULT_SEQ_LEN:
            data = {"seq_len": max_seq_len, **data}
        if run.get("init_from") is not None:
            optimizer = {"name": "adamw", **optimizer}
        elif data.get("tokenizer") is None:
            data = {**data, "tokenizer": "bpe:4096"}
        return {**tree, "data": data, "optimizer": optimizer}

    @model_validator(mode="after")
    def _check_consistency(self) -> "Config":
        run, model, data, optimizer, train = self.run, self.model, self.data, self.optimizer, self.train
        if train.lora_rank is not None and (run.init_from is None or optimizer.name == "muon"):
            raise ValueError("train.lora_rank goes with run.init_from and optimizer.name=adamw")
        if train.max_steps is None and train.max_minutes is None:
            raise ValueError("train.max_steps or train.max_minutes must say when to stop")
        if train.async_save and train.save_sharded is True:
            raise ValueError("train.async_save writes unsharded files; leave it out with train.save_sharded=true")
        has_samples = "sample_every" in train.model_fields_set  # null turns them off, and a prompt may stay
        for key, value, is_read, reader in (
            ("train.lora_alpha", train.lora_alpha, train.lora_rank is not None, "train.lora_rank"),
            ("train.keep_every", train.keep_every, train.save_every is not None, "train.save_every"),
            ("train.sample_prompt", train.sample_prompt, has_samples, "train.sample_every"),
            ("train.decay_fraction", train.decay_fraction, train.schedule == "wsd", "train.schedule=wsd"),
            ("optimizer.momentum", optimizer.momentum, optimizer.name == "muon", "optimizer.name=muon"),
            ("optimizer.head_lr", optimizer.head_lr, not model.tie_embeddings, "model.tie_embeddings=false"),
        ):
            if value not in (None, "") and not is_read:
                raise ValueError(f"{key} is read with {reader} only; leave it out")
        if train.deterministic and train.max_minutes is not None:
            raise ValueError("train.deterministic needs train.max_minutes=null: no two runs take the same time")
        if train.deterministic and train.micro_batch_size == "auto":
            raise ValueError("train.deterministic needs a train.micro_batch_size: free memory differs between runs")
        if model.max_seq_len is not None and data.seq_len > model.max_seq_len:
            raise ValueError(f"data.seq_len ({data.seq_len}) is longer than model.max_seq_len ({model.max_seq_len})")
        model_config = self.thinker_config(vocab_size=1)  # raises UserError where its values do not fit together
        if data.document_masking and model_config.prefix:
            raise ValueError("data.document_masking does not go with a prefix, which begins each sequence only once")
        if (prefix := model_config.prefix) > data.seq_len:
            raise ValueError(f"a prefix of {prefix} tokens leaves none of data.seq_len ({data.seq_len}) to predict")
        if data.document_masking and model_config.max_cached_len < data.seq_len:
            raise ValueError("data.document_masking does not go with dynamic rope_scaling, which needs whole sequences")
        return self

    def thinker_config(self, vocab_size: int) -> ThinkerConfig:
        """The architecture with a tokenizer of this size. Raises UserError where the two do not fit together."""
        values = self.model.model_dump()
        values["max_seq_len"] = values["max_seq_len"] or self.data.seq_len
        values["vocab_size"] = values["vocab_size"] or vocab_size
        if values["vocab_size"] < vocab_size:
            given = values["vocab_size"]
            raise UserError(f"model.vocab_size ({given}) is smaller than the tokenizer's ({vocab_size}); leave it out")
        return ThinkerConfig(**values)


class TrainSettings(sections.TrainConfig):
    """The section `train` with every choice made."""

    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool
    micro_batch_size: sections.Positive
    save_sharded: bool


class Settings(sections.ConfigSection):
    """What a config resolves to on this machine and data: nothing is "auto" or missing any more. Saved with the run."""

    run: sections.RunConfig
    model: Annotated[ThinkerConfig, BeforeValidator(lambda v: ThinkerConfig.from_dict(v) if isinstance(v, dict) else v)]
    data: sections.DataConfig
    optimizer: sections.OptimizerConfig
    train: TrainSettings
    tracking: sections.TrackingConfig

    def with_train(self, **changes: Any) -> "Settings":
        """A copy with other values in the section `train`."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})


def load_config(path: str | Path, overrides: list[str]) -> Config:
    """The config in a YAML file, with overrides "section.key=value" on top. Raises UserError that names a wrong key."""
    path = Path(path)
    if not path.exists():
        available = ", ".join(sorted(str(p) for p in Path("configs").glob("*.yaml")))
        raise UserError(f"there is no config {path}; available: {available or 'none in configs/'}")
    tree = read_yaml(path)
    tree = {name: {} if section is None else section for name, section in tree.items()}  # None: without keys
    for override in overrides:
        name, equals, text = override.partition("=")
        section, _, key = name.strip().partition(".")
        if not (equals and key and text.strip()):
            raise UserError(f"{override!r} is not an override; write section.key=value, such as train.max_steps=100")
        if not isinstance(tree.setdefault(section, {}), dict):
            raise UserError(f"{path}: {section} must hold keys, not {tree[section]!r}")
        try:
            value = yaml.load(text, Loader)
        except (yaml.YAMLError, ValueError, RecursionError):
            value = text
        is_text = not isinstance(value, bool | int | float | list | dict | None) and text.strip()[0] not in "'\""
        tree[section][key] = text.strip() if is_text else value  # whole: YAML takes " #2" for a comment
    run = tree.setdefault("run", {})
    if isinstance(run, dict) and run.get("dir") is None:
        run["dir"] = str(Path("runs") / path.stem)
    return validate_config(tree)


def check_run_folder(path: str | Path, config: Config, overrides: list[str]) -> None:
    """Raise UserError for the config of a run that was copied or moved, unless run.dir is given."""
    folder = Path(path).resolve().parent
    is_given = any(override.strip().startswith("run.dir") for override in overrides)
    if (folder / "checkpoints").is_dir() and not is_given and Path(config.run.dir).resolve() != folder:
        reason = "it was copied or moved, or starts from another folder"
        raise UserError(f"the run of {path} has run.dir={config.run.dir}, so {reason}; add run.dir={folder}")


def validate_config(tree: dict[str, Any]) -> Config:
    """A Config from plain dictionaries. Raises UserError that names the first wrong key."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        errors = error.errors()
        location, error_type = errors[0]["loc"][:2], errors[0]["type"]
        *section, key = map(str, location) if location else [""]
        name = ".".join([*section, key])
        if error_type in ("extra_forbidden", "invalid_key"):
            names = list(Config.model_fields[section[0]].annotation.model_fields if section else Config.model_fields)
            hint = did_you_mean(key, names, ".".join([*section, "{}"])) or f"; valid keys: {', '.join(names)}"
            raise UserError(f"the config has no key {name}{hint}") from error
        messages = []  # several if the key's type is a union
        for each in (each for each in errors if each["loc"][:2] == location):
            plain = each["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
            messages.append(next((text for kind, text in EXPECTED.items() if each["type"].startswith(kind)), plain))
        message = ", or ".join(messages).replace(", or it must be", ", or")
        if name and error_type != "value_error":
            message = f"{name} is {errors[0]['input']!r}; {message}"
        elif name:
            message = f"{name}: {message}"
        raise UserError(message) from error
