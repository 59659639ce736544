"""Completions in OpenAI's two forms, whole and as the chunks of a stream."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.sequence import SampledToken, Sequence
from thinker.generation.streaming import TextStreamer
from thinker.serving.calls.call_readers import Delta, ForcedCall, FreeCalls, join
from thinker.serving.protocol import TOKEN_PREFIX, ChatRequest, CompletionRequest

ScoredToken = tuple[int, "float | None", dict[int, float]]  # as SampledToken, or without a score


@dataclass(frozen=True)
class Prompt:
    """What a model reads before an answer."""

    tokens: list[int]
    text: str = ""  # of /v1/completions
    n_added: int = 0  # tokens at the beginning that the request did not have: BOS


class Choice:
    """Writes one choice of a request, piece by piece."""

    def __init__(
        self,
        sequence: Sequence,
        body: CompletionRequest | ChatRequest,
        prompt: Prompt,
        calls: ForcedCall | FreeCalls | None = None,
    ) -> None:
        """`calls`: what finds calls of tools."""
        self.sequence = sequence
        self.body = body
        self.tokenizer = sequence.tokenizer
        self.is_chat = isinstance(body, ChatRequest)
        self.is_echo = not self.is_chat and body.echo
        self.is_prompt_only = not self.is_chat and body.max_tokens == 0
        self._prompt = prompt
        self._calls = calls
        self._streamer = TextStreamer(self.tokenizer, sequence.params.stop, sequence.drops_space)
        self._has_begun = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0  # characters before the next token

    def opening(self) -> dict[str, Any] | None:
        """The choice of the first chunk of a chat, which says who speaks. Texts have none."""
        if not self.is_chat:
            return None
        choice = self._choice({"delta": {"role": "assistant", "content": ""}}, [], None)
        self._add_prompt(choice)
        return choice

    def pieces(
        self, text: str, sampled: list[SampledToken], finish_reason: str | None
    ) -> Iterator[dict[str, Any]]:
        """The choices of chunks, without those that would say nothing."""
        if self.is_chat:
            yield from self._chat_pieces(text, sampled, finish_reason)
        elif self.is_prompt_only:
            yield self._echo("length")
        else:
            yield from self._text_pieces(text, sampled, finish_reason)

    def _chat_pieces(
        self, text: str, sampled: list[SampledToken], finish_reason: str | None
    ) -> Iterator[dict[str, Any]]:
        for part, token in self._split(text, sampled):
            deltas = self._deltas(part)
            if not deltas and self._says_something("", token):
                deltas = [{"content": ""}]
            for delta in deltas:
                yield self._choice({"delta": delta}, token, None)
                token = []
        if finish_reason:
            for delta in self._last_deltas():
                yield self._choice({"delta": delta}, [], None)
            yield self._choice({"delta": {}}, [], self._chat_reason(finish_reason))

    def _deltas(self, text: str) -> list[Delta]:
        """What new text adds to the message of a chat."""
        if self._calls is not None:
            return list(self._calls.feed(text))
        return [{"content": text}] if text else []

    def _last_deltas(self) -> list[Delta]:
        """What the end of the text adds to the message of a chat."""
        if self._calls is None:
            return []
        return list(self._calls.finish(self._meets_constraint))

    def _chat_reason(self, reason: str) -> str:
        """Why an answer ended: a model stops to call a tool."""
        has_calls = self._calls is not None and self._calls.n_calls > 0
        # A stop string of the request may end a call that had to come.
        is_cut = isinstance(self._calls, ForcedCall) and not self._meets_constraint
        if has_calls and reason == "stop" and not is_cut:
            return "tool_calls"
        return reason

    @property
    def _meets_constraint(self) -> bool:
        return self.sequence.completion.constraint_met is True

    def _text_pieces(
        self, text: str, sampled: list[SampledToken], finish_reason: str | None
    ) -> Iterator[dict[str, Any]]:
        is_first = not self._has_begun
        self._has_begun = True
        if is_first and self.is_echo:
            yield self._echo(None)
            is_first = False
        parts = self._split(text, sampled)
        for number, (part, token) in enumerate(parts, 1):
            reason = finish_reason if number == len(parts) else None
            if self._says_something(part, token) or reason or is_first:
                choice = self._choice({"text": part}, token, reason)
                if is_first:
                    self._add_prompt(choice)
                yield choice
            is_first = False

    def _echo(self, finish_reason: str | None) -> dict[str, Any]:
        """A choice with the prompt alone."""
        choice = self._choice({"text": self._prompt.text}, [], finish_reason)
        if self.body.has_logprobs:
            choice["logprobs"] = self._prompt_logprobs()
        self._add_prompt(choice)
        return choice

    def _split(
        self, text: str, sampled: list[SampledToken]
    ) -> list[tuple[str, list[SampledToken]]]:
        """Divide the text of several tokens into that of each, if the request asks for tokens.

        Otherwise a chunk has all that one step added: clients need most of a fast stream's time.
        """
        if not self._has_token_fields:
            return [(text, sampled)]
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
        return bool(text or (sampled and self._has_token_fields))

    @property
    def _has_token_fields(self) -> bool:
        """Whether the request asks for something about each token."""
        return self.body.has_logprobs or self.body.return_token_ids

    def whole(self, sampled: list[SampledToken]) -> dict[str, Any]:
        """The choice of a response without a stream."""
        if self.is_prompt_only:
            return self._echo("length")
        completion = self.sequence.completion
        if self.is_chat:
            deltas = [*self._deltas(completion.text), *self._last_deltas()]
            message = {"role": "assistant", "refusal": None, **join(deltas)}
            reason = self._chat_reason(completion.finish_reason)
            choice = self._choice({"message": message}, sampled, reason)
            self._add_prompt(choice)
            return choice
        if not self.is_echo:
            choice = self._choice({"text": completion.text}, sampled, completion.finish_reason)
            self._add_prompt(choice)
            return choice
        choice = self._echo(completion.finish_reason)
        new = self._choice({"text": completion.text}, sampled, None)
        choice["text"] += new["text"]
        for name, values in (new["logprobs"] or {}).items():
            choice["logprobs"][name] += values
        if self.body.return_token_ids:
            choice["token_ids"] = new["token_ids"]
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
            choice["prompt_token_ids"] = self._prompt.tokens

    def _name(self, token: int) -> str:
        if self.body.return_tokens_as_token_ids:
            return f"{TOKEN_PREFIX}{token}"
        return token_text(self.tokenizer, token)

    def _prompt_logprobs(self) -> dict[str, list[Any]]:
        """Lists with an element per token of the prompt that the client sent.

        The first one has no log-probability, and what the server added before it is left out: as
        with OpenAI, element i belongs to token i of the prompt.
        """
        scores = self.sequence.prompt_scores
        n_added = self._prompt.n_added
        tokens = self._prompt.tokens[n_added:]
        logprobs = scores.logprobs[n_added:]
        if logprobs:
            logprobs[0] = None
        # Offsets count from the end of the text, because some tokenizers add a space before it.
        written = b"".join(map(self.tokenizer.token_bytes, tokens)).decode(errors="replace")
        self._offset = len(self._prompt.text) - len(written)
        lists = self._text_logprobs(list(zip(tokens, logprobs, scores.top_logprobs[n_added:])))
        # The answer is decoded on its own.
        self._offset = len(self._prompt.text)
        self._decoder.reset()
        return lists

    def _text_logprobs(self, scored: list[ScoredToken]) -> dict[str, list[Any]]:
        """Lists with an element per token."""
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, logprob, top in scored:
            lists["tokens"].append(self._name(token))
            lists["token_logprobs"].append(logprob)
            lists["top_logprobs"].append(self._named_top(token, logprob, top))
            lists["text_offset"].append(max(0, self._offset))
            # The decoder counts a character at the token that completes it.
            data = self.tokenizer.token_bytes(token)
            self._offset += len(self._decoder.decode(data))
        return lists

    def _named_top(
        self, token: int, logprob: float | None, top: dict[int, float]
    ) -> dict[str, float] | None:
        """The likeliest tokens by name, and the token itself if it is not one of them."""
        if logprob is None:
            return None
        named: dict[str, float] = {}
        for other, value in [*top.items(), (token, logprob)]:
            named.setdefault(self._name(other), value)  # two ids may have one name
        return named

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


def usage(choices: list[Choice], n_per_prompt: int) -> dict[str, Any]:
    """Count tokens; a prompt counts once for all its choices."""
    n_prompt = 0
    n_cached = 0
    n_new = 0
    for choice in choices[::n_per_prompt]:
        n_prompt += choice.sequence.completion.prompt_tokens
        n_cached += choice.sequence.n_shared
    for choice in choices:
        if not choice.is_prompt_only:
            n_new += len(choice.sequence.completion.token_ids)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
