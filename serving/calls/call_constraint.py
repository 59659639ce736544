"""What may follow in an answer that may call tools: anything, until a call begins."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.constraint import Constraint, TextConstraint, constraint_source, pack_tokens
from thinker.serving.calls.call_format import CallFormat
from thinker.serving.calls.call_schemas import Schema

MAX_HELD = 64  # characters of whitespace before the JSON of a call
# A call without an opening, up to where only a call can follow.
BARE_CALL = re.compile(rb'\[?\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:')
MAX_BARE = 256  # bytes up to there
WHITE = b" \t\r\n"


class CallGrammar:
    """The texts of the calls that a request allows."""

    def __init__(self, tokenizer: Tokenizer, schema: Schema) -> None:
        """`schema`: from written_calls_schema(). Raises UserError if it is not supported."""
        self._source = constraint_source()
        self._tokenizer = tokenizer
        self._schema = self._source.canonical_schema(schema)
        self.new_constraint()

    def new_constraint(self) -> TextConstraint:
        """A constraint at the beginning of a call."""
        # A bias of the API bans no token, as JSON has no infinity.
        return self._source.new_constraint(self._tokenizer, self._schema, None, ())

    def fits(self, call: str) -> bool:
        """Whether a text is a call of a tool, with arguments that fit its schema."""
        constraint = self.new_constraint()
        return constraint.append_bytes(call.encode()) and constraint.is_complete


@dataclass(frozen=True)
class CallMarks:
    """What stands around calls, for a tokenizer with which all of it has a text."""

    tokenizer: Tokenizer
    format: CallFormat
    after_bare: Tensor  # a mask as Constraint.allowed: whitespace, and the end of text


def call_marks(tokenizer: Tokenizer, call_format: CallFormat) -> CallMarks:
    """The marks of a format."""
    tokens = set(tokenizer.eos_ids)
    for token in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token)
        if data and not data.strip(WHITE):
            tokens.add(token)
    mask = torch.from_numpy(pack_tokens(tokens, tokenizer.vocab_size))
    return CallMarks(tokenizer, call_format, mask)


class CallConstraint:
    """Lets a model write any text, and from where a call begins only a call (see Constraint).

    A call begins with the opening of the format, or with the name of a tool in JSON at the start of
    the answer. In the latter case, only more calls may follow.
    """

    def __init__(self, marks: CallMarks, grammar: CallGrammar, names: list[str]) -> None:
        self._anything = torch.full_like(marks.after_bare, -1)
        self.allowed: Tensor = self._anything
        self.can_continue = True
        self._marks = marks
        self._opening = marks.format.opening.encode()
        self._grammar = grammar
        self._names = [name.encode() for name in names]
        self._text = b""  # where a call may begin
        self._is_start = True  # whether one without an opening may begin
        self._call: Constraint | None = None
        self._has_opening = False  # of the newest call
        self._next_call: Constraint | None = None  # behind one without an opening
        # The tokens of the texts of which one comes next, or may come before the JSON of a call.
        self._ways: list[list[int]] = []

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._call is None and not self._ways

    def append(self, token: int) -> None:
        """Add an allowed token, other than the end of text. Raises UserError as Constraint does."""
        data = self._marks.tokenizer.token_bytes(token)
        ways = [way[1:] for way in self._ways if way[0] == token]
        if ways:
            self._ways = [way for way in ways if way]
        elif self._call is not None:
            self._ways = []
            self._call.append(token)
        elif self._next_call is None:
            self._text += data
            self._find_call()
        elif data.strip(WHITE):
            self._call = self._next_call
            self._call.append(token)
        if self._call is not None and not self._call.can_continue:
            self._end_call(self._call)
        self.allowed = self._allowed()

    def _allowed(self) -> Tensor:
        if self._ways:
            next_tokens = {way[0] for way in self._ways}
            mask = torch.from_numpy(pack_tokens(next_tokens, self._marks.tokenizer.vocab_size))
            return mask if self._call is None else mask | self._call.allowed
        if self._call is not None:
            return self._call.allowed
        if self._next_call is not None:
            return self._next_call.allowed | self._marks.after_bare
        return self._anything

    def _find_call(self) -> None:
        """Look for a call in the text that was written freely."""
        if self._opening and self._opening in self._text:
            _, _, body = self._text.partition(self._opening)
            self._begin_call(body, has_opening=True)
            return
        if self._is_start:
            self._find_bare_call()
        elif self._opening:
            # Enough to find an opening that is not complete.
            self._text = self._text[-len(self._opening) :]
        else:
            self._text = b""

    def _find_bare_call(self) -> None:
        """Look for a call at the start of the answer, without an opening."""
        begin = self._text.lstrip(WHITE)
        n_white = len(self._text) - len(begin)
        is_other = begin[:1] not in b"{["  # which has b"", too
        if is_other or n_white > MAX_HELD or len(begin) > MAX_BARE:
            self._is_start = False
            return
        match = BARE_CALL.match(begin)
        if match is not None:
            self._is_start = False
            if match[1] in self._names:
                self._begin_call(begin, has_opening=False)

    def _begin_call(self, body: bytes, has_opening: bool) -> None:
        """Constrain what follows, if the call begins as one."""
        self._text = b""
        self._is_start = False
        self._has_opening = has_opening
        call = self._grammar.new_constraint()
        if not call.append_bytes(body.lstrip(WHITE)):
            return  # it is text
        self._call = call
        if not body and has_opening:
            self._offer(self._marks.format.before_json)

    def _end_call(self, call: Constraint) -> None:
        if not call.is_complete:  # no token can continue it
            self.can_continue = False
            return
        self._call = None
        form = self._marks.format
        if not self._has_opening:
            self._next_call = self._grammar.new_constraint()
        elif form.closing:
            self._offer(form.before_closing + form.closing, form.closing)

    def _offer(self, *texts: str) -> None:
        """Let one of some texts follow."""
        encode = self._marks.tokenizer.encode
        ways = [encode(text, allow_special=True, continues=True) for text in texts]
        self._ways = [way for way in ways if way]
