"""A chat in several turns: messages rendered by the model's template, of which the cache keeps what has been read."""

from bisect import bisect_left
from collections.abc import Iterator

from thinker.data import chat
from thinker.data.messages import Message
from thinker.generation.conversation import Conversation
from thinker.generation.engine import Generator
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion
from thinker.runtime.errors import UserError

ANSWER_SHARE = 1 / 4  # of the context that is left for an answer, at most


class ChatConversation(Conversation):
    """Messages of the user and answers of the model, after an optional system message.

    An interrupted answer keeps what the model said until then. If the Generator slides, the model does not see the
    oldest turns of a chat that does not fit into the context with room for an answer; the system message stays.
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
        self._n_unseen = 0  # turns that the model did not see when it answered last

    @property
    def text(self) -> str:
        """All messages, one per paragraph."""
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)

    def reply(self, text: str, params: SamplingParams) -> Iterator[str]:
        """Send a message, then yield the answer; UserError, with nothing changed, if it is empty or does not fit."""
        if not text.strip():
            raise UserError("a message needs text")
        generator, n_unseen = self.generator, 0
        if generator.slide:
            max_len = generator.context_len - min(params.max_new_tokens, ANSWER_SHARE * generator.context_len)
            turns = range(len(self.turn_starts))
            n_unseen = bisect_left(turns, True, key=lambda n: len(self.encode(text, n)) <= max_len)
        sequence = generator.new_sequence(0, Completion(text), params, self.encode(text, n_unseen))
        self._n_unseen = n_unseen
        self.turn_starts.append(len(self.messages))
        try:
            yield from self._decode(sequence)
        finally:
            answer = sequence.completion.text
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def encode(self, text: str, n_unseen: int = 0) -> list[int]:
        """The tokens of the chat and a new message, up to where the model answers, without its `n_unseen` first turns.

        The system message is always among them.
        """
        start = len(self.system)
        messages = [*self.system, *self.messages[start + 2 * n_unseen :], {"role": "user", "content": text}]
        return chat.encode_prompt(self.generator.tokenizer, messages)

    def undo(self) -> bool:
        """Remove the last message and its answer. Returns whether there was one."""
        if not self.turn_starts:
            return False
        del self.messages[self.turn_starts.pop() :]
        return True

    def news(self) -> Iterator[str]:
        """As in a Conversation; and that the model does not see the oldest turns."""
        if self._n_unseen and "unseen" not in self._said:
            self._said.add("unseen")
            fits = f"the chat no longer fits into the model's context of {self.generator.context_len} tokens"
            yield f"{fits}: the model does not see its oldest turns; --no-slide stops"
        yield from super().news()
