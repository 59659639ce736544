"""Schemas whose compilation would not end."""

import threading
import time

import pytest

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.structured_output.compile_limit import check_compile_time
from thinker.features.structured_output.constraints import GrammarConstraint
from thinker.features.structured_output.json_schema import canonical_schema
from thinker.runtime.errors import UserError

TOKENIZER = make_tokenizer("byte", [])
# Whether a text can match all of them takes llguidance hours to find out.
PATTERNS = [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(1, 40)]
ENDLESS = canonical_schema({"allOf": PATTERNS})
EASY = canonical_schema({"type": "array", "items": {"enum": ["cat", "mat"]}, "minItems": 1})


def test_a_schema_without_end_is_refused_and_others_are_used():
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(UserError, match="json_schema is too complex: it needs more than 1 s"):
            GrammarConstraint(TOKENIZER, ENDLESS, None)
        assert time.monotonic() - start < 60
        constraint = GrammarConstraint(TOKENIZER, EASY, None)
        for token in b'["cat"]':
            constraint.append(token)
        assert constraint.is_complete


def test_a_schema_that_makes_llguidance_crash_is_refused():
    """In llguidance 1.9, these bounds end the whole process."""
    grammar = (
        'start: %json {"type": "integer", "exclusiveMinimum": -1e30, "exclusiveMaximum": -1e29}'
    )
    for _ in range(2):
        with pytest.raises(UserError, match="json_schema is too complex"):
            check_compile_time("json_schema", f"%llguidance {{}}\n{grammar}")
        check_compile_time("json_schema", "%llguidance {}\nstart: /a/")


@pytest.mark.parametrize("kind", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("bound", [1e308, 2**63, -(2**63), -1e30])
def test_bounds_beyond_64_bits_are_refused(kind, bound):
    """Between 1e308 and 1.7e308, llguidance wrote 9223372036854775807."""
    schema = {"items": {"type": "integer", kind: bound}}
    with pytest.raises(UserError, match=f"json_schema has {kind} .*; use a number between"):
        canonical_schema(schema)
    assert "-9223372036854775807" in canonical_schema({kind: -(2**63) + 1})


def test_threads_that_compile_at_once():
    refused = []

    def compile_schema(index):
        schema = ENDLESS if index == 2 else canonical_schema({"const": index})
        try:
            GrammarConstraint(make_tokenizer("byte", []), schema, None)
        except UserError:
            refused.append(index)

    threads = [threading.Thread(target=compile_schema, args=[index]) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == [2]


def test_many_properties_are_no_problem():
    properties = {f"name_{index}": {"type": "string"} for index in range(400)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    constraint = GrammarConstraint(TOKENIZER, canonical_schema(schema), None)
    for token in b'{"name_7": "x"':
        constraint.append(token)
    assert constraint.can_continue


def test_a_text_that_reaches_a_limit_of_its_own_compiles_nothing_again(monkeypatch):
    properties = {f"k{index}": {"type": "string"} for index in range(1000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    constraint = GrammarConstraint(TOKENIZER, canonical_schema(schema), None)

    def compile_again(*arguments):
        raise AssertionError("compiled again, which delays all texts of a server")

    monkeypatch.setattr(constraint._grammar, "_compile", compile_again)
    with pytest.raises(UserError, match="too complex for a text of 1 tokens .Parser Error"):
        constraint.append(ord("{"))
