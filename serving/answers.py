"""Completions in OpenAI's two forms, whole and as the chunks of a stream."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.sequence import SampledToken, Sequence
from thinker.generation.streaming import TextStreamer
from thinker.serving.protocol import TOKEN_PREFIX, ChatRequest, CompletionRequest


class Choice:
    """Writes one choice of a request, piece by piece."""

    def __init__(self, sequence: Sequence, body: CompletionRequest | ChatRequest) -> None:
        """Create it before the sequence is submitted: then another thread changes the sequence."""
        self.sequence = sequence
        self.body = body
        self.tokenizer = sequence.tokenizer
        self.is_chat = isinstance(body, ChatRequest)
        self._prompt = list(sequence.tokens)
        self._streamer = TextStreamer(self.tokenizer, sequence.params.stop)
        self._has_begun = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0  # characters before the next token

    def opening(self) -> dict[str, Any] | None:
        """The choice of the first chunk of a chat, which says who speaks. Texts have none."""
        if not self.is_chat:
            return None
        choice = self._choice({"delta": {"role": "assistant", "content": ""}}, [], None)
        self._has_begun = True
        self._add_prompt(choice)
        return choice

    def pieces(
        self, text: str, sampled: list[SampledToken], finish_reason: str | None
    ) -> Iterator[dict[str, Any]]:
        """The choices of chunks: one per token, without those that would say nothing."""
        parts = self._split(text, sampled)
        for number, (part, token) in enumerate(parts, 1):
            if self.is_chat:
                if self._says_something(part, token):
                    yield self._choice({"delta": {"content": part}}, token, None)
                continue
            reason = finish_reason if number == len(parts) else None
            if self._says_something(part, token) or reason or not self._has_begun:
                choice = self._choice({"text": part}, token, reason)
                if not self._has_begun:
                    self._has_begun = True
                    self._add_prompt(choice)
                yield choice
        if self.is_chat and finish_reason:
            yield self._choice({"delta": {}}, [], finish_reason)

    def _split(
        self, text: str, sampled: list[SampledToken]
    ) -> list[tuple[str, list[SampledToken]]]:
        """Divide the text of several tokens into that of each."""
        parts = []
        for token in sampled[:-1]:
            part = self._streamer.feed(token[0])
            parts.append((part, [token]))
            text = text[len(part) :]
        for token in sampled[-1:]:
            self._streamer.feed(token[0])
        parts.append((text, sampled[-1:]))  # with what was held back until the end
        return parts

    def _says_something(self, text: str, sampled: list[SampledToken]) -> bool:
        # A token without text, such as half a character, still has a log-probability and an id.
        has_token_fields = self.body.has_logprobs or self.body.return_token_ids
        return bool(text or (sampled and has_token_fields))

    def whole(self, sampled: list[SampledToken]) -> dict[str, Any]:
        """The choice of a response without a stream."""
        completion = self.sequence.completion
        content: dict[str, Any] = {"text": completion.text}
        if self.is_chat:
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            content = {"message": message}
        choice = self._choice(content, sampled, completion.finish_reason)
        self._add_prompt(choice)
        return choice

    def _choice(
        self, content: dict[str, Any], sampled: list[SampledToken], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self.body.has_logprobs and sampled:
            write = self._chat_logprobs if self.is_chat else self._text_logprobs
            logprobs = write(sampled)
        choice = {
            "index": self.sequence.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = [token for token, *_ in sampled]
        return choice

    def _add_prompt(self, choice: dict[str, Any]) -> None:
        """Add what a client needs to repeat the request, once per choice."""
        choice["seed"] = self.sequence.params.seed
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = self._prompt

    def _name(self, token: int) -> str:
        if self.body.return_tokens_as_token_ids:
            return f"{TOKEN_PREFIX}{token}"
        return token_text(self.tokenizer, token)

    def _text_logprobs(self, sampled: list[SampledToken]) -> dict[str, list[Any]]:
        """Lists with an element per token."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for token, logprob, top in sampled:
            tokens.append(self._name(token))
            logprobs.append(logprob)
            # Two ids may have one name; then the later one counts.
            tops.append({self._name(other): value for other, value in top.items()})
            offsets.append(self._offset)
            # The decoder counts a character at the token that completes it.
            data = self.tokenizer.token_bytes(token)
            self._offset += len(self._decoder.decode(data))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _chat_logprobs(self, sampled: list[SampledToken]) -> dict[str, Any]:
        """An object per token."""
        content = []
        for token, logprob, top in sampled:
            entry = self._chat_logprob(token, logprob)
            entry["top_logprobs"] = [self._chat_logprob(*pair) for pair in top.items()]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _chat_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        data = list(self.tokenizer.token_bytes(token))
        if not data:  # a special token
            data = None
        return {"token": self._name(token), "logprob": logprob, "bytes": data}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token, as OpenAI writes it.

    Incomplete characters are "bytes:\\\\xe6\\\\xbc"; special tokens have their names.
    """
    data = tokenizer.token_bytes(token)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    if text:
        return text
    for name, number in tokenizer.special_tokens.items():
        if number == token:
            return name
    return f"<{token}>"


def envelope(body: CompletionRequest | ChatRequest) -> Callable[..., dict[str, Any]]:
    """A function from choices to a response, or to one of many chunks."""
    is_chunk = body.stream
    if isinstance(body, ChatRequest):
        prefix = "chatcmpl"
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
    else:
        prefix = "cmpl"
        kind = "text_completion"
    # All chunks of a stream have the same id and time.
    head = {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model,
    }
    has_usage = not is_chunk or body.wants_usage

    def wrap(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        response = {**head, "choices": choices}
        if has_usage:  # null in all chunks but the last
            response["usage"] = usage
        return response

    return wrap


def usage(sequences: list[Sequence], n_choices: int) -> dict[str, Any]:
    """Count tokens; a prompt counts once for all its choices."""
    n_prompt = n_cached = n_new = 0
    for sequence in sequences[::n_choices]:
        n_prompt += sequence.completion.prompt_tokens
        n_cached += sequence.n_shared
    for sequence in sequences:
        n_new += len(sequence.completion.token_ids)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
