"""Parser of attention patterns: names with numbers, combined with `&`, `|` and parentheses as in
Python."""

import ast
import inspect
import re
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

from thinker.model.patterns import content_patterns, position_patterns
from thinker.model.patterns.pattern import Pattern, full
from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.registry import Registry

MAX_NUMBER = 1 << 24  # the largest number in a pattern
MAX_TEXT_LENGTH = 1000  # characters
# By name: the argument that has a smaller maximum, and that maximum.
MAX_ARGUMENTS = {"random": (1, 256), "bigbird": (3, 256), "linear": (0, 1 << 16)}
MAY_BE_ZERO = ("token", "random", "bigbird")  # numbers from 0; other patterns require at least 1
HINT = "write it as in window(64) | global(4)"

# By name in a config. A pattern takes integers, and returns a Pattern; a user's module registers
# its own.
PATTERNS: Registry[Callable[..., Pattern]] = Registry("pattern")
PATTERNS.register("full", full)
PATTERNS.register("window", position_patterns.window)
PATTERNS.register("dilated", position_patterns.dilated)
PATTERNS.register("block", position_patterns.block)
PATTERNS.register("global", position_patterns.global_positions)
PATTERNS.register("token", position_patterns.global_tokens)
PATTERNS.register("strided", position_patterns.strided)
PATTERNS.register("random", position_patterns.random)
PATTERNS.register("prefix", position_patterns.prefix)
PATTERNS.register("topk", content_patterns.topk)
PATTERNS.register("heads", position_patterns.per_head)
PATTERNS.register("longformer", position_patterns.longformer)
PATTERNS.register("bigbird", position_patterns.bigbird)
PATTERNS.register("linear", position_patterns.linear)
PATTERNS.register("retrieve", content_patterns.retrieve)


# Python 3.11.0 to 3.11.7 and 3.12.0 to 3.12.1 count the depth of a syntax tree for all threads
# together, and raise SystemError if two threads build one at a time (CPython's gh-106905).
_building_tree = threading.Lock()


# Kept, because a server asks for the patterns of its model at each request.
@lru_cache(maxsize=1024)
def parse_pattern(text: str) -> Pattern:
    """Parse the text form of a pattern. Raises UserError for invalid text."""
    if len(text) > MAX_TEXT_LENGTH:
        raise UserError(
            f"model.attention has a pattern of {len(text):,} characters; use at most "
            f"{MAX_TEXT_LENGTH:,}"
        )
    try:
        if not text.isascii() or "_" in text:  # Python's parser would normalize other letters
            raise ValueError
        text_for_python = re.sub(r"\bglobal\b", "global_", text.strip())  # `global` is a keyword
        with _building_tree:
            tree = ast.parse(text_for_python, mode="eval")
        return _parse_node(tree.body)
    except UserError as error:
        raise UserError(f"model.attention {text!r}: {error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"model.attention {text!r} is not a valid pattern; {HINT}") from None


def _parse_node(node: ast.expr) -> Pattern:
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.BitOr):
            return _parse_node(node.left) | _parse_node(node.right)
        if isinstance(node.op, ast.BitAnd):
            return _parse_node(node.left) & _parse_node(node.right)
    if isinstance(node, ast.Name):
        return _make_pattern(node, node, [])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _make_pattern(node, node.func, node.args)
    raise UserError(f"{_unparse(node)} is not a pattern; {HINT}")


def _make_pattern(node: ast.expr, function: ast.Name, arguments: list[ast.expr]) -> Pattern:
    name = function.id.removesuffix("_")  # of `global_`
    if name not in PATTERNS:
        raise _unknown_pattern(name)
    new_pattern = PATTERNS.get(name)
    if name == "heads":
        values = [_parse_node(argument) for argument in arguments]
    else:
        least = 0 if name in MAY_BE_ZERO else 1
        values = [_parse_number(argument, least) for argument in arguments]
    _check_arguments(name, new_pattern, values)
    index, maximum = MAX_ARGUMENTS.get(name, (0, MAX_NUMBER))
    if name in MAX_ARGUMENTS and values[index] > maximum:
        raise UserError(f"{_unparse(node)} is too large: {values[index]:,} (maximum: {maximum:,})")
    return new_pattern(*values)


def _unknown_pattern(name: str) -> UserError:
    if name.isalpha() and (name.isupper() or set(name) <= {"l", "g"}):
        return UserError(
            f"{name} is not a list of layers; use the letters L (model.window) and G (full), as in "
            f"LLLG"
        )
    names = PATTERNS.names()
    hint = did_you_mean(name, names) or f"; use {', '.join(names)}"
    return UserError(f"unknown pattern {name}{hint}")


def _check_arguments(
    name: str, new_pattern: Callable[..., Pattern], values: Sequence[int | Pattern]
) -> None:
    signature = inspect.signature(new_pattern)
    try:
        signature.bind(*values)
    except TypeError:
        parameters = []
        for parameter in signature.parameters.values():
            parameters.append(str(parameter.replace(annotation=parameter.empty)))
        usage = f"{name}({', '.join(parameters)})"
        raise UserError(f"{name} has {len(values)} arguments; use {usage}") from None
    if not values and name in ("heads", "token"):
        raise UserError(f"{name}() has no arguments; it needs at least one")
    if name == "heads" and any("heads(" in value.text for value in values):
        raise UserError(
            "heads cannot be nested; list one pattern per head, as in heads(full, window(8), full)"
        )


def _parse_number(node: ast.expr, minimum: int) -> int:
    is_number = isinstance(node, ast.Constant) and type(node.value) is int
    if is_number and minimum <= node.value <= MAX_NUMBER:
        return node.value
    raise UserError(f"{_unparse(node)} is not an integer from {minimum} to {MAX_NUMBER:,}")


def _unparse(node: ast.expr) -> str:
    return ast.unparse(node).replace("global_", "global")


def layer_patterns(
    attention: str | list[str], n_layers: int, window_size: int | None, n_heads: int
) -> list[Pattern]:
    """Expand one pattern, a list of patterns, or letters such as "LLLG" to the pattern of each
    layer, by repetition.

    L is a window of `window_size` keys, G is full. Raises UserError for invalid patterns and parts
    without effect.
    """
    is_letters = isinstance(attention, str) and attention != "" and set(attention) <= {"L", "G"}
    needs_window = is_letters and "L" in attention
    if needs_window and window_size is None:
        raise UserError(
            f"model.attention {attention!r} needs model.window; set it to the number of keys for L"
        )
    texts = [attention]
    if is_letters or not isinstance(attention, str):
        texts = list(attention)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"model.attention is {attention!r}; it must be a pattern, a list of patterns, or "
            f"letters"
        )
    if len(texts) > 1 and any(text.count("(") != text.count(")") for text in texts):
        remedy = "put quotes around a pattern that contains commas, as in ['dilated(64, 2)', full]"
        raise UserError(f"model.attention {attention!r}: {remedy}")
    if len(texts) > n_layers:
        raise UserError(
            f"model.attention {attention!r} has {len(texts)} layers, but model.n_layers is "
            f"{n_layers}"
        )
    if is_letters:
        texts = [f"window({window_size})" if letter == "L" else "full" for letter in texts]
    parsed = [parse_pattern(text) for text in texts]
    if window_size is not None and not needs_window:
        raise UserError(
            "model.window has no effect without L layers in model.attention; use LLLG or window(64)"
        )
    if max(pattern.min_heads for pattern in parsed) > n_heads:
        raise UserError(
            f"model.attention {attention!r} has patterns for more heads than model.n_heads = "
            f"{n_heads}"
        )
    return [parsed[layer % len(parsed)] for layer in range(n_layers)]
