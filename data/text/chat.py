"""Render conversations with the tokenizer's chat template and mark the tokens of answers."""

import re

import numpy as np

from thinker.data.text import chat_template
from thinker.data.text.document import Message
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError


def render(
    tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool = False
) -> str:
    """Render a conversation; with add_generation_prompt it ends where the next answer starts.

    Raises UserError.
    """
    text, _ = _render(tokenizer, messages, add_generation_prompt, mark_answers=False)
    return text


def pieces(tokenizer: Tokenizer, messages: list[Message]) -> list[tuple[str, bool]]:
    """Split a conversation into (text, is an answer) pieces.

    Answers include the EOS token after them. Uses the answers that the template marks with {%
    generation %}. Otherwise an answer is the difference between the conversation up to and
    including it, and the conversation before it with the generation prompt. Raises UserError if the
    template renders earlier turns differently when later turns follow, because then answers cannot
    be located.
    """
    if _marks_answers(tokenizer.chat_template or ""):
        text, spans = _render(tokenizer, messages, add_generation_prompt=False, mark_answers=True)
    else:
        text = render(tokenizer, messages)
        spans = _find_answers(tokenizer, messages, text)
    parts = []
    position = 0
    for start, end in spans:
        parts.append((text[position:start], False))
        parts.append((text[start:end], True))
        position = end
    parts.append((text[position:], False))
    return [(part, is_answer) for part, is_answer in parts if part]


def _marks_answers(template: str) -> bool:
    """Whether a template says where answers begin and end."""
    code = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)  # without comments
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", code) is not None


def _find_answers(
    tokenizer: Tokenizer, messages: list[Message], text: str
) -> list[tuple[int, int]]:
    """Find the answers in a rendered conversation by rendering its beginnings."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # Without marks: what the answer adds to the conversation before it.
        before = render(tokenizer, messages[:number], add_generation_prompt=True)
        after = render(tokenizer, messages[: number + 1])
        if not after.startswith(before) or not text.startswith(after):
            raise UserError(
                "the chat template renders a turn differently if more turns follow, so answers "
                "cannot be located; mark them with {% generation %} and {% endgeneration %} "
                "in your own data.chat_template"
            )
        answer = after[len(before) :]
        spans.append((len(before), len(before) + _answer_length(tokenizer, answer)))
    return spans


def _answer_length(tokenizer: Tokenizer, answer: str) -> int:
    """Length of an answer including its EOS token, without a newline that the template adds."""
    ends = []
    for name, number in tokenizer.special_tokens.items():
        if number in tokenizer.eos_ids:
            ends.append(name)
    if "eos_token" in tokenizer.special_tokens_map:
        ends.append(tokenizer.special_tokens_map["eos_token"])
    stripped = answer.rstrip()
    if stripped.endswith(tuple(ends)):
        return len(stripped)
    return len(answer)


def encode(tokenizer: Tokenizer, messages: list[Message]) -> tuple[np.ndarray, np.ndarray]:
    """Encode a conversation: ids, (n,) uint32, and a mask of answers, (n,) bool.

    Without a BOS token at the start. Answers are tokenized separately from the text before them, as
    in generation.
    """
    ids: list[int] = []
    answers: list[bool] = []
    for text, is_answer in pieces(tokenizer, messages):
        part = tokenizer.encode(text, allow_special=True)
        ids += part
        answers += [is_answer] * len(part)
    if ids[:1] == [tokenizer.bos_id]:  # rendered by the template
        del ids[0], answers[0]
    return np.array(ids, np.uint32), np.array(answers, bool)


def encode_prompt(tokenizer: Tokenizer, messages: list[Message]) -> list[int]:
    """Encode a conversation up to where the model answers, with the usual BOS prefix."""
    text = render(tokenizer, messages, add_generation_prompt=True)
    ids = tokenizer.encode(text, allow_special=True)
    if ids[:1] == [tokenizer.bos_id]:  # rendered by the template
        return ids
    return [*tokenizer.bos_prefix, *ids]


def _render(
    tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool, mark_answers: bool
) -> tuple[str, list[tuple[int, int]]]:
    if tokenizer.chat_template is None:
        raise UserError(
            "conversations need a chat template, but the tokenizer has none; to train a chat "
            "model, set run.init_from and data.chat_template=configs/chat.jinja"
        )
    return chat_template.render(tokenizer, messages, add_generation_prompt, mark_answers)
