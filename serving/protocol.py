"""Requests of the API: OpenAI's fields, vLLM's additions, and how they become SamplingParams."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from thinker.generation.sampling_params import SamplingParams
from thinker.runtime.errors import UserError, did_you_mean
from thinker.serving.api_errors import ApiError
from thinker.serving.calls.call_schemas import call_or_answer_schema, call_schema

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
NUMBER = 1e100  # the range of SamplingParams
TOKEN_PREFIX = "token_id:"  # with return_tokens_as_token_ids
TOKEN_ID = r"0|[1-9][0-9]{0,18}"  # each id in one way only: two keys may not mean the same
REPLACED = {"functions": "tools", "function_call": "tool_choice"}  # old names of OpenAI


class Fields(BaseModel):
    """A JSON object without unknown fields, with values of exactly these types.

    The description of a field says what to use. A field with null is the same as no field, as for
    OpenAI: clients send null for what they leave at its default, and the messages of their history
    have fields such as "refusal": null.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if type(fields) is not dict:  # which is a mistake that pydantic reports
            return fields
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        n_unknown = 0
        for name, value in fields.items():
            n_unknown += name not in known
            # Of a million unknown fields, the first is enough: each mistake takes time.
            if value is not None and (name in known or n_unknown == 1):
                kept[name] = value
        return kept


def check_finite(value: Any) -> Any:
    """Return a JSON value. Raises ValueError if it has a number that JSON cannot express.

    The parser reads NaN, and 1e999 as infinity.
    """
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("not_finite", "a number is not finite") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(check_finite)]


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # nothing is added to the chunks


class JsonSchema(Fields):
    """A schema for the answer.

    It is always enforced, so `strict` makes no difference; the other fields are labels.
    """

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    json_schema: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """Free text, any JSON object, or JSON of a schema.

    `schema`, with the type json_object, is how other servers wrote it before OpenAI did.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    object_schema: dict[str, Any] | None = Field(None, alias="schema")


Item = TypeVar("Item")
# A body may have a million mistakes, and each takes memory: the first one is enough.
Items = Annotated[list[Item], Field(fail_fast=True)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-NUMBER, le=NUMBER, description="a number")]


class Labels(Fields):
    """Fields of OpenAI's reference that change no answer: labels, and wishes about speed.

    They are checked and then not used: nothing is stored, prefixes are shared anyway, and there is
    one tier of service.
    """

    user: str | None = Field(None, description="a string")
    metadata: dict[str, str] | None = Field(None, description="an object of strings")
    store: bool | None = Field(None, description="true or false; nothing is stored")
    service_tier: str | None = Field(None, description="a string")
    safety_identifier: str | None = Field(None, description="a string")
    prompt_cache_key: str | None = Field(None, description="a string")
    prompt_cache_retention: str | None = Field(None, description="a string")
    prompt_cache_options: JsonObject | None = Field(None, description="an object")


class Sampling(Labels):
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
        None, description='{"include_usage": true or false}, with stream, and no obfuscation'
    )
    response_format: ResponseFormat | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
    )
    return_token_ids: bool = Field(False, description="true or false")
    return_tokens_as_token_ids: bool = Field(False, description="true or false")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def schema_field(self) -> str:
        """The field with the schema of the answer."""
        return "response_format"

    def check(self) -> None:
        """Raise ApiError if fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options has no effect without stream; remove it"
            raise ApiError(400, message, "stream_options")

    def sampling_params(self, max_new_tokens: int, seed: int, logprobs: int) -> SamplingParams:
        """The parameters of one choice. Raises ApiError."""
        stop = self._stop_strings()
        json_schema = self._json_schema()
        bias = self._bias_by_id()
        try:
            return SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=bias,
                logprobs=logprobs,
                seed=seed,
                stop=stop,
                json_schema=json_schema,
            )
        except UserError as error:
            raise refusal(error, self) from None

    def _stop_strings(self) -> tuple[str, ...]:
        """The strings that end a text. Raises ApiError."""
        stop = self.stop
        if stop is None:
            stop = []
        elif isinstance(stop, str):
            stop = [stop]
        if len(stop) > 16 or "" in stop:
            raise invalid("stop", self.stop, type(self))
        return tuple(stop)

    def _json_schema(self) -> dict[str, Any] | bool | None:
        """The schema of the answer, or True for any JSON object. Raises ApiError."""
        form = self.response_format
        if form is None:
            return None
        if (form.type == "json_schema") != (form.json_schema is not None):
            message = "response_format: json_schema goes with the type json_schema"
            raise ApiError(400, message, "response_format")
        if form.object_schema is not None and form.type != "json_object":
            message = "response_format: schema goes with the type json_object"
            raise ApiError(400, message, "response_format")
        if form.type == "json_object":
            return True if form.object_schema is None else form.object_schema
        if form.type == "json_schema":
            return form.json_schema.json_schema
        return None

    def _bias_by_id(self) -> dict[int, float]:
        """The biases by token id; JSON writes the ids as text. Raises ApiError."""
        biases = self.logit_bias
        if biases is None:
            return {}
        if not all(re.fullmatch(TOKEN_ID, token) for token in biases):
            raise invalid("logit_bias", biases, type(self))
        return {int(token): number for token, number in biases.items()}


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]] = Field(
        description="a string, a list of token ids, or a list of either"
    )
    max_tokens: int = Field(16, ge=0, description="an integer of at least 1, or 0 with echo")
    echo: bool = Field(False, description="true or false")
    add_special_tokens: bool = Field(True, description="true or false")
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, description="an integer of at least 1, or null"
    )
    # More candidates than answers would mean that the server chooses the best ones.
    best_of: int | None = Field(None, description="1, or the number n of choices")
    suffix: Literal[""] | None = Field(None, description="no text: the model only continues")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}, or null"
    )

    def check(self) -> None:
        """As Sampling.check()."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", 0, type(self))
        if self.best_of not in (None, 1, self.n):
            raise invalid("best_of", self.best_of, type(self))

    @property
    def n_top(self) -> int:
        """Number of alternatives per token."""
        return 0 if self.logprobs is None else self.logprobs

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """A list of prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):  # one prompt of token ids
            return [self.prompt]
        return self.prompt


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Fields):
    """What an earlier answer called."""

    name: str
    arguments: str  # JSON


class ToolCall(Fields):
    """A call in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a chunk that a client sends back


class ChatMessage(Fields):
    """A message. The chat template decides which roles it knows."""

    role: str
    content: str | Items[TextPart] | None = None
    name: str | None = None  # of the speaker, for the template
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None  # of a tool's result: the call that it answers

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs a content")
        return self

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Function(Fields):
    """What a tool does, and the JSON schema of its arguments."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None  # the arguments of all calls follow the schema anyway


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    """The name of a tool."""

    name: str


class NamedTool(Fields):
    """A tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


class ToolSelection(Fields):
    """Some of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class AllowedTools(Fields):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSelection


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(
        min_length=1, description='a list of {"role": "user", "content": "..."}, with text only'
    )
    max_tokens: int | None = Field(None, ge=1, description="an integer of at least 1, or null")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="an integer of at least 1, or null"
    )
    modalities: Items[Literal["text"]] | None = Field(None, description='["text"]')
    reasoning_effort: Literal["none"] | None = Field(
        None, description='"none": the template decides whether the model thinks'
    )
    verbosity: Literal["medium"] | None = Field(None, description='"medium", the default')
    tools: Items[Tool] | None = Field(
        None,
        description='a list of {"type": "function", "function": {"name": "letters", '
        '"parameters": {...}}}',
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = Field(
        None,
        description='"none", "auto", "required" or '
        '{"type": "function", "function": {"name": "the name of a tool"}}',
    )
    parallel_tool_calls: bool = Field(True, description="true or false")
    chat_template_kwargs: JsonObject | None = Field(
        None, description="an object of variables for the chat template"
    )
    prediction: JsonObject | None = Field(  # a hint for speed
        None, description='an object such as {"type": "content", "content": "..."}'
    )
    logprobs: bool = Field(False, description="true or false")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description=f"an integer from 0 to {MAX_LOGPROBS} with logprobs, or null",
    )

    def check(self) -> None:
        """As Sampling.check()."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs has no effect without logprobs; set logprobs to true"
            raise ApiError(400, message, "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            message = "max_tokens and max_completion_tokens mean the same; use one"
            raise ApiError(400, message, "max_tokens")
        self._check_tools()

    def _check_tools(self) -> None:
        names: set[str] = set()
        for tool in self.tools or ():
            if tool.function.name in names:
                raise ApiError(400, f"two tools have the name {tool.function.name!r}", "tools")
            names.add(tool.function.name)
            kind = _parameters(tool).get("type", "object")
            if kind != "object":
                message = f"the parameters of {tool.function.name} have the type {kind!r}"
                raise ApiError(400, f'{message}; use "object"', "tools")
        named = self._named_tools
        if named is None:
            named = sorted(names)
        for name in named:
            if name not in names:
                hint = did_you_mean(name, sorted(names))
                raise ApiError(400, f"tool_choice names {name!r}, no tool{hint}", "tool_choice")
        if self.must_call and not named:
            raise ApiError(
                400, "tool_choice asks for a call, but there are no tools", "tool_choice"
            )

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call of a tool."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)

    @property
    def _named_tools(self) -> list[str] | None:
        """The names of the tools in tool_choice; None: all tools."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [choice.function.name]
        if isinstance(choice, AllowedTools):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        return None

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the model reads about."""
        if self.tools is None or self.tool_choice == "none":
            return []
        return self.tools

    @property
    def callable_tools(self) -> dict[str, dict[str, Any]]:
        """The tools that the answer may call: the schema of their arguments, by name."""
        names = self._named_tools
        schemas = {}
        for tool in self.shown_tools:
            if names is None or tool.function.name in names:
                schemas[tool.function.name] = _parameters(tool)
        return schemas

    def _json_schema(self) -> dict[str, Any] | bool | None:
        """As Sampling._json_schema(), or the schema of a call."""
        answer = super()._json_schema()
        tools = self.callable_tools
        if not tools:
            return answer
        if self.must_call:
            return call_schema(tools)
        if answer is None:
            return None
        if answer is True:
            answer = {"type": "object"}
        return call_or_answer_schema(tools, answer)

    @property
    def schema_field(self) -> str:
        """As Sampling.schema_field."""
        is_of_tools = self.must_call or self.may_call
        return "tools" if is_of_tools else "response_format"

    @property
    def may_call(self) -> bool:
        """Whether the answer may be any text, or calls of tools."""
        has_form = super()._json_schema() is not None
        return bool(self.callable_tools) and not (self.must_call or has_form)

    @property
    def max_calls(self) -> int | None:
        """How many calls an answer may have; None: any number."""
        return None if self.parallel_tool_calls else 1

    @property
    def n_top(self) -> int:
        """Number of alternatives per token."""
        return 0 if self.top_logprobs is None else self.top_logprobs

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return self.logprobs


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object."""
    parameters = tool.function.parameters
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not parameters.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"}:
        return {"type": "object", **parameters}
    return parameters


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
        first = error.errors(include_url=False, include_context=False)[0]
    location = [str(part) for part in first["loc"]]
    if not location:
        reason = first["msg"].removeprefix("Invalid JSON: ")
        message = f"the body of the request is not a valid JSON object: {reason}"
        raise ApiError(400, message, code="invalid_json")

    name = location[0]
    is_in_part = len(location) > 1  # such as messages.0.role
    if first["type"] == "extra_forbidden":
        param = ".".join(location)
        hint = ""
        if not is_in_part:
            hint = did_you_mean(name, kind.model_fields)
            if name in REPLACED:
                hint = f"; use {REPLACED[name]}"
        message = f"{param} is not supported here; remove it{hint}"
        raise ApiError(400, message, param, "unknown_field")
    if first["type"] == "not_finite":
        message = f"{'.'.join(location)} has a number that is not finite; JSON has no such numbers"
        raise ApiError(400, message, name)
    if first["type"] == "missing" and not is_in_part:
        message = f"{name} is missing; pass {kind.model_fields[name].description}"
        raise ApiError(400, message, name)
    # A mistake in a part is shown with the whole field, whose description says how it looks.
    raise invalid(name, json.loads(body)[name], kind)


def invalid(name: str, value: object, kind: type[Fields]) -> ApiError:
    """The error for a field with a wrong value."""
    shown = json.dumps(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return ApiError(400, f"{name} is {shown}; use {kind.model_fields[name].description}", name)


def refusal(error: UserError, body: Sampling) -> ApiError:
    """The error for what a Generator refuses. Its messages begin with the parameter at fault."""
    message = str(error)
    fields = type(body).model_fields
    prompt = "messages" if "messages" in fields else "prompt"
    if message.startswith("the prompt"):
        return ApiError(400, message, prompt)
    if message.startswith("json_schema"):
        return ApiError(400, message, body.schema_field)
    name = message.split()[0]
    if name not in fields:
        name = None
    return ApiError(400, message, name)
