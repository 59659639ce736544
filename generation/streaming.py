"""Streaming detokenizer, correct when characters or stop strings span several tokens."""

import codecs

from thinker.data.tokenizers.tokenizer import Tokenizer


class TextStreamer:
    """Decodes token by token, returning text as early as possible and never revising it.

    - The joined pieces equal all bytes decoded at once, with U+FFFD for invalid UTF-8 (The Unicode
      Standard, section 3.9: one per maximal subpart). Special tokens have no text.
    - With drops_space, a space at the very start is left out.
    - The text is cut before the earliest stop string, and later calls return "". A suffix that may
      begin a stop string is held back until that is certain.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), drops_space: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.drops_space = drops_space
        self.stop = stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = ""  # decoded text that may begin a stop string
        self.stopped = False

    def feed(self, *tokens: int) -> str:
        """Add tokens. Returns the newly certain text, or ""."""
        text = self.decoder.decode(self.tokenizer.decode_bytes(tokens))
        unfinished = self.decoder.getstate()[0]
        # Python waits for the third byte of a surrogate, for errors="surrogatepass"; here each byte
        # is a U+FFFD.
        if unfinished[:1] == b"\xed" and unfinished[1:] >= b"\xa0":
            text += self.decoder.decode(b"", final=True)
        return self._release(text)

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        text = self._release(self.decoder.decode(b"", final=True)) + self.pending
        self.pending = ""
        return text

    def _release(self, text: str) -> str:
        """Add decoded text. Returns what is certain, and keeps the rest for later."""
        if self.drops_space and text:
            text = text.removeprefix(" ")
            self.drops_space = False
        if self.stopped:
            return ""
        text = self.pending + text
        starts = [text.index(stop) for stop in self.stop if stop in text]
        if starts:
            self.stopped = True
            self.pending = ""
            return text[: min(starts)]
        n_certain = len(text) - self._n_held(text)
        self.pending = text[n_certain:]
        return text[:n_certain]

    def _n_held(self, text: str) -> int:
        """The length of the longest suffix that may begin a stop string."""
        longest = max(map(len, self.stop), default=0)
        for n in range(min(len(text), longest), 0, -1):
            suffix = text[-n:]
            if any(stop.startswith(suffix) for stop in self.stop):
                return n
        return 0
