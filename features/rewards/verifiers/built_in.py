"""Verifiers that come with Thinker."""

from __future__ import annotations

import ast
import importlib.util
import json
import operator
import re
from typing import Any

from thinker.features.rewards.verifiers.tales_story import tales_story
from thinker.features.rewards.verifiers.verifier import VERIFIERS, Answer, Verifier
from thinker.runtime.errors import UserError, install_command

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
EXPRESSION = re.compile(r"[\d +*()-]+$")
LEADING_ZEROS = re.compile(r"\b0+(?=\d)")


def exact(answer: Answer) -> float:
    """1 if the answer is that of the row, in its column answer or completion; otherwise 0."""
    for column in ("answer", "completion"):
        wanted = answer.row.get(column)
        if isinstance(wanted, (str, int, float)):
            return float(answer.text.strip() == str(wanted).strip())
    raise ValueError("the row has no text or number in the column answer or completion")


def regex(answer: Answer) -> float:
    """1 if the whole answer matches the regular expression in the column regex of the row."""
    pattern = _column(answer, "regex")
    return float(re.fullmatch(pattern, answer.text.strip()) is not None)


def json_schema(answer: Answer) -> float:
    """1 if the answer is JSON that fits the schema in the column json_schema of the row."""
    from jsonschema import Draft202012Validator

    schema = _column(answer, "json_schema")
    if isinstance(schema, str):
        schema = json.loads(schema)
    Draft202012Validator.check_schema(schema)
    try:
        value = json.loads(answer.text)
    except (ValueError, RecursionError):
        return 0.0
    return float(Draft202012Validator(schema).is_valid(value))


def arithmetic(answer: Answer) -> float:
    """1 if the answer is the value of the expression at the end of the prompt, such as "12+34=";
    otherwise 0."""
    end = answer.prompt.rstrip().removesuffix("=").rstrip()
    match = EXPRESSION.search(end)
    if match is None:
        raise ValueError("the prompt does not end with a sum, difference or product")
    return float(answer.text.strip() == str(evaluate(match.group().strip())))


def length(answer: Answer) -> float:
    """The number of characters, as a negative number: shorter is better. Give it a small weight."""
    return -float(len(answer.text))


def complete(answer: Answer) -> float:
    """1 if the answer has an end; 0 if it was cut at the longest length."""
    return float(answer.is_complete)


def check_packages(verifier: Verifier) -> None:
    """Raise UserError if a verifier needs a package that is not installed."""
    if verifier is json_schema and importlib.util.find_spec("jsonschema") is None:
        raise UserError(
            f"json_schema needs the jsonschema package; run {install_command('rewards')}"
        )


def _column(answer: Answer, name: str) -> Any:
    if name not in answer.row:
        raise ValueError(f"the row has no column {name}")
    return answer.row[name]


def evaluate(expression: str) -> int:
    """The value of sums, differences and products of whole numbers. Raises ValueError."""
    try:
        return _value(ast.parse(LEADING_ZEROS.sub("", expression), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two: it is too long
        raise ValueError(f"{expression[:100]} is no sum, difference or product") from error


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError(f"{ast.unparse(node)} is no sum, difference or product of whole numbers")


for verifier in (exact, regex, json_schema, arithmetic, length, complete, tales_story):
    VERIFIERS.register(verifier.__name__, verifier)
