"""Requests of the API: OpenAI's fields, vLLM's additions, and how they become SamplingParams."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from thinker.generation.sampler import SamplingParams
from thinker.runtime.errors import UserError, did_you_mean
from thinker.serving.errors import ApiError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
NUMBER = 1e100  # the range of SamplingParams
TOKEN_PREFIX = "token_id:"  # with return_tokens_as_token_ids


class Fields(BaseModel):
    """A JSON object without unknown fields, with values of exactly these types. A description says what to use.

    A field with null is the same as no field, as for OpenAI: clients send null for what they leave at its default, and
    the messages of their history have fields such as "refusal": null.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return (
            {name: value for name, value in fields.items() if value is not None}
            if type(fields) is dict
            else fields
        )


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = False


class JsonSchema(Fields):
    """A schema for the answer. It is always enforced, so `strict` makes no difference; the other fields are labels."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Item = TypeVar("Item")
Items = Annotated[
    list[Item], Field(fail_fast=True)
]  # a body may have a million mistakes, and each takes memory
Number = Annotated[float, Field(allow_inf_nan=False, ge=-NUMBER, le=NUMBER, description="a number")]


class Sampling(Fields):
    """Fields of both kinds of requests."""

    model: str = Field(description="the id of a model that /v1/models lists")
    temperature: float = Field(1.0, ge=0, le=NUMBER, description="0 (greedy) or a positive number")
    top_p: float = Field(1.0, gt=0, le=1, description="a number in (0, 1]")
    top_k: int | None = Field(None, ge=1, description="an integer of at least 1, or null")
    min_p: float = Field(0.0, ge=0, le=1, description="a number in [0, 1]")
    repetition_penalty: float = Field(
        1.0, gt=0, le=NUMBER, description="a positive number (1: none)"
    )
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: dict[str, Number] | None = Field(
        None, description="an object from token ids to numbers, or null"
    )
    n: int = Field(1, ge=1, le=MAX_CHOICES, description=f"an integer from 1 to {MAX_CHOICES}")
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description=f"an integer from 0 to {MAX_SEED}, or null"
    )
    stop: str | Items[str] | None = Field(
        None, description="a non-empty string, a list of up to 16 of them, or null"
    )
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions | None = Field(
        None, description='{"include_usage": true or false}, with stream'
    )
    response_format: ResponseFormat | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
    )
    return_token_ids: bool = Field(False, description="true or false")
    return_tokens_as_token_ids: bool = Field(False, description="true or false")

    def sampling_params(self, max_new_tokens: int, seed: int, logprobs: int) -> SamplingParams:
        """The parameters of one choice. Raises ApiError."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > 16 or "" in stop:
            raise invalid("stop", self.stop, type(self))
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options has no effect without stream; remove it", "stream_options"
            )
        if logprobs and not self.has_logprobs:
            raise ApiError(
                400,
                "top_logprobs has no effect without logprobs; set logprobs to true",
                "top_logprobs",
            )
        kind = None if self.response_format is None else self.response_format.type
        schema = None if self.response_format is None else self.response_format.json_schema
        if (kind == "json_schema") != (schema is not None):
            raise ApiError(
                400,
                "response_format: json_schema goes with the type json_schema",
                "response_format",
            )
        try:
            bias = {int(token): number for token, number in (self.logit_bias or {}).items()}
        except ValueError:
            raise invalid("logit_bias", self.logit_bias, type(self)) from None
        json_schema = {"json_object": True, "json_schema": schema and schema.json_schema}.get(kind)
        try:
            return SamplingParams(
                max_new_tokens, self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty,
                self.presence_penalty, self.frequency_penalty, logit_bias=bias, logprobs=logprobs, seed=seed,
                stop=tuple(stop), json_schema=json_schema,
            )  # fmt: skip
        except UserError as error:
            raise refusal(error, type(self)) from None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]] = Field(
        description="a string, a list of token ids, or a list of either"
    )
    max_tokens: int = Field(16, ge=1, description="an integer of at least 1")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}, or null"
    )

    @property
    def n_top(self) -> int:
        """Number of alternatives per token."""
        return self.logprobs or 0

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """A list of prompts."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return self.prompt


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Fields):
    """A message. The chat template decides which roles it knows."""

    role: str
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        """The content as one string."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(
        min_length=1, description='a list of {"role": "user", "content": "..."}, with text only'
    )
    max_tokens: int | None = Field(None, ge=1, description="an integer of at least 1, or null")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="an integer of at least 1, or null"
    )
    logprobs: bool = Field(False, description="true or false")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description=f"an integer from 0 to {MAX_LOGPROBS} with logprobs, or null",
    )

    @property
    def n_top(self) -> int:
        """Number of alternatives per token."""
        return self.top_logprobs or 0

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return self.logprobs


class InspectRequest(Fields):
    """POST /inspect."""

    model: str = Field(description="the id of a model that /v1/models lists")
    text: str | None = Field(None, description="a string")
    token_ids: Items[int] | None = Field(None, description="a list of token ids")


Request = TypeVar("Request", bound=Fields)


def parse(kind: type[Request], body: bytes) -> Request:
    """Parse and validate the body of a request. Raises ApiError with the first mistake."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_context=False)
    location = [str(part) for part in first["loc"]]
    if not location:
        reason = first["msg"].removeprefix("Invalid JSON: ")
        raise ApiError(
            400,
            f"the body of the request is not a valid JSON object: {reason}",
            code="invalid_json",
        )
    names = {field.alias or name for name, field in kind.model_fields.items()}
    if first["type"] == "extra_forbidden":
        param = ".".join(location)
        hint = did_you_mean(location[0], names) if len(location) == 1 else ""
        raise ApiError(
            400, f"{param} is not supported here; remove it{hint}", param, "unknown_field"
        )
    if first["type"] == "missing" and len(location) == 1:
        raise ApiError(
            400,
            f"{location[0]} is missing; pass {kind.model_fields[location[0]].description}",
            location[0],
        )
    raise invalid(location[0], _value(body, location[0]), kind)


def invalid(name: str, value: object, kind: type[Fields]) -> ApiError:
    """The error for a field with a wrong value."""
    shown = json.dumps(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ApiError(400, f"{name} is {shown}; use {kind.model_fields[name].description}", name)


def refusal(error: UserError, kind: type[Fields]) -> ApiError:
    """The error for what a Generator refuses. Its messages begin with the parameter at fault."""
    prompt = "messages" if "messages" in kind.model_fields else "prompt"
    fields = {"the prompt": prompt, "json_schema": "response_format"} | {
        name: name for name in kind.model_fields
    }
    return ApiError(
        400,
        str(error),
        next((fields[name] for name in fields if str(error).startswith(name)), None),
    )


def _value(body: bytes, name: str) -> object:
    return json.loads(body)[name]
