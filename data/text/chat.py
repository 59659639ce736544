"""Render conversations with the tokenizer's chat template and mark the tokens of answers."""

import re

import numpy as np

from thinker.data.text import chat_template
from thinker.data.text.messages import Message
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError


def render(
    tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool = False
) -> str:
    """Render a conversation; with add_generation_prompt it ends where the next answer starts. Raises UserError."""
    return _render(tokenizer, messages, add_generation_prompt, mark_answers=False)[0]


def pieces(tokenizer: Tokenizer, messages: list[Message]) -> list[tuple[str, bool]]:
    """Split a conversation into (text, is an answer) pieces. Answers include the EOS token after them.

    Uses the answers that the template marks with {% generation %}. Otherwise an answer is the difference between the
    conversation up to and including it, and the conversation before it with the generation prompt. Raises UserError if
    the template renders earlier turns differently when later turns follow, because then answers cannot be located.
    """
    code = re.sub(
        r"\{#.*?#\}", "", tokenizer.chat_template or "", flags=re.DOTALL
    )  # without comments
    if re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", code):
        text, spans = _render(tokenizer, messages, add_generation_prompt=False, mark_answers=True)
    else:
        text, spans = render(tokenizer, messages), []
        for number in [
            number for number, message in enumerate(messages) if message["role"] == "assistant"
        ]:
            before = render(tokenizer, messages[:number], add_generation_prompt=True)
            after = render(tokenizer, messages[: number + 1])
            if not (after.startswith(before) and text.startswith(after)):
                reason = (
                    "renders a turn differently if more turns follow, so answers cannot be located"
                )
                remedy = "mark them with {% generation %} and {% endgeneration %} in your own data.chat_template"
                raise UserError(f"the chat template {reason}; {remedy}")
            spans.append(
                (len(before), len(before) + _answer_length(tokenizer, after[len(before) :]))
            )
    parts, position = [], 0
    for start, end in [*spans, (len(text), len(text))]:
        parts += [(text[position:start], False), (text[start:end], True)]
        position = end
    return [(part, is_answer) for part, is_answer in parts if part]


def _answer_length(tokenizer: Tokenizer, answer: str) -> int:
    """Length of an answer including its EOS token, without a newline that the template adds."""
    ends = [
        name for name, number in tokenizer.special_tokens.items() if number in tokenizer.eos_ids
    ]
    ends += [name for key, name in tokenizer.special_tokens_map.items() if key == "eos_token"]
    stripped = answer.rstrip()
    return len(stripped) if stripped.endswith(tuple(ends)) else len(answer)


def encode(tokenizer: Tokenizer, messages: list[Message]) -> tuple[np.ndarray, np.ndarray]:
    """Encode a conversation: ids, (n,) uint32, and a mask of answers, (n,) bool, without a BOS token at the start.

    Answers are tokenized separately from the text before them, as in generation.
    """
    parts = [
        (tokenizer.encode(text, allow_special=True), is_answer)
        for text, is_answer in pieces(tokenizer, messages)
    ]
    ids = np.array([i for part, _ in parts for i in part], np.uint32)
    answers = np.array([is_answer for part, is_answer in parts for _ in part], bool)
    start = int(ids[:1].tolist() == [tokenizer.bos_id])
    return ids[start:], answers[start:]


def encode_prompt(tokenizer: Tokenizer, messages: list[Message]) -> list[int]:
    """Encode a conversation up to where the model answers, with the usual BOS prefix."""
    ids = tokenizer.encode(
        render(tokenizer, messages, add_generation_prompt=True), allow_special=True
    )
    return ids if ids[:1] == [tokenizer.bos_id] else [*tokenizer.bos_prefix, *ids]


def _render(
    tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool, mark_answers: bool
) -> tuple[str, list[tuple[int, int]]]:
    if tokenizer.chat_template is None:
        need = "conversations need a chat template, but the tokenizer has none"
        remedy = "set run.init_from and data.chat_template=configs/chat.jinja"
        raise UserError(f"{need}; to train a chat model, {remedy}")
    return chat_template.render(tokenizer, messages, add_generation_prompt, mark_answers)
