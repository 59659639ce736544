"""The messages and tools of a request, in the form that a chat template can render."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from thinker.data.chat import chat
from thinker.data.chat.template_variables import mentions
from thinker.data.text.document import Message
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError
from thinker.serving.api_errors import ApiError
from thinker.serving.protocol import ChatMessage, ChatRequest, check_finite

HOW_TO_CALL = (
    "You can call tools. To call one, answer only with JSON: "
    '{"name": "...", "arguments": {...}}\nThe tools:'
)


def encode_chat(tokenizer: Tokenizer, body: ChatRequest, allow_special: bool = False) -> list[int]:
    """The tokens of a conversation up to where the model answers. Raises ApiError.

    allow_special: names of special tokens in messages are these tokens.
    """
    template = tokenizer.chat_template
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if not mentions(template, name):
            message = f"chat_template_kwargs has {name}, which the chat template ignores; remove it"
            raise ApiError(400, message, "chat_template_kwargs")
    messages = _messages(body.messages, template)
    unseen = {"function": {"strict"}}  # says nothing to a model
    tools = [tool.model_dump(exclude_none=True, exclude=unseen) for tool in body.shown_tools]
    try:
        if tools and not mentions(template, "tools"):
            messages = _with_described_tools(tokenizer, messages, tools, variables)
            tools = []
        return chat.encode_prompt(
            tokenizer,
            messages,
            tools=tools or None,
            template_kwargs=variables,
            allow_special=allow_special,
        )
    except UserError as error:  # of the chat template
        param = "messages"
        if str(error).startswith("chat_template_kwargs"):
            param = "chat_template_kwargs"
        raise ApiError(400, str(error), param) from None


def _messages(given: list[ChatMessage], template: str) -> list[Message]:
    """The messages as transformers gives them to a template. Raises ApiError."""
    if not mentions(template, "tool_calls"):
        return _as_texts(given, template)
    messages: list[Message] = []
    for number, one in enumerate(given):
        message = _message(one, template)
        calls = _calls(one, number)
        if calls:
            message["tool_calls"] = calls
        if one.tool_call_id is not None:
            message["tool_call_id"] = one.tool_call_id
        messages.append(message)
    return messages


def _as_texts(given: list[ChatMessage], template: str) -> list[Message]:
    """The messages for a template that knows no calls: they and their results become text.

    A result becomes a part of the user's turn, because many templates accept only turns of the user
    and the assistant that alternate. Raises ApiError.
    """
    messages: list[Message] = []
    is_after_result = False
    for number, one in enumerate(given):
        message = _message(one, template)
        lines = [json.dumps(call["function"], ensure_ascii=False) for call in _calls(one, number)]
        if lines:
            message["content"] = "\n".join([*filter(None, [one.text]), *lines])
        if one.role == "tool":
            message = {"role": "user", "content": one.text}
        if is_after_result and message["role"] == "user":
            messages[-1]["content"] += "\n" + message["content"]
        else:
            messages.append(message)
        is_after_result = one.role == "tool"
    return messages


def _message(given: ChatMessage, template: str) -> Message:
    message: Message = {"role": given.role, "content": given.text}
    if given.role == "developer" and not mentions(template, "developer"):
        message["role"] = "system"  # its older name
    if given.name is not None:
        message["name"] = given.name
    return message


def _calls(message: ChatMessage, number: int) -> list[dict[str, Any]]:
    """The calls in a message, whose arguments become objects. Raises ApiError."""
    calls = []
    for index, call in enumerate(message.tool_calls or ()):
        try:
            # The parser of requests, which also limits the depth.
            arguments = check_finite(from_json(call.function.arguments or "{}"))
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            field = f"messages.{number}.tool_calls.{index}.function.arguments"
            raise ApiError(400, f"{field} is not a JSON object; send the text of one", "messages")
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def _with_described_tools(
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
) -> list[Message]:
    """The messages for a template that cannot render tools: the system message describes them.

    If the template rejects or drops system messages, the first message does. Raises ApiError.
    """
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join([HOW_TO_CALL, *lines])
    first, *others = messages
    if first["role"] == "system":
        longer = {**first, "content": f"{first['content']}\n\n{text}"}
        attempts = [[longer, *others]]
    else:
        longer = {**first, "content": f"{text}\n\n{first['content']}"}
        attempts = [[{"role": "system", "content": text}, *messages], [longer, *others]]
    problem = "the chat template renders neither tools nor a text before the first message"
    for attempt in attempts:
        try:
            rendered = chat.render(tokenizer, attempt, True, template_kwargs=variables)
        except UserError as error:
            problem = str(error)
            continue
        if text in rendered:
            return attempt
    raise ApiError(400, f"the tools cannot be shown to the model: {problem}", "tools")
