"""The pad token of an exported tokenizer.

Libraries for training leave pad tokens out of the loss, and transformers does not train the
embedding of config.pad_token_id. A pad token that also ends texts would therefore not be learned as
their end. So an export has the tokenizer's own pad token if it neither begins nor ends texts, else
a new one at an id of the model that no token uses, else none.

A new one is only in the exported files. Reading them removes it, so that a tokenizer is the same
after an export and an import.
"""

from typing import Any, NamedTuple

from thinker.data.tokenizers.tokenizer import Tokenizer

NAME = "<|pad|>"
KEY = "thinker_pad_token"  # our own key in tokenizer_config.json: the name of a new pad token


class PadToken(NamedTuple):
    """The pad token of an export."""

    name: str
    id: int
    is_new: bool


def find_pad_token(tokenizer: Tokenizer, model_vocab_size: int) -> PadToken | None:
    """The pad token of an export for a model with `model_vocab_size` ids."""
    no_pads = {tokenizer.bos_id, *tokenizer.eos_ids}
    for name in (tokenizer.special_tokens_map.get("pad_token"), NAME):
        number = tokenizer.special_tokens.get(name)
        if number is not None and number not in no_pads:
            return PadToken(name, number, is_new=False)
    is_taken = NAME in tokenizer.special_tokens or NAME.encode() in tokenizer._tokens
    number = _free_id(tokenizer)
    if is_taken or number >= max(model_vocab_size, tokenizer.vocab_size):
        return None
    return PadToken(NAME, number, is_new=True)


def _free_id(tokenizer: Tokenizer) -> int:
    """The first id that no token uses, at most tokenizer.vocab_size."""
    used = set(tokenizer.special_tokens.values())
    for number, token in enumerate(tokenizer._tokens):
        if token is None and number not in used:
            return number
    return tokenizer.vocab_size


def add_pad_token(content: dict, config: dict, pad: PadToken | None) -> tuple[dict, dict]:
    """tokenizer.json and tokenizer_config.json with this pad token."""
    config = {key: value for key, value in config.items() if key != KEY}
    if pad is None:
        return content, config | {"pad_token": None}
    config["pad_token"] = pad.name
    if not pad.is_new:
        return content, config
    token = {
        "id": pad.id,
        "content": pad.name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    added = sorted([*content["added_tokens"], token], key=lambda token: token["id"])
    content = content | {"added_tokens": added}
    vocab = content["model"]["vocab"]
    # The library numbers an added token after all others, unless it is in the vocabulary. But an id
    # above those of the vocabulary would move the ids of added tokens that are not in it.
    if isinstance(vocab, dict) and pad.id < max(vocab.values()):
        content["model"] = content["model"] | {"vocab": vocab | {pad.name: pad.id}}
    return content, config | {KEY: pad.name}


def new_pad_token(config: dict) -> str | None:
    """The name of the pad token that an export added, if tokenizer_config.json still has it."""
    name = config.get(KEY)
    stated = config.get("pad_token")
    if isinstance(stated, dict):
        stated = stated.get("content")
    if isinstance(name, str) and name == stated:
        return name
    return None


def remove_pad_token(content: dict, config: dict, name: str) -> tuple[dict, dict]:
    """tokenizer.json and tokenizer_config.json as before add_pad_token()."""
    added = [token for token in content["added_tokens"] if token["content"] != name]
    content = content | {"added_tokens": added}
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        pieces = {piece: number for piece, number in vocab.items() if piece != name}
        content["model"] = content["model"] | {"vocab": pieces}
    config = {key: value for key, value in config.items() if key not in (KEY, "pad_token")}
    return content, config


def is_named(token: Any, name: str | None) -> bool:
    """Whether a token in Hugging Face's files, a name or a dictionary, has this name."""
    if isinstance(token, dict):
        token = token.get("content")
    return token == name
