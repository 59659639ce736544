"""A chat in several turns: messages rendered by the model's template, of which the cache keeps what has been read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from thinker.data import chat
from thinker.data.messages import Message
from thinker.generation.conversation import Conversation
from thinker.generation.engine import Generator
from thinker.generation.sampler import SamplingParams
from thinker.runtime.errors import UserError


class ChatConversation(Conversation):
    """Messages of the user and answers of the model, after an optional system message.

    An interrupted answer keeps what the model said until then.
    """

    greeting = "Type a message; /help lists the commands."
    description = "Whatever you type is a message, and the model answers it."
    continues_text = False

    def __init__(self, generator: Generator, system: str | None = None) -> None:
        self.system = [] if system is None else [{"role": "system", "content": system}]
        super().__init__(generator)

    def reset(self) -> None:
        """Start a new chat, with the same system message."""
        super().reset()
        self.messages: list[Message] = list(self.system)

    @property
    def text(self) -> str:
        """All messages, one per paragraph."""
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)

    def reply(self, text: str, params: SamplingParams) -> Iterator[str]:
        """Send a message, then yield the answer; UserError, with nothing changed, if it is empty or does not fit."""
        if not text.strip():
            raise UserError("a message needs text")
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = chat.encode_prompt(self.generator.tokenizer, messages)
        # A template may render earlier turns otherwise than they were generated: the cache holds what both begin with.
        n_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, tokens)))
        answer, n_turns = "", len(self.turn_starts)
        try:
            for piece in self._continue(tokens, text, params, n_equal):
                answer += piece
                yield piece
        finally:
            if len(self.turn_starts) > n_turns:  # the message did fit
                self.messages = [*messages, {"role": "assistant", "content": answer}]

    def undo(self) -> bool:
        """Remove the last message and its answer. Returns whether there was one."""
        had_turn = super().undo()
        if had_turn:
            del self.messages[-2:]
        return had_turn
