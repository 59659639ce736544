"""Streaming detokenizer: tokens to text, safe where characters or stop strings span several tokens."""

from __future__ import annotations

import codecs

from thinker.data.tokenizer import Tokenizer


class TextStreamer:
    """Decodes token by token; the text it returns is never revised, and is returned as early as possible.

    - The joined pieces equal all tokens' bytes decoded at once, with U+FFFD for invalid UTF-8 (The Unicode Standard,
      section 3.9: one U+FFFD per maximal subpart). A character that spans tokens appears when it is complete, a U+FFFD
      as soon as no further byte can prevent it. Special tokens have no text.
    - The text ends at the token, or finish(), that completes a stop string. It is cut where the earliest stop string
      found then begins; later calls return "".
    - A suffix of the text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = ""  # decoded text that may be the beginning of a stop string
        self.stopped = False
        self._failure = [_failure_function(text) for text in stop]
        self._matched = [0] * len(stop)  # for each stop string, how many of its characters the text ends with

    def feed(self, token: int) -> str:
        """Add a token; returns the text that became certain, perhaps ""."""
        text = self.decoder.decode(self.tokenizer.decode_bytes([token]))
        unfinished = self.decoder.getstate()[0]
        # Python waits for the third byte of a surrogate, for errors="surrogatepass"; here each byte is a U+FFFD.
        if unfinished[:1] == b"\xed" and unfinished[1:] >= b"\xa0":
            text += self.decoder.decode(b"", final=True)
        return self._release(text)

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        text = self._release(self.decoder.decode(b"", final=True)) + self.pending
        self.pending = ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        starts = []
        for index, (stop, failure) in enumerate(zip(self.stop, self._failure)):
            matched = self._matched[index]
            for end, char in enumerate(text, len(self.pending) + 1):
                matched = _advance(stop, failure, matched, char)
                if matched == len(stop):
                    starts.append(end - matched)
                    break
            self._matched[index] = matched
        self.pending += text
        self.stopped = bool(starts)
        if self.stopped:
            released, self.pending = self.pending[: min(starts)], ""
        else:
            end = len(self.pending) - max(self._matched, default=0)
            released, self.pending = self.pending[:end], self.pending[end:]
        return released


def _advance(stop: str, failure: list[int], matched: int, char: str) -> int:
    """`matched` after one more character (Knuth, Morris, Pratt 1977: amortized constant time per character)."""
    while matched and stop[matched] != char:
        matched = failure[matched]
    return matched + (stop[matched] == char)


def _failure_function(stop: str) -> list[int]:
    """For each n < len(stop), the length of the longest proper prefix of stop[:n] that is also its suffix."""
    failure = [0, 0]
    for char in stop[1:-1]:
        failure.append(_advance(stop, failure, failure[-1], char))
    return failure
