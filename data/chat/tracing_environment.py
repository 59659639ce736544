"""An environment of Jinja that traces which characters of a rendered text come from messages.

It is used in the process that renders chat templates. The library transformers compiles them there
in this environment instead of the one of Jinja.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2.sandbox
from jinja2 import Template
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.nodes import Concat, EvalContext
from jinja2.runtime import Context, Macro

from thinker.data.chat.traced_text import (
    TEMPLATE,
    VARIABLE,
    TracedText,
    as_text,
    call,
    from_messages,
    holds_traced,
    joined,
    origins_of,
    plain,
    traced,
    with_origin,
)

# Filters that use only methods of texts.
OF_TEXTS = ("capitalize", "lower", "replace", "trim", "upper")
# Filters that return what they are given, or a part of it.
SELECTING = (
    *("attr", "batch", "d", "default", "dictsort", "first", "groupby", "items", "last", "list"),
    *("map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr"),
    *("slice", "sort", "unique"),
)


def _text_of(value: Any) -> str:
    return str(as_text(value))


@jinja2.pass_eval_context
def _joined(
    eval_ctx: EvalContext, value: Iterable, d: str = "", attribute: str | int | None = None
) -> str:
    """The filter `join`."""
    if attribute is not None:
        value = map(make_attrgetter(eval_ctx.environment, attribute), value)
    return traced(str(d)).join(map(_text_of, value))


class _Filters(dict):
    """Filters by name, which keep the origins of texts."""

    def __setitem__(self, name: str, function: Callable) -> None:
        super().__setitem__(name, _keeping_origins(name, function))


def _keeping_origins(name: str, function: Callable) -> Callable:
    """The filter, which keeps the origins of texts where it can."""
    if name in SELECTING:
        return function
    if name == "join":
        return _joined
    if name in ("string", "safe"):  # nothing is escaped
        return _text_of

    @functools.wraps(function)
    def of_texts(*args: Any, **kwargs: Any) -> Any:
        return function(*map(as_text, args), **kwargs)

    @functools.wraps(function)
    def tojson(value: Any, *args: Any, **kwargs: Any) -> Any:
        return call(lambda other: function(other, *args, **kwargs), value, is_quoted=True)

    @functools.wraps(function)
    def other(*args: Any, **kwargs: Any) -> Any:
        return call(lambda given: function(*given, **kwargs), args)

    if name in OF_TEXTS:
        return of_texts
    return tojson if name == "tojson" else other


class _CodeGenerator(CodeGenerator):
    """Compiles templates as usual, except for the operator ~."""

    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("environment.concat(map(environment.text_of, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _TracingTemplate(Template):
    """A template that traces the texts of messages, and of the variables in `traced`."""

    def render(self, **variables: Any) -> str:
        text = super().render(**self._traced(variables))
        self.environment.rendered[:] = [text]
        return text

    def generate(self, **variables: Any) -> Iterator[str]:
        self.environment.rendered.clear()
        for part in super().generate(**self._traced(variables)):
            self.environment.rendered.append(part)
            yield part

    def _traced(self, variables: dict[str, Any]) -> dict[str, Any]:
        found = variables | {"strftime_now": self.environment.now.strftime}
        for name in self.environment.traced:
            found[name] = with_origin(variables[name], VARIABLE)
        found["messages"] = from_messages(variables["messages"])
        return found


class TracingEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox for chat templates, with traced texts.

    Class attributes:
        traced: names of the variables whose texts are traced.
        now: what the clock of templates says.
        rendered: the parts of the text that was rendered last.
    """

    code_generator_class = _CodeGenerator
    template_class = _TracingTemplate
    concat = staticmethod(joined)
    text_of = staticmethod(_text_of)
    intercepted_binops = frozenset("%")
    traced: frozenset[str] = frozenset()
    now: datetime = datetime(2000, 1, 1)
    rendered: list[str] = []  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=as_text, **kwargs)
        filters = _Filters()
        for name, function in self.filters.items():
            filters[name] = function
        self.filters = filters

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operator %, which may format a text."""
        if isinstance(left, TracedText) and set(origins_of(left)) <= {chr(TEMPLATE)}:
            left = plain(left)
        if isinstance(left, TracedText) or not isinstance(left, str):
            return left % right
        return call(lambda values: left % values, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method in a template."""
        base = super()
        owner = getattr(function, "__self__", None)
        if isinstance(function, Macro) or isinstance(owner, dict | list):
            return base.call(context, function, *args, **kwargs)
        if type(owner) is str and holds_traced([args, kwargs]):
            function = getattr(traced(owner), function.__name__)

        def apply(given: tuple[tuple, dict]) -> Any:
            return base.call(context, function, *given[0], **given[1])

        if isinstance(owner, str):
            return apply((args, kwargs))
        result = call(apply, (args, kwargs))
        if isinstance(owner, bytes) and isinstance(result, str):
            return TracedText(result)
        return result
