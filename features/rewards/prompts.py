"""The prompts that a run answers: in rows of their own, before the last answer of conversations, or
the beginnings of texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from thinker.data.chat.messages import check_roles
from thinker.data.text.document import Document, Message
from thinker.data.text.sources import open_source
from thinker.data.text.split import split_documents
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError
from thinker.training.settings.settings import Settings


@dataclass(frozen=True)
class Prompt:
    """A prompt: its tokens with BOS, its text, and the row that it comes from."""

    tokens: list[int]
    text: str
    row: Mapping[str, Any]


def load_prompts(settings: Settings, tokenizer: Tokenizer, split: str) -> tuple[list[Prompt], int]:
    """The prompts of a split, and the number of those that are too long for an answer. Raises
    UserError if the training split has none."""
    data, grpo = settings.data, settings.train.grpo
    longest = longest_prompt(settings)
    documents = _documents_of_split(settings, split)
    prompts, n_too_long = read_prompts(documents, tokenizer, grpo.prompt_tokens, longest)
    if not prompts and split == "train":
        if n_too_long == 0 and grpo.prompt_tokens is not None:
            raise UserError(
                f"no text of {data.describe_text()} is as long as train.grpo.prompt_tokens="
                f"{grpo.prompt_tokens}"
            )
        raise UserError(
            f"no prompt of {data.describe_text()} is short enough ({n_too_long} are not): "
            f"data.seq_len={data.seq_len} leaves {max(longest, 0)} tokens beside "
            f"train.grpo.max_new_tokens={grpo.max_new_tokens}"
        )
    return prompts, n_too_long


def prompts_of_split(settings: Settings, tokenizer: Tokenizer, split: str) -> Iterator[Prompt]:
    """The prompts of a split that leave room for an answer, one by one."""
    for document in _documents_of_split(settings, split):
        prompt = read_prompt(document, tokenizer, settings.train.grpo.prompt_tokens)
        if prompt is not None and len(prompt.tokens) <= longest_prompt(settings):
            yield prompt


def longest_prompt(settings: Settings) -> int:
    """Tokens of a prompt that leave room for an answer. The last token of an answer is not read."""
    seq_len = min(settings.model.max_seq_len, settings.data.seq_len)
    return seq_len - settings.train.grpo.max_new_tokens + 1


def _documents_of_split(settings: Settings, split: str) -> Iterator[Document]:
    data = settings.data
    source = open_source(**data.source_options(), seed=settings.run.seed)
    for place, document in split_documents(source, data.val_fraction):
        if place == split:
            yield document


def digest_of(prompts: Iterable[Prompt]) -> str:
    """A digest of prompts and of what verifiers read of their rows."""
    digest = hashlib.sha256()
    for prompt in prompts:
        values = [prompt.tokens, prompt.text, dict(prompt.row)]
        digest.update(json.dumps(values, default=str).encode())
    return digest.hexdigest()


def read_prompts(
    documents: Iterable[Document], tokenizer: Tokenizer, prompt_tokens: int | None, longest: int
) -> tuple[list[Prompt], int]:
    """The prompts of at most `longest` tokens in documents, and the number of those that are
    longer."""
    prompts = []
    n_too_long = 0
    for document in documents:
        prompt = read_prompt(document, tokenizer, prompt_tokens)
        if prompt is None:
            continue
        if len(prompt.tokens) <= longest:
            prompts.append(prompt)
        else:
            n_too_long += 1
    return prompts, n_too_long


def read_prompt(
    document: Document, tokenizer: Tokenizer, prompt_tokens: int | None
) -> Prompt | None:
    """The prompt in a document; None for a text that is shorter than one."""
    is_row = document.encode is not None
    if prompt_tokens is not None and (is_row or document.messages is not None):
        raise UserError(
            "train.grpo.prompt_tokens (in thinker eval, --prompt-tokens) is for plain texts, but "
            "these rows have prompts; remove it"
        )
    if is_row:
        return _of_row(document, tokenizer)
    if document.messages is not None:
        return _of_conversation(document, tokenizer)
    if prompt_tokens is None:
        raise UserError(
            "prompts are the beginnings of these texts; set their length in tokens, "
            "train.grpo.prompt_tokens (in thinker eval, --prompt-tokens)"
        )
    ids = tokenizer.encode(document.text)
    if len(ids) < prompt_tokens:
        return None
    ids = ids[:prompt_tokens]
    row = {"text": document.text, **(document.row or {})}
    return Prompt([*tokenizer.bos_prefix, *ids], tokenizer.decode(ids), row)


def _of_row(document: Document, tokenizer: Tokenizer) -> Prompt:
    """The prompt of a row of data.source=prompts."""
    ((ids, _),) = document.encode(tokenizer)
    text = document.row["prompt"]
    if not isinstance(text, str):
        text = _content(check_roles(text, document.where)[-1])
    return Prompt([*tokenizer.bos_prefix, *ids.tolist()], text, document.row)


def _content(message: Message) -> str:
    """The text of a message; "" for one without, such as a tool call."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _of_conversation(document: Document, tokenizer: Tokenizer) -> Prompt:
    """What is before the last answer of a conversation."""
    from thinker.data.chat import chat  # texts do not need it

    messages = document.messages
    places = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    if not places:
        raise UserError(
            f"{document.where} has no answer; use data.source=prompts for prompts alone"
        )
    last = places[-1]
    tokens = chat.encode_prompt(
        tokenizer,
        messages[:last],
        tools=document.tools,
        template_kwargs=document.template_kwargs,
        allow_special=document.allow_special,
    )
    text = _content(messages[last - 1]) if last else ""
    row = {"answer": _content(messages[last]), **(document.row or {})}
    return Prompt(tokens, text, row)
