"""The text of a Modelfile, from which Ollama makes a model of a GGUF file.

Ollama renders conversations with Go templates, tokenizers with Jinja. We find the texts that a
Jinja template puts around messages, and write a Go template that puts the same texts there.
"""

import itertools
from dataclasses import dataclass

from thinker.data.chat import chat
from thinker.data.text.document import Message
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError

TOO_COMPLEX = "the chat template does something that a Go template cannot express simply"
Pair = tuple[str, str]  # the text before and after a message


@dataclass(frozen=True)
class Template:
    """The texts that a chat template puts around messages."""

    start: str  # at the start of every conversation
    start_without_system: str  # only without a system message, such as a default one
    around: dict[str, Pair]  # by role
    answer: str  # where the model answers

    def render(self, messages: list[Message]) -> str:
        """The conversation up to where the model answers."""
        text = self.start
        if not any(message["role"] == "system" for message in messages):
            text += self.start_without_system
        for message in messages:
            before, after = self.around[message["role"]]
            text += before + message["content"] + after
        return text + self.answer

    def to_go(self) -> str:
        """The same as a Go template, for a Modelfile."""
        text = go_text(self.start)
        if self.start_without_system:
            without_system = go_text(self.start_without_system)
            text += "{{ if not .System }}" + without_system + "{{ end }}"
        branches = []
        for role, (before, after) in self.around.items():
            content = go_text(before) + "{{ .Content }}" + go_text(after)
            branches.append(f'if eq .Role "{role}" }}}}{content}{{{{ ')
        message = "{{ " + "else ".join(branches) + "end }}"
        text += "{{ range .Messages }}" + message + "{{ end }}"
        return text + go_text(self.answer)


def modelfile(tokenizer: Tokenizer, gguf_name: str, context_len: int) -> str:
    """The text of a Modelfile for the GGUF file of this name, in the same folder."""
    lines = [f"FROM ./{gguf_name}", f"PARAMETER num_ctx {context_len}"]
    for name, number in tokenizer.special_tokens.items():
        if number in tokenizer.eos_ids:
            lines.append(f"PARAMETER stop {_quoted(name)}")
    if tokenizer.chat_template is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    else:
        try:
            template = find_template(tokenizer)
            lines.append(f'TEMPLATE """{template.to_go()}"""')
        except UserError as error:
            reason = " ".join(str(error).split())
            lines.append(f"# No TEMPLATE: {reason}")
    return "\n".join(lines) + "\n"


def find_template(tokenizer: Tokenizer) -> Template:
    """Find the texts that the tokenizer's chat template puts around messages.

    Renders short conversations, without a BOS token at the start if llama.cpp adds it. Outer
    whitespace of messages, which some templates remove, is not examined. Raises UserError if the
    template does more than put texts around messages, or rejects these conversations.
    """
    system = _message("system", 0)
    user = _message("user", 1)
    reply = _message("assistant", 2)
    user_2 = _message("user", 3)

    # What the template writes between messages.
    _, after_user = _split(tokenizer, [user])
    start, user_to_reply, after_reply = _split(tokenizer, [user, reply])
    _, _, reply_to_user, _ = _split(tokenizer, [user, reply, user_2])
    system_start, system_to_user, _ = _split(tokenizer, [system, user])
    _, end = _split(tokenizer, [user], answers=True)

    # What belongs to each message.
    before_user = _without_prefix(reply_to_user, after_reply)
    before_reply = _without_prefix(user_to_reply, after_user)
    after_system = _without_suffix(system_to_user, before_user)
    answer = _without_prefix(end, after_user)

    # What comes first. It is shared if a system message only adds text, and differs if the template
    # has a default system message.
    start = _without_suffix(start, before_user)
    shared = ""
    if system_start.startswith(start):
        shared = start
    before_system = system_start.removeprefix(shared)
    without_system = start.removeprefix(shared)

    template = Template(
        start=shared,
        start_without_system=without_system,
        around={
            "system": (before_system, after_system),
            "user": (before_user, after_user),
            "assistant": (before_reply, after_reply),
        },
        answer=answer,
    )
    for messages in ([user], [user, reply, user_2], [system, user], [system, user, reply, user_2]):
        if template.render(messages) != _render(tokenizer, messages, answers=True):
            raise UserError(TOO_COMPLEX)
    return template


def go_text(text: str) -> str:
    """Text as it must be in a Go template in a Modelfile.

    Braces, quotes and characters that Ollama would drop become escapes.
    """
    parts = []
    for is_unsafe, run in itertools.groupby(text, _is_unsafe):
        if is_unsafe:
            escapes = "".join(rf"\U{ord(char):08x}" for char in run)
            parts.append('{{ "' + escapes + '" }}')
        else:
            parts.append("".join(run))
    return "".join(parts)


def _is_unsafe(char: str) -> bool:
    if char in '{}"':
        return True
    return not char.isprintable() and char != "\n"


def _quoted(text: str) -> str:
    """A value in a Modelfile, which knows no escapes."""
    quotes = '"""' if '"' in text else '"'
    return quotes + text + quotes


def _message(role: str, number: int) -> Message:
    """A message whose text is in no template."""
    return {"role": role, "content": f"Marker{number}of{role}"}


def _render(tokenizer: Tokenizer, messages: list[Message], answers: bool = False) -> str:
    """Render a conversation, without the BOS token that llama.cpp adds."""
    text = chat.render(tokenizer, messages, add_generation_prompt=answers)
    if not tokenizer.bos_prefix:
        return text
    found = ""  # the longest name, as one may begin with another
    for name, number in tokenizer.special_tokens.items():
        if number == tokenizer.bos_id and text.startswith(name) and len(name) > len(found):
            found = name
    return text.removeprefix(found)


def _split(tokenizer: Tokenizer, messages: list[Message], answers: bool = False) -> list[str]:
    """The texts before, between and after the messages.

    Raises UserError if a message is missing, or not there once.
    """
    text = _render(tokenizer, messages, answers)
    texts = []
    for message in messages:
        if text.count(message["content"]) != 1:
            raise UserError("the chat template does not render each message once and in order")
        before, text = text.split(message["content"])
        texts.append(before)
    texts.append(text)
    return texts


def _without_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise UserError(TOO_COMPLEX)
    return text.removeprefix(prefix)


def _without_suffix(text: str, suffix: str) -> str:
    if not text.endswith(suffix):
        raise UserError(TOO_COMPLEX)
    return text.removesuffix(suffix)
