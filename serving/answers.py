"""Completions in OpenAI's two forms, whole and as the chunks of a stream."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Callable
from typing import Any

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.sequence import Completion, SampledToken, Sequence
from thinker.serving.protocol import TOKEN_PREFIX, ChatRequest, CompletionRequest


class Choice:
    """Writes one choice of a request, piece by piece."""

    def __init__(self, sequence: Sequence, body: CompletionRequest | ChatRequest) -> None:
        """Create it before the sequence is submitted: then another thread changes the sequence."""
        self._prompt = list(sequence.tokens)
        self.sequence, self.body, self.tokenizer = sequence, body, sequence.tokenizer
        self.is_chat = isinstance(body, ChatRequest)
        self._has_begun = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0  # characters before the next token

    def piece(
        self, text: str, sampled: list[SampledToken], finish_reason: str | None
    ) -> dict[str, Any] | None:
        """A choice of a chunk, or None if it would say nothing."""
        is_first, self._has_begun = not self._has_begun, True
        wants_tokens = sampled and (self.body.has_logprobs or self.body.return_token_ids)
        if not (is_first or text or wants_tokens or finish_reason):
            return None
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {
                "delta": {"role": "assistant", "content": text} if is_first else {"content": text}
            }
        choice = self._choice(content, sampled, finish_reason)
        if is_first:
            self._add_prompt(choice)
        return choice

    def whole(self, sampled: list[SampledToken]) -> dict[str, Any]:
        """The choice of a response without a stream."""
        completion = self.sequence.completion
        content: dict[str, Any] = {"text": completion.text}
        if self.is_chat:
            content = {
                "message": {"role": "assistant", "content": completion.text, "refusal": None}
            }
        choice = self._choice(content, sampled, completion.finish_reason)
        self._add_prompt(choice)
        return choice

    def _choice(
        self, content: dict[str, Any], sampled: list[SampledToken], reason: str | None
    ) -> dict[str, Any]:
        write = self._chat_logprobs if self.is_chat else self._text_logprobs
        logprobs = write(sampled) if self.body.has_logprobs and sampled else None
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
        choice["seed"] = self.sequence.params.seed
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = self._prompt

    def _name(self, token: int) -> str:
        return (
            f"{TOKEN_PREFIX}{token}"
            if self.body.return_tokens_as_token_ids
            else token_text(self.tokenizer, token)
        )

    def _text_logprobs(self, sampled: list[SampledToken]) -> dict[str, list[Any]]:
        """Lists with an element per token."""
        offsets = []
        for token, *_ in sampled:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self.tokenizer.token_bytes(token)))
        return {
            "tokens": [self._name(token) for token, *_ in sampled],
            "token_logprobs": [logprob for _, logprob, _ in sampled],
            "top_logprobs": [
                {self._name(token): value for token, value in top.items()} for *_, top in sampled
            ],
            "text_offset": offsets,
        }

    def _chat_logprobs(self, sampled: list[SampledToken]) -> dict[str, Any]:
        """An object per token."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            data = list(self.tokenizer.token_bytes(token))
            return {"token": self._name(token), "logprob": logprob, "bytes": data or None}

        return {
            "content": [
                entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in top.items()]}
                for token, logprob, top in sampled
            ],
            "refusal": None,
        }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; incomplete characters as "bytes:\\\\xe6\\\\xbc", as OpenAI does; special tokens by name."""
    data = tokenizer.token_bytes(token)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    names = (name for name, number in tokenizer.special_tokens.items() if number == token)
    return text or next(names, f"<{token}>")


def envelope(body: CompletionRequest | ChatRequest) -> Callable[..., dict[str, Any]]:
    """A function from choices to a response, or to one of many chunks."""
    is_chat, is_chunk = isinstance(body, ChatRequest), body.stream
    kind = (
        ("chat.completion.chunk" if is_chunk else "chat.completion")
        if is_chat
        else "text_completion"
    )
    head = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}", "object": kind}
    head |= {"created": int(time.time()), "model": body.model}

    def wrap(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        has_usage = not is_chunk or (
            body.stream_options is not None and body.stream_options.include_usage
        )
        return {**head, "choices": choices} | ({"usage": usage} if has_usage else {})

    return wrap


def usage(sequences: list[Sequence], n_choices: int) -> dict[str, Any]:
    """Count tokens; a prompt counts once for all its choices."""
    completions: list[Completion] = [sequence.completion for sequence in sequences]
    n_prompt = sum(completion.prompt_tokens for completion in completions[::n_choices])
    n_new = sum(len(completion.token_ids) for completion in completions)
    n_cached = sum(sequence.n_shared for sequence in sequences[::n_choices])
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
