"""Tokens to text as they come, safe at the borders of characters and of stop strings."""

from __future__ import annotations

import codecs

from thinker.data.tokenizer import Tokenizer


class TextStreamer:
    """Decodes token by token; what it gives out is never taken back, and nothing is withheld without need.

    - Joined, the pieces are all tokens' bytes decoded at once, bytes that are no UTF-8 as U+FFFD. A character that
      spans tokens appears when it is whole, a U+FFFD as soon as no further byte can prevent it. Special tokens are
      no text. (The Unicode Standard, section 3.9: one U+FFFD per maximal subpart.)
    - Text ends with the first token, or finish(), after which it contains a stop string (none may be empty): it is
      cut where the earliest one to be found then begins, and whatever is fed later gives "".
    - The longest end of the text that is a beginning of a stop string waits, shorter than the longest stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # decoded, but perhaps the beginning of a stop string
        self.stopped = False
        self._borders = [_borders(text) for text in stop]
        self._matched = [0] * len(stop)  # how many characters of each stop string the text now ends with

    def feed(self, token: int) -> str:
        """The text that is certain after this token, "" while there is none."""
        text = self.decoder.decode(self.tokenizer.decode_bytes([token]))
        unfinished = self.decoder.getstate()[0]
        # Python waits for the third byte of a surrogate, which errors="surrogatepass" would need; here all are U+FFFD.
        if unfinished[:1] == b"\xed" and unfinished[1:] >= b"\xa0":
            text += self.decoder.decode(b"", final=True)
        return self._release(text)

    def finish(self) -> str:
        """The rest, when no token comes any more."""
        text = self._release(self.decoder.decode(b"", final=True))
        text, self.held = text + self.held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        starts = []
        for which, (stop, borders) in enumerate(zip(self.stop, self._borders)):
            matched = self._matched[which]
            for at, char in enumerate(text, len(self.held) + 1):
                matched = _advance(stop, borders, matched, char)
                if matched == len(stop):
                    starts.append(at - matched)
                    break
            self._matched[which] = matched
        self.held += text
        self.stopped = bool(starts)
        end = min(starts, default=len(self.held) - max(self._matched, default=0))
        released, self.held = self.held[:end], "" if starts else self.held[end:]
        return released


def _advance(stop: str, borders: list[int], matched: int, char: str) -> int:
    """`matched` after one more character of text (Knuth, Morris, Pratt 1977: constant time, averaged over a text)."""
    while matched and stop[matched] != char:
        matched = borders[matched]
    return matched + (stop[matched] == char)


def _borders(stop: str) -> list[int]:
    """For each n below len(stop), how long a beginning of it, itself left out, stop[:n] ends with."""
    borders = [0, 0]
    for char in stop[1:-1]:
        borders.append(_advance(stop, borders, borders[-1], char))
    return borders
