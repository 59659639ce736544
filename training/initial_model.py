"""Fine-tuning: start a run from the weights and tokenizer of another model."""

import json
import sys
from pathlib import Path

import torch

from thinker.data.text.sources import SOURCES
from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import check_spec, is_path
from thinker.interop import load
from thinker.interop.find import is_hf_folder
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_text
from thinker.training.config.config import ARCHITECTURE, Config
from thinker.training.config.load import validate_config
from thinker.training.settings.settings import Settings

# Keys that may differ from the initial model's; `init` and `head_init_std` have no effect in
# fine-tuning.
MAY_CHANGE = (
    "dropout",
    "max_seq_len",
    "rope_scaling",
    "attention_temperature",
    "init",
    "head_init_std",
)


def load_initial_model(
    config: Config,
    previous: Settings | None = None,
    own_tokenizer: Tokenizer | None = None,
    is_main: bool = True,
) -> tuple[Config, Thinker | None, Tokenizer | None]:
    """Load the model in run.init_from. A resumed run (with `previous`) has its own weights and
    `own_tokenizer`.

    Returns the config, completed with the model's architecture and tokenizer; the model, or None
    for random weights and resumed runs; the tokenizer, or None if it has yet to be made from the
    config.

    is_main: print messages. Raises UserError if the config contradicts the model.
    """
    source = config.run.init_from
    model = None
    if previous is not None:
        tokenizer = own_tokenizer
    elif source is None:
        tokenizer = _with_chat_template(config, None)
        tokenizer = _with_answer_end(config, tokenizer, is_main)
    else:
        model, tokenizer = load(source)
        _take_weights(model)
        if config.train.lora_rank is not None and is_main:
            _say_if_no_adapters(Path(source))
        _check_tokenizer(config, tokenizer)
        tokenizer = _with_chat_template(config, tokenizer)
        tokenizer = _with_answer_end(config, tokenizer, is_main)
    if source is None:
        return config, None, tokenizer

    initial = previous.model if model is None else model.config
    model_config = _with_changes(config, initial)
    seq_len = config.data.seq_len
    if "seq_len" not in config.data.model_fields_set:
        seq_len = min(seq_len, model_config.max_seq_len)
    _check_sizes(config, model_config, seq_len)
    tree = config.model_dump()
    tree["model"] = model_config.to_dict()
    tree["data"]["seq_len"] = seq_len
    if not config.data.tokenizer:
        tree["data"]["tokenizer"] = str(source) if previous is None else previous.data.tokenizer
    if model is not None and model_config != model.config:
        weights = model.state_dict()
        model = Thinker(model_config)
        model.load_state_dict(weights)
    return validate_config(tree), model, tokenizer


@torch.no_grad()
def _take_weights(model: Thinker) -> None:
    """Copy weights that may be mapped from a file, whose pages training would copy one by one.

    The last bits of products may depend on where a matrix begins in memory. With copies, a run that
    resumes computes the same bits.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _say_if_no_adapters(source: Path) -> None:
    """Say before training, not after it, that peft cannot open what is trained."""
    if not is_hf_folder(source):
        return
    from thinker.interop.peft_adapter import check_adapters  # other runs do not need it

    try:
        check_adapters(source)
    except UserError as error:
        print(error, file=sys.stderr)


def _check_tokenizer(config: Config, tokenizer: Tokenizer | None) -> None:
    """Raise UserError if the initial model has no tokenizer, or data.tokenizer names another."""
    source = config.run.init_from
    spec = config.data.tokenizer
    if tokenizer is None:
        raise UserError(
            f"run.init_from={source} has no tokenizer; use a model that is saved with its tokenizer"
        )
    if spec is None:
        return
    is_same = False
    if check_spec(spec) == "path":
        is_same = load_tokenizer(spec).content_hash == tokenizer.content_hash
    if not is_same:
        raise UserError(
            f"data.tokenizer={spec} is not the tokenizer of run.init_from={source}; remove it"
        )


def _check_sizes(config: Config, model_config: ThinkerConfig, seq_len: int) -> None:
    """Raise UserError if sequences or adapters are too large for the initial model."""
    if seq_len > model_config.max_seq_len:
        raise UserError(
            f"data.seq_len ({seq_len}) is longer than the context of the model in run.init_from "
            f"({model_config.max_seq_len}); lower it, or raise model.max_seq_len (see also "
            f"model.rope_scaling)"
        )
    lora_rank = config.train.lora_rank
    if lora_rank is not None and lora_rank > model_config.d_model:
        raise UserError(
            f"train.lora_rank is {lora_rank}; use at most d_model={model_config.d_model}"
        )


def _with_changes(config: Config, model_config: ThinkerConfig) -> ThinkerConfig:
    """The initial model's architecture, with the changes that the config may make."""
    values = model_config.to_dict()
    for name in config.model.model_fields_set & ARCHITECTURE:
        value = getattr(config.model, name)
        is_size_of_weight = name == "max_seq_len" and model_config.positions == "learned"
        if value is not None and name in MAY_CHANGE and not is_size_of_weight:
            values[name] = value
        elif value not in (None, values[name]):
            source = f"run.init_from={config.run.init_from}"
            has = json.dumps(values[name])
            raise UserError(
                f"model.{name} is {json.dumps(value)}, but the model in {source} has {has}; "
                f"remove it"
            )
    return ThinkerConfig.from_dict(values)


def _with_chat_template(config: Config, tokenizer: Tokenizer | None) -> Tokenizer | None:
    """The tokenizer, with the chat template in data.chat_template if that is set."""
    path = config.data.chat_template
    if tokenizer is None:
        spec = config.data.tokenizer
        is_file = is_path(spec) and check_spec(spec) == "path"
        if path is None and not is_file:
            return None
        if not is_file:
            raise UserError(
                "data.chat_template needs an existing tokenizer; set run.init_from or "
                "data.tokenizer=PATH"
            )
        tokenizer = load_tokenizer(config.data.tokenizer)
    if path is None:
        return tokenizer
    if not Path(path).is_file():
        raise UserError(
            f"data.chat_template={path} is not a file; use the path of a Jinja template"
        )
    return tokenizer.with_chat_template(read_text(Path(path)))


def _with_answer_end(
    config: Config, tokenizer: Tokenizer | None, is_main: bool
) -> Tokenizer | None:
    """The tokenizer, in which the token that ends answers ends texts, if conversations may be
    trained."""
    if tokenizer is None or tokenizer.chat_template is None:
        return tokenizer
    kinds = [SOURCES.get(source.source) for source in config.data.text_sources()]
    if not any(kind.has_conversations for kind in kinds):
        return tokenizer
    from thinker.data.chat import chat  # texts do not need it

    try:
        changed = chat.with_answer_end(tokenizer)
    except UserError:  # the template wants other conversations, or there will be none
        return tokenizer
    if changed is not tokenizer and is_main:
        names = {number: name for name, number in changed.special_tokens.items()}
        name = names[changed.eos_ids[-1]]
        print(f"{name} ends the answers of the chat template: texts now end there", file=sys.stderr)
    return changed
