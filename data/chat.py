"""Conversations as text, by a tokenizer's own template, and which of their tokens are answers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from thinker.data.tokenizer import Tokenizer
from thinker.runtime.errors import UserError

JSON = (str, int, float, bool, list, dict, type(None))
Message = dict[str, Any]  # {"role": "user", "content": "..."}; roles are those that the template knows


def check_messages(value: Any, where: str) -> list[Message]:
    """The messages of one row of a table. Raises UserError, naming the row, where these are none."""
    good = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    if not good or not all(isinstance(message.get("role"), str) for message in value):
        raise UserError(f'{where} is not a conversation: it must be a list of {{"role": ..., "content": ...}}')
    if odd := next((part for message in value for part in message.values() if not isinstance(part, JSON)), None):
        raise UserError(
            f"{where}: {odd!r} was read as a {type(odd).__name__}; write all messages so that they are text"
        )
    if not any(message["role"] == "assistant" for message in value):
        raise UserError(f"{where} has no message whose role is assistant, and so no answer")
    return [{key: part for key, part in message.items() if part is not None} for message in value]


def render(tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool = False) -> str:
    """The conversation as text; with add_generation_prompt, up to where the next answer begins.

    Raises UserError where there is no template, or it fails on these messages.
    """
    return _render(tokenizer, messages, add_generation_prompt, mark_answers=False)[0]


def pieces(tokenizer: Tokenizer, messages: list[Message]) -> list[tuple[str, bool]]:
    """The conversation's text in pieces, each with whether it is an answer, the token that ends it included.

    Where the template marks answers, by {% generation %}, these are taken; elsewhere an answer is what a conversation
    up to it has more than one that is asked for it. Raises UserError where a template tells earlier turns otherwise
    once there are later ones, so that this cannot be said.
    """
    said = re.sub(r"\{#.*?#\}", "", tokenizer.chat_template or "", flags=re.DOTALL)  # without its comments
    if re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", said):
        text, spans = _render(tokenizer, messages, add_generation_prompt=False, mark_answers=True)
    else:
        text, spans = render(tokenizer, messages), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = (
                render(tokenizer, messages[:number], add_generation_prompt=True),
                render(tokenizer, messages[: number + 1]),
            )
            if not (after.startswith(before) and text.startswith(after)):
                raise UserError(
                    "the chat template renders a turn differently when others follow, so that answers cannot be "
                    "located; mark them by {% generation %} and {% endgeneration %} in your own (data.chat_template)"
                )
            spans.append((len(before), len(before) + _end(tokenizer, after[len(before) :])))
    parts, at = [], 0
    for start, end in spans:
        parts += [(text[at:start], False), (text[start:end], True)]
        at = end
    return [(part, answer) for part, answer in [*parts, (text[at:], False)] if part]


def _end(tokenizer: Tokenizer, answer: str) -> int:
    """Where an answer ends: with the token that ends it, not with the line break that a template writes behind."""
    names = [name for name, number in tokenizer.special_tokens.items() if number in tokenizer.eos_ids]
    names += [tokenizer.special_tokens_map[name] for name in ("eos_token",) if name in tokenizer.special_tokens_map]
    stripped = answer.rstrip()
    return len(stripped) if stripped.endswith(tuple(names)) else len(answer)


def encode(tokenizer: Tokenizer, messages: list[Message]) -> tuple[np.ndarray, np.ndarray]:
    """Ids (n,) uint32, and which of them belong to answers, (n,) bool. A BOS token in front is left out.

    Answers are tokenized apart from what is before them, as when the model is asked.
    """
    ids: list[int] = []
    answers: list[bool] = []
    for text, answer in pieces(tokenizer, messages):
        more = tokenizer.encode(text, allow_special=True)
        ids += more
        answers += [answer] * len(more)
    first = int(ids[:1] == [tokenizer.bos_id])
    return np.array(ids[first:], np.uint32), np.array(answers[first:], bool)


def encode_prompt(tokenizer: Tokenizer, messages: list[Message]) -> list[int]:
    """The ids of a conversation up to where the model answers, with the BOS prefix of every text."""
    ids = tokenizer.encode(render(tokenizer, messages, add_generation_prompt=True), allow_special=True)
    return ids if ids[:1] == [tokenizer.bos_id] else [*tokenizer.bos_prefix, *ids]


def _render(
    tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool, mark_answers: bool
) -> tuple[str, list[tuple[int, int]]]:
    if tokenizer.chat_template is None:
        raise UserError(
            "conversations need a chat template, and the tokenizer has none; to train with a plain one, give "
            "data.chat_template=configs/chat.jinja"
        )
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise UserError("conversations need the library transformers: pip install transformers jinja2") from error
    try:
        texts, spans = render_jinja_template(
            [messages], chat_template=tokenizer.chat_template, add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=mark_answers, **tokenizer.special_tokens_map,
        )  # fmt: skip
    except Exception as error:  # a template is a program, which can fail in any way
        raise UserError(f"the chat template refuses a conversation: {error or type(error).__name__}") from error
    return texts[0], spans[0] if mark_answers else []
