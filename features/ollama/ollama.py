"""Write a Modelfile, from which Ollama makes a model of a GGUF file."""

import itertools
from dataclasses import dataclass

from thinker.data.text import chat
from thinker.data.text.messages import Message
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError

ROLES = "system", "user", "assistant"
TOO_COMPLEX = "the chat template does something that a Go template cannot express simply"
Pair = tuple[str, str]  # the text before and after a message


@dataclass(frozen=True)
class Template:
    """The texts that a chat template puts around messages."""

    start: str  # at the start of every conversation
    start_without_system: (
        str  # only if there is no system message, such as a default system message
    )
    around: dict[str, Pair]  # by role
    answer: str  # where the model answers

    def render(self, messages: list[Message]) -> str:
        """The conversation up to where the model answers."""
        has_system = any(message["role"] == "system" for message in messages)
        texts = [self.start, "" if has_system else self.start_without_system]
        for message in messages:
            before, after = self.around[message["role"]]
            texts += [before, message["content"], after]
        return "".join([*texts, self.answer])

    def to_go(self) -> str:
        """The same as a Go template, for a Modelfile."""
        branches = [
            f'if eq .Role "{role}" }}}}{go_text(before)}{{{{ .Content }}}}{go_text(after)}{{{{ '
            for role, (before, after) in self.around.items()
        ]
        start, without = go_text(self.start), go_text(self.start_without_system)
        start += without and f"{{{{ if not .System }}}}{without}{{{{ end }}}}"
        loop = f"{{{{ range .Messages }}}}{{{{ {'else '.join(branches)}end }}}}{{{{ end }}}}"
        return start + loop + go_text(self.answer)


def modelfile(tokenizer: Tokenizer, gguf_name: str, context_len: int) -> str:
    """The text of a Modelfile for the GGUF file of this name, in the same folder."""
    lines = [f"FROM ./{gguf_name}", f"PARAMETER num_ctx {context_len}"]
    names = [
        name for name, number in tokenizer.special_tokens.items() if number in tokenizer.eos_ids
    ]
    lines += [f"PARAMETER stop {_quoted(name)}" for name in names]
    if tokenizer.chat_template is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    else:
        try:
            lines.append(f'TEMPLATE """{find_template(tokenizer).to_go()}"""')
        except UserError as error:
            lines.append(f"# No TEMPLATE: {' '.join(str(error).split())}")
    return "\n".join(lines) + "\n"


def find_template(tokenizer: Tokenizer) -> Template:
    """Find the texts that the tokenizer's chat template puts around messages, by rendering short conversations.

    Without a BOS token at the start if llama.cpp adds it. Outer whitespace of messages, which some templates remove,
    is not examined. Raises UserError if the template does more than that, or rejects these conversations.
    """
    system, user, reply, user_2 = (
        _message(role, number) for number, role in enumerate((*ROLES, "user"))
    )
    _, after_user = _split(tokenizer, [user])
    start, between_user_and_reply, after_reply = _split(tokenizer, [user, reply])
    _, _, between_reply_and_user, _ = _split(tokenizer, [user, reply, user_2])
    system_start, between_system_and_user, _ = _split(tokenizer, [system, user])
    _, end = _split(tokenizer, [user], answers=True)
    before_user = _without_prefix(between_reply_and_user, after_reply)
    start = _without_suffix(start, before_user)
    shared = start if system_start.startswith(start) else ""
    around = {
        "system": (
            system_start[len(shared) :],
            _without_suffix(between_system_and_user, before_user),
        ),
        "user": (before_user, after_user),
        "assistant": (_without_prefix(between_user_and_reply, after_user), after_reply),
    }
    template = Template(
        shared, start[len(shared) :], around, answer=_without_prefix(end, after_user)
    )
    for messages in ([user], [user, reply, user_2], [system, user], [system, user, reply, user_2]):
        if template.render(messages) != _render(tokenizer, messages, answers=True):
            raise UserError(TOO_COMPLEX)
    return template


def go_text(text: str) -> str:
    """Text as it must be in a Go template in a Modelfile: braces, quotes and what Ollama would drop as escapes."""
    parts = []
    for is_unsafe, run in itertools.groupby(text, _is_unsafe):
        escapes = "".join(rf"\U{ord(char):08x}" if is_unsafe else char for char in run)
        parts.append(f'{{{{ "{escapes}" }}}}' if is_unsafe else escapes)
    return "".join(parts)


def _is_unsafe(char: str) -> bool:
    return char in '{}"' or not (char.isprintable() or char == "\n")


def _quoted(text: str) -> str:
    """A value in a Modelfile, which knows no escapes."""
    return f'"""{text}"""' if '"' in text else f'"{text}"'


def _message(role: str, number: int) -> Message:
    return {"role": role, "content": f"Marker{number}of{role}"}  # no text of a template


def _render(tokenizer: Tokenizer, messages: list[Message], answers: bool = False) -> str:
    """Render a conversation, without the BOS token that llama.cpp adds."""
    text = chat.render(tokenizer, messages, add_generation_prompt=answers)
    names = [
        name for name, number in tokenizer.special_tokens.items() if number == tokenizer.bos_id
    ]
    name = max((name for name in names if text.startswith(name)), key=len, default="")
    return text[len(name) :] if tokenizer.bos_prefix else text


def _split(tokenizer: Tokenizer, messages: list[Message], answers: bool = False) -> list[str]:
    """The texts before, between and after the messages. Raises UserError if a message is missing, or not there once."""
    text, texts = _render(tokenizer, messages, answers), []
    for message in messages:
        if text.count(message["content"]) != 1:
            raise UserError("the chat template does not render each message once and in order")
        before, text = text.split(message["content"])
        texts.append(before)
    return [*texts, text]


def _without_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise UserError(TOO_COMPLEX)
    return text[len(prefix) :]


def _without_suffix(text: str, suffix: str) -> str:
    if not text.endswith(suffix):
        raise UserError(TOO_COMPLEX)
    return text[: len(text) - len(suffix)]
