"""Conversations as tokens: what a chat asks a model, and what a model is trained on.

One rule holds for both: each answer is trained in exactly the context of tokens that a chat gives
when it asks for that answer. A conversation is one row of tokens if the context of each answer is
the beginning of that row. Otherwise each answer becomes a row of its own, with its own context:
when the template renders earlier turns differently once others follow, or when the tokenizer merges
the end of a context with the answer behind it.
"""

import difflib
import json
import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from thinker.data.chat import chat_template
from thinker.data.chat.chat_template import Cut
from thinker.data.chat.literal_names import clean, literal_spans, special_names
from thinker.data.chat.traced_text import MESSAGE, VARIABLE
from thinker.data.text.document import Message
from thinker.data.tokenizers.common_prefix import common_prefix
from thinker.data.tokenizers.tokenizer import Span, Tokenizer
from thinker.runtime.errors import UserError, misspelled

ROLES = ("system", "developer", "user", "assistant", "tool")
TRAINING_KEYS = ("weight", "train")  # of a message: whether the answer is trained
# Of a message: what templates need not write. Most tell an answer of a tool by its place.
NOT_RENDERED = ("role", "tool_call_id", "id", *TRAINING_KEYS)


class Row(NamedTuple):
    """The tokens of a conversation, or of the part of one that ends with an answer."""

    ids: np.ndarray  # (n,) uint32, without a BOS token at the start
    is_target: np.ndarray  # (n,) bool, the tokens of answers that are trained


@dataclass(frozen=True)
class Conversation:
    """Messages, and the variables that their template gets.

    tools: their JSON schemas. template_kwargs: more variables, by name. allow_special: names of
    special tokens in the messages are these tokens; otherwise they are plain text. now: what the
    template's clock says.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    allow_special: bool = False
    now: datetime = field(default_factory=datetime.now)


@dataclass(frozen=True)
class _Rendered:
    """A rendered beginning of a conversation."""

    text: str
    answers: list[Span]  # that the template marks
    literal: list[Span]  # of messages, in names of special tokens
    origins: list[tuple[int, int, int]]  # of the parts that are not the template's

    def with_bos(self, tokenizer: Tokenizer) -> "_Rendered":
        """The text, which begins with the BOS token if prompts do, as in an exported template."""
        bos = tokenizer.bos_token
        is_written = self.text.startswith(bos)
        if self.literal and self.literal[0][0] < len(bos):
            is_written = False
        if not tokenizer.bos_prefix or is_written:
            return self
        n = len(bos)
        answers = [(start + n, end + n) for start, end in self.answers]
        literal = [(start + n, end + n) for start, end in self.literal]
        origins = [(start + n, end + n, origin) for start, end, origin in self.origins]
        return _Rendered(bos + self.text, answers, literal, origins)

    def begins_with(self, other: "_Rendered") -> bool:
        """Whether the text begins with another, with the same names as plain text."""
        if not self.text.startswith(other.text):
            return False
        literal = [span for span in self.literal if span[0] < len(other.text)]
        return literal == other.literal

    def encode(
        self, tokenizer: Tokenizer, start: int = 0, end: int | None = None, continues: bool = False
    ) -> list[int]:
        """The tokens of a part of the text."""
        if end is None:
            end = len(self.text)
        literal = [(first - start, last - start) for first, last in self.literal]
        text = self.text[start:end]
        ids = tokenizer.encode_array(text, True, literal=literal, continues=continues)
        return ids.tolist()


def render(
    tokenizer: Tokenizer,
    messages: list[Message],
    add_generation_prompt: bool = False,
    *,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """Render a conversation; with add_generation_prompt it ends where the next answer starts.

    Raises UserError.
    """
    conversation = Conversation(messages, tools, template_kwargs or {}, allow_special=True)
    (rendered,) = _render(tokenizer, conversation, [(len(messages), add_generation_prompt)])
    return rendered.text


def encode_prompt(
    tokenizer: Tokenizer,
    messages: list[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    allow_special: bool = False,
) -> list[int]:
    """Encode a conversation up to where the model answers, with the usual BOS prefix.

    See Conversation. Raises UserError.
    """
    conversation = Conversation(messages, tools, template_kwargs or {}, allow_special)
    (rendered,) = _render(tokenizer, conversation, [(len(messages), True)])
    return rendered.with_bos(tokenizer).encode(tokenizer)


def encode(tokenizer: Tokenizer, conversation: Conversation, all_tokens: bool = False) -> list[Row]:
    """Encode a conversation for training: one row, or one for each answer (see above).

    An answer includes the token that ends it. Answers are what the template marks with
    {% generation %}, or else what a message adds to the conversation before it with the generation
    prompt. Answers with `"weight": 0` or `"train": false` are no targets. all_tokens: the rest of
    the conversation is trained as well, each message once. Raises UserError if answers cannot be
    located.
    """
    messages = conversation.messages
    cuts: list[Cut] = [(len(messages), False)]
    trained = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and is_trained(message):
            trained.append(number)
            # Before the answer as a part of the conversation, and where it starts; and behind it.
            cuts += [(number, number == 0), (number, True), (number + 1, False)]
    is_marked = _marks_answers(tokenizer.chat_template or "")
    rendered = _render(tokenizer, conversation, cuts, is_marked)
    _check_all_is_rendered(tokenizer, conversation, cuts, rendered)
    whole, *parts = [beginning.with_bos(tokenizer) for beginning in rendered]
    turns = []
    for number, before, prompt, answered in zip(trained, parts[::3], parts[1::3], parts[2::3]):
        content = messages[number].get("content", "")
        turns.append(_Turn(number, content, before, prompt, answered, is_marked))

    row = _whole_row(tokenizer, whole, turns)
    if row is None:
        rows = [_answer_row(tokenizer, turn) for turn in turns]
        if all_tokens:
            rows = _with_all_tokens(tokenizer, whole, turns, rows)
    else:
        if all_tokens:
            row.is_target[:] = True
        rows = [row]
    return [_without_bos(tokenizer, row) for row in rows]


def find_answer_end(tokenizer: Tokenizer) -> int | None:
    """The special token that ends the answers of a chat template; None if there is none."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    row = encode(tokenizer, Conversation(messages))[-1]
    targets = row.ids[row.is_target].tolist()
    if not targets or not _is_special(tokenizer, targets[-1]):
        return None
    return targets[-1]


def with_answer_end(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with the special token that ends answers among those that end texts.

    Otherwise a chat would go on after an answer. Raises UserError if the template rejects a plain
    conversation.
    """
    end = find_answer_end(tokenizer)
    if end is None or end in tokenizer.eos_ids:
        return tokenizer
    return tokenizer.with_eos(end)


def is_trained(message: Message) -> bool:
    """Whether the answer in a message is a target."""
    return message.get("weight", 1) != 0 and message.get("train", True) is True


@dataclass(frozen=True)
class _Turn:
    """An answer that is trained, with what is rendered before it."""

    number: int  # of its message
    content: str  # of its message
    before: _Rendered  # the messages before it
    prompt: _Rendered  # ends where the answer starts
    answered: _Rendered  # ends with the answer
    is_marked: bool  # whether the template marks answers

    @property
    def begins_with_prompt(self) -> bool:
        """Whether the answer is rendered behind its prompt, as in a chat."""
        return self.answered.text.startswith(self.prompt.text)

    def spans(self, tokenizer: Tokenizer) -> list[Span]:
        """The parts of answered.text that are the answer. Raises UserError if it cannot be
        located."""
        start = len(self.prompt.text)
        if self.is_marked:
            spans = self.answered.answers[len(self.before.answers) :]
            if self.begins_with_prompt:
                spans = [(first, last) for first, last in self.answered.answers if last > start]
            self._check_marks(spans)
            return spans
        if not self.begins_with_prompt:
            raise UserError(
                "the chat template renders an answer differently than it begins one, so answers "
                "cannot be located; mark them with {% generation %} and {% endgeneration %} in "
                "your own data.chat_template"
            )
        answer = self.answered.text[start:]
        return [(start, start + _answer_length(tokenizer, answer, self.content))]

    def _check_marks(self, spans: list[Span]) -> None:
        """Raise UserError if the marks of an answer cut its text, as they do in a macro or a block
        of {% set %}, whose text is written later."""
        content = self.content.strip()
        if not spans or content not in self.answered.text:
            return
        if content not in self.answered.text[spans[0][0] : spans[-1][1]]:
            raise UserError(
                "the chat template marks another part of the text than an answer; write {% "
                "generation %} outside of macros and {% set %} in your own data.chat_template"
            )


def _whole_row(tokenizer: Tokenizer, whole: _Rendered, turns: list[_Turn]) -> Row | None:
    """A conversation as one row; None if it gives an answer another context than a chat."""
    beginnings = _Beginnings(tokenizer, whole)
    ids = beginnings.ids
    is_target = np.zeros(len(ids), bool)
    for turn in turns:
        if not turn.begins_with_prompt or not whole.begins_with(turn.answered):
            return None
        if not whole.begins_with(turn.prompt):  # the same text, but not the same special tokens
            return None
        if beginnings.n_tokens(len(turn.prompt.text)) is None:
            return None
        last = None
        for start, end in turn.spans(tokenizer):
            first = beginnings.n_tokens(start)
            last = beginnings.n_tokens(end)
            if first is None or last is None:
                return None
            is_target[first:last] = True
        if last is not None and ids[last - 1] not in tokenizer.eos_ids:
            return None  # each answer is to learn where it ends
    return Row(np.array(ids, np.uint32), is_target)


class _Beginnings:
    """The tokens of a text, and of its beginnings."""

    def __init__(self, tokenizer: Tokenizer, rendered: _Rendered) -> None:
        self.tokenizer = tokenizer
        self.rendered = rendered
        self.ids = rendered.encode(tokenizer)
        # Special tokens: their end, their start, and the number of tokens before. What follows does
        # not depend on those, so a beginning needs to be encoded only from there on.
        self.cuts = [(0, 0, 0)]
        spans = tokenizer.cut_spans(rendered.text, rendered.literal)
        written = [tokenizer.special_tokens[rendered.text[start:end]] for start, end in spans]
        places = np.flatnonzero(np.isin(self.ids, written)).tolist()
        if [self.ids[place] for place in places] == written:
            self.cuts += [(end, start, place) for (start, end), place in zip(spans, places)]

    def n_tokens(self, length: int) -> int | None:
        """The number of tokens of the first characters; None if they have other tokens alone."""
        number = bisect_right(self.cuts, length, key=lambda cut: cut[0]) - 1
        _, start, n_before = self.cuts[number]
        rest = self.rendered.encode(self.tokenizer, start, length)
        end = n_before + len(rest)
        if self.ids[n_before:end] != rest:
            return None
        return end


def _answer_row(tokenizer: Tokenizer, turn: _Turn) -> Row:
    """An answer in the context that a chat gives it."""
    ids = turn.prompt.encode(tokenizer)
    is_target = [False] * len(ids)
    position = len(turn.prompt.text)
    spans = turn.spans(tokenizer)
    if not turn.begins_with_prompt and spans:
        position = spans[0][0]
    for start, end in spans:
        start = max(start, position)
        for first, last, is_answer in ((position, start, False), (start, end, True)):
            part = _continuation(tokenizer, turn, ids, first, last)
            ids += part
            is_target += [is_answer] * len(part)
        position = end
    return Row(np.array(ids, np.uint32), np.array(is_target, bool))


def _continuation(
    tokenizer: Tokenizer, turn: _Turn, ids: list[int], start: int, end: int
) -> list[int]:
    """The tokens of a part of an answer, behind `ids`."""
    if turn.begins_with_prompt:
        together = turn.answered.encode(tokenizer, end=end)
        if together[: len(ids)] == ids:
            return together[len(ids) :]
    return turn.answered.encode(tokenizer, start, end, continues=bool(ids))


def _with_all_tokens(
    tokenizer: Tokenizer, whole: _Rendered, turns: list[_Turn], rows: list[Row]
) -> list[Row]:
    """The rows of answers with all tokens of the conversation as targets, each in one row.

    A row trains what follows the answer of the row before. What follows the last answer is in its
    row, or in one more if that answer is rendered differently once others follow.
    """
    texts = [turn.answered for turn in turns]
    all_ids = [row.ids.tolist() for row in rows]
    whole_ids = whole.encode(tokenizer)
    if common_prefix(whole_ids, all_ids[-1]) == len(all_ids[-1]):
        texts[-1] = whole
        all_ids[-1] = whole_ids
    else:
        texts.append(whole)
        all_ids.append(whole_ids)

    first = np.array(all_ids[0], np.uint32)
    found = [Row(first, np.ones(len(first), bool))]
    for number in range(1, len(all_ids)):
        ids = all_ids[number]
        is_target = np.ones(len(ids), bool)
        is_target[: common_prefix(all_ids[number - 1], ids)] = False
        for start, end in _trained_before(tokenizer, texts[number], turns[number - 1]):
            n_before = common_prefix(texts[number].encode(tokenizer, end=start), ids)
            n_until = common_prefix(texts[number].encode(tokenizer, end=end), ids)
            is_target[n_before:n_until] = False
        if is_target.any():
            found.append(Row(np.array(ids, np.uint32), is_target))
    return found


def _trained_before(tokenizer: Tokenizer, text: _Rendered, turn: _Turn) -> list[Span]:
    """The parts of a text that the rows up to the answer of a turn have trained."""
    begin = _end_of_message(text, turn.number)
    # The answer's row also has the mark of its end.
    start = _end_of_message(turn.answered, turn.number)
    spans = turn.spans(tokenizer)
    if spans:
        end_mark = turn.answered.text[start : spans[-1][1]]
        if text.text.startswith(end_mark, begin):
            begin += len(end_mark)
    parts = [(0, begin)]
    for first, last, origin in text.origins:
        # Told again, as by templates that write the system message before the newest question.
        is_old = origin == VARIABLE or MESSAGE <= origin <= MESSAGE + turn.number
        if is_old and first >= begin:
            parts.append((first, last))
    return parts


def _end_of_message(rendered: _Rendered, number: int) -> int:
    """Where a message ends in a rendered conversation, or where the last before it does if nothing
    of it is rendered."""
    ends = {origin: end for _, end, origin in rendered.origins}  # the last of each
    for origin in range(MESSAGE + number, MESSAGE - 1, -1):
        if origin in ends:
            return ends[origin]
    return 0


def _without_bos(tokenizer: Tokenizer, row: Row) -> Row:
    """The row without a BOS token at its start, which each row of a corpus gets."""
    if row.ids[:1].tolist() == [tokenizer.bos_id]:  # rendered by the template
        return Row(row.ids[1:], row.is_target[1:])
    return row


def _is_special(tokenizer: Tokenizer, token_id: int) -> bool:
    return token_id in tokenizer.eos_ids or token_id in tokenizer.special_tokens.values()


def _marks_answers(template: str) -> bool:
    """Whether a template says where answers begin and end."""
    code = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)  # without comments
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", code) is not None


def _answer_length(tokenizer: Tokenizer, answer: str, content: str) -> int:
    """Length of an answer including the special token that ends it, without what follows.

    content: of the message. An added token that is not special ends an answer if it is all that
    follows the content.
    """
    stripped = answer.rstrip()
    ends = [*special_names(tokenizer), *tokenizer.special_tokens_map.values()]
    tail = ""
    if content.strip():
        _, _, tail = stripped.rpartition(content.strip())
    if stripped.endswith(tuple(ends)) or tail.strip() in tokenizer.special_tokens:
        return len(stripped)
    return len(answer)


def _render(
    tokenizer: Tokenizer, conversation: Conversation, cuts: list[Cut], mark_answers: bool = False
) -> list[_Rendered]:
    """Render beginnings of a conversation. Raises UserError."""
    if tokenizer.chat_template is None:
        raise UserError(
            "conversations need a chat template, but the tokenizer has none; to train a chat "
            "model, set run.init_from and data.chat_template=chat.jinja"
        )
    for number, message in enumerate(conversation.messages):
        _check_role(tokenizer.chat_template, str(message["role"]), number)
    messages = [_prepared(message) for message in conversation.messages]
    tools = clean(conversation.tools)
    variables = {name: clean(value) for name, value in conversation.template_kwargs.items()}

    renderings = chat_template.render(
        tokenizer,
        messages,
        cuts,
        tools=tools,
        template_kwargs=variables,
        mark_answers=mark_answers,
        now=conversation.now,
    )
    names = special_names(tokenizer)
    found = []
    for each in renderings:
        literal = [] if conversation.allow_special else literal_spans(each, names)
        found.append(_Rendered(each.text, each.answers, literal, each.origins))
    return found


def _check_all_is_rendered(
    tokenizer: Tokenizer, conversation: Conversation, cuts: list[Cut], rendered: list[_Rendered]
) -> None:
    """Raise UserError if a template leaves out a message, or a part of one, from all texts.

    What is not found there as it is written may be written in another form: then the text changes
    with it.
    """
    texts = [each.text for each in rendered]
    for number, message in enumerate(conversation.messages):
        for key, value in message.items():
            if key in NOT_RENDERED or value in (None, "", [], {}):
                continue
            if isinstance(value, str) and any(value.strip() in text for text in texts):
                continue
            changed = list(conversation.messages)
            changed[number] = _with_another(message, key)
            other = replace(conversation, messages=changed, allow_special=True)
            if _texts(tokenizer, other, cuts) == texts:
                what = f"the {key} of message {number + 1} ({message['role']})"
                raise UserError(f"the chat template does not render {what}")
    if conversation.tools:
        without = replace(conversation, tools=None, allow_special=True)
        if _texts(tokenizer, without, cuts) == texts:
            raise UserError("the chat template does not render the tools")


def _with_another(message: Message, key: str) -> Message:
    """The message with another value of a key."""
    value = message[key]
    if isinstance(value, str):
        return message | {key: value + " x"}
    return {other: message[other] for other in message if other != key}


def _texts(tokenizer: Tokenizer, conversation: Conversation, cuts: list[Cut]) -> list[str] | None:
    """The rendered texts; None if the template rejects the conversation."""
    try:
        return [each.text for each in _render(tokenizer, conversation, cuts)]
    except UserError:
        return None


def _check_role(template: str, role: str, number: int) -> None:
    """Raise UserError for a misspelled role, which many templates would render as it is.

    Roles of one's own, and those that the template names, are valid.
    """
    if role in ROLES or f"'{role}'" in template or f'"{role}"' in template:
        return
    close = difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=0.8)
    if close:
        raise UserError(f"message {number + 1} has the role {role}; did you mean {close[0]}?")


def _prepared(message: Message) -> Message:
    """A message as templates expect it: without our keys, arguments of calls as an object.

    Raises UserError for a role that is more than a word, which could contain special tokens.
    """
    if not re.fullmatch(r"[\w .-]{1,64}", str(message["role"])):
        raise UserError(f"the role {message['role']!r} of a message is not a word")
    prepared = {key: value for key, value in message.items() if key not in TRAINING_KEYS}
    calls = []
    given = prepared.get("tool_calls") or []
    if not isinstance(given, list) or not all(isinstance(call, dict) for call in given):
        raise UserError("the tool_calls of a message are not a list of objects")
    for call in given:
        _check_call(call)
        calls.append(_with_parsed_arguments(call))
    if calls:
        prepared["tool_calls"] = calls
    return clean(prepared)


def _check_call(call: dict[str, Any]) -> None:
    """Raise UserError if the name or the arguments of a call have a misspelled key."""
    function = call.get("function", call)
    if not isinstance(function, dict):
        return
    for key in ("name", "arguments"):
        hint = misspelled(function, [key])
        if key not in function and hint:
            raise UserError(f"a call of a tool has no {key}{hint}")


def _with_parsed_arguments(call: Any) -> Any:
    """A call of a tool whose arguments are an object; OpenAI's API writes them as JSON text."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function
