"""Pairs of answers in table rows, and their tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from thinker.data.chat.messages import check_messages, describe_unread, read_beside
from thinker.data.text.document import Document, Message
from thinker.data.text.sources import Source, SourceOptions, source_key
from thinker.data.text.tables.any_rows import open_rows
from thinker.data.tokenizers.common_prefix import common_prefix
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError, did_you_mean

FORMAT = 2  # changes with the tokens of pairs
SIDES = ("chosen", "rejected")
PROMPT = "prompt"

Row = tuple[np.ndarray, np.ndarray]  # ids without BOS, and which of them are targets


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt: two conversations with the same beginning.

    texts: prompt, chosen and rejected, if all three are plain text. Without a chat template they
    are two continuations of a text. where: the table row, for messages.
    """

    chosen: list[Message]
    rejected: list[Message]
    texts: tuple[str, str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    allow_special: bool = False
    where: str = ""

    def encode(self, tokenizer: Tokenizer) -> list[Row]:
        """The rows of the chosen and of the rejected answer, whose tokens are the targets.

        Raises UserError if the template does not read a part of the row, or gives an answer more
        than one context, or if the rows have the same tokens.
        """
        if tokenizer.chat_template is None and self.texts is not None:
            prompt, *answers = self.texts
            rows = [_text_row(tokenizer, prompt, answer) for answer in answers]
        else:
            conversations = (self.chosen, self.rejected)
            rows = [self._chat_row(tokenizer, messages) for messages in conversations]
        for side, (_, is_target) in zip(SIDES, rows):
            if not is_target.any():
                raise UserError(f"the {side} answer has no tokens")
        (chosen, _), (rejected, _) = rows
        if np.array_equal(chosen, rejected):
            raise UserError("chosen and rejected have the same tokens")
        return rows

    def _chat_row(self, tokenizer: Tokenizer, messages: list[Message]) -> Row:
        # Texts do not need these.
        from thinker.data.chat import chat
        from thinker.data.chat.template_variables import check_variables

        document = Document("", None, messages, self.tools, self.template_kwargs, where=self.where)
        check_variables(tokenizer.chat_template, document)
        n_common = common_messages(self.chosen, self.rejected)
        context = [_untrained(message) for message in messages[:n_common]]
        conversation = chat.Conversation(
            [*context, *messages[n_common:]], self.tools, self.template_kwargs, self.allow_special
        )
        rows = chat.encode(tokenizer, conversation)
        if len(rows) != 1:
            raise UserError(
                "the chat template gives the answers of a conversation different contexts, so only "
                "the last message of chosen and rejected may differ"
            )
        return rows[0].ids, rows[0].is_target


def common_messages(chosen: list[Message], rejected: list[Message]) -> int:
    """How many messages two conversations have in common at their beginning."""
    n = 0
    for first, second in zip(chosen, rejected):
        if first != second:
            break
        n += 1
    return n


def _untrained(message: Message) -> Message:
    """The message as context, which is no target."""
    if message["role"] == "assistant":
        return message | {"weight": 0}
    return message


def _text_row(tokenizer: Tokenizer, prompt: str, answer: str) -> Row:
    """A text whose last part is trained, from the first token that is not the prompt's."""
    before = tokenizer.encode_array(prompt)
    ids = tokenizer.encode_array(prompt + answer)
    if common_prefix(before.tolist(), ids.tolist()) < len(before):
        # They merge where they meet. A prompt is encoded alone when it is answered.
        rest = tokenizer.encode_array(answer, continues=len(before) > 0)
        ids = np.concatenate([before, rest])
    is_target = np.arange(len(ids)) >= len(before)
    return ids, is_target


def open_pairs(name: str, options: SourceOptions) -> Source:
    """A file, folder, glob or dataset with a pair in each row."""
    read_row = partial(_read_row, allow_special=bool(options.allow_special_tokens))
    source = open_rows(replace(options, column=SIDES[0]), read_row)
    return replace(source, name=name, key=source_key(name, FORMAT, source.key))


def _read_row(
    row: dict[str, Any], column: str, number: int, where: str, allow_special: bool
) -> Document:
    """As read_pair(), for tables, whose `column` is that of the chosen answer."""
    return read_pair(row, f"row {number} of {where}", allow_special)


def read_pair(row: dict[str, Any], name: str, allow_special: bool = False) -> Document:
    """The pair in a row, as a document of two rows.

    chosen and rejected are the rest of what begins with `prompt`, or whole conversations. Each of
    the three is a text or a list of messages; a text is a message of its own. name: of the row, in
    messages. Raises UserError.
    """
    _check_columns(row, name)
    values = tuple(row.get(key) for key in (PROMPT, *SIDES))
    conversations = _conversations(row, name)
    _check_sides(*conversations, name)
    others = {key: value for key, value in row.items() if key not in (PROMPT, *SIDES)}
    chosen, tools, variables = read_beside(others, "", conversations[0], name)
    system = chosen[: len(chosen) - len(conversations[0])]
    rejected = [*system, *conversations[1]]
    is_plain = all(isinstance(value, str) for value in values)
    texts = None
    if is_plain and not (system or tools or variables):
        texts = values
    pair = PreferencePair(chosen, rejected, texts, tools, variables, allow_special, name)
    describe_unread(others, "", name)
    text = json.dumps([*values, system, tools, variables], ensure_ascii=False)
    return Document(text, where=name, encode=pair.encode)


def _check_columns(row: dict[str, Any], name: str) -> None:
    """Raise UserError unless the row has both answers."""
    for side in SIDES:
        if side not in row:
            hint = did_you_mean(side, row)
            raise UserError(f"{name} has no column {side} (has {', '.join(row)}){hint}")
        if row[side] is None:
            raise UserError(f"{name}: {side} is null; give both answers or leave the row out")
    if row.get(PROMPT) is None and isinstance(row[SIDES[0]], str):
        raise UserError(
            f"{name}: chosen is a text without a prompt; add the column prompt, or write both "
            'sides as lists of {"role": ..., "content": ...}'
        )


def _conversations(row: dict[str, Any], name: str) -> list[list[Message]]:
    """The messages of both sides, with those of the prompt."""
    prompt: list[Message] = []
    if row.get(PROMPT) is not None:
        prompt = _as_messages(row[PROMPT], "user", f"{name}: {PROMPT}")
    sides = [_as_messages(row[side], "assistant", f"{name}: {side}") for side in SIDES]
    # Some data has the prompt in a column of its own and in both conversations.
    is_repeated = all(len(side) > len(prompt) and side[: len(prompt)] == prompt for side in sides)
    if not is_repeated:
        sides = [[*prompt, *side] for side in sides]
    return [check_messages(side, f"{name}: {key}") for key, side in zip(SIDES, sides)]


def _as_messages(value: Any, role: str, where: str) -> list[Message]:
    """The messages in a column. Raises UserError for anything but a text and a list."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return value
    raise UserError(f"{where} is {type(value).__name__}; it must be text or a list of messages")


def _check_sides(chosen: list[Message], rejected: list[Message], where: str) -> None:
    """Raise UserError unless both conversations end with different answers."""
    if chosen == rejected:
        raise UserError(f"{where}: chosen and rejected are equal, so there is nothing to learn")
    n_common = common_messages(chosen, rejected)
    for side, messages in zip(SIDES, (chosen, rejected)):
        rest = messages[n_common:]
        if not rest or rest[-1]["role"] != "assistant":
            raise UserError(f"{where}: {side} does not end with an answer of its own")
        if n_common == 0 and rest[0]["role"] != "assistant":
            raise UserError(
                f"{where}: chosen and rejected do not begin with the same message; two answers to "
                "different prompts cannot be compared"
            )
