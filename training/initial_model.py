"""Where a run begins when it does not begin anew: with the weights and the tokenizer of another model."""

from __future__ import annotations

import json
from pathlib import Path

from thinker.data.tokenizer import Tokenizer
from thinker.data.tokenizer_factory import check_spec, load_tokenizer
from thinker.interop import load
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.training.config import Config, ModelSection, validate_config
from thinker.training.resume import RunState

# What a model may be trained on with, other than it was made with; `init` and `head_init_std` decide nothing any more.
FREE = ("dropout", "max_seq_len", "rope_scaling", "init", "head_init_std")


def load_initial_model(
    config: Config, before: RunState | None = None, run: Path | None = None
) -> tuple[Thinker | None, Tokenizer | None]:
    """The model and the tokenizer that run.init_from names; fills in what the config leaves out of its shape.

    Args:
        before: where a run that goes on stands: its own folder, `run`, then has all that is needed.

    Returns: the model, None where the config begins anew or goes on; the tokenizer, None where the config's own one is
        to be made.

    Raises UserError where the config contradicts the model.
    """
    source = config.run.init_from
    if source is None:
        return None, _with_template(config, before, run)
    if before is not None:
        model_config = ThinkerConfig.from_dict(before.config["model"])
        config.data.tokenizer = config.data.tokenizer or before.config["data"]["tokenizer"]
        model, tokenizer = None, load_tokenizer(run)
    else:
        model, tokenizer = load(source)
        if tokenizer is None:
            raise UserError(f"run.init_from={source} has no tokenizer, without which its tokens mean nothing")
        if config.data.tokenizer is not None:
            _refuse_another(config.data.tokenizer, tokenizer, source)
        config.data.tokenizer = config.data.tokenizer or str(source)
        tokenizer = _with_template(config, None, None, tokenizer)
        model_config = model.config
    given = {name: getattr(config.model, name) for name in config.model.model_fields_set}
    values = model_config.to_dict()
    for name, value in given.items():
        learned = name == "max_seq_len" and model_config.positions == "learned"
        if name in FREE and value is not None and not learned:
            values[name] = value
        elif value is not None and value != values[name]:
            both = f"is {json.dumps(value)}, but the model in run.init_from={source} has {json.dumps(values[name])}"
            raise UserError(f"model.{name} {both}; leave it out")
    model_config = ThinkerConfig.from_dict(values)
    if config.data.seq_len > model_config.max_seq_len:
        raise UserError(
            f"data.seq_len ({config.data.seq_len}) is longer than the context of the model in run.init_from "
            f"({model_config.max_seq_len}); lower it, or raise model.max_seq_len, perhaps with model.rope_scaling"
        )
    if (config.train.lora_rank or 0) > model_config.d_model:
        raise UserError(
            f"train.lora_rank is {config.train.lora_rank}, more than the model is wide ({model_config.d_model})"
        )
    config.model = ModelSection(**model_config.to_dict())
    validate_config(config.model_dump())  # what sections say of each other, now that all is known
    if model is not None and model_config != model.config:
        weights = model.state_dict()
        model = Thinker(model_config)
        model.load_state_dict(weights)
    return model, tokenizer


def _refuse_another(spec: str, tokenizer: Tokenizer, source: str) -> None:
    same = check_spec(spec) == "path" and load_tokenizer(spec).content_hash == tokenizer.content_hash
    if not same:
        raise UserError(
            f"data.tokenizer={spec} is not that of run.init_from={source}; leave it out: data.tokenizer=null"
        )


def _with_template(
    config: Config, before: RunState | None, run: Path | None, tokenizer: Tokenizer | None = None
) -> Tokenizer | None:
    """The tokenizer with the config's own chat template, if it has one; a run that goes on has both in its folder."""
    path = config.data.chat_template
    if path is None:
        return tokenizer
    if before is not None:
        return load_tokenizer(run)
    if tokenizer is None:
        if check_spec(config.data.tokenizer) != "path":
            raise UserError("data.chat_template goes with a tokenizer that there is: run.init_from, or a path")
        tokenizer = load_tokenizer(config.data.tokenizer)
    try:
        return tokenizer.with_chat_template(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template={path} cannot be read: {getattr(error, 'strerror', error)}") from error
