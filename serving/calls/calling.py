"""Answers of a model that may or have to call tools."""

from __future__ import annotations

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.sequence import Sequence
from thinker.runtime.registry import offers
from thinker.serving.calls.call_constraint import CallConstraint, CallGrammar, call_marks
from thinker.serving.calls.call_format import find_call_format
from thinker.serving.calls.call_readers import ForcedCall, FreeCalls
from thinker.serving.calls.call_schemas import written_calls_schema
from thinker.serving.protocol import ChatRequest


class Calling:
    """How a model calls tools.

    Attributes:
        tokenizer: decodes the marks of calls to their names if they are special tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._format = find_call_format(tokenizer)
        self._model_tokenizer = tokenizer
        self.tokenizer = tokenizer.with_written_names(self._format.hidden)
        self._marks = call_marks(self.tokenizer, self._format)

    def prepare(self, sequence: Sequence, body: ChatRequest) -> ForcedCall | FreeCalls:
        """Constrain the calls of an answer. Returns what finds them in its text.

        Raises UserError if the schema of a tool is not supported.
        """
        if body.must_call:
            return ForcedCall()
        names = list(body.callable_tools)
        grammar = self._grammar(body)
        if grammar is None:
            return FreeCalls(names, body.max_calls, self._format, lambda call: True)
        if body.may_call:
            sequence.constraint = CallConstraint(self._marks, grammar, names)
        return FreeCalls(names, body.max_calls, self._format, grammar.fits)

    def _grammar(self, body: ChatRequest) -> CallGrammar | None:
        """The grammar of calls; None if no feature can check them."""
        if not any(offers("constraint")):
            return None
        schema = written_calls_schema(body.callable_tools, self._format, body.max_calls)
        return CallGrammar(self._model_tokenizer, schema)
