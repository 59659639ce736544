"""The models of a server, and how requests become sequences of their engines."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from thinker.generation.engine import Generator
from thinker.generation.prompt_scores import PromptScores
from thinker.generation.sampling_params import SamplingParams, check_text
from thinker.generation.sequence import Completion
from thinker.runtime.errors import UserError
from thinker.serving.answers import Choice, Prompt
from thinker.serving.api_errors import ApiError
from thinker.serving.calls.calling import Calling
from thinker.serving.chat_prompts import encode_chat
from thinker.serving.engine_thread import EngineThread
from thinker.serving.protocol import ChatRequest, CompletionRequest, invalid, refusal


@dataclass(frozen=True)
class ServedModel:
    """A model and the thread that decodes its texts."""

    name: str
    path: Path  # its folder; of a run, the folder of a checkpoint
    engine: EngineThread
    precision: str  # for people: "fp32", or "8-bit weights, fp32"
    n_parameters: int  # of the model as it was trained
    prompt_limit: int | None = None  # tokens; None: the context
    max_tokens: int | None = None  # generated tokens of a text; None: any number
    allow_special: bool = False  # names of special tokens in messages of chats are these tokens
    example: str | None = None  # the beginning of a text of its kind, if its run names one

    @property
    def generator(self) -> Generator:
        """The model, ready to decode."""
        return self.engine.generator

    @property
    def context_len(self) -> int:
        """Tokens that the model was trained to read."""
        return int(min(self.generator.context_len, self.generator.config.max_seq_len))

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt."""
        if self.prompt_limit is None:
            return self.context_len
        return min(self.context_len, self.prompt_limit)

    def describe(self) -> dict[str, Any]:
        """An entry of /v1/models: OpenAI's fields, and ours."""
        tokenizer = self.generator.tokenizer
        return {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "thinker",
            # Ours from here on.
            "context_length": self.context_len,
            "max_prompt_tokens": self.max_prompt,
            "max_tokens": self.max_tokens,
            "vocab_size": tokenizer.vocab_size,
            "chat": tokenizer.chat_template is not None,
            "slides": self.generator.slide,
            "parameters": self.n_parameters,
            "precision": self.precision,
            "example": self.example,
        }

    def vocabulary(self) -> dict[str, Any]:
        """The text of every id. Ids without valid text have null, and their bytes apart."""
        tokenizer = self.generator.tokenizer
        texts: list[str | None] = []
        incomplete: dict[str, list[int]] = {}
        for token in range(tokenizer.vocab_size):
            data = tokenizer.token_bytes(token)
            text = None
            try:
                if data:  # special tokens have none
                    text = data.decode()
            except UnicodeDecodeError:  # a part of a character
                incomplete[str(token)] = list(data)
            texts.append(text)
        return {
            "tokens": texts,
            "bytes": incomplete,
            "bos_id": tokenizer.bos_id,
            "eos_ids": tokenizer.eos_ids,
            "special": {str(token): name for name, token in tokenizer.special_tokens.items()},
        }

    def choices(self, body: CompletionRequest | ChatRequest) -> list[Choice]:
        """All choices of a request, with their sequences; may take long for long texts.

        Raises ApiError.
        """
        body.check()
        seed = body.seed
        if seed is None:
            seed = secrets.randbelow(2**31)
        choices = []
        try:
            for prompt in self._encoded_prompts(body):
                n_new = self._max_new_tokens(body, len(prompt.tokens))
                for _ in range(body.n):
                    # Each choice has a seed of its own, and the response says which one.
                    index = len(choices)
                    params = body.sampling_params(n_new, seed + index, body.n_top)
                    choices.append(self._new_choice(index, body, prompt, params))
        except UserError as error:
            raise refusal(error, body) from None
        return choices

    def _new_choice(
        self,
        index: int,
        body: CompletionRequest | ChatRequest,
        prompt: Prompt,
        params: SamplingParams,
    ) -> Choice:
        generator = self.generator
        completion = Completion("")
        if isinstance(body, ChatRequest) and body.callable_tools:
            tokenizer = self._calling.tokenizer
            sequence = generator.new_sequence(index, completion, params, prompt.tokens, tokenizer)
            return Choice(sequence, body, prompt, self._calling.prepare(sequence, body))
        sequence = generator.new_sequence(index, completion, params, prompt.tokens)
        if isinstance(body, CompletionRequest) and body.echo and body.has_logprobs:
            n_ids = generator.tokenizer.vocab_size
            n_visible = generator.config.prefix
            sequence.prompt_scores = PromptScores(prompt.tokens, body.n_top, n_ids, n_visible)
        return Choice(sequence, body, prompt)

    @cached_property
    def _calling(self) -> Calling:
        """How this model calls tools."""
        return Calling(self.generator.tokenizer)

    def _encoded_prompts(self, body: CompletionRequest | ChatRequest) -> list[Prompt]:
        if isinstance(body, ChatRequest):
            return [Prompt(self._chat_prompt(body))]
        return self._prompts(body)

    def _prompts(self, body: CompletionRequest) -> list[Prompt]:
        prompts = body.prompts
        self._check_number(len(prompts) * body.n)
        if not prompts or [] in prompts:
            raise invalid("prompt", body.prompt, type(body))
        # All are encoded before the first is checked: a text that cannot be encoded is the error.
        encoded = [self._encode(prompt, body.add_special_tokens) for prompt in prompts]
        if body.truncate_prompt_tokens is not None:
            encoded = [self._newest(prompt, body.truncate_prompt_tokens) for prompt in encoded]
        for prompt in encoded:
            self._check_length(prompt.tokens, "prompt")
        return encoded

    def _newest(self, prompt: Prompt, n_tokens: int) -> Prompt:
        """The last tokens of a prompt."""
        n_removed = len(prompt.tokens) - n_tokens
        if n_removed <= 0:
            return prompt
        tokens = prompt.tokens[n_removed:]
        return Prompt(tokens, self._decode(tokens), max(0, prompt.n_added - n_removed))

    def _decode(self, tokens: list[int]) -> str:
        """The text of tokens. Unknown ids, which are refused later, have none."""
        tokenizer = self.generator.tokenizer
        return tokenizer.decode(token for token in tokens if 0 <= token < tokenizer.vocab_size)

    def _encode(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        """A text or token ids as a Prompt, with the BOS token if the model expects one."""
        tokenizer = self.generator.tokenizer
        added = tokenizer.bos_prefix if add_special_tokens else []
        if isinstance(prompt, str):
            text = check_text(prompt, "the prompt")
            tokens = tokenizer.encode(text)
            if not tokens and not added:
                added = [tokenizer.bos_id]  # a model cannot read nothing
        else:
            tokens = prompt
            if tokens[: len(added)] == added:
                added = []
            text = self._decode(tokens)
        return Prompt([*added, *tokens], text, len(added))

    def _chat_prompt(self, body: ChatRequest) -> list[int]:
        tokenizer = self.generator.tokenizer
        self._check_number(body.n)
        if tokenizer.chat_template is None:
            reason = "has no chat template: it was not trained on chats; use /v1/completions"
            raise ApiError(400, f"the model {self.name} {reason}", "model")
        tokens = encode_chat(tokenizer, body, self.allow_special)
        self._check_length(tokens, "messages")
        return tokens

    def _max_new_tokens(self, body: CompletionRequest | ChatRequest, n_prompt: int) -> int:
        limit = body.max_tokens
        name = "max_tokens"
        if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
            limit = body.max_completion_tokens
            name = "max_completion_tokens"
        most = self.max_tokens
        if limit is None:
            # What fits: the last new token is not read, so it needs no place.
            limit = self.context_len + 1 - n_prompt
            if most is not None:
                limit = min(limit, most)
        elif most is not None and limit > most:
            message = f"{name} is {limit}; this server generates at most {most} tokens per text"
            raise ApiError(400, message, name)
        return max(1, limit)  # with max_tokens 0, which is of a prompt alone, it is not shown

    def _check_length(self, tokens: list[int], param: str) -> None:
        if len(tokens) > self.max_prompt:
            limit = f"the model {self.name} reads at most {self.max_prompt}"
            has = "have" if param == "messages" else "has"
            message = f"{param} {has} {len(tokens)} tokens; {limit}"
            raise ApiError(400, message, param, "context_length_exceeded")

    def _check_number(self, n_texts: int) -> None:
        if n_texts > self.engine.max_texts:
            limit = f"this server decodes and queues at most {self.engine.max_texts}"
            raise ApiError(400, f"the request asks for {n_texts} texts; {limit}", "n")
