"""A document of a corpus, and the error for text that is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thinker.runtime.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from thinker.data.tokenizers.tokenizer import Tokenizer

Message = dict[str, Any]  # {"role": "user", "content": "..."}; the template defines the roles


class MissingData(UserError):
    """Error for text or a related file that is not where the config says."""


# The number and the position of a document, with which its source can begin again there.
Start = tuple[int, Any]
BEGIN: Start = (0, None)


@dataclass(slots=True)
class Document:
    """A text, or a conversation in `messages`, whose JSON is `text`.

    encode: makes the rows of the document instead of text and messages: for each the ids without a
    BOS token, and which of them are targets.
    tools, template_kwargs: variables of the chat template, which some conversations have.
    allow_special: names of special tokens in messages are these tokens.
    unread: what is said about the columns of its row that are not read, or "".
    """

    text: str
    log_prob: float | None = None  # ln P(text) in nats, for generated sources
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    allow_special: bool = False
    continues: bool = False  # the text of the document before, in one whole text
    unread: str = ""
    where: str = ""  # the table row, for messages about a conversation
    row: dict[str, Any] | None = None  # the table row that it comes from
    share_read: float | None = None  # of the source, up to and with this document, if known
    number: int = 0  # in the source
    position: Any = None  # in the files of the source, as JSON; None if the number is enough
    encode: Callable[[Tokenizer], list[tuple[np.ndarray, np.ndarray | None]]] | None = None

    @property
    def start(self) -> Start:
        """Where to begin to read the source so that this document comes first."""
        return self.number, self.position
