"""The source `prompts`: rows with a prompt and whatever verifiers need, but no answer to learn."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from thinker.data.chat.messages import check_roles, read_beside
from thinker.data.text.document import Document, Message
from thinker.data.text.sources import Source, SourceOptions, source_key
from thinker.data.text.tables.any_rows import open_rows
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError

FORMAT = 1  # changes with the tokens of prompts
PROMPT = "prompt"
# Columns that belong to the prompt; verifiers read the others.
BESIDE = ("system", "tools", "chat_template_kwargs")

Row = tuple[np.ndarray, np.ndarray]  # ids without BOS, and which of them are targets


@dataclass(frozen=True)
class PromptRow:
    """A prompt: messages, or with a model without a chat template the text of the only one."""

    messages: list[Message]
    is_text: bool
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    allow_special: bool = False
    where: str = ""

    def encode(self, tokenizer: Tokenizer) -> list[Row]:
        """The tokens of the prompt, up to where an answer begins. All count in the loss.

        Raises UserError for messages without a chat template.
        """
        if tokenizer.chat_template is not None:
            ids = self._chat_ids(tokenizer)
        elif self.is_text:
            ids = tokenizer.encode_array(self.messages[0]["content"])
        else:
            raise UserError(
                "the prompt has messages, and the tokenizer no chat template; set "
                "data.chat_template=chat.jinja"
            )
        return [(ids, np.ones(len(ids), dtype=bool))]

    def _chat_ids(self, tokenizer: Tokenizer) -> np.ndarray:
        from thinker.data.chat import chat  # texts do not need it

        ids = chat.encode_prompt(
            tokenizer,
            self.messages,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
            allow_special=self.allow_special,
        )
        n_bos = len(tokenizer.bos_prefix)
        return np.array(ids[n_bos:], dtype=np.int64)


def open_prompts(name: str, options: SourceOptions) -> Source:
    """A file, folder, glob or dataset with a prompt in each row."""
    read_row = partial(_read_row, allow_special=bool(options.allow_special_tokens))
    source = open_rows(replace(options, column=PROMPT), read_row)
    return replace(source, name=name, key=source_key(name, FORMAT, source.key))


def _read_row(
    row: dict[str, Any], column: str, number: int, where: str, allow_special: bool
) -> Document:
    """The document of a row. Raises UserError."""
    name = f"row {number} of {where}"
    if row.get(PROMPT) is None:
        raise UserError(f"{name} has no column {PROMPT} (has {', '.join(row)})")
    prompt = row[PROMPT]
    if prompt == "":
        raise UserError(f"{name}: {PROMPT} is empty")
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt:
        messages = check_roles(prompt, f"{name}: {PROMPT}")
    else:
        raise UserError(
            f"{name}: {PROMPT} is {type(prompt).__name__}; it must be text or a list of messages"
        )
    beside = {key: value for key, value in row.items() if key in BESIDE}
    all_messages, tools, variables = read_beside(beside, "", messages, name)
    is_text = isinstance(prompt, str) and not (tools or variables or len(all_messages) > 1)
    parsed = PromptRow(all_messages, is_text, tools, variables, allow_special, name)
    # Verifiers read the row, so a run that resumes needs the same.
    text = json.dumps(row, ensure_ascii=False, sort_keys=True, default=str)
    return Document(text, encode=parsed.encode, where=name, row=row)
