"""Tokens to text as they come, safe at the borders of characters and of stop strings."""

from __future__ import annotations

import codecs

from data.tokenizer import Tokenizer


class TextStream:
    """Decodes token by token; what it gives out is never taken back.

    A character that spans tokens appears when it is whole, and text that may be the beginning of a stop string
    waits until it is clear that it is none.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # decoded, but perhaps the beginning of a stop string
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that is certain after this token, "" while there is none."""
        return self._release(self.decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self) -> str:
        """The rest, when no token comes any more."""
        text = self._release(self.decoder.decode(b"", final=True))
        if not self.stopped:
            text, self.held = text + self.held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        self.held += text
        ends = [at for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return self.held[: min(ends)]
        wait = max((self._overlap(stop) for stop in self.stop), default=0)
        released, self.held = self.held[: len(self.held) - wait], self.held[len(self.held) - wait :]
        return released

    def _overlap(self, stop: str) -> int:
        """How many of the last characters held are a beginning of `stop`."""
        longest = min(len(stop) - 1, len(self.held))
        return next((n for n in range(longest, 0, -1) if self.held.endswith(stop[:n])), 0)
