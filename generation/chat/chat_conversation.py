"""A chat in several turns, rendered with the model's chat template."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from thinker.data.chat import chat
from thinker.data.text.document import Message
from thinker.generation.chat.conversation import Conversation
from thinker.generation.engine import Generator
from thinker.generation.sampling_params import SamplingParams
from thinker.generation.sequence import Completion
from thinker.model import KVCache
from thinker.runtime.errors import UserError

ANSWER_SHARE = 1 / 4  # largest part of the context to reserve for an answer


class ChatConversation(Conversation):
    """User messages and model answers, after an optional system message.

    If the Generator slides, the oldest turns are dropped when the chat and an answer do not fit
    into the context.
    """

    greeting = "Type a message; /help lists the commands."
    description = "Each line that you type is a message, and the model answers it."
    continues_text = False
    kind = "chat"

    def __init__(
        self, generator: Generator, system: str | None = None, allow_special: bool = False
    ) -> None:
        """allow_special: names of special tokens in messages are these tokens; otherwise they are
        plain text."""
        self.allow_special = allow_special
        self.system = [] if system is None else [{"role": "system", "content": system}]
        super().__init__(generator)

    def reset(self) -> None:
        """Start a new chat, with the same system message."""
        super().reset()
        self.messages: list[Message] = list(self.system)
        self._n_unseen = 0  # turns dropped from the context in the last answer

    def state(self) -> dict[str, Any]:
        """As Conversation.state()."""
        return super().state() | {"messages": self.messages}

    def restore(self, state: dict[str, Any], cache: KVCache | None, read: list[int]) -> None:
        """As Conversation.restore(). The system message is the saved one.

        Raises UserError if another one was given.
        """
        saved = [each for each in state["messages"][:1] if each["role"] == "system"]
        if self.system and self.system != saved:
            raise UserError("the saved chat has another system message; leave out --system")
        super().restore(state, cache, read)
        self.messages = state["messages"]
        self.system = saved

    @property
    def text(self) -> str:
        """The messages, one per paragraph."""
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)

    def reply(self, text: str, params: SamplingParams) -> Iterator[str]:
        """Send a message and yield the answer.

        Raises UserError, with nothing changed, if it is empty or too long.
        """
        if not text.strip():
            raise UserError("the message is empty; type some text")
        generator = self.generator
        n_unseen = 0
        if generator.slide:
            context_len = generator.context_len
            max_len = context_len - min(params.max_new_tokens, ANSWER_SHARE * context_len)
            turns = range(len(self.turn_starts))
            n_unseen = bisect_left(turns, True, key=lambda n: len(self.encode(text, n)) <= max_len)
        sequence = generator.new_sequence(0, Completion(text), params, self.encode(text, n_unseen))
        self._n_unseen = n_unseen
        self.turn_starts.append(len(self.messages))
        try:
            yield from self._decode(sequence)
        finally:
            answer = sequence.completion.text
            self.messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": answer},
            ]

    def encode(self, text: str, n_unseen: int = 0) -> list[int]:
        """Encode the system message, the chat without its first `n_unseen` turns, and a new
        message."""
        start = len(self.system)
        messages = [
            *self.system,
            *self.messages[start + 2 * n_unseen :],
            {"role": "user", "content": text},
        ]
        tokenizer = self.generator.tokenizer
        return chat.encode_prompt(tokenizer, messages, allow_special=self.allow_special)

    def undo(self) -> bool:
        """Remove the last message and its answer. Returns False if there is none."""
        if not self.turn_starts:
            return False
        del self.messages[self.turn_starts.pop() :]
        return True

    def news(self) -> Iterator[str]:
        """As in Conversation; also reports that old turns were dropped."""
        if self._n_unseen and "unseen" not in self._said:
            self._said.add("unseen")
            length = self.generator.context_len
            dropped = "the oldest turns of the chat are dropped (see --no-slide)"
            yield f"the context of {length} tokens is full: {dropped}"
        yield from super().news()
