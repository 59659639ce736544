"""A conversation in a file, with which a later session goes on.

The file has the text, and what the cache keeps beyond it: blocks that have left a window. Caches
without such a memory are filled again from the text.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from thinker.generation.chat.conversation import Conversation
from thinker.generation.engine import Generator
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write

FORMAT = "thinker conversation 1"


def save_conversation(conversation: Conversation, path: Path) -> None:
    """Write a conversation, completely or not at all."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "kind": conversation.kind,
        "model": model_digest(conversation.generator),
        "state": conversation.state(),
        "cached": None,
    }
    tensors: dict[str, Tensor] = {}
    filled = conversation.filled_cache()
    if filled is not None:
        cache, read = filled
        memory = cache.memory()
        if memory is not None:
            content["cached"] = {"options": memory.options, "tokens": read}
            tensors = {name: tensor.cpu().contiguous() for name, tensor in memory.tensors.items()}
    atomic_write(path, save(tensors, metadata={"conversation": json.dumps(content)}))


def load_conversation(conversation: Conversation, path: Path) -> None:
    """Go on with the conversation in a file.

    Raises UserError if it is damaged, or was held with another model or other options.
    """
    content, tensors = _read(path)
    generator = conversation.generator
    if content["kind"] != conversation.kind:
        raise UserError(f"{path} is a {content['kind']}, not a {conversation.kind}")
    if content["model"] != model_digest(generator):
        raise UserError(
            f"{path} was written with another model, or with weights in another form; use that one"
        )
    cached = content["cached"]
    if cached is None:
        conversation.restore(content["state"], None, [])
        return
    cache = generator.new_cache(1, conversation.cache_len)
    memory = cache.memory()
    options = None if memory is None else memory.options
    if options != cached["options"]:
        needed = ", ".join(f"{name}={value}" for name, value in cached["options"].items())
        raise UserError(f"{path} was written with {needed}; use these options")
    _check_shapes(path, tensors, memory.tensors)
    cache.remember(tensors, len(cached["tokens"]))
    conversation.restore(content["state"], cache, cached["tokens"])


def model_digest(generator: Generator) -> str:
    """Of the weights of a Generator as it uses them, and of its tokenizer."""
    digest = hashlib.sha256()
    form = [generator.tokenizer.content_hash, str(generator.model.dtype), str(generator.bits)]
    form.append(json.dumps(generator.config.to_dict(), sort_keys=True))
    digest.update("\n".join(form).encode())
    for name, tensor in sorted(generator.model.state_dict().items()):
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(name.encode())
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What save_conversation() wrote. Raises UserError if it is no such file."""
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads((file.metadata() or {})["conversation"])
            if content["format"] != FORMAT:
                raise UserError(f"{path} is of another version: {content['format']}")
            missing = {"kind", "model", "state", "cached"} - content.keys()
            if missing:
                raise UserError(f"{path} is damaged: it has no {min(missing)}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no saved conversation, or it is damaged") from error
    return content, tensors


def _check_shapes(path: Path, found: dict[str, Tensor], empty: dict[str, Tensor]) -> None:
    """Raise UserError unless tensors have the names, dimensions and dtypes of those of a cache. The
    number of stored blocks may differ."""
    is_complete = found.keys() == empty.keys()
    for name, tensor in found.items():
        expected = empty.get(name)
        is_same = expected is not None and tensor.dim() == expected.dim()
        is_complete = is_complete and is_same and tensor.dtype == expected.dtype
    if not is_complete:
        raise UserError(f"{path} is damaged: its tensors are not those of this cache")
