"""Encoding of documents in threads, ahead of the batch that is being written."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from thinker.data.text.document import Document
from thinker.data.text.split import SplitDocument
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError

BATCH_CHARS = 4 << 20  # characters that are read together
CHUNK_CHARS = 1 << 16  # that a thread encodes at once: many short documents, or one long one
BATCHES_AHEAD = 2  # so that no thread waits for the last chunk of a batch

Encoded = tuple[np.ndarray, np.ndarray | None]  # ids, and which of them are targets; None: all
Chunk = tuple[list[SplitDocument], Future[list[Encoded]]]


def encode_documents(
    tokenizer: Tokenizer,
    documents: Iterable[SplitDocument],
    assistant_only_loss: bool,
    batch_chars: int = BATCH_CHARS,
) -> Iterator[tuple[SplitDocument, Encoded]]:
    """Yield documents in order with their encoding. Threads encode while the caller reads and
    writes.

    batch_chars: about how many characters are read together; BATCHES_AHEAD times as many are read
    ahead.

    Raises UserError if rows mix conversations and text, or do not fit the tokenizer or
    assistant_only_loss.
    """
    pending: deque[list[Chunk]] = deque()  # batches

    def finish() -> Iterator[tuple[SplitDocument, Encoded]]:
        for chunk, future in pending.popleft():
            yield from zip(chunk, future.result())

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for batch in _groups(documents, batch_chars):
                check_kinds([document for _, document in batch], assistant_only_loss)
                chunks = []
                for chunk in _groups(batch, CHUNK_CHARS):
                    future = pool.submit(_encode_chunk, tokenizer, chunk, assistant_only_loss)
                    chunks.append((chunk, future))
                pending.append(chunks)
                if len(pending) > BATCHES_AHEAD:
                    yield from finish()
            while pending:
                yield from finish()
        finally:
            pool.shutdown(cancel_futures=True)


def check_kinds(documents: list[Document], assistant_only_loss: bool) -> None:
    """Raise UserError if rows mix conversations and text, or if assistant_only_loss is set for
    text."""
    if len({document.messages is None for document in documents}) > 1:
        raise UserError(
            "the rows mix conversations and text; put them in separate sources (data.sources)"
        )
    if documents[0].messages is None and assistant_only_loss:
        raise UserError(
            "data.assistant_only_loss=true needs conversations; set data.column to the column "
            "that has them"
        )


def encode_document(tokenizer: Tokenizer, document: Document, assistant_only_loss: bool) -> Encoded:
    """Encode a text or a conversation."""
    if document.messages is None:
        return tokenizer.encode_array(document.text), None
    template = tokenizer.chat_template
    if template is not None and "tool_calls" not in template:
        _check_no_lone_calls(document)
    from thinker.data.text import chat  # texts do not need it

    ids, answers = chat.encode(tokenizer, document.messages)
    if assistant_only_loss:
        return ids, answers
    return ids, np.ones_like(answers)


def _check_no_lone_calls(document: Document) -> None:
    """Raise UserError if a message of a conversation has nothing but calls of tools."""
    for message in document.messages:
        if "tool_calls" in message and not message.get("content"):
            raise UserError(
                f"{document.where}: a message has only tool_calls, which the chat template ignores"
            )


def _encode_chunk(
    tokenizer: Tokenizer, chunk: list[SplitDocument], assistant_only_loss: bool
) -> list[Encoded]:
    return [encode_document(tokenizer, document, assistant_only_loss) for _, document in chunk]


def _groups(documents: Iterable[SplitDocument], n_chars: int) -> Iterator[list[SplitDocument]]:
    """Group documents into lists of at least `n_chars` characters, except the last."""
    group: list[SplitDocument] = []
    size = 0
    for split, document in documents:
        group.append((split, document))
        size += len(document.text)
        if size >= n_chars:
            yield group
            group = []
            size = 0
    if group:
        yield group
