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

# Ids, and which of them are targets; None: all.
Encoded = tuple[np.ndarray, np.ndarray | None]
Chunk = tuple[list[SplitDocument], Future[list[list[Encoded]]]]


def encode_documents(
    tokenizer: Tokenizer,
    documents: Iterable[SplitDocument],
    assistant_only_loss: bool,
    batch_chars: int = BATCH_CHARS,
) -> Iterator[tuple[SplitDocument, list[Encoded]]]:
    """Yield documents in order with their encodings; see encode_document().

    Threads encode while the caller reads and writes.

    batch_chars: about how many characters are read together; BATCHES_AHEAD times as many are read
    ahead.

    Raises UserError if rows mix conversations and text, or do not fit the tokenizer or
    assistant_only_loss.
    """
    pending: deque[list[Chunk]] = deque()  # batches

    def finish() -> Iterator[tuple[SplitDocument, list[Encoded]]]:
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
    has_text = documents[0].messages is None and documents[0].encode is None
    if has_text and assistant_only_loss:
        raise UserError(
            "data.assistant_only_loss=true needs conversations; set data.column to the column "
            "that has them"
        )


def encode_document(
    tokenizer: Tokenizer, document: Document, assistant_only_loss: bool
) -> list[Encoded]:
    """Encode a text, or a conversation, which may become several rows (see chat.py).

    assistant_only_loss: the targets of a conversation are its answers; otherwise they are all
    tokens, each in one row.
    """
    if document.encode is not None:
        try:
            return document.encode(tokenizer)
        except UserError as error:
            raise _located(error, document) from error
    if document.messages is None:
        ids = tokenizer.encode_array(document.text, continues=document.continues)
        return [(ids, None)]
    # Texts do not need these.
    from thinker.data.chat import chat
    from thinker.data.chat.template_variables import check_variables

    check_variables(tokenizer.chat_template, document)
    conversation = chat.Conversation(
        document.messages, document.tools, document.template_kwargs, document.allow_special
    )
    if not assistant_only_loss and not all(map(chat.is_trained, document.messages)):
        raise UserError(
            f"{document.where}: the answer with weight 0 would be trained; set "
            "data.assistant_only_loss=true"
        )
    try:
        rows = chat.encode(tokenizer, conversation, all_tokens=not assistant_only_loss)
    except UserError as error:
        raise _located(error, document) from error
    return [(row.ids, row.is_target) for row in rows]


def _located(error: UserError, document: Document) -> UserError:
    """The error, with the table row of the document if that is known."""
    if not document.where:
        return error
    return UserError(f"{document.where}: {error}")


def _encode_chunk(
    tokenizer: Tokenizer, chunk: list[SplitDocument], assistant_only_loss: bool
) -> list[list[Encoded]]:
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
